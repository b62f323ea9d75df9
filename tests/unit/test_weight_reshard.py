"""The exact plan, on every rank alike, and its execution between threads: each destination byte written exactly once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from r3channel.errors import (
    DeadlineExceeded,
    NonFiniteWeights,
    PeerFailed,
    PlanInvalid,
    PlanMismatch,
    TransportError,
    UsageError,
    WeightsCorrupt,
)
from r3channel.transport.base import Transport
from r3channel.weights.geometry import Box, Layout
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.messages import in_order, messages
from r3channel.weights.reshard import RankPlan, plan_reshard
from r3channel.weights.resharder import Resharder, ReshardReport
from r3channel.weights.shardmap import ShardMap
from r3channel.weights.survey import survey
from tests.reshard_cases import TIMEOUT_S, Held, cases, equals_oracle, held, on_threads, side

Case = tuple[ShardMap, ShardMap, int]
MODEL = [
    ("embed.weight", torch.bfloat16, (23, 6)),
    ("layers.0.norm.rep", torch.float32, (6,)),
    ("layers.0.proj.weight", torch.float8_e4m3fn, (17, 9)),
    ("layers.0.scale", torch.float32, ()),
    ("layers.0.empty", torch.bfloat16, (0, 4)),
    ("layers.0.codes", torch.int8, (13, 5)),
    ("layers.1.big", torch.float32, (300, 40)),
]


def plans(case: Case) -> list[RankPlan]:
    source, target, world_size = case
    return [plan_reshard(source, target, rank=rank, world_size=world_size) for rank in range(world_size)]


def reshard(
    case: Case,
    *,
    max_bytes: int = 1 << 20,
    seed: int = 1,
    spoil: Callable[[Transport, Held], None] | None = None,
) -> tuple[list[Any], list[Held]]:
    source, target, world_size = case
    filled = [held(target, rank, seed=None) for rank in range(world_size)]

    def work(transport: Transport) -> ReshardReport:
        plan = plan_reshard(source, target, rank=transport.rank, world_size=world_size)
        mine = held(source, transport.rank, seed=seed)
        if spoil is not None:
            spoil(transport, mine)
        resharder = Resharder(plan, transport, max_message_bytes=max_bytes)
        resharder.agree(timeout_s=TIMEOUT_S)
        return resharder.run(mine, filled[transport.rank], timeout_s=TIMEOUT_S)

    return on_threads(world_size, work), filled


@settings(max_examples=150, deadline=None)
@given(cases(world_sizes=st.integers(2, 13)))
def test_every_destination_element_is_written_exactly_once(case: Case) -> None:
    _, target, world_size = case
    for plan in plans(case):
        written = {
            name: [(box, torch.zeros(box.shape, dtype=torch.int32)) for box in boxes]
            for name, boxes in target.held_by(plan.rank).items()
        }
        for op in plan.ops:
            if op.dst == plan.rank:
                for outer, count in written[plan.tensors[op.tensor].name]:
                    if outer.intersect(op.box) == op.box:
                        count[op.box.within(outer)] += 1
        assert all(bool((count == 1).all()) for parts in written.values() for _, count in parts)
        assert all(op.src < world_size for op in plan.ops)


@settings(max_examples=100, deadline=None)
@given(cases(world_sizes=st.integers(2, 13)))
def test_all_ranks_plan_the_same_and_each_keeps_only_its_part(case: Case) -> None:
    source, _, world_size = case
    all_plans = plans(case)
    assert len({(plan.hash, plan.sent_bytes_R) for plan in all_plans}) == 1
    everything = {op for plan in all_plans for op in plan.ops}
    for plan in all_plans:
        mine = {op for op in everything if plan.rank in (op.src, op.dst)}
        assert set(plan.ops) == mine and len(plan.ops) == len(mine)
    holders = [source.held_by(rank) for rank in range(world_size)]
    for op in everything:
        name = all_plans[0].tensors[op.tensor].name
        assert any(box.intersect(op.box) == op.box for box in holders[op.src][name])
    sent = [0] * world_size
    for op in everything:
        sent[op.src] += op.nbytes * (op.src != op.dst)
    assert tuple(sent) == all_plans[0].sent_bytes_R


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(world_sizes=st.sampled_from((2, 3, 5, 6, 7, 12, 13))), st.sampled_from((256, 300, 1 << 20)))
def test_what_arrives_equals_the_oracle_bit_by_bit(case: Case, max_bytes: int) -> None:
    reports, filled = reshard(case, max_bytes=max_bytes)
    assert [report for report in reports if isinstance(report, Exception)] == []
    for found in filled:
        assert equals_oracle(case[1], found, seed=1)


@pytest.mark.parametrize("world_size", [3, 5, 6, 7, 12])
def test_odd_world_sizes_lose_nothing_in_colocated_and_separated_mode(world_size: int) -> None:
    everyone = list(range(world_size))
    trainers, engines = everyone[: world_size // 2], everyone[world_size // 2 :]
    for src_ranks, dst_ranks in ((everyone, everyone), (trainers, engines)):
        case = side(MODEL, src_ranks, axis=0), side(MODEL, dst_ranks, axis=1), world_size
        reports, filled = reshard(case, max_bytes=512)
        assert [report for report in reports if isinstance(report, Exception)] == []
        assert all(equals_oracle(case[1], found, seed=1) for found in filled)
        assert sum(len(found) for found in filled) == len(MODEL) * len(dst_ranks)


@settings(max_examples=60, deadline=None)
@given(cases(world_sizes=st.integers(2, 9)), st.integers(256, 2000))
def test_both_ends_of_a_pair_cut_the_same_messages_within_the_limit(case: Case, max_bytes: int) -> None:
    all_plans = plans(case)
    orders = [in_order(plan, max_bytes=max_bytes) for plan in all_plans]
    for plan, order in zip(all_plans, orders, strict=True):
        for peer in plan.sends():
            theirs = [m for m in orders[peer] if m.src == plan.rank]
            assert [m for m in order if m.dst == peer] == theirs
        for message in order:
            assert message.payload_bytes <= max_bytes + 8
            assert all(piece.offset % 256 == 0 for piece in message.pieces)


def test_the_hash_depends_on_layout_dtype_and_world_but_not_on_the_rank() -> None:
    source, target = side(MODEL, [0, 1], axis=0), side(MODEL, [2, 3], axis=0)
    changed = [(n, torch.float32 if n == "embed.weight" else d, s) for n, d, s in MODEL]
    hashes = [
        plan_reshard(source, target, rank=0).hash,
        plan_reshard(source, side(MODEL, [2, 3], axis=1), rank=0).hash,
        plan_reshard(source, side(changed, [2, 3], axis=0), rank=0).hash,
        plan_reshard(source, target, rank=0, world_size=5).hash,
    ]
    assert len(set(hashes)) == 4 and plan_reshard(source, target, rank=3).hash == hashes[0]


def test_different_plans_are_refused_with_both_hashes_before_a_byte_moves() -> None:
    source, target = side(MODEL, [0], axis=0), side(MODEL, [1, 2], axis=0)
    other = side(MODEL, [1, 2], axis=1)
    hashes = [plan_reshard(source, t, rank=0).hash for t in (target, other)]

    def work(transport: Transport) -> None:
        plan = plan_reshard(source, other if transport.rank == 2 else target, rank=transport.rank)
        Resharder(plan, transport).agree(timeout_s=TIMEOUT_S)

    for error in on_threads(3, work):
        assert isinstance(error, PlanMismatch)
        assert all(value in str(error) for value in (*hashes, "rank 2"))


def test_all_ranks_take_the_smallest_bucket_that_one_can_spare() -> None:
    source, target = side(MODEL, [0], axis=0), side(MODEL, [1], axis=0)
    spare, filled = (1 << 20, 1024), held(target, 1, seed=None)

    def work(transport: Transport) -> int:
        plan = plan_reshard(source, target, rank=transport.rank)
        resharder = Resharder(plan, transport, max_message_bytes=spare[transport.rank])
        resharder.agree(timeout_s=TIMEOUT_S)
        mine = held(source, transport.rank, seed=1)
        return resharder.run(mine, [{}, filled][transport.rank], timeout_s=TIMEOUT_S).messages

    wanted, large = (
        len(in_order(plan_reshard(source, target, rank=0), max_bytes=n)) for n in (1024, 1 << 20)
    )
    assert on_threads(2, work) == [wanted] * 2 and wanted > large
    assert equals_oracle(target, filled, seed=1)


def test_running_without_agreement_is_refused() -> None:
    source, target = side(MODEL, [0], axis=0), side(MODEL, [1], axis=0)
    for error in on_threads(
        2, lambda t: Resharder(plan_reshard(source, target, rank=t.rank), t).run({}, {}, timeout_s=1.0)
    ):
        assert isinstance(error, UsageError)


def test_a_nan_is_named_by_its_holder_and_reaches_all_ranks() -> None:
    case = side(MODEL, [0, 1], axis=0), side(MODEL, [2, 3], axis=0), 4

    def spoil(transport: Transport, mine: Held) -> None:
        if transport.rank == 1:
            mine["layers.1.big"][0][1][3, 3] = float("nan")

    reports, _ = reshard(case, spoil=spoil)
    assert isinstance(reports[1], NonFiniteWeights)
    assert "layers.1.big" in str(reports[1]) and "bucket 0 from rank 1 to rank 3" in str(reports[1])
    for rank in (0, 2, 3):
        assert isinstance(reports[rank], PeerFailed) and "layers.1.big" in str(reports[rank])


class Damaging:
    """A transport that turns one bit of one message."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.epoch, self.rank, self.world_size = inner.epoch, inner.rank, inner.world_size
        self.armed = True

    def recv(self, src: int, out_N: torch.Tensor, *, timeout_s: float) -> None:
        self._inner.recv(src, out_N, timeout_s=timeout_s)
        if self.armed and len(out_N) > 2048:
            self.armed = False
            out_N[7] ^= 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_damaged_bucket_is_named_with_tensor_and_the_next_run_is_clean() -> None:
    source, target = side(MODEL, [0], axis=0), side(MODEL, [1], axis=0)
    filled = held(target, 1, seed=None)

    def work(transport: Transport) -> list[Any]:
        wrapped: Any = Damaging(transport) if transport.rank == 1 else transport
        resharder = Resharder(plan_reshard(source, target, rank=transport.rank), wrapped)
        resharder.agree(timeout_s=TIMEOUT_S)
        outcomes: list[Any] = []
        for _ in range(2):
            try:
                mine = held(source, transport.rank, seed=4)
                outcomes.append(resharder.run(mine, filled if transport.rank else {}, timeout_s=TIMEOUT_S))
            except (WeightsCorrupt, PeerFailed) as error:
                outcomes.append(error)
        return outcomes

    sender, receiver = on_threads(2, work)
    assert isinstance(receiver[0], WeightsCorrupt) and "bucket 0 from rank 0 to rank 1" in str(receiver[0])
    assert "embed.weight" in str(receiver[0]) and isinstance(sender[0], PeerFailed)
    assert isinstance(receiver[1], ReshardReport) and equals_oracle(target, filled, seed=4)


