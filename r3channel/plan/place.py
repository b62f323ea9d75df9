"""Writes samples' ids into shards: each row of each layer once, in the order in which its router will ask for it.

Rows that no engine computed (each sample's last token, padding, the tail of a pack) get the ids of `spread_ids`: distinct,
in range, and loading no single expert. With the `native` pad policy they are placeholders that no router uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from r3channel.plan.shards import Plan, Shard, ShardKey
from r3channel.routing import Ids
from r3channel.spec import RoutingSpec

_BLOCK_BYTES = 96 << 10
"""Transposed at once, so that both sides stay in the level-2 cache: 0.03 us per token of 48 x top-8, against 0.25 for one
copy of single ids (CPU time, shared AMD EPYC)."""

_ITEMS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""Items of so many bytes that numpy copies fastest; 16 bytes go as a complex number (measured)."""

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def spread_ids(spec: RoutingSpec, *, positions_T: Ids) -> Ids:
    """[T, K] pad ids: consecutive experts, moving on by K each position, so padding loads no single expert."""
    start = (np.asarray(positions_T, dtype=np.int64) * spec.top_k)[:, None]
    return ((start + np.arange(spec.top_k)) % spec.num_experts).astype(spec.id_dtype)


def fill_invalid(expert_ids_TLK: Ids, valid_T: np.ndarray[Any, np.dtype[np.bool_]], spec: RoutingSpec) -> Ids:
    """The ids with rows that hold no routing replaced by pad ids; the same array where all are valid."""
    if valid_T.all():
        return expert_ids_TLK
    rows = np.flatnonzero(~valid_T)
    filled = expert_ids_TLK.copy()
    filled[rows] = spread_ids(spec, positions_T=rows)[:, None]
    return filled


def fresh(shard: Shard) -> _Bytes:
    """New memory for one shard. Its first touch costs as much as the placement: whoever places often reuses buffers."""
    return np.empty(shard.nbytes, np.uint8)


def place_samples(
    plan: Plan, *, dp: int, ids_of: Callable[[str], Ids], buffer_of: Callable[[Shard], _Bytes] = fresh
) -> dict[ShardKey, _Bytes]:
    """The uint8 shards of all pipeline stages and CP ranks of one DP rank, by (dp, pp, cp).

    `ids_of(sample_id)` gives [tokens - 1, all MoE layers, K]; it is asked once per sample, in the plan's order.
    `buffer_of(shard)` gives `shard.nbytes` bytes of any content; every byte is overwritten.
    """
    layout = plan.layout
    shards = [plan.shard(dp=dp, pp=pp, cp=cp) for pp in range(layout.pp) for cp in range(layout.cp)]
    buffers = [buffer_of(shard) for shard in shards]
    views = [shard.views(buffer) for shard, buffer in zip(shards, buffers, strict=True)]
    for number, microbatch in enumerate(plan.microbatches[dp]):
        for shard, view in zip(shards, views, strict=True):
            place_tail(shard, view[number], microbatch=number)
        for index, sample_id in enumerate(microbatch.sample_ids):
            ids_TLK = ids_of(sample_id)
            for shard, view in zip(shards, views, strict=True):
                place_sample(shard, view[number], microbatch=number, sample=index, expert_ids_TLK=ids_TLK)
    return {shard.key: buffer for shard, buffer in zip(shards, buffers, strict=True)}


def place_sample(shard: Shard, view_SLRK: Ids, *, microbatch: int, sample: int, expert_ids_TLK: Ids) -> None:
    """Write one sample's rows of one rank, pads included, into a micro-batch's view. Any thread; each sample once.

    `expert_ids_TLK` [tokens - 1, all MoE layers, K] of the spec's id dtype.
    """
    batch = shard.microbatches[microbatch]
    place_runs(
        shard,
        _target(shard, view_SLRK, microbatch),
        shard.table.of_sample(cp=shard.cp, microbatch=microbatch, sample=sample),
        column=0 if batch.packed else sample,
        expert_ids_TLK=expert_ids_TLK,
    )


def place_runs(
    shard: Shard,
    target_SLPW: Any,
    runs: Sequence[tuple[int, ...]],
    *,
    column: int,
    expert_ids_TLK: Ids | None,
) -> None:
    """Write runs (position, slot, where in the slot, length, real) of one sample, or of a tail (no ids), pads included.

    `target_SLPW[slot]` is [L, positions, width] with one item per row of K ids (`row_items`).
    """
    source_TL = None if expert_ids_TLK is None else row_items(expert_ids_TLK)
    spans = _spans(shard.sources)
    for position, slot, local, length, real in runs:
        part_LT = target_SLPW[slot][:, local : local + length, column]
        if source_TL is not None:
            for here, there in spans:
                _transpose(source_TL[position : position + real, there], part_LT[here, :real])
        if real < length:
            _pad(shard.spec, part_LT[:, real:], first=position + real)


def place_tail(shard: Shard, view_SLRK: Ids, *, microbatch: int) -> None:
    """Write the pad ids of a pack's tail, where it has one."""
    if not shard.microbatches[microbatch].tail:
        return
    place_runs(
        shard,
        _target(shard, view_SLRK, microbatch),
        shard.table.of_sample(cp=shard.cp, microbatch=microbatch, sample=-1),
        column=0,
        expert_ids_TLK=None,
    )


def _target(shard: Shard, view_SLRK: Ids, microbatch: int) -> Any:
    """[slot, L, positions of the slot, width], one item per row of K ids."""
    width = shard.microbatches[microbatch].width
    return row_items(view_SLRK).reshape(
        shard.tp_slots, len(shard.layers), shard.slot_rows(microbatch) // width, width
    )


def row_items(ids_K: Ids) -> Any:
    """A view in which the K ids of a row are one item: numpy then copies rows and not single ids."""
    if ids_K.strides[-1] != ids_K.itemsize:
        ids_K = np.ascontiguousarray(ids_K)
    row_bytes = ids_K.shape[-1] * ids_K.itemsize
    return ids_K.view(_ITEMS.get(row_bytes, f"V{row_bytes}"))[..., 0]


def _spans(sources: Sequence[int]) -> list[tuple[slice, slice]]:
    """(slice of the shard's layers, slice of the MoE axis) of each stretch of consecutive sources.

    >>> _spans((1, 2, 5))
    [(slice(0, 2, None), slice(1, 3, None)), (slice(2, 3, None), slice(5, 6, None))]
    """
    found = []
    for _, group in groupby(enumerate(sources), key=lambda pair: pair[1] - pair[0]):
        pairs = list(group)
        (here, there), count = pairs[0], len(pairs)
        found.append((slice(here, here + count), slice(there, there + count)))
    return found


def _transpose(source_TL: Any, target_LT: Any) -> None:
    rows = max(1, _BLOCK_BYTES // max(1, source_TL.shape[1] * source_TL.itemsize))
    for at in range(0, len(source_TL), rows):
        block = slice(at, at + rows)
        target_LT[:, block] = source_TL[block].T


def _pad(spec: RoutingSpec, target_LT: Any, *, first: int) -> None:
    positions = np.arange(first, first + target_LT.shape[1])
    target_LT[:] = row_items(spread_ids(spec, positions_T=positions))
