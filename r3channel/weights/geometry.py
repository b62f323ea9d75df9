"""Boxes of a tensor and who holds them. Arithmetic only: no tensor values, no dtypes, no network.

A *box* is a half-open cuboid of a tensor, one start and stop per axis. A *layout* says which rank holds which box; ranks
that hold the same box are replicas.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import sub
from typing import Any, NamedTuple

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
        """Whether the other one is a box, and lies within."""
        corners = zip(self.start, other.start, other.stop, self.stop, strict=True)
        return all(first <= start <= stop <= end for first, start, stop, end in corners)

    def cut(self, most: int) -> Iterator[Box]:
        """Boxes of at most `most` items, in C order, or of one item where that is less."""
        axis = next((axis for axis, size in enumerate(self.shape) if size > 1), None)
        if axis is None or self.numel <= most:
            yield self
            return
        lines = max(1, most * self.shape[axis] // self.numel)
        for start in range(self.start[axis], self.stop[axis], lines):
            stop = min(start + lines, self.stop[axis])
            part = Box(_with(self.start, axis, start), _with(self.stop, axis, stop))
            yield from part.cut(most) if lines == 1 else (part,)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Slices that cut this box out of a tensor that holds exactly `outer`."""
        spans = zip(self.start, self.stop, outer.start, strict=True)
        return tuple(slice(start - base, stop - base) for start, stop, base in spans)


def _with(corner: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*corner[:axis], value, *corner[axis + 1 :])


class Layout(NamedTuple):
    """Which ranks hold which box of a tensor of this shape. A rank may hold several boxes, or none; empty ones are left out."""

    shape: tuple[int, ...]
    held: tuple[tuple[Box, tuple[int, ...]], ...]
    """Distinct boxes in ascending order, and the ranks that hold each."""
    digest: str
    """Over shape, boxes and ranks."""

    @classmethod
    def of(cls, shape: Sequence[int], held: Iterable[tuple[int, Box]]) -> Layout:
        """From (rank, box) pairs. Raises ManifestMismatch for a box that is not within the shape."""
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
        """By tensor."""
        self.index_of: Mapping[str, int] = {meta.name: i for i, meta in enumerate(self.metas)}
        rows = [[*meta.row(), layout.digest] for meta, layout in placed]
        self.digest = xxhash.xxh3_128_hexdigest(json.dumps(rows, separators=(",", ":")).encode())

    @classmethod
    def of_holders(
        cls, tensors: Iterable[tuple[TensorMeta, Sequence[int]]], holders: Sequence[tuple[Sequence[int], Box]]
    ) -> ShardMap:
        """From the indexes, for each tensor, into `holders`: ranks that hold a box, and the box."""
        known: dict[tuple[Any, ...], Layout] = {}
        rows = []
        for meta, indexes in tensors:
            key = (meta.shape, *indexes)
            if key not in known:
                held = [(rank, holders[index][1]) for index in indexes for rank in holders[index][0]]
                known[key] = Layout.of(meta.shape, held)
            rows.append((meta, known[key]))
        return cls(rows)

    @classmethod
    def gathered(cls, reports: Sequence[bytes]) -> ShardMap:
        """From what each rank says it holds (`report_of`), by rank. The first rank that has a tensor decides its place.

        Raises ManifestMismatch when two ranks disagree about a tensor, with both values.
        """
        held: dict[str, list[int]] = {}
        told, holders = list[list[Any]](), list[tuple[list[int], Box]]()
        for rank, report in enumerate(reports):
            for (*kind, start, stop), names in json.loads(zlib.decompress(report)):
                for name in names.split("\n"):
                    first, *_ = indexes = held.setdefault(name, [len(told)])
                    if first == len(told):
                        continue
                    if told[first] != kind:
                        raise ManifestMismatch(
                            f"rank {rank} has a part of {name} {kind[0]}{kind[1]}, others {name} {told[first][0]}{told[first][1]}"
                        )
                    indexes.append(len(told))
                told.append(kind)
                holders.append(([rank], Box(tuple(start), tuple(stop))))
        metas = (TensorMeta.from_row([name, *told[first]]) for name, (first, *_) in held.items())
        return cls.of_holders(zip(metas, held.values(), strict=True), holders)


def report_of(held: Iterable[tuple[TensorMeta, Box]]) -> bytes:
    """What a rank holds, for `ShardMap.gathered`: names by kind, since a model has thousands of one kind; packed."""
    kinds: dict[tuple[Any, ...], list[str]] = {}
    for meta, box in held:
        kinds.setdefault((meta.dtype_name, meta.shape, box.start, box.stop), []).append(meta.name)
    rows = [(kind, "\n".join(names)) for kind, names in kinds.items()]
    return zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 1)
