"""Writes received rows into a shard: each row of each layer once, in the order in which its router will ask for it.

With numba (extra `fast`) one compiled call writes many runs, past the caches, and sums their digests in the same pass; numpy does
the same without it. Both give the same bytes.

Rows that no engine computed (each sample's last token, padding, the tail of a pack, rows without routing) get the ids of
`spread_ids`: distinct, in range, and loading no single expert. Where the live router chooses they are placeholders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from r3channel.model.spec import RoutingSpec
from r3channel.plan.row_order import Ints
from r3channel.plan.shards import Plan, ShardKey
from r3channel.plan.stream import Stream, Stretches
from r3channel.plan.ticket import TicketSample
from r3channel.wire.digest import coefficients, item_bytes_of, items_of, kernels, layer_digests
from r3channel.wire.mixing import multipliers
from r3channel.wire.routing import Ids

_BLOCK_BYTES = 96 << 10
"""Transposed at once by numpy, so that both sides stay in the level-2 cache."""
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def spread_ids(spec: RoutingSpec, *, positions_T: Ids) -> Ids:
    """Return pad ids, [T, K] in the spec's dtype.

    These are consecutive experts that move on by K at each position, so padding loads no single expert.

    Args:
        spec: The model's spec.
        positions_T: The position of each row.
    """
    start = (np.asarray(positions_T, dtype=np.int64) * spec.top_k)[:, None]
    return ((start + np.arange(spec.top_k)) % spec.num_experts).astype(spec.id_dtype)


def warm(spec: RoutingSpec) -> None:
    """Compile now what receiving rows of this model takes.

    It takes a second or two, once for each machine, which a step then does not pay.

    Args:
        spec: The model's spec.
    """
    compiled, item = kernels(), item_bytes_of(spec)
    if compiled is not None:
        items = _pad_items(spec).shape[1]
        compiled.place_runs(item, items=items)
        compiled.column_sums(item, spec.id_dtype.itemsize, items=items)


class Placement:
    """One shard as it fills: where each run of its plan lies in the buffer. It is used by one thread.

    `pads` once, and every row of the stream once through `rows`, write each byte of the buffer exactly once.
    """

    def __init__(self, stream: Stream, buffer_N: _Bytes) -> None:
        """Start with a buffer of any content.

        Args:
            stream: The rows that travel to the shard.
            buffer_N: `shard.nbytes` bytes, which this object fills.
        """
        self._stream, self._buffer_N = stream, buffer_N
        shard, spec = stream.shard, stream.shard.spec
        self._id_bytes = spec.top_k * spec.id_dtype.itemsize
        columns = {column: index for index, column in enumerate(stream.columns)}
        self._sources_L = np.asarray([columns[source] for source in shard.sources], np.int64)
        ends = stream.stretches.position + stream.stretches.rows
        self._coefficients_P = coefficients(0, int(ends.max(initial=0)))

    def pads(self) -> None:
        """Write the rows that do not travel."""
        pads, shard = self._stream.pads, self._stream.shard
        none_TLK = np.empty((0, len(self._stream.columns), shard.spec.top_k), shard.spec.id_dtype)
        if not self._place_compiled(pads, none_TLK, self.new_digests()):
            for _, position, rows, target_LP in self._targets(pads):
                ids_PK = spread_ids(shard.spec, positions_T=np.arange(position, position + rows))
                target_LP[:] = _row_items(ids_PK)

    def table(self, digests_CSL: Ids) -> Ids:
        """Return digests as int64.

        Args:
            digests_CSL: What `new_digests` made and `rows` added to.
        """
        return digests_CSL.view(np.int64)

    def new_digests(self) -> Ids:
        """Return a table of digests, all 0.

        Returns:
            [TP slot, sample of the DP rank, layer] uint64.
        """
        shard = self._stream.shard
        return np.zeros((shard.tp_slots, len(self._stream.samples), len(shard.layers)), np.uint64)

    def rows(self, source_TLK: Ids, digests_CSL: Ids, *, begin: int) -> None:
        """Write rows of the stream, and add their digests.

        Args:
            source_TLK: Rows [begin, begin + T) of the stream; their memory may be reused after the call.
            digests_CSL: The table to which the digests of the rows are added.
            begin: Number of the first row in the stream.
        """
        piece = _slice(self._stream.stretches, begin, begin + len(source_TLK))
        if not self._place_compiled(piece, source_TLK, digests_CSL):
            self._in_numpy(piece, source_TLK, digests_CSL)

    def _place_compiled(self, stretches: Stretches, source_TLK: Ids, digests_CSL: Ids) -> bool:
        """Place all stretches in one compiled call; False without numba.

        The stretches are pads where there is no source.
        """
        compiled, stream = kernels(), self._stream
        if compiled is None:
            return False
        run, rows, spec = stretches.run, stretches.rows, stream.shard.spec
        real = rows if len(source_TLK) else np.zeros_like(rows)
        slot = stream.runs.slot[run]
        sample = slot * len(stream.samples) + np.maximum(stream.sample_of[run], 0)
        layout = places(stream, stretches)
        table = np.stack((stretches.begin[:-1], real, rows, *layout, stretches.position, sample), axis=1)
        slots, samples, layers = digests_CSL.shape
        digests, pads = digests_CSL.reshape(slots * samples, layers), _pad_items(spec)
        items = pads.shape[1]
        place = compiled.place_runs(item_bytes_of(spec), items=items)
        words = np.empty(len(stream.columns) * (1 + items), np.uint64)
        place(
            items_of(source_TLK), table, self._sources_L, self._buffer_N, pads, self._coefficients_P,
            multipliers(items), digests, words,
        )  # fmt: skip
        return True

    def _in_numpy(self, stretches: Stretches, source_TLK: Ids, digests_CSL: Ids) -> None:
        stream, begin = self._stream, stretches.begin
        source_TC = _row_items(source_TLK)
        spans = _spans(self._sources_L.tolist())
        for index, (run, position, rows, target_LP) in enumerate(self._targets(stretches)):
            own = slice(int(begin[index]), int(begin[index]) + rows)
            for here, there in spans:
                _transpose(source_TC[own, there], target_LP[here])
            found_C = layer_digests(source_TLK[own], first_row=position)
            digest_L = digests_CSL[stream.runs.slot[run], stream.sample_of[run]]
            digest_L += found_C[self._sources_L]

    def _targets(self, stretches: Stretches) -> Iterator[tuple[int, int, int, Ids]]:
        """Yield (run, position, rows, target) of each stretch.

        The target is a view [layer, row] in which the K ids of a row are one item.
        """
        layers = len(self._stream.shard.layers)
        named = (stretches.run, stretches.position, stretches.rows, *places(self._stream, stretches))
        for run, position, rows, offset, layer_bytes, step in np.stack(named, axis=1).tolist():
            ids_LPK = np.lib.stride_tricks.as_strided(
                self._buffer_N[offset : offset + self._id_bytes],
                (layers, rows, self._id_bytes),
                (layer_bytes, step, 1),
            )
            yield run, position, rows, _row_items(ids_LPK)


def places(stream: Stream, stretches: Stretches) -> tuple[Ints, Ints, Ints]:
    """Return where stretches lie in a shard, in bytes.

    Args:
        stream: The rows that travel to the shard.
        stretches: Parts of the stream's runs.

    Returns:
        Columns: offset of the first row in the first layer, bytes from layer to layer, bytes from row to row.
    """
    shard, runs = stream.shard, stream.runs.take(stretches.run)
    numbers, id_bytes = range(len(shard.microbatches)), shard.spec.top_k * shard.spec.id_dtype.itemsize
    begin_M = np.cumsum([0, *map(shard.microbatch_bytes, numbers)])
    rows_M = np.asarray([*map(shard.slot_rows, numbers)], np.int64)
    width_M = np.asarray([batch.width for batch in shard.microbatches], np.int64)
    packed_M = np.asarray([batch.packed for batch in shard.microbatches])
    number = runs.microbatch
    width, layer_bytes = width_M[number], rows_M[number] * id_bytes
    column = np.where(packed_M[number], 0, runs.sample)
    slot = begin_M[number] + runs.slot * (len(shard.layers) * layer_bytes)
    local = runs.local + stretches.position - runs.position
    return slot + (local * width + column) * id_bytes, layer_bytes, width * id_bytes


def place_samples(plan: Plan, *, dp: int, ids_of: Callable[[str], Ids]) -> dict[ShardKey, _Bytes]:
    """Place the whole samples of one DP rank into its shards.

    Args:
        plan: The plan of the step.
        dp: The DP rank.
        ids_of: `ids_of(sample_id)` gives [tokens - 1, all MoE layers, K].

    Returns:
        The uint8 shards of all processes of the DP rank, by (dp, pp, cp): what receivers end with.
    """
    layout = plan.layout
    samples = [
        TicketSample(name, tokens, 0, 0, ())
        for batch in plan.microbatches[dp]
        for name, tokens in zip(batch.sample_ids, batch.tokens, strict=True)
    ]
    shards = [plan.shard(dp=dp, pp=pp, cp=cp) for pp in range(layout.pp) for cp in range(layout.cp)]
    return {shard.key: place_shard(Stream(shard, samples), ids_of=ids_of) for shard in shards}


def place_shard(stream: Stream, *, ids_of: Callable[[str], Ids]) -> _Bytes:
    """Place whole samples into one shard, sample by sample.

    Args:
        stream: The rows that travel to the shard.
        ids_of: As in `place_samples`.
    """
    buffer_N = np.empty(stream.shard.nbytes, np.uint8)
    placement, begin = Placement(stream, buffer_N), 0
    digests = placement.new_digests()
    placement.pads()
    for sample, position, rows in stream.sends():
        ids_TLK = ids_of(stream.samples[sample].sample_id)[position : position + rows]
        placement.rows(np.ascontiguousarray(ids_TLK[:, list(stream.columns)]), digests, begin=begin)
        begin += rows
    return buffer_N


def _slice(stretches: Stretches, begin: int, end: int) -> Stretches:
    first = stretches.begin
    low, high = np.searchsorted(first, begin, side="right") - 1, np.searchsorted(first, end, side="left")
    own = slice(int(low), int(high))
    skipped = np.maximum(begin - first[:-1][own], 0)
    rows = np.minimum(first[1:][own], end) - np.maximum(first[:-1][own], begin)
    return Stretches(stretches.run[own], stretches.position[own] + skipped, rows)


@lru_cache(maxsize=8)
def _pad_items(spec: RoutingSpec) -> Ids:
    """Return pad ids as items, [E, items], unsigned.

    Line p % E has the pad ids of position p.
    """
    ids_EK = spread_ids(spec, positions_T=np.arange(spec.num_experts))
    return np.ascontiguousarray(ids_EK).view(f"u{item_bytes_of(spec)}")


_ITEMS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""Items of so many bytes that numpy copies fastest; 16 bytes go as a complex number (measured)."""


def _row_items(ids_K: Ids) -> Any:
    row_bytes = ids_K.shape[-1] * ids_K.itemsize
    # the K ids of a row are one item: numpy then copies rows and not single ids
    return ids_K.view(_ITEMS.get(row_bytes, f"V{row_bytes}"))[..., 0]


def _spans(sources: list[int]) -> list[tuple[slice, slice]]:
    """Return slices for each stretch of consecutive sources.

    A pair is (slice of the shard's layers, slice of the source's columns).

    >>> _spans([1, 2, 5])
    [(slice(0, 2, None), slice(1, 3, None)), (slice(2, 3, None), slice(5, 6, None))]
    """
    edges = [*np.flatnonzero(np.diff(sources, prepend=-2) != 1).tolist(), len(sources)]
    return [(slice(a, b), slice(sources[a], sources[a] + b - a)) for a, b in pairwise(edges)]


def _transpose(source_TL: Any, target_LT: Any) -> None:
    rows = max(1, _BLOCK_BYTES // max(1, source_TL.shape[1] * source_TL.itemsize))
    for at in range(0, len(source_TL), rows):
        block = slice(at, at + rows)
        target_LT[:, block] = source_TL[block].T
