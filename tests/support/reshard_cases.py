"""Random and named cases of resharding: layouts, tensors, and an oracle that knows only whole tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from hypothesis import strategies as st

from r3channel.weights.geometry import Box, Layout, ShardMap
from r3channel.weights.manifest import TensorMeta
from tests.support.reshard_model import chunked, replicated

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.float16)


@st.composite
def cut_boxes(draw: st.DrawFn, shape: Sequence[int]) -> list[Box]:
    """The tensor cut along each axis at random places: uneven, possibly empty parts."""
    corners = [Box((), ())]
    for size in shape:
        cuts = [0, *sorted(draw(st.lists(st.integers(0, size), max_size=3))), size]
        spans = list(pairwise(cuts))
        corners = [Box((*b.start, lo), (*b.stop, hi)) for b in corners for lo, hi in spans]
    return corners


@st.composite
def layouts(draw: st.DrawFn, shape: Sequence[int], ranks: Sequence[int], *, complete: bool) -> Layout:
    """Each box of a random cut on some of the ranks (at least one, if `complete`)."""
    least = 1 if complete else 0
    boxes = draw(cut_boxes(shape))
    some = st.lists(st.sampled_from(list(ranks)), min_size=least, max_size=4, unique=True)
    return Layout.of(shape, [(rank, box) for box in boxes for rank in draw(some)])


@st.composite
def cases(draw: st.DrawFn, *, world_sizes: st.SearchStrategy[int]) -> tuple[ShardMap, ShardMap, int]:
    """(source, target, world size): trainers, then engines' ranks; dtypes may change on the way."""
    world_size = draw(world_sizes)
    everyone = list(range(world_size))
    cut = draw(st.integers(1, world_size - 1))
    sides = everyone[:cut], everyone[cut:]
    source, target = [], []
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        wider = {torch.bfloat16: torch.float32}.get(dtype, dtype) if draw(st.booleans()) else dtype
        name = f"t{number}"
        for side, ranks, kind in ((source, sides[0], wider), (target, sides[1], dtype)):
            places = draw(layouts(shape, ranks, complete=side is source))
            side.append((TensorMeta(name=name, dtype=kind, shape=shape), places))
    return ShardMap(source), ShardMap(target), world_size


def side(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], ranks: Sequence[int], *, axis: int
) -> ShardMap:
    """A plain tensor-parallel side: scalars, empty and odd-shaped tensors replicated, the others cut along `axis`."""
    rows = []
    for name, dtype, shape in tensors:
        whole = len(shape) <= axis or not math.prod(shape) or "rep" in name
        layout = replicated(shape, ranks) if whole else chunked(shape, axis, [[rank] for rank in ranks])
        rows.append((TensorMeta(name=name, dtype=dtype, shape=shape), layout))
    return ShardMap(rows)