def test_a_rank_that_leaves_ends_the_exchange_of_the_others() -> None:
    source, target = side(MODEL, [0, 1], axis=0), side(MODEL, [2], axis=0)

    def work(transport: Transport) -> None:
        resharder = Resharder(plan_reshard(source, target, rank=transport.rank), transport)
        resharder.agree(timeout_s=TIMEOUT_S)
        if transport.rank == 1:
            transport.abort()
            return
        mine = held(source, transport.rank, seed=1)
        resharder.run(mine, held(target, transport.rank, seed=None), timeout_s=2.0)

    errors = on_threads(3, work)
    assert all(isinstance(errors[rank], (TransportError, DeadlineExceeded)) for rank in (0, 2))


def test_messages_swapped_in_order_are_noticed() -> None:
    source, target = side(MODEL, [0], axis=0), side(MODEL, [1], axis=0)
    plan = plan_reshard(source, target, rank=1)
    first, second, *_ = messages(plan, plan.receives()[0], max_bytes=4096)
    buffer_N = torch.zeros(8192, dtype=torch.uint8)
    second.seal(buffer_N)
    tail = buffer_N[second.payload_bytes : second.total_bytes].clone()
    buffer_N[first.payload_bytes : first.payload_bytes + len(tail)] = tail
    with pytest.raises(WeightsCorrupt, match="out of order"):
        first.verify(buffer_N)


