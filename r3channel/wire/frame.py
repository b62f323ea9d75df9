"""One request's rows on the wire, version 2. No I/O here: arrays in, bytes out, and back after every check.

    header (104 B, little endian, its own xxh3 last; see `wire.header`)
    validity bitmap   ceil(T/8) bytes, only with flag VALIDITY; bit = row is valid
    provenance        spans x {start u32, end u32, weight_version i64, kind u8 (`RowKind`), 7 zero}
    digests           L x u64 over all rows (see `wire.digest`)
    chunk table       see `wire.codec`
    padding           zeros to a multiple of 16 B from the start of the frame
    chunks            ids [rows, L, K] in `spec.id_dtype`, each coded on its own

The header's second hash covers the sections, from the bitmap to the padding; the digests among them cover the ids as they are
decoded. `read_frame` checks in the order: magic and version, size, header hash, fields against the local spec, bounds, sections
hash, tables; nothing is allocated from a number that was not checked. `Frame.fill` reads the ids and checks every one: in range,
distinct, and those that the engine hashed. Hashes and digests stop accidents, not attackers.

An ERROR frame has nothing but its text, as sections.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from r3channel import errors
from r3channel.model.spec import RoutingSpec
from r3channel.wire import header as head
from r3channel.wire.codec import (
    CHUNK_ROWS,
    CODECS,
    Entry,
    Wire,
    codecs_for,
    encode_chunks,
    read_table,
    table_of,
)
from r3channel.wire.digest import layer_digests
from r3channel.wire.frame_view import Frame
from r3channel.wire.header import FRAME_MAGIC, HEADER_BYTES, MAX_ROWS, Header
from r3channel.wire.mixing import Ids, Valid
from r3channel.wire.routing import ProvenanceSpan, RowKind, Run, check_shape, check_spans, spans_of
from r3channel.wire.source import InHand, Source

__all__ = ["FRAME_MAGIC", "HEADER_BYTES", "Frame", "encode_frame", "parse_frame", "read_frame", "sample_key"]


def sample_key(request_id: str) -> int:
    """Return the 64-bit key that ties a frame to a request.

    Args:
        request_id: The engine's request id; any string, as JSON may name lone surrogates.
    """
    return xxhash.xxh3_64_intdigest(request_id.encode("utf-8", "surrogatepass"))


def encode_frame(
    spec: RoutingSpec, *, expert_ids_TLK: Ids, first_row: int = 0,
    valid_T: Valid | None = None, provenance: Sequence[ProvenanceSpan] | None = None,
    sample_key: int = 0, kept_rows: int = 0, codec: str = "auto",
) -> bytes:  # fmt: skip
    """Return the bytes of one frame.

    Ids are hashed and not checked here: the engine's scheduler thread pays for this call, and the relay checks every id.

    Args:
        spec: The model's spec.
        expert_ids_TLK: [rows, L, K] in `spec.id_dtype`, copied once. Ids of invalid rows may be anything; a codec that drops the
            order of a row replaces them.
        first_row: Position of the first row in its sample.
        valid_T: Which rows are valid; None where all are.
        provenance: Without it all rows are decoded rows of weight version 0.
        sample_key: Key of the request, as `sample_key` makes it.
        kept_rows: How many of the rows a retraction did not lose.
        codec: Name of a codec, or `auto`.

    Raises:
        RoutingError: The ids have another shape or dtype, the spans do not tile the rows, or there are more than `MAX_SPANS`
            spans.
        SpecMismatch: The ids have other layers or another top-k than `spec`.
        ConfigError: No codec has this name, or its package is not installed.
    """
    check_shape(expert_ids_TLK, spec=spec, where="encode_frame")
    rows = len(expert_ids_TLK)
    if provenance is None:
        provenance = spans_of(np.zeros(rows, np.int64), np.zeros(rows, np.uint8), first_row=first_row)
    check_spans(provenance, first_row=first_row, rows=rows, where="encode_frame")
    if len(provenance) > head.MAX_SPANS:
        raise errors.RoutingError(
            f"{len(provenance)} provenance spans for {rows} rows; expected at most {head.MAX_SPANS} spans"
        )
    codecs = codecs_for(expert_ids_TLK[:CHUNK_ROWS], codec=codec)
    if not all(chosen.keeps_order for chosen in codecs):
        expert_ids_TLK = _with_sets_in_invalid_rows(expert_ids_TLK, valid_T)
    entries, wires = encode_chunks(expert_ids_TLK, codecs=codecs)
    if any(not CODECS[entry.codec].keeps_order for entry in entries):
        expert_ids_TLK = _as_decoded(expert_ids_TLK, entries, wires)
    digests_L = layer_digests(expert_ids_TLK, first_row=first_row, valid_T=valid_T)
    begin = frame_head(
        spec, entries, first_row=first_row, valid_T=valid_T, provenance=provenance, digests_L=digests_L, sample_key=sample_key,
        kept_rows=kept_rows,
    )  # fmt: skip
    return b"".join((begin, *wires))


def frame_head(
    spec: RoutingSpec, chunks: Sequence[Entry], *, first_row: int, valid_T: Valid | None,
    provenance: Sequence[ProvenanceSpan] | Sequence[Run], digests_L: Ids, sample_key: int, kept_rows: int = 0,
) -> bytes:  # fmt: skip
    """Return a frame up to its chunks, which follow.

    The digests of the rows are known, so no row is read.

    Args:
        spec: The model's spec.
        chunks: The table of the chunks that follow.
        first_row: Position of the first row in its sample.
        valid_T: Which rows are valid; None where all are.
        provenance: The spans of the rows.
        digests_L: The digest of each MoE layer.
        sample_key: Key of the request.
        kept_rows: How many of the rows a retraction did not lose.
    """
    codecs, rows = [chunk.codec for chunk in chunks], sum([chunk.rows for chunk in chunks])
    flags = 0 if all(CODECS[codec].keeps_order for codec in codecs) else head.FLAG_UNORDERED
    parts = [head.SPAN.pack(*span) for span in provenance]
    if valid_T is not None and not valid_T.all():
        flags |= head.FLAG_VALIDITY
        parts.insert(0, np.packbits(valid_T, bitorder="little").tobytes())
    parts += digests_L.astype("<u8", copy=False).tobytes(), table_of(chunks, layers=spec.num_moe_layers)
    sections = b"".join(parts)
    sections += bytes(head.padding(len(sections)))
    fields = (
        FRAME_MAGIC, head.WIRE_VERSION, head.KIND_EXPERT_IDS, max(codecs, default=0), flags,
        spec.digest, spec.num_experts, spec.top_k, spec.num_moe_layers, spec.id_dtype.itemsize, 0,
        spec.num_moe_layers, rows, first_row, len(chunks), len(provenance), len(sections),
        rows * spec.bytes_per_token, sum([chunk.nbytes for chunk in chunks]), sample_key,
        max([span[2] for span in provenance], default=-1), kept_rows,
    )  # fmt: skip
    return head.assemble(fields, sections)


def encode_error(message: str, *, sample_key: int = 0) -> bytes:
    """Return a frame that says why the engine has no rows.

    `parse_frame` raises the text as `EngineReported`.
    """
    text = message.encode("utf-8", "replace")[: head.MAX_ERROR_BYTES]
    return head.assemble(
        Header(kind=head.KIND_ERROR, sections_bytes=len(text), sample_key=sample_key)[:-2], text
    )


def _with_sets_in_invalid_rows(ids_TLK: Ids, valid_T: Valid | None) -> Ids:
    if valid_T is None or valid_T.all():
        return ids_TLK
    # ids of invalid rows mean nothing; without 0..K-1 there, one such row would cost a chunk its `set` coding
    return np.where(valid_T[:, None, None], ids_TLK, np.arange(ids_TLK.shape[-1], dtype=ids_TLK.dtype))


def _as_decoded(ids_TLK: Ids, entries: Sequence[Entry], wires: Sequence[Wire]) -> Ids:
    seen_TLK = np.array(ids_TLK)
    for (row, rows, codec, _), wire in zip(entries, wires, strict=True):
        if not CODECS[codec].keeps_order:  # the other end sees each row sorted
            CODECS[codec].decode_into(memoryview(wire), seen_TLK[row : row + rows])
    return seen_TLK


# -- parsing -----------------------------------------------------------------------------------------------------------


def parse_frame(
    data: bytes | bytearray | memoryview, *, spec: RoutingSpec, sample_id: str = "?", engine: str = "?",
    max_rows: int = MAX_ROWS,
) -> Frame:  # fmt: skip
    """Read a frame that is in hand, up to its ids.

    This checks what `read_frame` checks, and raises the same errors. The frame's ids can be asked for.

    Args:
        data: The frame; it must not change while the frame is used.
        spec: The local spec.
        sample_id: Names the sample in error texts.
        engine: Names the engine in error texts.
        max_rows: Bound on the frame's rows.
    """
    source = InHand(data)
    frame = read_frame(source, spec=spec, where=f"sample {sample_id} from engine {engine}", max_rows=max_rows)
    frame.payload = source.take(source.left)
    return frame


def read_frame(
    source: Source, *, spec: RoutingSpec, where: str, max_rows: int = MAX_ROWS, begun: memoryview | bytes = b"",
    more: bool = False,
) -> Frame:  # fmt: skip
    """Read and verify one frame up to its ids.

    `Frame.fill` reads the ids next. Memory that is taken here and later is bounded by `max_rows` x `spec.bytes_per_token`,
    whatever the bytes say. The first check that fails raises its typed error, which names `where`.

    Args:
        source: Bytes of the frame that were not read yet.
        spec: The local spec that the frame must fit.
        where: Names the frame in error texts.
        max_rows: Bound on the frame's rows.
        begun: Bytes of the header that were read already.
        more: Whether something may lie behind the frame.
    """
    nbytes = len(begun) + source.left
    rest = source.take(min(HEADER_BYTES - len(begun), source.left))
    begin = memoryview(bytes(begun) + bytes(rest)) if begun else rest
    header = head.read_header(begin, nbytes=nbytes, where=where, more=more)
    head.check_kind(header, source, kind=head.KIND_EXPERT_IDS, where=where)
    head.check_fields(header, spec=spec, max_rows=max_rows, where=where)
    sections = source.take(header.sections_bytes)
    head.check_sections(header, sections, where=where)
    return _read_sections(header, sections, spec=spec, where=where)


def _read_sections(header: Header, sections: memoryview, *, spec: RoutingSpec, where: str) -> Frame:
    at, rows, valid_T = 0, header.rows, None
    if header.flags & head.FLAG_VALIDITY:
        at = -(-rows // 8)
        bits = np.frombuffer(sections[:at], np.uint8)
        valid_T = np.unpackbits(bits, count=rows, bitorder="little").view(bool)
        valid_T = None if valid_T.all() else valid_T
    spans = _read_spans(header, sections[at:], where=where)
    at += header.spans * head.SPAN_BYTES
    digests_L = np.frombuffer(sections[at : at + 8 * spec.num_moe_layers], "<u8").copy()
    table = sections[at + digests_L.nbytes :]
    entries = read_table(table, wire_bytes=header.wire_bytes, rows=rows, spec=spec, where=where)
    return Frame(
        spec=spec, rows=rows, first_row=header.first_row, sample_key=header.sample_key,
        weight_version=header.weight_version, where=where, nbytes=header.nbytes, partly_valid_T=valid_T, provenance=spans,
        digests_L=digests_L, ordered=_keep_order(header, entries, where=where), entries=entries,
        kept_rows=header.kept_rows,
    )  # fmt: skip


def _keep_order(header: Header, chunks: Sequence[Entry], *, where: str) -> bool:
    """Return whether all chunks keep order, as the header must say."""
    ordered = all(CODECS[chunk.codec].keeps_order for chunk in chunks)
    highest = max((chunk.codec for chunk in chunks), default=0)
    if ordered == bool(header.flags & head.FLAG_UNORDERED) or header.codec != highest:
        raise errors.FrameCorrupt(
            f"{where}: flags {header.flags} and codec {header.codec} do not describe chunks of codecs up to {highest}"
        )
    return ordered


def _read_spans(header: Header, body: memoryview, *, where: str) -> tuple[ProvenanceSpan, ...]:
    spans = list[ProvenanceSpan]()
    for start, end, version, kind in head.SPAN.iter_unpack(body[: header.spans * head.SPAN_BYTES]):
        if kind not in RowKind._value2member_map_:
            raise errors.FrameCorrupt(f"{where}: provenance kind {kind} is unknown")
        spans.append(ProvenanceSpan(start, end, version, RowKind(kind)))
    try:
        check_spans(spans, first_row=header.first_row, rows=header.rows, where=where)
    except errors.RoutingError as error:
        raise errors.FrameCorrupt(str(error)) from error
    newest = max((span.weight_version for span in spans), default=-1)
    if newest != header.weight_version:
        raise errors.FrameCorrupt(f"{where}: weight version {header.weight_version}, the rows say {newest}")
    return tuple(spans)
