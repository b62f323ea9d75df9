"""One sample's rows on the wire, version 1. No I/O here: arrays in, bytes out, and back after every check.

    header (104 B, little endian, its own xxh3 last)
    validity bitmap   ceil(T/8) bytes, only with flag VALIDITY; bit = row is valid
    provenance        spans x {start u32, end u32, weight_version i64, kind u8, 7 zero}
    digests           L x u64, only with flag DIGESTS (see `wire.digest`)
    chunk table       chunks x {row u32, rows u32, moe_index u16, layers u16, bytes u32, codec u8, 3 zero}
    chunks            token-major ids [rows, layers, K] in `spec.id_dtype`

The payload hash covers everything after the header. `parse_frame` checks in the order: size, magic, version, header hash,
fields against the local spec, bounds, payload hash, tables; nothing is allocated from a number that was not checked.
Ids are range- and distinctness-checked by `Frame.routing`. Hashes stop accidents, not attackers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash

from r3channel import errors
from r3channel.routing import Ids, ProvenanceSpan, RowKind, SampleRouting, check_shape, check_spans
from r3channel.spec import RoutingSpec
from r3channel.wire.codec import CODECS, encode_chunk
from r3channel.wire.digest import layer_digests

FRAME_MAGIC = b"R3F\x01"
WIRE_VERSION = 1
KIND_EXPERT_IDS, KIND_ERROR = 1, 255
FLAG_VALIDITY, FLAG_DIGESTS = 1, 2
CHUNK_ROWS = 8192
"""Rows per chunk at most: fixed-width data does not care, adaptive codecs are best at 4-8 k rows (measured)."""
MAX_ROWS = 1 << 24
"""Bound on rows of one sample, far above any context length today (16.7 M tokens)."""
MAX_ERROR_BYTES = 4096

_HEADER = struct.Struct("<4sBBBBQIHHBBHIIIIIQQQqQQQ")
_SPAN = struct.Struct("<IIqB7x")
_CHUNK = struct.Struct("<IIHHIB3x")
HEADER_BYTES = _HEADER.size


def sample_key(request_id: str) -> int:
    """64-bit key that ties a frame to the engine's request id."""
    return xxhash.xxh3_64_intdigest(request_id.encode())


class _Header(NamedTuple):
    """The fields of `_HEADER`, in order."""

    magic: bytes
    version: int
    kind: int
    codec: int
    flags: int
    spec_digest: int
    num_experts: int
    top_k: int
    num_moe_layers: int
    id_width: int
    reserved0: int
    reserved1: int
    rows: int
    first_row: int
    chunks: int
    spans: int
    sections_bytes: int
    raw_bytes: int
    wire_bytes: int
    sample_key: int
    weight_version: int
    reserved2: int
    payload_hash: int
    header_hash: int


class _Chunk(NamedTuple):
    row: int
    rows: int
    moe_index: int
    layers: int
    codec: int
    wire: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A frame whose bytes have been verified; ids are still encoded. Holds views of the caller's buffer, no copy."""

    spec: RoutingSpec
    rows: int
    first_row: int
    sample_key: int
    weight_version: int
    """The newest weight version among the rows; -1 when there are no rows."""
    payload_hash: int
    nbytes: int
    valid_T: np.ndarray[Any, np.dtype[np.bool_]]
    provenance: tuple[ProvenanceSpan, ...]
    digests_L: Ids | None
    """uint64 per MoE layer as the engine computed them, or None."""
    _chunks: tuple[_Chunk, ...]

    def decode_into(self, out_TLK: Ids) -> None:
        """Fill a C-contiguous array [rows, L, K] of `spec.id_dtype`; raise `PayloadCorrupt` if the chunks do not fit."""
        check_shape(out_TLK, spec=self.spec, where="decode buffer")
        if len(out_TLK) != self.rows or not out_TLK.flags.c_contiguous:
            raise errors.UsageError(
                f"decode buffer has {len(out_TLK)} rows, expected {self.rows}, C-contiguous"
            )
        for chunk in self._chunks:
            part = out_TLK[chunk.row : chunk.row + chunk.rows]
            CODECS[chunk.codec].decode_into(chunk.wire, part.reshape(-1).view(np.uint8).data)

    def decode(self) -> Ids:
        """[rows, L, K] in a fresh array of `spec.id_dtype`."""
        out_TLK = np.empty((self.rows, self.spec.num_moe_layers, self.spec.top_k), self.spec.id_dtype)
        self.decode_into(out_TLK)
        return out_TLK

    def routing(self, *, sample_id: str) -> SampleRouting:
        """Decode and check every id."""
        return SampleRouting(
            spec=self.spec,
            sample_id=sample_id,
            tokens=self.first_row + self.rows + 1,
            first_row=self.first_row,
            expert_ids_TLK=self.decode(),
            valid_T=self.valid_T,
            provenance=self.provenance,
        )


