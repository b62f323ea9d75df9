"""The exact plan, on every rank alike: boxes and splits, each element written once, senders balanced, at full size too."""

from __future__ import annotations

import heapq
import json
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from r3channel.errors import ManifestMismatch
from r3channel.weights import geometry
from r3channel.weights.config import SyncConfig
from r3channel.weights.geometry import (
    Box,
    Layout,
    Needs,
    Part,
    RankPlan,
    ShardMap,
    batches,
    deal,
    plan_reshard,
)
from r3channel.weights.groups import turns
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.progress import Deadline
from r3channel.weights.rank_link import Piece, RankLink
from r3channel.weights.ranks import TrainerRanks
from r3channel.weights.send_planner import SendPlanner, UpdateSpec
from tests.support.reshard import bounds_of, cases, held_by, model_side, plain_side

Case = tuple[ShardMap, ShardMap, int]
MODEL = [
    ("embed.weight", torch.bfloat16, (23, 6)), ("layers.0.norm.rep", torch.float32, (6,)),
    ("layers.0.proj.weight", torch.float8_e4m3fn, (17, 9)), ("layers.0.scale", torch.float32, ()),
    ("layers.0.empty", torch.bfloat16, (0, 4)), ("layers.0.codes", torch.int8, (13, 5)),
    ("layers.1.big", torch.float32, (300, 40)),
]  # fmt: skip


def plans(case: Case) -> list[RankPlan]:
    source, target, world_size = case
    return [plan_reshard(source, target, rank=rank, world_size=world_size) for rank in range(world_size)]


def boxes_of(plan: RankPlan) -> list[tuple[int, int, Box]]:
    """(receiver, tensor, box) of all that it sends."""
    return [(dst, *item) for dst, items in plan.sends.items() for item in items]


@settings(max_examples=150)
@given(cases(world_sizes=st.integers(2, 13)))
def test_all_ranks_plan_alike_and_write_every_element_once_from_one_that_holds_it(case: Case) -> None:
    (source, target, world_size), all_plans = case, plans(case)
    holders = [held_by(source, rank) for rank in range(world_size)]
    written = [
        {
            name: [(box, torch.zeros(box.shape, dtype=torch.int32)) for box in boxes]
            for name, boxes in held_by(target, rank).items()
        }
        for rank in range(world_size)
    ]
    for rank, plan in enumerate(all_plans):
        for dst, tensor, sent in boxes_of(plan):
            name = target.metas[tensor].name
            assert any(box.holds(sent) for box in holders[rank][name])
            for outer, count in written[dst][name]:
                if outer.holds(sent):
                    count[sent.slices_in(outer)] += 1
    boxes = [parts for held in written for parts in held.values()]
    assert all(bool((count == 1).all()) for parts in boxes for _, count in parts)

    assert len({plan.hash for plan in all_plans}) == 1
    loads_R, metas = np.zeros(world_size, dtype=np.int64), target.metas
    for batch in batches(source, target):
        deal(loads_R, batch)
    sent = [sum(b.numel * metas[t].dtype.itemsize for _, t, b in boxes_of(plan)) for plan in all_plans]
    assert sent == loads_R.tolist()


def test_the_hash_depends_on_layout_dtype_and_world_but_not_on_the_rank() -> None:
    source, target = plain_side(MODEL, [0, 1], axis=0), plain_side(MODEL, [2, 3], axis=0)
    changed = [(n, torch.float32 if n == "embed.weight" else d, s) for n, d, s in MODEL]
    hashes = [
        plan_reshard(source, target, rank=0, world_size=9).hash,
        plan_reshard(source, plain_side(MODEL, [2, 3], axis=1), rank=0, world_size=9).hash,
        plan_reshard(source, plain_side(changed, [2, 3], axis=0), rank=0, world_size=9).hash,
        plan_reshard(source, target, rank=0, world_size=5).hash,
    ]
    assert len(set(hashes)) == 4 and plan_reshard(source, target, rank=3, world_size=9).hash == hashes[0]


