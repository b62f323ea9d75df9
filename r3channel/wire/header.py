"""The fixed header of a frame and the checks on its numbers. Knows nothing of what the numbers describe.

104 bytes, little endian, its own xxh3 last. `read_header` and `check_fields` look at every number before any of them sizes
anything; hashes stop accidents, not attackers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from r3channel import errors
from r3channel.model.spec import RoutingSpec
from r3channel.wire.codec import CHUNK_BYTES, CODECS, chunk_count
from r3channel.wire.source import Source
from r3channel.wire.token_tensors import KIND_ERROR, KIND_EXPERT_IDS, kind_names

WIRE_VERSION = 2
FRAME_MAGIC = b"R3F" + bytes([WIRE_VERSION])
_KINDS = kind_names()
FLAG_VALIDITY, FLAG_UNORDERED = 1, 8
_FLAG_PREFIX = 4
"""Reserved: rows that another frame, of kind 2, carries. Neither is sent, nor chunks of fewer than all layers; all three are
refused by name."""
ALIGNMENT = 16
"""The first chunk begins at a multiple of this. Stored ids are then checked and placed where they lie, in 8-byte words:
unaligned words cost three times as much, and a copy into fresh memory six times (measured)."""
MAX_ROWS = 1 << 24
"""Rows of one sample at most, in all its turns: 16.7 M, far above any context length today."""
MAX_SPANS = 1 << 14
"""Bound on provenance spans: a sample that crosses this many weight updates and cache hits does not exist, and a span
costs six times more memory when read than on the wire."""
MAX_ERROR_BYTES = 4096

_HEADER = struct.Struct("<4sBBBBQIHHBBHIIIIIQQQqQQQ")
HEADER_BYTES = _HEADER.size
_HASH = struct.Struct("<Q")
SPAN = struct.Struct("<IIqB7x")
SPAN_BYTES = SPAN.size


class Header(NamedTuple):
    """The fields of a frame's header, in order."""

    magic: bytes = FRAME_MAGIC
    version: int = WIRE_VERSION
    kind: int = KIND_EXPERT_IDS
    codec: int = 0
    """The highest codec id among the chunks."""
    flags: int = 0
    spec_digest: int = 0
    num_experts: int = 0
    top_k: int = 0
    num_moe_layers: int = 0
    id_width: int = 0
    reserved0: int = 0
    layers_per_chunk: int = 0
    """All MoE layers."""
    rows: int = 0
    first_row: int = 0
    chunks: int = 0
    spans: int = 0
    sections_bytes: int = 0
    raw_bytes: int = 0
    """Decoded bytes of the rows."""
    wire_bytes: int = 0
    sample_key: int = 0
    weight_version: int = 0
    kept_rows: int = 0
    """How many of the rows a retraction did not lose: they are those of the pass that made the tokens."""
    sections_hash: int = 0
    header_hash: int = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole frame."""
        return HEADER_BYTES + self.sections_bytes + self.wire_bytes


def seal(data: memoryview, fields: Sequence[int | bytes] = ()) -> None:
    """Write both hashes of a header.

    Args:
        data: The header, and behind it the sections.
        fields: The fields of `Header` but for its hashes; none where the header has them already.
    """
    if fields:
        _HEADER.pack_into(data, 0, *fields, 0, 0)
    _HASH.pack_into(data, HEADER_BYTES - 16, xxhash.xxh3_64_intdigest(data[HEADER_BYTES:]))
    _HASH.pack_into(data, HEADER_BYTES - 8, xxhash.xxh3_64_intdigest(data[: HEADER_BYTES - 8]))


def assemble(fields: Sequence[int | bytes], sections: bytes | bytearray) -> bytes:
    """Return the header and the sections in one piece.

    Args:
        fields: The fields of `Header` but for its hashes.
        sections: The sections that follow the header.
    """
    data = bytearray(HEADER_BYTES) + sections
    seal(memoryview(data), fields)
    return bytes(data)


def announced_bytes(head: memoryview | bytes) -> int:
    """Return the frame's size as its header announces it, unchecked.

    Args:
        head: Bytes that begin with the header.

    Returns:
        Bytes of the whole frame; 0 where `head` does not begin with a header.
    """
    if bytes(head[:4]) != FRAME_MAGIC or len(head) < HEADER_BYTES:
        return 0
    return Header(*_HEADER.unpack_from(head)).nbytes


def read_header(head: memoryview, *, nbytes: int, where: str, more: bool = False) -> Header:
    """Check magic, version, hash, kind and size, and return the header.

    Args:
        head: The first bytes of the frame.
        nbytes: How many bytes begin with `head`.
        where: Names the frame in error texts.
        more: Whether something may lie behind what the header announces.

    Raises:
        FrameMagicMismatch: The bytes do not begin with a frame's magic.
        FrameVersionMismatch: The wire version or the kind is another one.
        FrameCorrupt: The size or the header's hash does not fit.
    """
    header = _header_in(head, nbytes=nbytes, where=where)
    if nbytes != header.nbytes and not (more and nbytes > header.nbytes):
        behind = "; do tensors lie behind it that token_tensors does not name?" * (nbytes > header.nbytes)
        raise errors.FrameCorrupt(
            f"{where}: {nbytes} bytes, expected the {header.nbytes} that the header announces{behind}"
        )
    return header


def _header_in(view: memoryview, *, nbytes: int, where: str) -> Header:
    if bytes(view[:3]) == FRAME_MAGIC[:3] and len(view) > 3 and view[3] != WIRE_VERSION:
        age = "older" if view[3] < WIRE_VERSION else "newer"
        raise errors.FrameVersionMismatch(
            f"{where}: wire version {view[3]}, expected {WIRE_VERSION}: is the engine's r3channel {age}?"
        )
    if bytes(view[:4]) != FRAME_MAGIC:
        raise errors.FrameMagicMismatch(
            f"{where}: {nbytes} bytes begin with {bytes(view[:8])!r}, expected {FRAME_MAGIC!r}. Stock int32 routing or "
            "an error page? Is the r3channel plug-in on in this engine?"
        )
    if len(view) < HEADER_BYTES:
        raise errors.FrameCorrupt(f"{where}: {nbytes} bytes, expected at least a header of {HEADER_BYTES}")
    header = Header(*_HEADER.unpack_from(view))
    if header.version != WIRE_VERSION:
        raise errors.FrameVersionMismatch(f"{where}: wire version {header.version}, expected {WIRE_VERSION}")
    if xxhash.xxh3_64_intdigest(view[: HEADER_BYTES - 8]) != header.header_hash:
        raise errors.FrameCorrupt(f"{where}: the header's hash does not match its bytes; damaged on the way")
    if header.kind not in _KINDS:
        raise errors.FrameVersionMismatch(
            f"{where}: kind {header.kind}, expected one of {_KINDS}: is the sender's r3channel of another release?"
        )
    return header


def check_kind(header: Header, source: Source, *, kind: int, where: str) -> None:
    """Check that a frame is of the expected kind.

    Args:
        header: The frame's header.
        source: Its next bytes are the frame's sections, read only for the frame of an error.
        kind: The expected kind.
        where: Names the frame in error texts.

    Raises:
        EngineReported: The engine could not build the frame; the error holds the engine's text, read from `source`.
        FrameVersionMismatch: The frame is of another kind.
        FrameCorrupt: The hash of the engine's text does not match.
    """
    if header.kind == KIND_ERROR and header.sections_bytes <= MAX_ERROR_BYTES:
        text = source.take(header.sections_bytes)
        check_sections(header, text, where=where)
        reported = bytes(text).decode(errors="replace")
        raise errors.EngineReported(f"{where}: expected a frame; the engine could not build it: {reported}")
    if header.kind != kind:
        raise errors.FrameVersionMismatch(
            f"{where}: a frame of kind {_KINDS[header.kind]}, expected {_KINDS[kind]}; sent to the wrong place?"
        )


def check_fields(header: Header, *, spec: RoutingSpec, max_rows: int, where: str) -> None:
    """Check every number of a header before it sizes anything.

    Args:
        header: A header whose hash was checked.
        spec: The local spec that the numbers must fit.
        max_rows: The caller's bound on rows.
        where: Names the frame in error texts.

    Raises:
        SpecMismatch: The frame is of another model.
        FrameVersionMismatch: The frame uses what is reserved.
        RowCountMismatch: The frame has more than `max_rows` rows.
        FrameCorrupt: The numbers are impossible.
    """
    _check_spec(header, spec=spec, where=where)
    _check_reserved(header, where=where)
    if header.rows > max_rows:
        raise errors.RowCountMismatch(
            f"{where}: {header.rows} rows, expected at most {max_rows}. Is the prompt in `tokens`, before the response?"
        )
    bounds = (
        header.first_row + header.rows <= MAX_ROWS, header.raw_bytes == header.rows * spec.bytes_per_token,
        header.wire_bytes <= header.raw_bytes, header.layers_per_chunk == spec.num_moe_layers, header.reserved0 == 0,
        header.kept_rows <= header.rows, header.codec in CODECS, header.flags & ~(FLAG_VALIDITY | FLAG_UNORDERED) == 0,
        header.spans <= min(header.rows, MAX_SPANS),
    )  # fmt: skip
    if not all(bounds) or not _counts_fit(header, spec=spec):
        raise errors.FrameCorrupt(f"{where}: impossible numbers in the header: {header._asdict()}")


def _check_reserved(header: Header, *, where: str) -> None:
    seen = ""
    if header.flags & _FLAG_PREFIX:
        seen = f"flag {_FLAG_PREFIX}: another frame carries some of its rows, expected all of its {header.rows} rows"
    elif 0 < header.layers_per_chunk < header.num_moe_layers:
        seen = f"chunks of {header.layers_per_chunk} layers, expected all {header.num_moe_layers}"
    if seen:
        raise errors.FrameVersionMismatch(f"{where}: {seen}: is the sender's r3channel of another release?")


def _check_spec(header: Header, *, spec: RoutingSpec, where: str) -> None:
    for seen, expected, what in (
        (header.num_experts, spec.num_experts, "experts"),
        (header.top_k, spec.top_k, "top-k"),
        (header.num_moe_layers, spec.num_moe_layers, "MoE layers"),
        (header.id_width, spec.id_dtype.itemsize, "bytes per id"),
        (header.spec_digest, spec.digest, "spec digest"),
    ):
        if seen != expected:
            raise errors.SpecMismatch(f"{where}: {what} {seen}, expected {expected}. Another model's frame?")


def _counts_fit(header: Header, *, spec: RoutingSpec) -> bool:
    bitmap = -(-header.rows // 8) if header.flags & FLAG_VALIDITY else 0
    expected = sections_size(header.rows, spans=header.spans, layers=spec.num_moe_layers, bitmap=bitmap)
    return header.chunks == chunk_count(header.rows) and header.sections_bytes == expected


def sections_size(rows: int, *, spans: int, layers: int, bitmap: int = 0) -> int:
    """Return the bytes of a frame's sections, padding included.

    Args:
        rows: Rows of the frame.
        spans: Provenance spans.
        layers: MoE layers.
        bitmap: Bytes of the validity bitmap.
    """
    size = bitmap + spans * SPAN_BYTES + 8 * layers + chunk_count(rows) * CHUNK_BYTES
    return size + padding(size)


def padding(sections_bytes: int) -> int:
    """Return the number of zero bytes after the sections.

    The first chunk then starts at a multiple of `ALIGNMENT` of the frame.

    >>> padding(24), padding(25)
    (0, 15)
    """
    return -(HEADER_BYTES + sections_bytes) % ALIGNMENT


def check_sections(header: Header, sections: memoryview, *, where: str) -> None:
    """Check the hash of the bytes between header and chunks.

    The digests cover the ids, which are checked where they are decoded.

    Raises:
        FrameCorrupt: The hash does not match.
    """
    if xxhash.xxh3_64_intdigest(sections) != header.sections_hash:
        raise errors.FrameCorrupt(
            f"{where}: the hash of the {header.sections_bytes} bytes of the sections does not match; damaged on the way"
        )
