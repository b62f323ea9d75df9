"""Boxes of a tensor and who holds them. Arithmetic only: no tensor values, no dtypes, no network.

A *box* is a half-open cuboid of a tensor, one start and stop per axis. A *layout* says which rank holds which box; ranks
that hold the same box are replicas.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import le, sub
from typing import Any, NamedTuple

import numpy as np
import xxhash

from r3channel.errors import ManifestMismatch
from r3channel.weights.manifest import TensorMeta

MOST_PIECES = 4096
"""Boxes that one tensor may be cut into at most."""


class Box(NamedTuple):
    """`start[axis] <= index < stop[axis]`. A scalar's only box has no axes and one element.

    >>> Box((0, 2), (4, 6)).intersect(Box((2, 0), (9, 3)))
    Box(start=(2, 2), stop=(4, 3))
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
        """Whether the other one lies within."""
        return all(map(le, self.start, other.start)) and all(map(le, other.stop, self.stop))

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None when it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return None if any(a >= b for a, b in zip(start, stop, strict=True)) else Box(start, stop)

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


class Layout:
    """Which rank holds which box of a tensor of this shape. Immutable; equal content compares and hashes equal.

    A rank may hold several boxes, or none. Held as arrays, so that hundreds of ranks cost no objects.
    """

    __slots__ = ("digest", "ranks_N", "shape", "starts_ND", "stops_ND")

    def __init__(
        self, shape: Sequence[int], ranks_N: np.ndarray, starts_ND: np.ndarray, stops_ND: np.ndarray
    ) -> None:
        """Arrays of int64, one line per box. Raises ManifestMismatch for a box outside the shape."""
        self.shape = tuple(shape)
        self.ranks_N, self.starts_ND, self.stops_ND = ranks_N, starts_ND, stops_ND
        outside = (starts_ND < 0) | (stops_ND < starts_ND) | (stops_ND > np.array(self.shape, dtype=np.int64))
        if outside.any():
            worst = int(np.argmax(outside.any(axis=1)))
            raise ManifestMismatch(
                f"rank {ranks_N[worst]} holds {starts_ND[worst].tolist()}..{stops_ND[worst].tolist()} of a tensor "
                f"of shape {list(self.shape)}; expected a part of it"
            )
        raw = b"".join(array.tobytes() for array in (ranks_N, starts_ND, stops_ND))
        self.digest = xxhash.xxh3_128_digest(repr(self.shape).encode() + raw)
        """16 bytes over shape, ranks and boxes in the order given."""

    @classmethod
    def of(cls, shape: Sequence[int], held: Iterable[tuple[int, Box]]) -> Layout:
        """From (rank, box) pairs."""
        pairs = list(held)
        wrong = next((box for _, box in pairs if len(box.start) != len(shape)), None)
        if wrong is not None:
            raise ManifestMismatch(f"box {wrong} has not the {len(shape)} axes of the shape {list(shape)}")
        corners = (len(pairs), len(shape))
        return cls(
            shape,
            np.array([rank for rank, _ in pairs], dtype=np.int64),
            np.array([box.start for _, box in pairs], dtype=np.int64).reshape(corners),
            np.array([box.stop for _, box in pairs], dtype=np.int64).reshape(corners),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


class ShardMap:
    """Tensors in order, each with its layout. Immutable."""

    def __init__(self, tensors: Iterable[tuple[TensorMeta, Layout]]) -> None:
        metas: list[TensorMeta] = []
        interned: dict[Layout, int] = {}
        indexes: list[int] = []
        for meta, layout in tensors:
            metas.append(meta)
            indexes.append(interned.setdefault(layout, len(interned)))
        self.metas: tuple[TensorMeta, ...] = tuple(metas)
        self.layouts: tuple[Layout, ...] = tuple(interned)
        self.layout_of: tuple[int, ...] = tuple(indexes)
        """Index into `layouts`, per tensor."""
        self.index_of: Mapping[str, int] = {meta.name: i for i, meta in enumerate(metas)}
        rows = [[*meta.row(), index] for meta, index in zip(metas, indexes, strict=True)]
        digest = xxhash.xxh3_128(json.dumps(rows, separators=(",", ":")).encode())
        for layout in self.layouts:
            digest.update(layout.digest)
        self.digest: str = digest.hexdigest()

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
