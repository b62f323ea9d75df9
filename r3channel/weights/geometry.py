"""Boxes of a tensor, who holds them, which a rank of an engine takes, and which holder sends what. No values, no network.

A *box* is a half-open cuboid of a tensor, one start and stop per axis. A *layout* says which rank holds which box; ranks
that hold the same box are replicas. A *part* is a box and where it lies in a parameter; a rank's *needs* are all its parts.

The *plan*, the same on every rank, is balanced by bytes: largest first, each to the holder with the fewest bytes so far, ties to
the lowest rank (Graham's LPT rule). Real models have thousands of items of one size with the same holders, so these are dealt out
at once, with the result that one by one would give. With holders that may serve anything the busiest sender stays within the mean
plus the largest item; where only some ranks hold an item no rule can promise that, and the benchmark tells what was possible.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import sub
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
import xxhash

from r3channel.errors import ManifestMismatch
from r3channel.weights.manifest import TensorMeta

MOST_PIECES = 4096
"""Boxes that one tensor may be cut into at most."""


class Box(NamedTuple):
    """`start[axis] <= index < stop[axis]`. A scalar's only box has no axes and one element.

    >>> Box((0, 2), (4, 6)).shape, Box((0, 2), (4, 6)).holds(Box((1, 2), (4, 3)))
    ((4, 4), True)
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.stop, self.start))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def holds(self, other: Box) -> bool:
        """Return whether `other` is a box and lies within this one."""
        corners = zip(self.start, other.start, other.stop, self.stop, strict=True)
        return all(first <= start <= stop <= end for first, start, stop, end in corners)

    def cut(self, most: int) -> Iterator[Box]:
        """Cut this box into boxes of at most `most` items.

        They come in C order. Where `most` is less than one, each has one item.
        """
        axis = next((axis for axis, size in enumerate(self.shape) if size > 1), None)
        if axis is None or self.numel <= most:
            yield self
            return
        lines = max(1, most * self.shape[axis] // self.numel)
        for first in range(self.start[axis], self.stop[axis], lines):
            start, stop = [*self.start], [*self.stop]
            start[axis], stop[axis] = first, min(first + lines, self.stop[axis])
            yield from Box(tuple(start), tuple(stop)).cut(most)

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Return slices that cut this box out of an outer one.

        Args:
            outer: the box that a tensor holds exactly.
        """
        spans = zip(self.start, self.stop, outer.start, strict=True)
        return tuple(slice(start - base, stop - base) for start, stop, base in spans)


class Layout(NamedTuple):
    """Which ranks hold which box of a tensor of this shape. A rank may hold several boxes, or none; empty ones are left out."""

    shape: tuple[int, ...]
    held: tuple[tuple[Box, tuple[int, ...]], ...]
    """Distinct boxes in ascending order, and the ranks that hold each."""
    digest: str
    """A hash over shape, boxes and ranks."""

    @classmethod
    def of(cls, shape: Sequence[int], held: Iterable[tuple[int, Box]]) -> Layout:
        """Make a layout of (rank, box) pairs.

        >>> Layout.of((8,), [(3, Box((0,), (9,)))])
        Traceback (most recent call last):
        r3channel.errors.ManifestMismatch: rank 3 holds Box(start=(0,), stop=(9,)), which is no part of shape [8]

        Raises:
            ManifestMismatch: a box is not within the shape.
        """
        ranks: dict[Box, set[int]] = {}
        for rank, box in held:
            if len(box.start) != len(shape) or not Box.whole(shape).holds(box):
                raise ManifestMismatch(f"rank {rank} holds {box}, which is no part of shape {list(shape)}")
            if box.numel:
                ranks.setdefault(box, set()).add(rank)
        boxes = tuple((box, tuple(sorted(ranks[box]))) for box in sorted(ranks))
        return cls(tuple(shape), boxes, xxhash.xxh3_128_hexdigest(f"{list(shape)} {boxes}".encode()))


class ShardMap:
    """Tensors in order, each with its layout. Immutable."""

    def __init__(self, tensors: Iterable[tuple[TensorMeta, Layout]]) -> None:
        placed = list(tensors)
        self.metas = tuple(meta for meta, _ in placed)
        self.layouts = tuple(layout for _, layout in placed)
        """The layouts, by tensor."""
        rows = [[*meta.row(), layout.digest] for meta, layout in placed]
        self.digest = xxhash.xxh3_128_hexdigest(json.dumps(rows, separators=(",", ":")).encode())

    @classmethod
    def of_holders(
        cls, tensors: Iterable[tuple[TensorMeta, Sequence[int]]], holders: Sequence[tuple[Sequence[int], Box]]
    ) -> ShardMap:
        """Make a map of tensors and the boxes that ranks hold.

        Args:
            tensors: each tensor with indexes into `holders`.
            holders: ranks that hold a box, and the box.
        """

        @cache
        def layout(shape: tuple[int, ...], *indexes: int) -> Layout:
            return Layout.of(shape, ((rank, holders[at][1]) for at in indexes for rank in holders[at][0]))

        return cls((meta, layout(meta.shape, *indexes)) for meta, indexes in tensors)

    @classmethod
    def gathered(cls, reports: Sequence[bytes]) -> ShardMap:
        """Make a map of what each rank says it holds.

        Args:
            reports: by rank, what `report_of` returned there. The first rank that has a tensor decides the tensor's place.

        Raises:
            ManifestMismatch: two ranks disagree about a tensor; the text has both values.
        """
        held: dict[str, list[int]] = {}
        kinds, holders = list[list[Any]](), list[tuple[list[int], Box]]()
        for rank, report in enumerate(reports):
            for (*kind, start, stop), names in json.loads(zlib.decompress(report)):
                kinds.append(kind)
                holders.append(([rank], Box(tuple(start), tuple(stop))))
                for name in names.split("\n"):
                    indexes = held.setdefault(name, [])
                    indexes.append(len(kinds) - 1)
                    if (other := kinds[indexes[0]]) != kind:
                        raise ManifestMismatch(
                            f"rank {rank} has a part of {name} {kind[0]}{kind[1]}, others {name} {other[0]}{other[1]}"
                        )
        metas = (TensorMeta.from_row([name, *kinds[first]]) for name, (first, *_) in held.items())
        return cls.of_holders(zip(metas, held.values(), strict=True), holders)


def report_of(held: Iterable[tuple[TensorMeta, Box]]) -> bytes:
    """Pack what a rank holds, for `ShardMap.gathered`.

    Names are listed by kind, since a model has thousands of one kind.
    """
    kinds: dict[tuple[Any, ...], list[str]] = {}
    for meta, box in held:
        kinds.setdefault((meta.dtype_name, meta.shape, box.start, box.stop), []).append(meta.name)
    rows = [(kind, "\n".join(names)) for kind, names in kinds.items()]
    return zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 1)


# -- what a rank of an engine takes ---------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A box of a checkpoint tensor and its place in one parameter; offset and strides (by the tensor's axes) in items."""

    tensor: int
    box: Box
    param: int
    offset: int
    strides: tuple[int, ...]

    def start(self, box: Box) -> int:
        """Return the parameter's item at which a box within the part begins."""
        steps = zip(box.start, self.box.start, self.strides, strict=True)
        return self.offset + sum((start - base) * stride for start, base, stride in steps)

    def gaps(self, box: Box) -> bool:
        """Return whether the box's items lie with gaps in the parameter.

        They do if they do not lie one after the other.
        """
        dims = zip(box.shape, self.strides, steps_of(box.shape), strict=True)
        return any(size != 1 and stride != step for size, stride, step in dims)

    def view(self, flat: torch.Tensor, box: Box | None = None) -> torch.Tensor:
        """Return the part as a view of the parameter's memory.

        Args:
            flat: the parameter as a flat tensor of its dtype.
            box: a box within the part; None for the whole part.
        """
        box = box or self.box
        return torch.as_strided(flat, box.shape, self.strides, flat.storage_offset() + self.start(box))


class PartTable(Sequence[Part]):
    """Parts in columns, since a model has many of few kinds. A `Part` is made when it is asked for, and kept."""

    def __init__(self, columns_CP: np.ndarray, kinds: Sequence[tuple[Box, tuple[int, ...]]]) -> None:
        """Keep the columns.

        Args:
            columns_CP: int64 rows of tensor, parameter, offset and kind, one column for each part.
            kinds: boxes and strides.
        """
        self.columns_CP, self.kinds = columns_CP, kinds
        self.tensor_P, self.param_P, self.offset_P, self.kind_P = columns_CP
        self._made: dict[int, Part] = {}

    @classmethod
    def of(cls, parts: Sequence[Part]) -> PartTable:
        kinds: dict[tuple[Box, tuple[int, ...]], int] = {}
        numbers = [kinds.setdefault((part.box, part.strides), len(kinds)) for part in parts]
        rows = [(p.tensor, p.param, p.offset, kind) for p, kind in zip(parts, numbers, strict=True)]
        return cls(np.array(rows, dtype=np.int64).reshape(-1, 4).T, tuple(kinds))

    def __len__(self) -> int:
        return len(self.tensor_P)

    def __getitem__(self, index: Any) -> Any:
        if index not in self._made:
            tensor, param, offset, kind = self.columns_CP[:, index].tolist()
            box, strides = self.kinds[kind]
            self._made[index] = Part(tensor, box, param, offset, strides)
        return self._made[index]


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Needs:
    """The parts of a checkpoint that one rank takes."""

    params: tuple[TensorMeta, ...] = ()
    parts: PartTable = field(default_factory=lambda: PartTable.of(()))
    """Ordered by tensor."""
    missing: tuple[str, ...] = ()
    """Parameters that the tensors leave empty or fill in part."""
    padding: tuple[tuple[Part, float], ...] = ()
    """Places that no tensor fills (`tensor` -1), with the loader's constant where it is not there yet, as after `--load-format
    dummy`. The rank fills them; no trainer is told."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        params = [meta.row() for meta in self.params]
        kinds = [(box.start, box.stop, strides) for box, strides in self.parts.kinds]
        parts = base64.b64encode(zlib.compress(self.parts.columns_CP.astype("<i8").tobytes(), 1)).decode()
        return {"params": params, "missing": self.missing, "kinds": kinds, "parts": parts}

    @classmethod
    def from_dict(cls, value: dict[str, Any], tensors: int) -> Needs:
        """Read the needs that another process made with `to_dict`.

        The call returns the same object again while one of equal content lives: ranks at the same place of several engines share
        it.

        Args:
            value: what `to_dict` returned.
            tensors: the number of tensors that the needs may name.

        Raises:
            ValueError, TypeError, LookupError, OverflowError, zlib.error: no rank needs such parts of so many tensors.
        """
        key = xxhash.xxh3_128_digest(json.dumps(value).encode())
        if (needs := _alive.get(key)) is None:
            data = zlib.decompressobj().decompress(base64.b64decode(value["parts"]), 1 << 28)
            kinds = [(Box(tuple(a), tuple(b)), tuple(strides)) for a, b, strides in value["kinds"]]
            params = tuple(TensorMeta.from_row(row) for row in value["params"])
            table = PartTable(np.frombuffer(data, dtype="<i8").reshape(4, -1), kinds)
            _check_parts(table, [math.prod(meta.shape) for meta in params], tensors)
            needs = _alive[key] = cls(params, table, tuple(value["missing"]))
        return needs


_alive = WeakValueDictionary[bytes, Needs]()


def _check_parts(table: PartTable, sizes: Sequence[int], tensors: int) -> None:
    axes = [list(zip(box.start, box.stop, strides, strict=True)) for box, strides in table.kinds]
    ends_K = np.array([1 + sum((b - a - 1) * step for a, b, step in spans) for spans in axes], np.int64)
    sizes_M, most_C = np.array(sizes, np.int64), np.array([tensors, len(sizes), 1 << 62, len(axes)])
    known = (table.columns_CP >= 0) & (table.columns_CP < most_C[:, None])
    ascend = all(0 <= a <= b and step >= 0 for spans in axes for a, b, step in spans)
    if not (ascend and known.all()) or (table.offset_P > sizes_M[table.param_P] - ends_K[table.kind_P]).any():
        raise ValueError("a part lies outside its tensor or parameter")


def steps_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the items between neighbours along each axis."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


# -- who sends what ----------------------------------------------------------------------------------------------------


def deal(loads_R: np.ndarray, batch: Batch) -> np.ndarray:
    """Assign a batch's items to their least loaded holders.

    The result is as if items were given one after the other. The items fill the holders like water: every holder below the final
    level is raised to it in whole items, and what is left goes to the lowest.

    Args:
        loads_R: int64, bytes per rank. The batch is added to it.
        batch: items of one size with the same holders.

    Returns:
        The sender of each item.
    """
    holders_H, nbytes = np.array(batch.holders), batch.nbytes
    count = len(batch.tensors) * len(batch.items)
    if len(holders_H) == 1 or nbytes == 0:
        loads_R[holders_H[0]] += count * nbytes
        return np.full(count, holders_H[0])
    held_H = loads_R[holders_H]
    # The final level is that of the `active` holders whose load is below it: what they hold, and the batch, evenly.
    rising = np.sort(held_H)
    volume = count * nbytes + np.cumsum(rising)
    active = int(np.flatnonzero(rising * np.arange(1, len(rising) + 1) < volume)[-1]) + 1
    below_H = (int(volume[active - 1]) - active * held_H) // (active * nbytes)
    items_H = np.maximum(below_H, -1) + 1  # at most: those below the level, and one more
    who = np.repeat(np.arange(len(holders_H)), items_H)
    nth = np.arange(len(who)) - np.repeat(np.cumsum(items_H) - items_H, items_H)
    senders = who[np.lexsort((who, held_H[who] + nth * nbytes))[:count]]
    loads_R[holders_H] += np.bincount(senders, minlength=len(holders_H)) * nbytes
    return holders_H[senders]


class RankPlan(NamedTuple):
    """What one rank sends."""

    hash: str
    """The hash over every box that any rank sends, in order."""
    sends: dict[int, list[tuple[int, Box]]]
    """What this rank sends to each receiver: the tensor's number in the target map, and a box of it."""


def plan_reshard(source: ShardMap, target: ShardMap, *, rank: int, world_size: int) -> RankPlan:
    """Return the plan of one rank.

    Every tensor of `target` must be in `source` with the same whole shape and be held completely, each element by one box or by
    replicas of that box. Tensors that only `source` has are not sent. Memory: what this rank sends, and the items of each pair of
    layouts that occurs.

    Args:
        source: what trainer ranks hold.
        target: what engines' ranks need. Ranks of both maps are numbers of one joint group, and no rank is in both.
        rank: the rank whose plan is made.
        world_size: ranks of the joint group.

    Raises:
        ManifestMismatch: a tensor breaks these rules; the text names it.
    """
    # The hash begins with a version of the rules, so that processes with other rules do not agree.
    digest = xxhash.xxh3_128(f"r3channel reshard 1{source.digest} {target.digest} {world_size}".encode())
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
    """Return all batches, largest items first.

    Equal ones come in the order in which the target first needs them.

    Raises:
        ManifestMismatch: a tensor is missing, has another shape, is not held completely, or is held in boxes that overlap.
    """
    given = {meta.name: (meta, layout) for meta, layout in zip(source.metas, source.layouts, strict=True)}
    alike: dict[tuple[str, str, int], tuple[Layout, Layout, list[int]]] = {}
    for index, (meta, needed) in enumerate(zip(target.metas, target.layouts, strict=True)):
        if meta.name not in given:
            raise ManifestMismatch(f"tensor {meta} is wanted by the engines, and no trainer rank reported it")
        theirs, held = given[meta.name]
        if theirs.shape != meta.shape:
            raise ManifestMismatch(f"tensor {meta}: the trainer's is {theirs}; expected equal whole shapes")
        key = held.digest, needed.digest, meta.dtype.itemsize
        alike.setdefault(key, (held, needed, []))[2].append(index)
    batches = list[Batch]()
    for (_, _, itemsize), (held, needed, tensors) in alike.items():
        for (holders, numel), chosen in _items(target.metas[tensors[0]], held, needed).items():
            batches.append(Batch(numel * itemsize, holders, tensors, chosen))
    return sorted(batches, key=lambda batch: -batch.nbytes)


# -- one pair of layouts -----------------------------------------------------------------------------------------------


_Items = dict[tuple[tuple[int, ...], int], list[tuple[Box, int]]]
"""Boxes and the ranks that need them, by who holds each box and by its number of elements."""


def _items(meta: TensorMeta, src: Layout, dst: Layout) -> _Items:
    """Return what is sent of tensors cut alike; errors name `meta`."""
    starts, stops, numel_SD = _common(src, dst)
    _, _, again_SS = _common(src, src)
    np.fill_diagonal(again_SS, 0)
    for first, second in np.argwhere(again_SS)[:1].tolist():  # no rule says whose value counts
        who = f"tensor {meta}: rank {src.held[first][1][0]} and rank {src.held[second][1][0]}"
        raise ManifestMismatch(f"{who} hold different boxes that overlap; expected equal or disjoint")
    for (box, ranks), numel in zip(dst.held, numel_SD.sum(axis=0).tolist(), strict=True):
        if numel != box.numel:
            raise ManifestMismatch(
                f"tensor {meta}: rank {ranks[0]} needs {box} ({box.numel} elements), of which the sources hold {numel}; is a "
                "trainer rank's report missing?"
            )
    items: _Items = {}
    for at in map(tuple, np.argwhere(numel_SD).tolist()):
        cut = Box(tuple(starts[at].tolist()), tuple(stops[at].tolist()))
        chosen = items.setdefault((src.held[at[0]][1], int(numel_SD[at])), [])
        chosen += [(cut, rank) for rank in dst.held[at[1]][1]]
    return items


def _common(first: Layout, second: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return starts, stops and sizes of what each pair has in common."""
    mine, theirs = (
        np.array([box for box, _ in layout.held], np.int64).reshape(len(layout.held), 2, len(layout.shape))
        for layout in (first, second)
    )
    starts = np.maximum(mine[:, None, 0], theirs[None, :, 0])
    stops = np.minimum(mine[:, None, 1], theirs[None, :, 1])
    return starts, stops, np.prod(np.maximum(stops - starts, 0), axis=2, dtype=np.int64)
