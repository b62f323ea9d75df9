"""Writes samples' ids into shards: each row of each layer once, in the order in which its router will ask for it.

With numba (extra `fast`) one compiled call writes all runs of a job, past the caches: 0.05 us per token of 48 x top-8 against
0.075 for numpy's transposed blocks and 0.033 for memcpy (CPU time, shared AMD EPYC). Both give the same bytes.

Rows that no engine computed (each sample's last token, padding, the tail of a pack) get the ids of `spread_ids`: distinct,
in range, and loading no single expert. With the `native` pad policy they are placeholders that no router uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np

from r3channel.distinct import kernels
from r3channel.plan.rows import Ints, Microbatch, Runs
from r3channel.plan.shards import Plan, Shard, ShardKey
from r3channel.routing import Ids
from r3channel.spec import RoutingSpec

_BLOCK_BYTES = 96 << 10
"""Transposed at once, so that both sides stay in the level-2 cache: 0.03 us per token of 48 x top-8, against 0.25 for one
copy of single ids (CPU time, shared AMD EPYC)."""

_JOB_ROWS = 8192
"""About half a millisecond of placement: enough that a thread is worth it, little enough to hold decoded frames for."""

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


Jobs = Callable[[Callable[[range], None], Sequence[range]], object]
"""Calls a function once for each of some ranges, in any order and on any threads, and returns when all are done."""


def one_by_one(work: Callable[[range], None], jobs: Sequence[range]) -> None:
    """All jobs on the caller's thread."""
    for job in jobs:
        work(job)


def place_samples(
    plan: Plan,
    *,
    dp: int,
    ids_of: Callable[[str], Ids],
    buffer_of: Callable[[Shard], _Bytes] = fresh,
    run: Jobs = one_by_one,
) -> dict[ShardKey, _Bytes]:
    """The uint8 shards of all pipeline stages and CP ranks of one DP rank, by (dp, pp, cp).

    `ids_of(sample_id)` gives [tokens - 1, all MoE layers, K]; it is asked once per sample, on the threads of `run`, and what it
    gave is held until its job of about 8,192 rows is done. `buffer_of(shard)` gives `shard.nbytes` bytes of any content; every
    byte is overwritten.
    """
    layout = plan.layout
    shards = [plan.shard(dp=dp, pp=pp, cp=cp) for pp in range(layout.pp) for cp in range(layout.cp)]
    buffers = [buffer_of(shard) for shard in shards]

    writers = [ShardWriter(shard, buffer) for shard, buffer in zip(shards, buffers, strict=True)]

    def place(job: range) -> None:
        ids = [[ids_of(name) for name in plan.microbatches[dp][number].sample_ids] for number in job]
        for writer in writers:
            writer.write(job, ids)

    run(place, _jobs(plan.microbatches[dp]))
    return {shard.key: buffer for shard, buffer in zip(shards, buffers, strict=True)}


def _jobs(batches: Sequence[Microbatch]) -> list[range]:
    """Ranges of micro-batches of at least `_JOB_ROWS` rows each, the last one aside."""
    jobs, first, rows = [], 0, 0
    for number, batch in enumerate(batches):
        rows += batch.rows
        if rows >= _JOB_ROWS or number == len(batches) - 1:
            jobs.append(range(first, number + 1))
            first, rows = number + 1, 0
    return jobs


class ShardWriter:
    """Where the rows of one rank lie in its buffer, and the way to write them. Any thread; each micro-batch once."""

    def __init__(self, shard: Shard, buffer: _Bytes) -> None:
        self._shard, self._buffer = shard, buffer
        numbers = range(len(shard.microbatches))
        self._row_bytes = shard.spec.top_k * shard.spec.id_dtype.itemsize
        self._begin_M = np.cumsum([0, *map(shard.microbatch_bytes, numbers)]) + buffer.ctypes.data
        self._width_M = np.asarray([batch.width for batch in shard.microbatches])
        self._packed_M = np.asarray([batch.packed for batch in shard.microbatches])
        self._layer_bytes_M = np.asarray([*map(shard.slot_rows, numbers)]) * self._row_bytes
        self._sources_L = np.asarray(shard.sources, dtype=np.int64)

    def write(self, microbatches: range, ids: Sequence[Sequence[Ids]]) -> None:
        """Write some micro-batches, pads included: `ids[i][j]` [tokens - 1, all MoE layers, K] of sample j of the i-th."""
        shard = self._shard
        if not shard.layers or self._write_compiled(microbatches, ids):
            return
        views = shard.views(self._buffer)
        for number, samples in zip(microbatches, ids, strict=True):
            place_tail(shard, views[number], microbatch=number)
            for index, ids_TLK in enumerate(samples):
                place_sample(shard, views[number], microbatch=number, sample=index, expert_ids_TLK=ids_TLK)

    def _write_compiled(self, microbatches: range, ids: Sequence[Sequence[Ids]]) -> bool:
        """One call for all; False where there is no numba, or where a row or an array is not made of whole, aligned words."""
        compiled = kernels()
        if compiled is None or self._row_bytes % 8 or self._begin_M[0] % 8:
            return False
        flat = [np.ascontiguousarray(ids_TLK) for samples in ids for ids_TLK in samples]
        addresses = np.asarray([ids_TLK.ctypes.data for ids_TLK in flat], dtype=np.int64)
        if (addresses % 8).any():
            return False
        shard = self._shard
        runs = shard.table.of_microbatches(cp=shard.cp, first=microbatches.start, last=microbatches.stop)
        before = np.cumsum([0, *map(len, ids)])[runs.microbatch - microbatches.start]
        source_bytes = shard.spec.num_moe_layers * self._row_bytes
        sources = addresses[before + np.maximum(runs.sample, 0)] + runs.position * source_bytes
        table = np.stack((sources, runs.real, runs.length, *self._targets(runs), runs.position), axis=1)
        compiled.place_runs(table, self._sources_L, source_bytes, _pad_words(shard.spec))
        return True

    def _targets(self, runs: Runs) -> tuple[Ints, Ints, Ints]:
        """(address of each run's first row in the first layer, bytes between its layers, bytes between its rows)."""
        number = runs.microbatch
        width, layer_bytes = self._width_M[number], self._layer_bytes_M[number]
        column = np.where(self._packed_M[number], 0, runs.sample)
        slot = self._begin_M[number] + runs.slot * (len(self._shard.layers) * layer_bytes)
        return slot + (runs.local * width + column) * self._row_bytes, layer_bytes, width * self._row_bytes


@lru_cache(maxsize=8)
def _pad_words(spec: RoutingSpec) -> Ids:
    """[E, words]: the pad ids of position p as words, in line p % E."""
    return spread_ids(spec, positions_T=np.arange(spec.num_experts)).view(np.uint64)


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
