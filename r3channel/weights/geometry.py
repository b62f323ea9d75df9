"""Boxes of a tensor and who holds them. Arithmetic only: no tensor values, no dtypes, no network.

A *box* is a half-open cuboid of a tensor, one start and stop per axis. A *layout* says which rank holds which box; ranks
that hold the same box are replicas. Splits follow `torch.chunk`: parts of ceil(n / parts), the last ones shorter or empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import xxhash

from r3channel.errors import PlanInvalid


@dataclass(frozen=True, slots=True)
class Box:
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
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None when it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return None if any(a >= b for a, b in zip(start, stop, strict=True)) else Box(start, stop)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Slices that cut this box out of a tensor that holds exactly `outer`."""
        spans = zip(self.start, self.stop, outer.start, strict=True)
        return tuple(slice(start - base, stop - base) for start, stop, base in spans)


def chunk_bounds(size: int, parts: int) -> list[tuple[int, int]]:
    """(start, stop) of each of `parts` parts of an axis, as `torch.chunk` cuts it; late parts may be empty.

    >>> chunk_bounds(10, 4)
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    step = -(-size // parts)
    return [(min(i * step, size), min((i + 1) * step, size)) for i in range(parts)]


def grid_boxes(shape: Sequence[int], parts: Sequence[int]) -> list[Box]:
    """The boxes of a tensor cut into `parts[axis]` chunks along each axis, last axis fastest."""
    corners: list[Box] = [Box((), ())]
    for size, count in zip(shape, parts, strict=True):
        bounds = chunk_bounds(size, count)
        corners = [Box((*b.start, lo), (*b.stop, hi)) for b in corners for lo, hi in bounds]
    return corners


def split_box(box: Box, *, max_numel: int) -> list[Box]:
    """Cut a box into boxes of at most `max_numel` (>= 1) elements, along the earliest axes, in memory order."""
    if box.numel <= max_numel:
        return [box]
    axis = next(i for i, size in enumerate(box.shape) if size > 1)
    row = math.prod(box.shape[axis + 1 :])
    step = max(1, max_numel // row)
    cuts = [*range(box.start[axis], box.stop[axis], step), box.stop[axis]]
    parts = [_with_axis(box, axis, lo, hi) for lo, hi in pairwise(cuts)]
    return [small for part in parts for small in split_box(part, max_numel=max_numel)]


def _with_axis(box: Box, axis: int, lo: int, hi: int) -> Box:
    start, stop = list(box.start), list(box.stop)
    start[axis], stop[axis] = lo, hi
    return Box(tuple(start), tuple(stop))


class Layout:
    """Which rank holds which box of a tensor of this shape. Immutable; equal content compares and hashes equal.

    A rank may hold several boxes, or none. Held as arrays, so that hundreds of ranks cost no objects.
    """

    __slots__ = ("digest", "ranks_N", "shape", "starts_ND", "stops_ND")

    def __init__(
        self, shape: Sequence[int], ranks_N: np.ndarray, starts_ND: np.ndarray, stops_ND: np.ndarray
    ) -> None:
        """Arrays of int64, one line per box. Raises PlanInvalid for a box outside the shape."""
        self.shape = tuple(shape)
        self.ranks_N, self.starts_ND, self.stops_ND = ranks_N, starts_ND, stops_ND
        outside = (starts_ND < 0) | (stops_ND < starts_ND) | (stops_ND > np.array(self.shape, dtype=np.int64))
        if outside.any():
            worst = int(np.argmax(outside.any(axis=1)))
            raise PlanInvalid(
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
            raise PlanInvalid(f"box {wrong} has not the {len(shape)} axes of the shape {list(shape)}")
        corners = (len(pairs), len(shape))
        return cls(
            shape,
            np.array([rank for rank, _ in pairs], dtype=np.int64),
            np.array([box.start for _, box in pairs], dtype=np.int64).reshape(corners),
            np.array([box.stop for _, box in pairs], dtype=np.int64).reshape(corners),
        )

    @classmethod
    def replicated(cls, shape: Sequence[int], ranks: Iterable[int]) -> Layout:
        """Every rank holds the whole tensor."""
        whole = Box.whole(shape)
        return cls.of(shape, [(rank, whole) for rank in ranks])

    @classmethod
    def chunked(cls, shape: Sequence[int], axis: int, ranks: Sequence[Iterable[int]]) -> Layout:
        """`ranks[i]` all hold part i of the axis, cut as `torch.chunk` cuts."""
        parts = [1] * len(shape)
        parts[axis] = len(ranks)
        boxes = grid_boxes(shape, parts)
        return cls.of(
            shape, [(rank, box) for box, holders in zip(boxes, ranks, strict=True) for rank in holders]
        )

    def shifted(self, offset: int) -> Layout:
        """The same boxes, held by ranks that are numbered `offset` higher."""
        return Layout(self.shape, self.ranks_N + offset, self.starts_ND, self.stops_ND)

    def boxes(self, rank: int) -> list[Box]:
        """The boxes of one rank, in the order given."""
        mine = np.flatnonzero(self.ranks_N == rank)
        return [Box(tuple(self.starts_ND[i].tolist()), tuple(self.stops_ND[i].tolist())) for i in mine]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Layout(shape={self.shape}, boxes={len(self.ranks_N)})"
