"""Which holder sends what, balanced by bytes. Decisions only: integers in, integers out, the same on every rank.

Largest first, each to the holder with the fewest bytes so far, ties to the lowest rank (Graham's LPT rule). Real models
have thousands of items of one size with the same holders, so these are dealt out at once, with the result that one by one
would give. With holders that may serve anything the busiest sender stays within the mean plus the largest item; where
only some ranks hold an item no rule can promise that, and the benchmark tells what was possible.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash

from r3channel.errors import ManifestMismatch
from r3channel.weights.geometry import Box, Layout, ShardMap
from r3channel.weights.manifest import TensorMeta


def deal(loads_R: np.ndarray, holders_H: np.ndarray, *, count: int, nbytes: int) -> np.ndarray:
    """Give `count` items of `nbytes` each to the least loaded of `holders_H` (ascending ranks), one after the other.

    Returns the sender of each item and adds to `loads_R` (int64, bytes per rank). The items fill the holders like water:
    everybody below the final level is raised to it in whole items, and what is left goes to the lowest.
    """
    if len(holders_H) == 1 or nbytes == 0:
        loads_R[holders_H[0]] += count * nbytes
        return np.full(count, holders_H[0])
    held_H = loads_R[holders_H]
    items_H = _whole_items(held_H, count, nbytes)
    who = np.repeat(np.arange(len(holders_H)), items_H)
    nth = np.arange(len(who)) - np.repeat(np.cumsum(items_H) - items_H, items_H)
    levels = held_H[who] + nth * nbytes
    order = np.lexsort((who, levels))[:count]
    senders = who[order]
    loads_R[holders_H] += np.bincount(senders, minlength=len(holders_H)) * nbytes
    return holders_H[senders]


def _whole_items(held_H: np.ndarray, count: int, nbytes: int) -> np.ndarray:
    """How many items each holder takes at most: those below the common level, and one more."""
    rising = np.sort(held_H)
    width = np.arange(1, len(rising) + 1)
    volume = count * nbytes + np.cumsum(rising)
    active = int(np.flatnonzero(rising * width < volume)[-1]) + 1  # holders whose load is below the level
    below = (int(volume[active - 1]) - active * held_H) // (active * nbytes)
    return np.maximum(below, -1) + 1


_RULES = b"r3channel reshard 1"
"""Part of the hash, so that processes with other rules do not agree."""


@dataclass(frozen=True, slots=True)
class Op:
    """One box of one tensor, to one rank."""

    tensor: int
    """Index into the plan's tensors."""
    dst: int
    box: Box


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank sends, and what is known of the others' load."""

    tensors: tuple[TensorMeta, ...]
    """The receivers' metas, in the target map's order."""
    hash: str
    """The hash over every operation of every rank, in order."""
    ops: tuple[Op, ...]
    """The operations that this rank sends."""
    sent_bytes_R: tuple[int, ...]
    """Bytes that each rank sends."""
    shares: tuple[tuple[tuple[int, ...], int, int], ...]
    """(holders, bytes of one item, number of items) of all that is dealt out."""

    def sends(self) -> dict[int, list[Op]]:
        """This rank's operations by receiver."""
        grouped: dict[int, list[Op]] = {}
        for op in self.ops:
            grouped.setdefault(op.dst, []).append(op)
        return grouped


def plan_reshard(source: ShardMap, target: ShardMap, *, rank: int, world_size: int) -> RankPlan:
    """The plan of one rank. Ranks of both maps are numbers of one joint group, and no rank is in both.

    Every tensor of `target` must be in `source` with the same whole shape and be held completely, each element by one box
    or by replicas of that box; tensors that only `source` has are not sent. Raises ManifestMismatch, naming the tensor.
    Memory: this rank's operations, one geometry per pair of layouts, and one batch of equal items at a time.
    """
    groups = _groups(source, target)
    loads_R = np.zeros(world_size, dtype=np.int64)
    digest = xxhash.xxh3_128(_RULES + f"{source.digest} {target.digest} {world_size}".encode())
    mine: list[Op] = []
    batches = _batches(groups)
    for batch in batches:
        mine += _deal_batch(batch, loads_R, digest, rank)
    return RankPlan(
        tensors=target.metas,
        hash=digest.hexdigest(),
        ops=tuple(mine),
        sent_bytes_R=tuple(loads_R.tolist()),
        shares=tuple((batch.holders, batch.nbytes, batch.count) for batch in batches),
    )


# -- one pair of layouts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Parts:
    """The distinct boxes of a layout and who holds each. Empty boxes are left out."""

    starts_PD: np.ndarray
    stops_PD: np.ndarray
    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, layout: Layout) -> _Parts:
        filled = (layout.stops_ND > layout.starts_ND).all(axis=1)
        # The last column is for unique(), which is not defined for lines without one: those of a scalar.
        columns = layout.starts_ND, layout.stops_ND, np.zeros_like(layout.ranks_N)[:, None]
        unique, index = np.unique(np.concatenate(columns, axis=1)[filled], axis=0, return_inverse=True)
        index = index.reshape(-1)
        ranks_F = layout.ranks_N[filled]
        axes = len(layout.shape)
        held = tuple(tuple(np.unique(ranks_F[index == part]).tolist()) for part in range(len(unique)))
        return cls(unique[:, :axes], unique[:, axes:-1], held)


@dataclass(frozen=True, slots=True)
class _Geometry:
    """The items that a pair of layouts gives, for any tensor that is cut so."""

    starts_ID: np.ndarray
    stops_ID: np.ndarray
    numel_I: np.ndarray
    dst_I: np.ndarray
    part_I: np.ndarray
    """Index into `holders`."""
    holders: tuple[tuple[int, ...], ...]
    digest: bytes


