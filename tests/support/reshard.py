"""Cases of resharding: random ones, plain ones, and the shard maps of a DeepSeek-V3-like model. No bytes are sent.

45,215 tensors, 256 trainer ranks to 8 engines of 32 ranks. Trainers: dense weights cut 8 ways, experts over 64 ranks.
Engines: dense weights cut 32 ways, experts over all 32 ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from hypothesis import strategies as st

from r3channel.weights.geometry import Box, Layout, ShardMap, batches, deal
from r3channel.weights.manifest import TensorMeta

HIDDEN, LAYERS, DENSE_LAYERS, EXPERTS, VOCABULARY = 7168, 61, 3, 256, 129_280
ROWS, COLUMNS = 0, 1
Cut = int | None
"""The axis along which tensor parallelism cuts; None for replicated."""


def tensors() -> Iterator[tuple[str, tuple[int, ...], Cut, int | None]]:
    """(name, shape, cut, expert) of the whole model."""
    yield "embed", (VOCABULARY, HIDDEN), ROWS, None
    for layer in range(LAYERS):
        for name, shape, cut in _attention():
            yield f"layers.{layer}.{name}", shape, cut, None
        mlp = _mlp(18_432) if layer < DENSE_LAYERS else _mlp(2048)
        for name, shape, cut in mlp:
            yield f"layers.{layer}.mlp.{name}", shape, cut, None
        if layer >= DENSE_LAYERS:
            yield f"layers.{layer}.mlp.gate", (EXPERTS, HIDDEN), None, None
            for expert in range(EXPERTS):
                for name, shape, _ in _mlp(2048):
                    yield f"layers.{layer}.mlp.experts.{expert}.{name}", shape, None, expert
    yield "norm", (HIDDEN,), None, None
    yield "head", (VOCABULARY, HIDDEN), ROWS, None


def _attention() -> tuple[tuple[str, tuple[int, ...], Cut], ...]:
    return (
        ("q_a_proj", (1536, HIDDEN), None), ("q_b_proj", (24_576, 1536), ROWS), ("kv_a_proj", (576, HIDDEN), None),
        ("kv_b_proj", (32_768, 512), ROWS), ("o_proj", (HIDDEN, 16_384), COLUMNS), ("input_norm", (HIDDEN,), None),
        ("post_norm", (HIDDEN,), None),
    )  # fmt: skip


def _mlp(width: int) -> tuple[tuple[str, tuple[int, ...], Cut], ...]:
    return (
        ("gate_proj", (width, HIDDEN), ROWS),
        ("up_proj", (width, HIDDEN), ROWS),
        ("down_proj", (HIDDEN, width), COLUMNS),
    )


def replicated(shape: Sequence[int], ranks: Iterable[int]) -> Layout:
    """Every rank holds the whole tensor."""
    return Layout.of(shape, [(rank, Box.whole(shape)) for rank in ranks])


def chunked(shape: Sequence[int], axis: int, ranks: Sequence[Iterable[int]]) -> Layout:
    """`ranks[i]` all hold part i of the axis, cut as `torch.chunk` cuts; late parts may be empty."""
    size, step = shape[axis], -(-shape[axis] // len(ranks))
    held = []
    for part, holders in enumerate(ranks):
        start, stop = [0] * len(shape), list(shape)
        start[axis], stop[axis] = min(part * step, size), min((part + 1) * step, size)
        held += [(rank, Box(tuple(start), tuple(stop))) for rank in holders]
    return Layout.of(shape, held)


def held_by(shards: ShardMap, rank: int) -> dict[str, list[Box]]:
    """The boxes of one rank, by tensor; tensors of which it holds nothing are left out."""
    boxes = ([box for box, ranks in layout.held if rank in ranks] for layout in shards.layouts)
    return {meta.name: mine for meta, mine in zip(shards.metas, boxes, strict=True) if mine}


def model_side(*, ranks: int, tp: int, ep: int, first: int = 0) -> ShardMap:
    """A side of `ranks` ranks from number `first`: TP or EP fastest, replicas for the rest."""
    layout, mine = cache(_layout), range(first, first + ranks)
    return ShardMap(
        (
            TensorMeta(name=name, dtype=torch.bfloat16, shape=shape),
            layout(shape, cut, None if expert is None else expert * ep // EXPERTS, mine, tp=tp, ep=ep),
        )
        for name, shape, cut, expert in tensors()
    )


def _layout(shape: tuple[int, ...], cut: Cut, slot: int | None, ranks: range, *, tp: int, ep: int) -> Layout:
    if slot is not None:
        return replicated(shape, [rank for rank in ranks if rank % ep == slot])
    if cut is None:
        return replicated(shape, ranks)
    return chunked(shape, cut, [[rank for rank in ranks if rank % tp == part] for part in range(tp)])


def bounds_of(source: ShardMap, target: ShardMap, *, world_size: int) -> tuple[int, float]:
    """Bytes of the busiest rank: what it sends, and the mean plus two percent and an item."""
    dealt, loads_R = batches(source, target), np.zeros(world_size, dtype=np.int64)
    for batch in dealt:
        deal(loads_R, batch)
    mean = loads_R.sum() / len({rank for batch in dealt for rank in batch.holders})
    return int(loads_R.max()), 1.02 * mean + max(batch.nbytes for batch in dealt)


# -- random and plain cases

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


def plain_side(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], ranks: Sequence[int], *, axis: int
) -> ShardMap:
    """A plain tensor-parallel side: scalars, empty and odd-shaped tensors replicated, the others cut along `axis`."""
    rows = []
    for name, dtype, shape in tensors:
        whole = len(shape) <= axis or not math.prod(shape) or "rep" in name
        layout = replicated(shape, ranks) if whole else chunked(shape, axis, [[rank] for rank in ranks])
        rows.append((TensorMeta(name=name, dtype=dtype, shape=shape), layout))
    return ShardMap(rows)
