"""The exact plan, on every rank alike: each destination element written exactly once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from r3channel.errors import ManifestMismatch
from r3channel.weights.geometry import Box, Layout, ShardMap, report_of
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.plan import RankPlan, plan_reshard
from tests.reshard_cases import cases, side
from tests.reshard_model import held_by, replicated

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


@settings(max_examples=150, deadline=None)
@given(cases(world_sizes=st.integers(2, 13)))
def test_every_destination_element_is_written_exactly_once_by_one_that_holds_it(case: Case) -> None:
    source, target, world_size = case
    holders = [held_by(source, rank) for rank in range(world_size)]
    written = [
        {
            name: [(box, torch.zeros(box.shape, dtype=torch.int32)) for box in boxes]
            for name, boxes in held_by(target, rank).items()
        }
        for rank in range(world_size)
    ]
    for rank, plan in enumerate(plans(case)):
        for op in plan.ops:
            name = plan.tensors[op.tensor].name
            assert any(box.intersect(op.box) == op.box for box in holders[rank][name])
            for outer, count in written[op.dst][name]:
                if outer.intersect(op.box) == op.box:
                    count[op.box.within(outer)] += 1
    boxes = [parts for held in written for parts in held.values()]
    assert all(bool((count == 1).all()) for parts in boxes for _, count in parts)


@settings(max_examples=100, deadline=None)
@given(cases(world_sizes=st.integers(2, 13)))
def test_all_ranks_plan_the_same_and_each_keeps_only_what_it_sends(case: Case) -> None:
    all_plans = plans(case)
    assert len({(plan.hash, plan.sent_bytes_R) for plan in all_plans}) == 1
    sent = [
        sum(op.box.numel * plan.tensors[op.tensor].dtype.itemsize for op in plan.ops) for plan in all_plans
    ]
    assert tuple(sent) == all_plans[0].sent_bytes_R


def test_the_hash_depends_on_layout_dtype_and_world_but_not_on_the_rank() -> None:
    source, target = side(MODEL, [0, 1], axis=0), side(MODEL, [2, 3], axis=0)
    changed = [(n, torch.float32 if n == "embed.weight" else d, s) for n, d, s in MODEL]
    hashes = [
        plan_reshard(source, target, rank=0, world_size=9).hash,
        plan_reshard(source, side(MODEL, [2, 3], axis=1), rank=0, world_size=9).hash,
        plan_reshard(source, side(changed, [2, 3], axis=0), rank=0, world_size=9).hash,
        plan_reshard(source, target, rank=0, world_size=5).hash,
    ]
    assert len(set(hashes)) == 4 and plan_reshard(source, target, rank=3, world_size=9).hash == hashes[0]


@pytest.mark.parametrize(("replicas", "engines"), [(2, 3), (3, 4), (4, 2)])
def test_replicas_of_a_tensor_take_turns_over_the_engines(replicas: int, engines: int) -> None:
    metas = [TensorMeta(name=f"w{n}", dtype=torch.float32, shape=(8, 4)) for n in range(12)]
    trainers, targets = list(range(replicas)), list(range(replicas, replicas + engines))
    source = ShardMap([(meta, replicated(meta.shape, trainers)) for meta in metas])
    target = ShardMap([(meta, replicated(meta.shape, targets)) for meta in metas])
    found = [plan_reshard(source, target, rank=rank, world_size=9) for rank in trainers]
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
        ShardMap((TensorMeta(name=n, dtype=torch.float32, shape=s), replicated(s, [rank])) for n, s in rows)
        for rank, rows in enumerate((source, target))
    ]
    with pytest.raises(ManifestMismatch, match=message):
        plan_reshard(maps[0], maps[1], rank=0, world_size=9)


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
    with pytest.raises(ManifestMismatch, match=message):
        plan_reshard(source, ShardMap([(meta, replicated((8,), [2]))]), rank=2, world_size=9)


def test_ranks_that_disagree_about_a_tensor_are_told_both_values() -> None:
    metas = [TensorMeta(name="w", dtype=torch.float32, shape=(n,)) for n in (4, 5)]
    reports = [report_of([(meta, Box.whole(meta.shape))]) for meta in metas]
    with pytest.raises(ManifestMismatch, match=r"rank 1 .*w float32\[5\].*w float32\[4\]"):
        ShardMap.gathered(reports)


def test_what_ranks_report_is_gathered_to_the_map_that_they_have() -> None:
    shards = side(MODEL, [0, 1, 2], axis=0)
    reports = []
    for rank in range(3):
        boxes = held_by(shards, rank)
        reports.append(report_of((meta, box) for meta in shards.metas for box in boxes.get(meta.name, ())))
    gathered = ShardMap.gathered(reports)
    assert gathered.metas == shards.metas
    assert all(held_by(gathered, rank) == held_by(shards, rank) for rank in range(3))
