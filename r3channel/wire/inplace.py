"""A stored frame that is filled where it lies: the ids are gathered straight into their place on the wire. No I/O.

    unfinished = StoredFrame(spec, runs=[...])
    np.take(..., out=unfinished.ids_TLK)     # whoever has the rows
    unfinished.finish(sample_key=...)        # digests, tables, header: buffer_N holds what encode_frame(codec="stored") gives

For callers that finish thousands of requests on a thread that must not be busy: no copy is made after the gather, and no
object per span. All rows are valid rows; a sample with invalid rows takes `encode_frame`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from r3channel.model.spec import RoutingSpec
from r3channel.wire.chunks import CHUNK_BYTES, chunk_count, stored_entries, table_of
from r3channel.wire.codec import STORED
from r3channel.wire.digest import layer_digests
from r3channel.wire.frame import pack_span
from r3channel.wire.header import (
    FRAME_MAGIC,
    HEADER_BYTES,
    KIND_EXPERT_IDS,
    SPAN_BYTES,
    WIRE_VERSION,
    Header,
    header_bytes,
    padding,
)
from r3channel.wire.routing import Ids

Run = tuple[int, int, int, int]
"""Rows [start, end) with their weight version and kind, positions absolute: a provenance span as plain numbers."""


def prepare(spec: RoutingSpec) -> None:
    """Compile what `finish` needs now, and not while a request waits."""
    layer_digests(np.zeros((1, spec.num_moe_layers, spec.top_k), spec.id_dtype), first_row=0)


class StoredFrame:
    """NEW -> (owner fills `ids_TLK`) -> `finish`. One thread at a time; any thread may finish."""

    __slots__ = ("_first_row", "_runs", "_sections_bytes", "buffer_N", "ids_TLK", "spec")

    def __init__(self, spec: RoutingSpec, *, rows: int, first_row: int, runs: Sequence[Run]) -> None:
        """`runs` tile [first_row, first_row + rows) in order; the caller made them by run length, so it is not checked."""
        self.spec, self._first_row, self._runs = spec, first_row, runs
        chunks_bytes = CHUNK_BYTES * chunk_count(rows)
        sections_bytes = len(runs) * SPAN_BYTES + 8 * spec.num_moe_layers + chunks_bytes
        self._sections_bytes = sections_bytes + padding(sections_bytes)
        payload = HEADER_BYTES + self._sections_bytes
        self.buffer_N = np.empty(payload + rows * spec.bytes_per_token, np.uint8)
        """The whole frame; complete once `finish` has returned."""
        shape = (rows, spec.num_moe_layers, spec.top_k)
        self.ids_TLK: Ids = np.ndarray(shape, spec.id_dtype, self.buffer_N.data, payload)
        """[rows, L, K] in the id dtype: the payload itself, uninitialised until the owner fills it."""

    def finish(self, *, sample_key: int) -> None:
        """Write digests, tables and header. Nothing may write to `ids_TLK` any more."""
        out = self.buffer_N.data
        sections = self._sections().ljust(self._sections_bytes, b"\0")
        out[HEADER_BYTES : HEADER_BYTES + self._sections_bytes] = sections
        sections_hash = xxhash.xxh3_64_intdigest(sections)
        out[:HEADER_BYTES] = header_bytes(self._header(sample_key, sections_hash))

    def _sections(self) -> bytes:
        spec, rows = self.spec, len(self.ids_TLK)
        parts = [pack_span(*run) for run in self._runs]
        parts.append(layer_digests(self.ids_TLK, first_row=self._first_row).tobytes())
        entries = stored_entries(rows, row_bytes=spec.bytes_per_token)
        parts.append(table_of(entries, layers=spec.num_moe_layers))
        return b"".join(parts)

    def _header(self, sample_key: int, sections_hash: int) -> Header:
        spec, rows, size = self.spec, len(self.ids_TLK), self.ids_TLK.nbytes
        newest = max((run[2] for run in self._runs), default=-1)
        # By position: a fifth of the time of keywords, and this is paid for each request.
        return Header(
            FRAME_MAGIC, WIRE_VERSION, KIND_EXPERT_IDS, STORED.codec_id, 0,
            spec.digest, spec.num_experts, spec.top_k, spec.num_moe_layers, spec.id_dtype.itemsize, 0,
            spec.num_moe_layers, rows, self._first_row, chunk_count(rows),
            len(self._runs), self._sections_bytes, size, size, sample_key, newest, 0, sections_hash,
        )  # fmt: skip