@pytest.mark.parametrize(("replicas", "engines"), [(2, 3), (3, 4), (4, 2)])
def test_awex_replicas_of_a_tensor_take_turns_over_the_engines(replicas: int, engines: int) -> None:
    metas = [TensorMeta(name=f"w{n}", dtype=torch.float32, shape=(8, 4)) for n in range(12)]
    trainers, targets = list(range(replicas)), list(range(replicas, replicas + engines))
    source = ShardMap([(meta, Layout.replicated(meta.shape, trainers)) for meta in metas])
    target = ShardMap([(meta, Layout.replicated(meta.shape, targets)) for meta in metas])
    found = [plan_reshard(source, target, rank=rank) for rank in trainers]
    assert set(found[0].sent_bytes_R[:replicas]) == {12 * engines * 128 // replicas}
    for plan in found:
        sent = [op.tensor for ops in plan.sends().values() for op in ops]
        assert len(set(sent)) >= 12 // replicas, "no replica serves one tensor to all while others rest"


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ([("a", (4,))], [("b", (4,))], "b float32.*no trainer rank reported"),
        ([("a", (4,))], [("a", (5,))], r"a float32\[5\].*a float32\[4\].*equal whole shapes"),
    ],
)
def test_maps_that_do_not_fit_are_refused_by_name(source: Any, target: Any, message: str) -> None:
    maps = [
        ShardMap(
            (TensorMeta(name=n, dtype=torch.float32, shape=s), Layout.replicated(s, [rank])) for n, s in rows
        )
        for rank, rows in enumerate((source, target))
    ]
    with pytest.raises(PlanInvalid, match=message):
        plan_reshard(maps[0], maps[1], rank=0)


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([(0, Box((0,), (5,))), (1, Box((4,), (8,)))], "tensor w .*rank 0 and rank 1 .*overlap"),
        ([(0, Box((0,), (5,))), (1, Box((6,), (8,)))], r"tensor w .*rank 2 needs .*8 elements.*hold 7"),
    ],
)
def test_overlap_and_gap_of_the_sources_are_refused_by_name(boxes: Any, message: str) -> None:
    meta = TensorMeta(name="w", dtype=torch.float32, shape=(8,))
    source = ShardMap([(meta, Layout.of((8,), boxes))])
    with pytest.raises(PlanInvalid, match=message):
        plan_reshard(source, ShardMap([(meta, Layout.replicated((8,), [2]))]), rank=2)