def encode_frame(
    spec: RoutingSpec,
    *,
    expert_ids_TLK: Ids,
    first_row: int = 0,
    valid_T: np.ndarray[Any, np.dtype[np.bool_]] | None = None,
    provenance: Sequence[ProvenanceSpan] | None = None,
    sample_key: int = 0,
    codec: str = "auto",
    row_digests: bool = False,
) -> bytes:
    """Bytes of one frame. `expert_ids_TLK` is [rows, L, K] in `spec.id_dtype` and is copied once.

    Without `provenance` all rows are decoded rows of weight version 0. Ids are not checked here: the engine's
    scheduler thread pays for this call, and the relay checks every id. Ids of invalid rows may be anything.
    """
    check_shape(expert_ids_TLK, spec=spec, where="encode_frame")
    rows = len(expert_ids_TLK)
    if provenance is None:
        provenance = (
            [ProvenanceSpan(start=first_row, end=first_row + rows, weight_version=0, kind=RowKind.DECODED)]
            if rows
            else []
        )
    check_spans(provenance, first_row=first_row, rows=rows, where="encode_frame")
    flags, sections = 0, bytearray()
    if valid_T is not None and not valid_T.all():
        flags |= FLAG_VALIDITY
        sections += np.packbits(valid_T, bitorder="little").tobytes()
    for span in provenance:
        sections += _SPAN.pack(span.start, span.end, span.weight_version, span.kind)
    if row_digests:
        flags |= FLAG_DIGESTS
        positions = np.arange(first_row, first_row + rows)
        sections += layer_digests(expert_ids_TLK, positions_T=positions, layers_L=spec.moe_layers).tobytes()
    chunks = _encode_chunks(np.ascontiguousarray(expert_ids_TLK), spec=spec, codec=codec)
    for chunk in chunks:
        sections += _CHUNK.pack(*chunk[:4], len(chunk.wire), chunk.codec)
    header = _Header(
        magic=FRAME_MAGIC,
        version=WIRE_VERSION,
        kind=KIND_EXPERT_IDS,
        codec=max((chunk.codec for chunk in chunks), default=0),
        flags=flags,
        spec_digest=spec.digest,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        num_moe_layers=spec.num_moe_layers,
        id_width=spec.id_dtype.itemsize,
        reserved0=0,
        reserved1=0,
        rows=rows,
        first_row=first_row,
        chunks=len(chunks),
        spans=len(provenance),
        sections_bytes=len(sections),
        raw_bytes=rows * spec.bytes_per_token,
        wire_bytes=sum(len(chunk.wire) for chunk in chunks),
        sample_key=sample_key,
        weight_version=max((span.weight_version for span in provenance), default=-1),
        reserved2=0,
        payload_hash=0,
        header_hash=0,
    )
    return _assemble(header, [sections, *(chunk.wire for chunk in chunks)])


def encode_error(message: str, *, sample_key: int = 0) -> bytes:
    """A frame that says why the engine has no rows; `parse_frame` raises it as `EngineReported`."""
    text = message.encode()[:MAX_ERROR_BYTES]
    zeros = _Header(FRAME_MAGIC, WIRE_VERSION, KIND_ERROR, *[0] * (len(_Header._fields) - 3))
    return _assemble(zeros._replace(sections_bytes=len(text), sample_key=sample_key), [text])


