"""A stored frame that is filled where it lies: the ids are gathered straight into their place on the wire. No I/O.

    draft = StoredFrame(spec, rows=..., provenance=...)
    np.take(..., out=draft.ids_TLK)          # whoever has the rows
    draft.finish()                           # digests, hashes, header: buffer_N holds what encode_frame(codec="stored") gives

For callers that finish thousands of requests on a thread that must not be busy: no copy is made after the gather.
All rows are valid rows; a sample with invalid rows takes `encode_frame`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from r3channel.routing import Ids, ProvenanceSpan, check_spans
from r3channel.spec import RoutingSpec
from r3channel.wire.chunks import CHUNK_BYTES, CHUNK_ROWS, Chunk, chunk_count, table_of
from r3channel.wire.codec import STORED, bytes_of
from r3channel.wire.digest import layer_digests
from r3channel.wire.frame import pack_span
from r3channel.wire.header import FLAG_DIGESTS, HEADER_BYTES, SPAN_BYTES, Header, header_bytes, padding


class StoredFrame:
    """NEW -> (owner fills `ids_TLK`) -> `finish`. One thread at a time; any thread may finish."""

    __slots__ = (
        "_first_row",
        "_row_digests",
        "_sections_bytes",
        "buffer_N",
        "ids_TLK",
        "provenance",
        "sample_key",
        "spec",
    )

    def __init__(
        self,
        spec: RoutingSpec,
        *,
        rows: int,
        first_row: int,
        provenance: Sequence[ProvenanceSpan],
        sample_key: int,
        row_digests: bool = False,
    ) -> None:
        check_spans(provenance, first_row=first_row, rows=rows, where="StoredFrame")
        self.spec, self._row_digests = spec, row_digests
        self._first_row, self.provenance, self.sample_key = first_row, provenance, sample_key
        digests_bytes = 8 * spec.num_moe_layers if row_digests else 0
        chunks = chunk_count(rows, layers=1, layers_per_chunk=1)
        sections_bytes = len(provenance) * SPAN_BYTES + digests_bytes + chunks * CHUNK_BYTES
        self._sections_bytes = sections_bytes + padding(sections_bytes)
        payload = HEADER_BYTES + self._sections_bytes
        self.buffer_N = np.empty(payload + rows * spec.bytes_per_token, np.uint8)
        """The whole frame; complete once `finish` has returned."""
        ids_N = self.buffer_N[payload:].view(spec.id_dtype)
        self.ids_TLK: Ids = ids_N.reshape(rows, spec.num_moe_layers, spec.top_k)
        """[rows, L, K] in the id dtype: the payload itself, uninitialised until the owner fills it."""

    def finish(self) -> None:
        """Write tables, hashes and header. Nothing may write to `ids_TLK` any more."""
        out = self.buffer_N.data
        chunks = self._chunks()
        sections = self._sections(chunks).ljust(self._sections_bytes, b"\0")
        out[HEADER_BYTES : HEADER_BYTES + self._sections_bytes] = sections
        payload_hash = xxhash.xxh3_64_intdigest(out[HEADER_BYTES:])
        out[:HEADER_BYTES] = header_bytes(self._header(len(chunks), payload_hash))

    def _chunks(self) -> list[Chunk]:
        rows, layers = len(self.ids_TLK), self.spec.num_moe_layers
        blocks = ((row, min(CHUNK_ROWS, rows - row)) for row in range(0, rows, CHUNK_ROWS))
        return [
            Chunk(row, size, 0, layers, STORED.codec_id, bytes_of(self.ids_TLK[row : row + size]))
            for row, size in blocks
        ]

    def _sections(self, chunks: list[Chunk]) -> bytes:
        parts = [pack_span(span) for span in self.provenance]
        if self._row_digests:
            positions_T = np.arange(self._first_row, self._first_row + len(self.ids_TLK))
            digests_L = layer_digests(self.ids_TLK, positions_T=positions_T, layers_L=self.spec.moe_layers)
            parts.append(digests_L.tobytes())
        return b"".join([*parts, table_of(chunks)])

    def _header(self, chunks: int, payload_hash: int) -> Header:
        spec = self.spec
        return Header(
            codec=STORED.codec_id,
            flags=FLAG_DIGESTS if self._row_digests else 0,
            spec_digest=spec.digest,
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            num_moe_layers=spec.num_moe_layers,
            id_width=spec.id_dtype.itemsize,
            layers_per_chunk=spec.num_moe_layers,
            rows=len(self.ids_TLK),
            first_row=self._first_row,
            chunks=chunks,
            spans=len(self.provenance),
            sections_bytes=self._sections_bytes,
            raw_bytes=self.ids_TLK.nbytes,
            wire_bytes=self.ids_TLK.nbytes,
            sample_key=self.sample_key,
            weight_version=max((span.weight_version for span in self.provenance), default=-1),
            payload_hash=payload_hash,
        )
