"""Which holder sends what, balanced by bytes. Decisions only: integers in, integers out, the same on every rank.

Largest first, each to the holder with the fewest bytes so far, ties to the lowest rank (Graham's LPT rule). Real models
have thousands of items of one size with the same holders, so these are dealt out at once, with the result that one by one
would give. With holders that may serve anything the busiest sender stays within the mean plus the largest item; where
only some ranks hold an item no rule can promise that, and `Table.floor_bytes` says what was possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from r3channel.errors import PlanInvalid


@dataclass(frozen=True, slots=True)
class Item:
    """Something to send once, and who could."""

    name: str
    nbytes: int
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Item -> sender, and what each sender sends."""

    sender_of: Mapping[str, int]
    bytes_of: Mapping[int, int]
    """Per rank that holds anything, also those that send nothing."""
    largest_bytes: int
    floor_bytes: int
    """No table can have a busiest sender below this: the mean over the holders of the tightest group of items."""

    @property
    def mean_bytes(self) -> float:
        return sum(self.bytes_of.values()) / max(1, len(self.bytes_of))

    @property
    def busiest_bytes(self) -> int:
        return max(self.bytes_of.values(), default=0)

    @property
    def imbalance(self) -> float:
        """Busiest over mean; 1.0 is perfect."""
        return self.busiest_bytes / self.mean_bytes if self.mean_bytes else 1.0


def sender_table(items: Iterable[Item]) -> Table:
    """The byte-balanced table of these items. Raises PlanInvalid for an item that nobody holds, or a name given twice."""
    batches: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for item in items:
        if not item.holders:
            raise PlanInvalid(f"{item.name} ({item.nbytes} bytes) is held by no sender")
        batches.setdefault((item.nbytes, tuple(sorted(set(item.holders)))), []).append(item.name)
    holders = sorted({rank for _, ranks in batches for rank in ranks})
    loads_R = np.zeros(max(holders, default=0) + 1, dtype=np.int64)
    sender_of: dict[str, int] = {}
    count = 0
    for (nbytes, ranks), names in sorted(
        batches.items(), key=lambda batch: (-batch[0][0], min(batch[1]), batch[0][1])
    ):
        senders = deal(loads_R, np.array(ranks, dtype=np.int64), count=len(names), nbytes=nbytes)
        sender_of.update(zip(sorted(names), senders.tolist(), strict=True))
        count += len(names)
    if len(sender_of) != count:
        raise PlanInvalid("an item is given twice; names of one table are distinct")
    sizes = [(ranks, nbytes * len(names)) for (nbytes, ranks), names in batches.items()]
    return Table(
        sender_of=sender_of,
        bytes_of={rank: int(loads_R[rank]) for rank in holders},
        largest_bytes=max((nbytes for nbytes, _ in batches), default=0),
        floor_bytes=floor_bytes(sizes),
    )


def deal(loads_R: np.ndarray, holders_H: np.ndarray, *, count: int, nbytes: int) -> np.ndarray:
    """Give `count` items of `nbytes` each to the least loaded of `holders_H` (ascending ranks), one after the other.

    Returns the sender of each item and adds to `loads_R` (int64, bytes per rank). The items fill the holders like water:
    everybody below the final level is raised to it in whole items, and what is left goes to the lowest.
    """
    if len(holders_H) == 1 or nbytes == 0:
        loads_R[holders_H[0]] += count * nbytes
        return np.full(count, holders_H[0])
    held_H = loads_R[holders_H]
    if count == 1:
        chosen = holders_H[int(np.argmin(held_H))]
        loads_R[chosen] += nbytes
        return np.array([chosen])
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


def floor_bytes(sizes: Sequence[tuple[tuple[int, ...], int]]) -> int:
    """A lower bound of the busiest sender, over the holder sets that occur and their union.

    Items whose holders all lie in a set must be sent from within it, so the set's mean is a bound.
    """
    totals: dict[frozenset[int], int] = {}
    for ranks, nbytes in sizes:
        key = frozenset(ranks)
        totals[key] = totals.get(key, 0) + nbytes
    sets = [*totals, frozenset().union(*totals)] if totals else []
    means = [
        -(-sum(nbytes for ranks, nbytes in totals.items() if ranks <= outer) // len(outer)) for outer in sets
    ]
    return max(means, default=0)
