"""A stored frame that is filled where it lies: the ids are gathered straight into their place on the wire. No I/O.

    draft = StoredFrame(spec, rows=..., provenance=...)
    np.take(..., out=draft.ids_TLK)          # whoever has the rows
    data = draft.finish()                    # digests, hashes, header; the same bytes as encode_frame(codec="stored")

For callers that finish thousands of requests on a thread that must not be busy: no copy is made after the gather.
All rows are valid rows; a sample with invalid rows takes `encode_frame`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from r3channel.routing import Ids, ProvenanceSpan, check_spans
from r3channel.spec import RoutingSpec
from r3channel.wire import frame as wire
from r3channel.wire.codec import STORED
from r3channel.wire.digest import layer_digests


class StoredFrame:
    """NEW -> (owner fills `ids_TLK`) -> `finish`. One thread at a time; any thread may finish."""

    __slots__ = ("_first_row", "_sections_bytes", "buffer_N", "ids_TLK", "provenance", "sample_key", "spec")

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
        self.spec = spec
        self._first_row, self.provenance, self.sample_key = first_row, provenance, sample_key
        digests = 8 * spec.num_moe_layers if row_digests else 0
        chunks = -(-rows // wire.CHUNK_ROWS)
        self._sections_bytes = len(provenance) * wire._SPAN.size + digests + chunks * wire._CHUNK.size
        payload = wire.HEADER_BYTES + self._sections_bytes
        self.buffer_N = np.empty(payload + rows * spec.bytes_per_token, np.uint8)
        """The whole frame; complete once `finish` has returned."""
        ids_N = self.buffer_N[payload:].view(spec.id_dtype)
        self.ids_TLK: Ids = ids_N.reshape(rows, spec.num_moe_layers, spec.top_k)
        """[rows, L, K] in the id dtype: the payload itself, uninitialised until the owner fills it."""

    @property
    def _row_digests(self) -> bool:
        spans = len(self.provenance) * wire._SPAN.size
        return self._sections_bytes > spans + self._chunks * wire._CHUNK.size

    @property
    def _chunks(self) -> int:
        return -(-len(self.ids_TLK) // wire.CHUNK_ROWS)

    def finish(self) -> memoryview:
        """Write tables, hashes and header; return the frame's bytes. Nothing may write to `ids_TLK` any more."""
        out = self.buffer_N.data
        out[wire.HEADER_BYTES : wire.HEADER_BYTES + self._sections_bytes] = self._sections()
        payload_hash = xxhash.xxh3_64_intdigest(out[wire.HEADER_BYTES :])
        wire._HEADER.pack_into(out, 0, *self._header()._replace(payload_hash=payload_hash))
        header_hash = xxhash.xxh3_64_intdigest(out[: wire.HEADER_BYTES - 8])
        out[wire.HEADER_BYTES - 8 : wire.HEADER_BYTES] = header_hash.to_bytes(8, "little")
        return out

    def _sections(self) -> bytes:
        spec, rows = self.spec, len(self.ids_TLK)
        parts = [wire._SPAN.pack(s.start, s.end, s.weight_version, s.kind) for s in self.provenance]
        if self._row_digests:
            positions_T = np.arange(self._first_row, self._first_row + rows)
            parts.append(
                layer_digests(self.ids_TLK, positions_T=positions_T, layers_L=spec.moe_layers).tobytes()
            )
        for row in range(0, rows, wire.CHUNK_ROWS):
            size = min(wire.CHUNK_ROWS, rows - row)
            parts.append(
                wire._CHUNK.pack(
                    row, size, 0, spec.num_moe_layers, size * spec.bytes_per_token, STORED.codec_id
                )
            )
        return b"".join(parts)

    def _header(self) -> wire._Header:
        spec, rows = self.spec, len(self.ids_TLK)
        return wire._Header(
            magic=wire.FRAME_MAGIC,
            version=wire.WIRE_VERSION,
            kind=wire.KIND_EXPERT_IDS,
            codec=STORED.codec_id,
            flags=wire.FLAG_DIGESTS if self._row_digests else 0,
            spec_digest=spec.digest,
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            num_moe_layers=spec.num_moe_layers,
            id_width=spec.id_dtype.itemsize,
            reserved0=0,
            reserved1=0,
            rows=rows,
            first_row=self._first_row,
            chunks=self._chunks,
            spans=len(self.provenance),
            sections_bytes=self._sections_bytes,
            raw_bytes=self.ids_TLK.nbytes,
            wire_bytes=self.ids_TLK.nbytes,
            sample_key=self.sample_key,
            weight_version=max((span.weight_version for span in self.provenance), default=-1),
            reserved2=0,
            payload_hash=0,
            header_hash=0,
        )
