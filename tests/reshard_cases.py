"""Random and named cases of resharding: layouts, tensors, and an oracle that knows only whole tensors."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st

from r3channel.transport.base import Rendezvous, Transport
from r3channel.transport.joining import join
from r3channel.weights.geometry import Box, Layout, grid_boxes
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.shardmap import ShardMap

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.float16)
TIMEOUT_S = 20.0
Held = dict[str, list[tuple[Box, torch.Tensor]]]


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
    """(source, target, world size): separated, overlapping or colocated ranks; dtypes may change on the way."""
    world_size = draw(world_sizes)
    everyone = list(range(world_size))
    cut = draw(st.integers(1, world_size - 1))
    sides = draw(
        st.sampled_from([(everyone[:cut], everyone[cut:]), (everyone, everyone), (everyone[:cut], everyone)])
    )
    source, target = [], []
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        wider = {torch.bfloat16: torch.float32}.get(dtype, dtype) if draw(st.booleans()) else dtype
        name = f"t{number}"
        source.append(
            (
                TensorMeta(name=name, dtype=wider, shape=shape),
                draw(layouts(shape, sides[0], complete=True)),
            )
        )
        target.append(
            (
                TensorMeta(name=name, dtype=dtype, shape=shape),
                draw(layouts(shape, sides[1], complete=False)),
            )
        )
    return ShardMap(source), ShardMap(target), world_size


def whole_tensor(meta: TensorMeta, seed: int = 0) -> torch.Tensor:
    """Finite values that bfloat16 and fp8 hold exactly, different from element to element where the type allows."""
    count = math.prod(meta.shape)
    values = (torch.arange(count) * 7 + seed * 13 + sum(map(ord, meta.name))) % 15 - 7
    return values.to(torch.float32).to(meta.dtype).view(meta.shape)


def held(shards: ShardMap, rank: int, *, seed: int | None) -> Held:
    """The rank's tensors: cut from the whole one, or (no seed) filled with a value that no whole tensor has."""
    found: Held = {}
    for name, boxes in shards.held_by(rank).items():
        meta = shards.metas[shards.index_of[name]]
        whole = whole_tensor(meta, seed or 0)
        if seed is None:
            whole = torch.full(meta.shape, 100.0).to(meta.dtype)
        found[name] = [(box, whole[box.within(Box.whole(meta.shape))].clone()) for box in boxes]
    return found


def equals_oracle(
    shards: ShardMap, found: Mapping[str, Sequence[tuple[Box, torch.Tensor]]], seed: int
) -> bool:
    """Whether every tensor is the part of the whole one that its box says, bit by bit."""
    for name, parts in found.items():
        meta = shards.metas[shards.index_of[name]]
        whole = whole_tensor(meta, seed)
        for box, tensor in parts:
            part = whole[box.within(Box.whole(meta.shape))].contiguous()
            if not torch.equal(
                part.flatten().view(torch.uint8), tensor.contiguous().flatten().view(torch.uint8)
            ):
                return False
    return True


def side(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], ranks: Sequence[int], *, axis: int
) -> ShardMap:
    """A plain tensor-parallel side: scalars, empty and odd-shaped tensors replicated, the others cut along `axis`."""
    rows = []
    for name, dtype, shape in tensors:
        meta = TensorMeta(name=name, dtype=dtype, shape=shape)
        if len(shape) <= axis or not math.prod(shape) or "rep" in name:
            rows.append((meta, Layout.replicated(shape, ranks)))
            continue
        parts = [1] * len(shape)
        parts[axis] = len(ranks)
        rows.append((meta, Layout.of(shape, zip(ranks, grid_boxes(shape, parts), strict=True))))
    return ShardMap(rows)


def on_threads(world_size: int, work: Callable[[Transport], Any]) -> list[Any]:
    """`work` on every rank of a loopback group; an error is returned in its rank's place."""
    name = uuid.uuid4().hex

    def rank_main(rank: int) -> Any:
        rendezvous = Rendezvous(backend="loopback", name=name, epoch=1, rank=rank, world_size=world_size)
        transport = join(rendezvous, timeout_s=TIMEOUT_S)
        try:
            return work(transport)
        except Exception as error:
            return error
        finally:
            transport.close()

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(rank_main, range(world_size)))
