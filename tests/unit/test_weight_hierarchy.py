"""Between nodes: the model times the nodes, not times the ranks."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from r3channel.errors import PlanInvalid
from r3channel.transport.base import Transport
from r3channel.weights.hierarchy import HierarchicalResharder, plan_hierarchical
from r3channel.weights.reshard import plan_reshard
from r3channel.weights.shardmap import ShardMap
from tests.reshard_cases import TIMEOUT_S, cases, equals_oracle, held, on_threads, side

TENSORS = [(f"w{i}.rep", torch.bfloat16, (640, 30)) for i in range(30)] + [("s", torch.float32, ())]
MODEL_BYTES = 30 * 640 * 30 * 2 + 4
NODE_OF = (0, 0, 1, 1, 1, 2, 2, 2)
"""Two trainer ranks on one node, two engine nodes of three ranks."""


def sides() -> tuple[ShardMap, ShardMap]:
    return side(TENSORS, [0, 1], axis=0), side(TENSORS, range(2, 8), axis=0)


def all_plans() -> list[Any]:
    source, target = sides()
    return [plan_hierarchical(source, target, node_of=NODE_OF, rank=rank) for rank in range(8)]


def test_uccl_bytes_between_nodes_are_model_times_nodes_not_ranks() -> None:
    plans = all_plans()
    across = set(chain.from_iterable(plan.across.ops for plan in plans))
    within = set(chain.from_iterable(plan.within.ops for plan in plans))
    assert plans[0].crossing_bytes(across) == 2 * MODEL_BYTES
    assert plans[0].crossing_bytes(within) == 0
    direct = {op for rank in range(8) for op in plan_reshard(*sides(), rank=rank).ops}
    assert plans[0].crossing_bytes(direct) == 6 * MODEL_BYTES


def test_the_ranks_of_a_node_receive_equal_shares_from_outside() -> None:
    received = [
        sum(op.nbytes for op in plan.across.ops if op.dst == plan.across.rank) for plan in all_plans()
    ]
    assert received[:2] == [0, 0]
    assert max(received[2:]) - min(received[2:]) <= 640 * 30 * 2


class Counting:
    """A transport that counts the bytes that leave its node."""

    def __init__(self, inner: Transport) -> None:
        self._inner, self.crossed = inner, 0
        self.rank, self.world_size, self.epoch = inner.rank, inner.world_size, inner.epoch

    def send(self, dst: int, data_N: torch.Tensor, *, timeout_s: float) -> None:
        self.crossed += len(data_N) * (NODE_OF[self.rank] != NODE_OF[dst])
        self._inner.send(dst, data_N, timeout_s=timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_uccl_hierarchical_run_fills_every_rank_and_sends_as_planned() -> None:
    source, target = sides()
    filled = [held(target, rank, seed=None) for rank in range(8)]

    def work(transport: Transport) -> int:
        counting: Any = Counting(transport)
        plan = plan_hierarchical(source, target, node_of=NODE_OF, rank=transport.rank)
        resharder = HierarchicalResharder(plan, counting)
        resharder.agree(timeout_s=TIMEOUT_S)
        before = counting.crossed
        resharder.run(held(source, transport.rank, seed=3), filled[transport.rank], timeout_s=TIMEOUT_S)
        return counting.crossed - before

    crossed = on_threads(8, work)
    assert all(equals_oracle(target, found, seed=3) for found in filled)
    control = 60_000  # alignment to 256 bytes, trailers and votes
    assert 2 * MODEL_BYTES <= sum(crossed) <= 2 * MODEL_BYTES + control


@settings(max_examples=25, deadline=None)
@given(cases(world_sizes=st.integers(2, 7)), st.data())
def test_random_layouts_and_nodes_arrive_whole(
    case: tuple[ShardMap, ShardMap, int], data: st.DataObject
) -> None:
    source, target, world_size = case
    node_of = data.draw(st.lists(st.integers(0, 2), min_size=world_size, max_size=world_size))
    filled = [held(target, rank, seed=None) for rank in range(world_size)]

    def work(transport: Transport) -> None:
        plan = plan_hierarchical(source, target, node_of=node_of, rank=transport.rank)
        resharder = HierarchicalResharder(plan, transport)
        resharder.agree(timeout_s=TIMEOUT_S)
        resharder.run(held(source, transport.rank, seed=1), filled[transport.rank], timeout_s=TIMEOUT_S)

    assert on_threads(world_size, work) == [None] * world_size
    assert all(equals_oracle(target, found, seed=1) for found in filled)


def test_nodes_for_too_few_ranks_are_refused() -> None:
    with pytest.raises(PlanInvalid, match="nodes are given for 3 ranks"):
        plan_hierarchical(*sides(), node_of=(0, 0, 1), rank=0)