def _encode_chunks(ids_TLK: Ids, *, spec: RoutingSpec, codec: str) -> list[_Chunk]:
    chunks = []
    for row in range(0, len(ids_TLK), CHUNK_ROWS):
        part = ids_TLK[row : row + CHUNK_ROWS]
        codec_id, wire = encode_chunk(part.reshape(-1).view(np.uint8).data, codec=codec)
        chunks.append(_Chunk(row, len(part), 0, spec.num_moe_layers, codec_id, memoryview(wire)))
    return chunks


def _assemble(header: _Header, parts: Sequence[bytes | bytearray | memoryview]) -> bytes:
    out = bytearray(HEADER_BYTES + sum(len(part) for part in parts))
    at = HEADER_BYTES
    for part in parts:
        out[at : at + len(part)] = part
        at += len(part)
    payload_hash = xxhash.xxh3_64_intdigest(memoryview(out)[HEADER_BYTES:])
    _HEADER.pack_into(out, 0, *header._replace(payload_hash=payload_hash))
    struct.pack_into(
        "<Q", out, HEADER_BYTES - 8, xxhash.xxh3_64_intdigest(memoryview(out)[: HEADER_BYTES - 8])
    )
    return bytes(out)


# -- parsing -----------------------------------------------------------------------------------------------------------


def parse_frame(
    data: bytes | bytearray | memoryview, *, spec: RoutingSpec, sample_id: str = "?", engine: str = "?"
) -> Frame:
    """Verify the bytes of one frame against the local `spec`; raise the typed error of the first check that fails.

    `data` must stay unchanged while the frame is used. Errors name `sample_id` and `engine`.
    """
    where = f"sample {sample_id} from engine {engine}"
    view = memoryview(data).cast("B")
    header = _read_header(view, where=where)
    body = view[HEADER_BYTES:]
    if header.kind == KIND_ERROR:
        _check_payload(header, body, where=where)
        raise errors.EngineReported(
            f"{where}: expected a frame; the engine could not build it: "
            f"{bytes(body).decode(errors='replace')}"
        )
    _check_fields(header, spec=spec, where=where)
    _check_payload(header, body, where=where)
    return _read_body(header, body, spec=spec, where=where)


def _read_header(view: memoryview, *, where: str) -> _Header:
    if bytes(view[:4]) != FRAME_MAGIC:
        raise errors.FrameMagicMismatch(
            f"{where}: {len(view)} bytes begin with {bytes(view[:8])!r}, expected {FRAME_MAGIC!r}. Stock int32 routing or "
            "an error page? Is the r3channel plug-in on in this engine?"
        )
    if len(view) < HEADER_BYTES:
        raise errors.FrameTruncated(
            f"{where}: {len(view)} bytes, expected at least a header of {HEADER_BYTES}"
        )
    header = _Header(*_HEADER.unpack_from(view))
    if header.version != WIRE_VERSION:
        raise errors.FrameVersionMismatch(f"{where}: wire version {header.version}, expected {WIRE_VERSION}")
    if xxhash.xxh3_64_intdigest(view[: HEADER_BYTES - 8]) != header.header_hash:
        raise errors.HeaderCorrupt(f"{where}: the header's hash does not match its bytes; damaged on the way")
    if header.kind not in (KIND_EXPERT_IDS, KIND_ERROR):
        raise errors.FrameVersionMismatch(
            f"{where}: kind {header.kind}, expected {KIND_EXPERT_IDS} (expert_ids)"
        )
    size = HEADER_BYTES + header.sections_bytes + header.wire_bytes
    if len(view) != size:
        raise errors.FrameTruncated(
            f"{where}: {len(view)} bytes, expected the {size} that the header announces"
        )
    return header