def _geometry(source: Layout, target: Layout) -> _Geometry | str:
    """The items, or what is wrong (told by the caller, who knows a tensor's name)."""
    src, dst = _Parts.of(source), _Parts.of(target)
    starts = np.maximum(src.starts_PD[:, None], dst.starts_PD[None])
    stops = np.minimum(src.stops_PD[:, None], dst.stops_PD[None])
    numel_SD = np.prod(np.maximum(stops - starts, 0), axis=2, dtype=np.int64)
    problem = _overlap(src) or _gap(src, dst, numel_SD)
    if problem:
        return problem
    part_P, box_P = np.nonzero(numel_SD)
    fans = np.array([len(dst.ranks[box]) for box in box_P], dtype=np.int64)
    piece_I = np.repeat(np.arange(len(part_P)), fans)
    dst_I = np.array([rank for box in box_P for rank in dst.ranks[box]], dtype=np.int64)
    part_I = part_P[piece_I]
    at = part_I, box_P[piece_I]
    digest = xxhash.xxh3_128(source.digest + target.digest)
    for array in (starts[at], stops[at], dst_I, part_I):
        digest.update(np.ascontiguousarray(array).data)
    return _Geometry(starts[at], stops[at], numel_SD[at], dst_I, part_I, src.ranks, digest.digest())


def _overlap(src: _Parts) -> str | None:
    """Different boxes must not share elements: nobody could say whose value counts."""
    starts = np.maximum(src.starts_PD[:, None], src.starts_PD[None])
    stops = np.minimum(src.stops_PD[:, None], src.stops_PD[None])
    common: np.ndarray = np.asarray((stops > starts).all(axis=2))
    np.fill_diagonal(common, False)
    if not common.any():
        return None
    one, other = np.argwhere(common)[0]
    return (
        f"rank {src.ranks[one][0]} and rank {src.ranks[other][0]} hold different boxes that overlap; expected parts "
        "that are equal or disjoint"
    )


def _gap(src: _Parts, dst: _Parts, numel_SD: np.ndarray) -> str | None:
    wanted = np.prod(dst.stops_PD - dst.starts_PD, axis=1, dtype=np.int64)
    found = numel_SD.sum(axis=0)
    short = np.flatnonzero(found != wanted)
    if not len(short):
        return None
    box = int(short[0])
    return (
        f"rank {dst.ranks[box][0]} needs {dst.starts_PD[box].tolist()}..{dst.stops_PD[box].tolist()} "
        f"({wanted[box]} elements), of which the sources hold {found[box]}; is a trainer rank's report missing?"
    )


# -- tensors that share a pair of layouts ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors cut alike on both sides, with one item size in bytes."""

    geometry: _Geometry
    itemsize: int
    tensors_T: np.ndarray

    def op(self, tensor: int, item: int) -> Op:
        geometry = self.geometry
        box = Box(tuple(geometry.starts_ID[item].tolist()), tuple(geometry.stops_ID[item].tolist()))
        return Op(tensor, int(geometry.dst_I[item]), box)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Items of one size with the same holders: for each tensor of the group, each of `items_B`."""

    group: _Group
    items_B: np.ndarray
    holders: tuple[int, ...]
    nbytes: int

    @property
    def count(self) -> int:
        return len(self.group.tensors_T) * len(self.items_B)


def _groups(source: ShardMap, target: ShardMap) -> list[_Group]:
    """The groups, in the order in which the target first needs them."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for index, meta in enumerate(target.metas):
        at = source.index_of.get(meta.name)
        if at is None:
            raise ManifestMismatch(f"tensor {meta} is wanted by the engines, and no trainer rank reported it")
        if source.metas[at].shape != meta.shape:
            raise ManifestMismatch(
                f"tensor {meta}: the trainer's is {source.metas[at]}; expected equal whole shapes"
            )
        key = source.layout_of[at], target.layout_of[index], meta.dtype.itemsize
        found.setdefault(key, []).append(index)
    groups = []
    for (src, dst, itemsize), indexes in found.items():
        geometry = _geometry(source.layouts[src], target.layouts[dst])
        if isinstance(geometry, str):
            raise ManifestMismatch(f"tensor {target.metas[indexes[0]]}: {geometry}")
        groups.append(_Group(geometry, itemsize, np.array(indexes, dtype=np.int64)))
    return groups


def _batches(groups: list[_Group]) -> list[_Batch]:
    """The batches, largest items first; equal ones in the order of groups and parts."""
    batches = []
    for group in groups:
        geometry = group.geometry
        if not len(geometry.part_I):
            continue
        keys = np.stack([geometry.part_I, geometry.numel_I])
        kinds, kind_I = np.unique(keys, axis=1, return_inverse=True)
        for kind, (part, numel) in enumerate(kinds.T.tolist()):
            chosen = np.flatnonzero(kind_I.reshape(-1) == kind)
            batches.append(_Batch(group, chosen, geometry.holders[part], numel * group.itemsize))
    return sorted(batches, key=lambda batch: -batch.nbytes)


def _deal_batch(batch: _Batch, loads_R: np.ndarray, digest: xxhash.xxh3_128, rank: int) -> list[Op]:
    group = batch.group
    holders = np.array(batch.holders, dtype=np.int64)
    senders = deal(loads_R, holders, count=batch.count, nbytes=batch.nbytes)
    digest.update(group.geometry.digest)
    for array in (group.tensors_T, batch.items_B, senders.astype(np.int64)):
        digest.update(np.ascontiguousarray(array).data)
    per_tensor = len(batch.items_B)
    return [
        group.op(int(group.tensors_T[i // per_tensor]), int(batch.items_B[i % per_tensor]))
        for i in np.flatnonzero(senders == rank).tolist()
    ]