def test_a_shard_map_survives_json_and_notices_damage() -> None:
    import json

    shards = side(MODEL, [0, 1, 2], axis=0)
    text = json.dumps(shards.to_dict())
    assert ShardMap.from_dict(json.loads(text)).digest == shards.digest
    with pytest.raises(PlanInvalid, match="arrived as"):
        ShardMap.from_dict(json.loads(text.replace("embed", "embez")))


def test_ranks_that_disagree_about_a_tensor_are_told_both_values() -> None:
    metas = [TensorMeta(name="w", dtype=torch.float32, shape=(n,)) for n in (4, 5)]
    reports = {rank: [(meta, Box.whole(meta.shape))] for rank, meta in enumerate(metas)}
    with pytest.raises(PlanInvalid, match=r"rank 1 .*w float32\[5\].*w float32\[4\]"):
        ShardMap.gathered(reports)


def test_a_survey_tells_every_rank_both_maps_or_what_does_not_fit() -> None:
    source, target = side(MODEL, [0, 1], axis=0), side(MODEL, [2, 3, 4], axis=1)

    def work(transport: Transport, damage: bool) -> tuple[str, str]:
        mine = source if transport.rank < 2 else target
        boxes = mine.held_by(transport.rank)
        report = [(meta, box) for meta in mine.metas for box in boxes.get(meta.name, ())]
        if damage and transport.rank == 3:
            report[0] = (replace(report[0][0], dtype=torch.float64), report[0][1])
        found = survey(transport, report, trainers=2, timeout_s=TIMEOUT_S)
        return found[0].digest, found[1].digest

    assert on_threads(5, lambda transport: work(transport, False)) == [(source.digest, target.digest)] * 5
    errors = on_threads(5, lambda transport: work(transport, True))
    assert all(isinstance(e, PlanInvalid) and "rank 3 holds a part of" in str(e) for e in errors)