def _check_fields(header: _Header, *, spec: RoutingSpec, where: str) -> None:
    """Every number against the local spec, before any of them sizes anything."""
    for seen, expected, what, kind in (
        (header.num_experts, spec.num_experts, "experts", errors.ExpertCountMismatch),
        (header.top_k, spec.top_k, "top-k", errors.TopKMismatch),
        (header.num_moe_layers, spec.num_moe_layers, "MoE layers", errors.LayerMismatch),
        (header.id_width, spec.id_dtype.itemsize, "bytes per id", errors.SpecMismatch),
        (header.spec_digest, spec.digest, "spec digest", errors.SpecMismatch),
    ):
        if seen != expected:
            raise kind(f"{where}: {what} {seen}, expected {expected}. A frame of another model?")
    bounds = (
        header.rows <= MAX_ROWS and header.first_row <= MAX_ROWS,
        header.raw_bytes == header.rows * spec.bytes_per_token,
        header.wire_bytes <= header.raw_bytes,
        header.chunks == -(-header.rows // CHUNK_ROWS),
        header.spans <= max(header.rows, 0),
        header.codec in CODECS,
        header.flags & ~(FLAG_VALIDITY | FLAG_DIGESTS) == 0,
        header.sections_bytes == _sections_bytes(header),
    )
    if not all(bounds):
        raise errors.HeaderCorrupt(f"{where}: impossible sizes in the header: {header._asdict()}")


def _sections_bytes(header: _Header) -> int:
    bitmap = -(-header.rows // 8) if header.flags & FLAG_VALIDITY else 0
    digests = 8 * header.num_moe_layers if header.flags & FLAG_DIGESTS else 0
    return bitmap + digests + header.spans * _SPAN.size + header.chunks * _CHUNK.size


def _check_payload(header: _Header, body: memoryview, *, where: str) -> None:
    if xxhash.xxh3_64_intdigest(body) != header.payload_hash:
        raise errors.PayloadCorrupt(
            f"{where}: the payload's hash does not match its {len(body)} bytes; damaged on the way"
        )


def _read_body(header: _Header, body: memoryview, *, spec: RoutingSpec, where: str) -> Frame:
    at, rows = 0, header.rows
    valid_T = np.ones(rows, dtype=bool)
    if header.flags & FLAG_VALIDITY:
        size = -(-rows // 8)
        valid_T = np.unpackbits(np.frombuffer(body[:size], np.uint8), count=rows, bitorder="little").astype(
            bool
        )
        at += size
    spans = _read_spans(header, body[at:], where=where)
    at += header.spans * _SPAN.size
    digests_L = None
    if header.flags & FLAG_DIGESTS:
        digests_L = np.frombuffer(body[at : at + 8 * spec.num_moe_layers], "<u8").copy()
        at += 8 * spec.num_moe_layers
    return Frame(
        spec=spec,
        rows=rows,
        first_row=header.first_row,
        sample_key=header.sample_key,
        weight_version=header.weight_version,
        payload_hash=header.payload_hash,
        nbytes=HEADER_BYTES + len(body),
        valid_T=valid_T,
        provenance=spans,
        digests_L=digests_L,
        _chunks=_read_chunks(header, body[at:], spec=spec, where=where),
    )


def _read_spans(header: _Header, body: memoryview, *, where: str) -> tuple[ProvenanceSpan, ...]:
    spans = []
    for index in range(header.spans):
        start, end, version, kind = _SPAN.unpack_from(body, index * _SPAN.size)
        if kind not in RowKind._value2member_map_:
            raise errors.PayloadCorrupt(f"{where}: provenance kind {kind} is unknown")
        spans.append(ProvenanceSpan(start=start, end=end, weight_version=version, kind=RowKind(kind)))
    check_spans(spans, first_row=header.first_row, rows=header.rows, where=where)
    return tuple(spans)


def _read_chunks(header: _Header, body: memoryview, *, spec: RoutingSpec, where: str) -> tuple[_Chunk, ...]:
    """Chunks must tile the rows in order and the remaining bytes exactly."""
    chunks, row, at = [], 0, header.chunks * _CHUNK.size
    for index in range(header.chunks):
        first, rows, moe_index, layers, size, codec = _CHUNK.unpack_from(body, index * _CHUNK.size)
        expected = (row, min(CHUNK_ROWS, header.rows - row), 0, spec.num_moe_layers)
        if (first, rows, moe_index, layers) != expected or codec not in CODECS or at + size > len(body):
            raise errors.PayloadCorrupt(
                f"{where}: chunk {index} covers {(first, rows, moe_index, layers)}, expected {expected}"
            )
        chunks.append(_Chunk(row, rows, 0, layers, codec, body[at : at + size]))
        row, at = row + rows, at + size
    if at != len(body):
        raise errors.PayloadCorrupt(f"{where}: {len(body) - at} bytes after the last chunk")
    return tuple(chunks)