def one_tensor(name: str, size: int, *held: tuple[int, Box]) -> ShardMap:
    """A map of one float32 tensor; of rank 2 where no boxes are given."""
    layout = Layout.of((size,), held or [(2, Box.whole((size,)))])
    return ShardMap([(TensorMeta(name=name, dtype=torch.float32, shape=(size,)), layout)])


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (one_tensor("a", 4), one_tensor("b", 4), "b float32.*no trainer rank reported"),
        (one_tensor("a", 4), one_tensor("a", 5), r"a float32\[5\].*a float32\[4\].*equal whole shapes"),
        (one_tensor("w", 8, (0, Box((0,), (5,))), (1, Box((4,), (8,)))), one_tensor("w", 8),
         "tensor w .*rank 0 and rank 1 .*overlap"),
        (one_tensor("w", 8, (0, Box((0,), (5,))), (1, Box((6,), (8,)))), one_tensor("w", 8),
         r"tensor w .*rank 2 needs .*8 elements.*hold 7"),
    ],
)  # fmt: skip
def test_maps_that_do_not_fit_and_sources_that_overlap_or_gap_are_refused_by_name(
    source: ShardMap, target: ShardMap, message: str
) -> None:
    with pytest.raises(ManifestMismatch, match=message):
        plan_reshard(source, target, rank=2, world_size=9)


def test_ranks_that_disagree_about_a_tensor_are_told_both_values() -> None:
    metas = [TensorMeta(name="w", dtype=torch.float32, shape=(n,)) for n in (4, 5)]
    reports = [geometry.report_of([(meta, Box.whole(meta.shape))]) for meta in metas]
    with pytest.raises(ManifestMismatch, match=r"rank 1 .*w float32\[5\].*w float32\[4\]"):
        ShardMap.gathered(reports)


class OneRankOfTwo(TrainerRanks):
    """The other one gives the same and comes to the hash that it is told."""

    def __init__(self, other: str) -> None:
        super().__init__()
        self.size, self._other = 2, other

    def exchange(self, value: Any, deadline: Deadline) -> list[Any]:
        return [value, self._other or value if isinstance(value, str) else value]

    def exchange_bytes(self, raw: bytes, deadline: Deadline) -> list[bytes]:
        return [raw, raw]


def rank_link(meta: TensorMeta, box: Box) -> RankLink:
    needs = Needs(
        (TensorMeta(name="p", dtype=meta.dtype, shape=box.shape),),
        geometry.PartTable.of([Part(0, box, 0, 0, (1,))]),
    )
    return RankLink("e", 0, Mock(), Needs.from_dict(json.loads(json.dumps(needs.to_dict())), 1000), "", 0)


W = TensorMeta(name="w", dtype=torch.float32, shape=(8,))


def surveyed(other: str = "") -> SendPlanner:
    """One trainer's, which holds all of `w`, as another one does."""
    planner = SendPlanner(OneRankOfTwo(other), SyncConfig(engines=[]))
    planner.survey(UpdateSpec((((W, Box.whole((8,))),),), None), DEADLINE)
    return planner


DEADLINE = Deadline(3600, "test")


def test_trainers_that_planned_otherwise_are_told_both_hashes_before_a_byte() -> None:
    planner, link = surveyed("another hash"), rank_link(W, Box((0,), (8,)))
    with pytest.raises(ManifestMismatch, match="rank 1 planned another hash, rank 0 planned "):
        planner.aim([link], DEADLINE)
    assert planner.outdated_links([link]) == [0]


def test_an_engine_that_is_left_out_or_comes_back_changes_nothing_for_those_that_stay() -> None:
    planner, half = surveyed(), Box((0,), (4,))
    one, other, third = (rank_link(W, half) for _ in range(3))
    assert one.needs is other.needs, "ranks at the same place of two engines share what they say"

    def tables(links: list[RankLink]) -> list[int]:
        planner.aim(links, DEADLINE)
        assert planner.outdated_links(links) == []
        said: list[Any] = [link.link for link in (one, other, third)]
        return [link.send_record.call_count for link in said]

    assert tables([one, other, third]) == [1, 1, 1]
    kept = one.buckets, third.buckets
    assert tables([one, third]) == [1, 1, 1] and kept == (one.buckets, third.buckets)
    other = rank_link(W, half)
    assert tables([one, other, third]) == [1, 1, 1]
    planner.survey(UpdateSpec((((W, half),),), None), DEADLINE)
    assert planner.outdated_links([one]) == [0]
    planner.survey(UpdateSpec((((W, Box.whole((8,))),),), None), DEADLINE)
    assert tables([one, other, third]) == [1, 1, 1], "what is held is again what they were told of"
    planner.survey(UpdateSpec(((), ((W, Box.whole((8,))),)), None), DEADLINE)
    assert tables([one]) == [2, 1, 1], "it comes in another bucket"


