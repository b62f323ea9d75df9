"""Weights cross between nodes once per node, not once per rank: to one representative, which hands them on inside.

Two exact plans, one after the other. The first brings every distinct part that a node needs to one of its ranks that need
it, chosen so that the ranks of a node receive equal bytes; the second goes from there to the node's other ranks and never
leaves it. For tensors that are replicated over an engine's ranks this divides the traffic between nodes by their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from r3channel.errors import PlanInvalid
from r3channel.transport.base import Transport
from r3channel.weights.geometry import Box, Layout
from r3channel.weights.messages import DEFAULT_MESSAGE_BYTES
from r3channel.weights.reshard import Op, RankPlan, plan_reshard
from r3channel.weights.resharder import Resharder, Shards
from r3channel.weights.senders import Item, sender_table
from r3channel.weights.shardmap import ShardMap


@dataclass(frozen=True, slots=True)
class HierarchicalPlan:
    """One rank's part of both stages."""

    node_of: tuple[int, ...]
    """By rank."""
    across: RankPlan
    """Trainers to representatives."""
    within: RankPlan
    """Representatives to the other ranks of their node; tensors are named `NAME@NODE`."""

    def crossing_bytes(self, ops: Iterable[Op]) -> int:
        """Of these operations (of one rank, or of all), the bytes that leave a node."""
        return sum(op.nbytes for op in ops if self.node_of[op.src] != self.node_of[op.dst])


def plan_hierarchical(
    source: ShardMap, target: ShardMap, *, node_of: Sequence[int], rank: int
) -> HierarchicalPlan:
    """Plan both stages. `node_of[rank]` for every rank of the joint group. Raises PlanInvalid as `plan_reshard` does."""
    world_size = len(node_of)
    if max(source.world_size, target.world_size) > world_size:
        raise PlanInvalid(f"nodes are given for {world_size} ranks; the shard maps name more")
    chosen = _representatives(target, node_of)
    landing, onward_from, onward_to = [], [], []
    for index, meta in enumerate(target.metas):
        lands, leaves, arrives = _stages(target.layouts[target.layout_of[index]], index, node_of, chosen)
        landing.append((meta, Layout.of(meta.shape, lands)))
        for node in sorted(arrives):
            named = replace(meta, name=f"{meta.name}@{node}")
            onward_from.append((named, Layout.of(meta.shape, leaves[node])))
            onward_to.append((named, Layout.of(meta.shape, arrives[node])))
    return HierarchicalPlan(
        tuple(node_of),
        plan_reshard(source, ShardMap(landing), rank=rank, world_size=world_size),
        plan_reshard(ShardMap(onward_from), ShardMap(onward_to), rank=rank, world_size=world_size),
    )


class HierarchicalResharder:
    """Runs both stages over one transport; see `Resharder` for the contract."""

    def __init__(
        self,
        plan: HierarchicalPlan,
        transport: Transport,
        *,
        max_message_bytes: int = DEFAULT_MESSAGE_BYTES,
    ) -> None:
        self._node = plan.node_of[plan.across.rank]
        self._across = Resharder(plan.across, transport, max_message_bytes=max_message_bytes)
        self._within = Resharder(plan.within, transport, max_message_bytes=max_message_bytes)

    def agree(self, *, timeout_s: float) -> None:
        """Compare both plans' hashes on all ranks."""
        self._across.agree(timeout_s=timeout_s / 2)
        self._within.agree(timeout_s=timeout_s / 2)

    def run(self, source: Shards, target: Shards, *, timeout_s: float) -> None:
        """Fill this rank's `target`; each stage has half of `timeout_s`."""
        self._across.run(source, target, timeout_s=timeout_s / 2)
        onward = {f"{name}@{self._node}": parts for name, parts in target.items()}
        self._within.run(onward, onward, timeout_s=timeout_s / 2)


_Part = tuple[int, int, Box]
"""(tensor, node, box)"""


def _representatives(target: ShardMap, node_of: Sequence[int]) -> dict[_Part, int]:
    """Who receives each distinct part of each node, balanced by bytes."""
    needed: dict[_Part, set[int]] = {}
    for index in range(len(target.metas)):
        for rank, box in _pairs(target.layouts[target.layout_of[index]]):
            needed.setdefault((index, node_of[rank], box), set()).add(rank)
    items = [
        Item(str(number), box.numel * target.metas[index].dtype.itemsize, tuple(sorted(ranks)))
        for number, ((index, _, box), ranks) in enumerate(needed.items())
    ]
    sender_of = sender_table(items).sender_of
    return {part: sender_of[str(number)] for number, part in enumerate(needed)}


def _stages(
    layout: Layout, index: int, node_of: Sequence[int], chosen: dict[_Part, int]
) -> tuple[list[tuple[int, Box]], dict[int, list[tuple[int, Box]]], dict[int, list[tuple[int, Box]]]]:
    """Of one tensor: where it lands, and per node from where and to where it goes on."""
    lands: list[tuple[int, Box]] = []
    leaves: dict[int, list[tuple[int, Box]]] = {}
    arrives: dict[int, list[tuple[int, Box]]] = {}
    for rank, box in _pairs(layout):
        node = node_of[rank]
        if chosen[index, node, box] == rank:
            lands.append((rank, box))
            leaves.setdefault(node, []).append((rank, box))
        else:
            arrives.setdefault(node, []).append((rank, box))
    return lands, leaves, arrives


def _pairs(layout: Layout) -> list[tuple[int, Box]]:
    boxes = zip(layout.starts_ND.tolist(), layout.stops_ND.tolist(), strict=True)
    return [
        (rank, Box(tuple(lo), tuple(hi)))
        for rank, (lo, hi) in zip(layout.ranks_N.tolist(), boxes, strict=True)
    ]
