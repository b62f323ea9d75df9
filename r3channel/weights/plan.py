"""Which holder sends what, balanced by bytes. Decisions only: integers in, integers out, the same on every rank.

Largest first, each to the holder with the fewest bytes so far, ties to the lowest rank (Graham's LPT rule). Real models
have thousands of items of one size with the same holders, so these are dealt out at once, with the result that one by one
would give. With holders that may serve anything the busiest sender stays within the mean plus the largest item; where
only some ranks hold an item no rule can promise that, and the benchmark tells what was possible.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import xxhash

from r3channel.errors import ManifestMismatch
from r3channel.weights.geometry import Box, Layout, ShardMap


def deal(loads_R: np.ndarray, batch: Batch) -> np.ndarray:
    """Give a batch's items to the least loaded of its holders, one after the other.

    Returns the sender of each item and adds to `loads_R` (int64, bytes per rank). The items fill the holders like water:
    everybody below the final level is raised to it in whole items, and what is left goes to the lowest.
    """
    holders_H, nbytes = np.array(batch.holders), batch.nbytes
    count = len(batch.tensors) * len(batch.items)
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


class RankPlan(NamedTuple):
    """What one rank sends."""

    hash: str
    """The hash over every box that any rank sends, in order."""
    sends: dict[int, list[tuple[int, Box]]]
    """What this rank sends to each receiver: the tensor's number in the target map, and a box of it."""


def plan_reshard(source: ShardMap, target: ShardMap, *, rank: int, world_size: int) -> RankPlan:
    """The plan of one rank. Ranks of both maps are numbers of one joint group, and no rank is in both.

    Every tensor of `target` must be in `source` with the same whole shape and be held completely, each element by one box
    or by replicas of that box; tensors that only `source` has are not sent. Raises ManifestMismatch, naming the tensor.
    Memory: what this rank sends, and the items of each pair of layouts that occurs.
    """
    digest = xxhash.xxh3_128(_RULES + f"{source.digest} {target.digest} {world_size}".encode())
    loads_R, sends = np.zeros(world_size, dtype=np.int64), dict[int, list[tuple[int, Box]]]()
    for batch in batches(source, target):
        senders = deal(loads_R, batch)
        digest.update(senders.astype(np.int64).data)
        for at in np.flatnonzero(senders == rank).tolist():
            tensor, item = divmod(at, len(batch.items))
            box, dst = batch.items[item]
            sends.setdefault(dst, []).append((batch.tensors[tensor], box))
    return RankPlan(digest.hexdigest(), sends)


class Batch(NamedTuple):
    """Items of one size with the same holders, for any of the tensors, which are cut alike."""

    nbytes: int
    holders: tuple[int, ...]
    tensors: list[int]
    items: list[tuple[Box, int]]
    """Each a box and the rank that needs it; one object where several ranks need the same box."""


def batches(source: ShardMap, target: ShardMap) -> list[Batch]:
    """The batches, largest items first; equal ones in the order in which the target first needs them."""
    alike: dict[tuple[str, str, int], list[int]] = {}
    for index, meta in enumerate(target.metas):
        at = source.index_of.get(meta.name)
        if at is None:
            raise ManifestMismatch(f"tensor {meta} is wanted by the engines, and no trainer rank reported it")
        if source.metas[at].shape != meta.shape:
            text = f"tensor {meta}: the trainer's is {source.metas[at]}; expected equal whole shapes"
            raise ManifestMismatch(text)
        key = source.layouts[at].digest, target.layouts[index].digest, meta.dtype.itemsize
        alike.setdefault(key, []).append(index)
    found = list[Batch]()
    for (_, _, itemsize), tensors in alike.items():
        meta = target.metas[tensors[0]]
        try:
            items = _items(source.layouts[source.index_of[meta.name]], target.layouts[tensors[0]])
        except ManifestMismatch as error:
            raise ManifestMismatch(f"tensor {meta}: {error}") from error
        for (holders, numel), chosen in items.items():
            found.append(Batch(numel * itemsize, holders, tensors, chosen))
    return sorted(found, key=lambda batch: -batch.nbytes)


# -- one pair of layouts -----------------------------------------------------------------------------------------------


def _items(src: Layout, dst: Layout) -> dict[tuple[tuple[int, ...], int], list[tuple[Box, int]]]:
    """Boxes and the ranks that need them, by who holds each box and by its number of elements."""
    starts, stops, numel_SD = _common(src, dst)
    _, _, again_SS = _common(src, src)
    np.fill_diagonal(again_SS, 0)
    for one, other in np.argwhere(again_SS)[:1].tolist():  # nobody could say whose value counts
        ranks = f"rank {src.held[one][1][0]} and rank {src.held[other][1][0]}"
        raise ManifestMismatch(f"{ranks} hold different boxes that overlap; expected equal or disjoint")
    for (box, ranks), found in zip(dst.held, numel_SD.sum(axis=0).tolist(), strict=True):
        if found != box.numel:
            raise ManifestMismatch(
                f"rank {ranks[0]} needs {box} ({box.numel} elements), of which the sources hold {found}; is a trainer rank's "
                "report missing?"
            )
    items: dict[tuple[tuple[int, ...], int], list[tuple[Box, int]]] = {}
    for at in map(tuple, np.argwhere(numel_SD).tolist()):
        cut = Box(tuple(starts[at].tolist()), tuple(stops[at].tolist()))
        chosen = items.setdefault((src.held[at[0]][1], int(numel_SD[at])), [])
        chosen += [(cut, rank) for rank in dst.held[at[1]][1]]
    return items


def _common(one: Layout, other: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What each pair of boxes has in common: starts, stops, elements."""
    mine, theirs = (
        np.array([box for box, _ in layout.held], dtype=np.int64).reshape(
            len(layout.held), 2, len(layout.shape)
        )
        for layout in (one, other)
    )
    starts = np.maximum(mine[:, None, 0], theirs[None, :, 0])
    stops = np.minimum(mine[:, None, 1], theirs[None, :, 1])
    return starts, stops, np.prod(np.maximum(stops - starts, 0), axis=2, dtype=np.int64)