def test_a_record_takes_as_many_neighbours_as_it_has_room_for() -> None:
    box = Box((0,), (8,))
    link, pieces = rank_link(W, box), [Piece(0, one, W.dtype, W, 0, ()) for one in box.cut(1)]
    link.record_bytes = 3 * W.dtype.itemsize
    (records,), _ = link.records([pieces[::-1]])
    assert [(record.first, len(record.pieces)) for record in records] == [(0, 3), (3, 3), (6, 2)]


# -- who sends what ----------------------------------------------------------------------------------------------------


def one_by_one(loads: dict[int, int], count: int, nbytes: int) -> list[int]:
    """The rule itself: a heap of (bytes, rank)."""
    heap = [(held, rank) for rank, held in loads.items()]
    heapq.heapify(heap)
    chosen = []
    for _ in range(count):
        held, rank = heap[0]
        heapq.heapreplace(heap, (held + nbytes, rank))
        chosen.append(rank)
    return chosen


@given(
    st.dictionaries(st.integers(0, 30), st.integers(0, 200), min_size=1, max_size=12),
    st.integers(1, 60),
    st.integers(1, 90),
)
def test_dealing_at_once_equals_dealing_one_by_one(loads: dict[int, int], count: int, nbytes: int) -> None:
    loads = dict(sorted(loads.items()))
    loads_R = np.zeros(31, dtype=np.int64)
    loads_R[list(loads)] = list(loads.values())
    senders = deal(loads_R, geometry.Batch(nbytes, tuple(loads), [0] * count, [(Box((), ()), 99)]))
    assert senders.tolist() == one_by_one(loads, count, nbytes)
    assert {rank: int(loads_R[rank]) for rank in loads} == {
        rank: held + nbytes * senders.tolist().count(rank) for rank, held in loads.items()
    }


# -- a DeepSeek-V3-like model over 256 -> 256 ranks ----------------------------------------------------------------------


def test_the_busiest_of_256_senders_is_within_two_percent_and_keeps_its_part_of_the_plan_only() -> None:
    """It sends 1/256 of what the eight engines of 32 ranks receive; another rank comes to the same hash."""
    sides = model_side(ranks=256, tp=8, ep=64), model_side(ranks=256, tp=32, ep=32, first=256)
    trainer, engine = (plan_reshard(*sides, rank=rank, world_size=512) for rank in (7, 300))
    busiest, bound = bounds_of(*sides, world_size=512)
    assert busiest <= bound
    assert len(sides[1].metas) > 45_000 and len({r for b in batches(*sides) for r in b.holders}) == 256
    assert trainer.hash == engine.hash and not engine.sends and len(boxes_of(trainer)) < 3000


@given(st.data(), st.integers(1, 5), st.integers(1, 5))
def test_calls_that_wait_for_their_partners_all_end_in_the_order_of_turns(
    data: Any, trainers: int, engines: int
) -> None:
    """As NCCL carries out a group's calls: one after another, each when both sides are there."""
    row = st.lists(st.integers(0, 3), min_size=engines, max_size=engines)
    counts = data.draw(st.lists(row, min_size=trainers, max_size=trainers))
    size = max(trainers, engines)
    sends = [list(turns(number, 1, counts[number], size)) for number in range(trainers)]
    receives = [list(turns(number, -1, [each[number] for each in counts], size)) for number in range(engines)]
    assert sum(map(len, sends)) == sum(map(sum, counts)) == sum(map(len, receives))
    while any(sends):
        ready = [(t, calls[0][0]) for t, calls in enumerate(sends) if calls]
        met = [(t, e) for t, e in ready if receives[e] and receives[e][0][0] == t]
        assert met, "everybody waits"
        for trainer, engine in met:
            assert sends[trainer].pop(0)[1] == receives[engine].pop(0)[1]
