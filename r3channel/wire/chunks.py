"""Rows x layers cut into chunks, so that a pipeline stage decodes only its own layers. Knows codecs, and no headers.

Chunks lie row block by row block, within a block by ascending layers; the table in front of them is
    {row u32, rows u32, moe_index u16, layers u16, bytes u32, codec u8, 3 zero}
and must say exactly what the grid demands, so that it cannot lie.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from r3channel import errors
from r3channel.model.spec import RoutingSpec
from r3channel.wire.codec import CODECS, STORED, Wire, codec_for, encode_chunk
from r3channel.wire.routing import Ids

CHUNK_ROWS = 8192
"""Rows per chunk at most: fixed-width data does not care, adaptive codecs are best at 4-8 k rows (measured)."""

_CHUNK = struct.Struct("<IIHHIB3x")
CHUNK_BYTES = _CHUNK.size


class Chunk(NamedTuple):
    """One coded block. `row` counts from the first row that the frame carries, `moe_index` on the layer axis."""

    row: int
    rows: int
    moe_index: int
    layers: int
    codec: int
    wire: Wire

    @property
    def row_slice(self) -> slice:
        return slice(self.row, self.row + self.rows)


def chunk_count(rows: int, *, layers: int, layers_per_chunk: int) -> int:
    return -(-rows // CHUNK_ROWS) * -(-layers // layers_per_chunk)


def _grid(rows: int, *, layers: int, layers_per_chunk: int) -> Iterator[tuple[int, int, int, int]]:
    """(row, rows, moe_index, layers) of every chunk, in order."""
    for row in range(0, rows, CHUNK_ROWS):
        for moe_index in range(0, layers, layers_per_chunk):
            yield row, min(CHUNK_ROWS, rows - row), moe_index, min(layers_per_chunk, layers - moe_index)


def encode_chunks(ids_TLK: Ids, *, codec: str, layers_per_chunk: int) -> list[Chunk]:
    """All chunks. Their bytes may be views of `ids_TLK` where it is contiguous."""
    rows, layers, _ = ids_TLK.shape
    chosen = codec_for(ids_TLK[:CHUNK_ROWS, :layers_per_chunk], codec=codec)
    chunks = []
    for place in _grid(rows, layers=layers, layers_per_chunk=layers_per_chunk):
        row, height, moe_index, width = place
        part = np.ascontiguousarray(ids_TLK[row : row + height, moe_index : moe_index + width])
        chunks.append(Chunk(*place, *encode_chunk(part, codec=chosen)))
    return chunks


def table_of(chunks: list[Chunk]) -> bytes:
    return b"".join(_CHUNK.pack(*chunk[:4], len(chunk.wire), chunk.codec) for chunk in chunks)


def stored_table(rows: int, *, layers: int, row_bytes: int) -> bytes:
    """The table of rows that are stored as they are, in chunks over all layers."""
    blocks = ((row, min(CHUNK_ROWS, rows - row)) for row in range(0, rows, CHUNK_ROWS))
    return b"".join(
        _CHUNK.pack(row, size, 0, layers, size * row_bytes, STORED.codec_id) for row, size in blocks
    )


def read_chunks(
    body: memoryview, *, wire_bytes: int, rows: int, spec: RoutingSpec, layers_per_chunk: int, where: str
) -> tuple[tuple[Chunk, ...], memoryview]:
    """(chunks, all their bytes) behind the table; they must tile rows, layers and the remaining bytes exactly."""
    layers, chunks = spec.num_moe_layers, []
    table = chunk_count(rows, layers=layers, layers_per_chunk=layers_per_chunk) * CHUNK_BYTES
    at = len(body) - wire_bytes  # between the table and the chunks lies the padding
    payload = body[at:]
    if any(body[table:at]):
        raise errors.FrameCorrupt(f"{where}: bytes of the padding before the chunks are not 0")
    id_bytes = spec.top_k * spec.id_dtype.itemsize
    for index, expected in enumerate(_grid(rows, layers=layers, layers_per_chunk=layers_per_chunk)):
        *place, size, codec = _CHUNK.unpack_from(body, index * CHUNK_BYTES)
        raw_bytes = expected[1] * expected[3] * id_bytes
        least = raw_bytes if codec == STORED.codec_id else 0
        if (
            tuple(place) != expected
            or codec not in CODECS
            or not least <= size <= min(raw_bytes, len(body) - at)
        ):
            raise errors.FrameCorrupt(
                f"{where}: chunk {index} is {(*place, size, codec)}, expected {expected} in {least} to {raw_bytes} bytes"
            )
        chunks.append(Chunk(*expected, codec, body[at : at + size]))
        at += size
    if at != len(body):
        raise errors.FrameCorrupt(f"{where}: {len(body) - at} bytes after the last chunk")
    return tuple(chunks), payload


def decode_chunk(chunk: Chunk, out_TLK: Ids, *, layers: range) -> None:
    """Write the part of a chunk that lies in `layers` (moe indices) into `out_TLK` [all carried rows, layers, K].

    A chunk outside `layers` is not decoded at all.
    """
    start, stop = max(chunk.moe_index, layers.start), min(chunk.moe_index + chunk.layers, layers.stop)
    if start >= stop:
        return
    target = out_TLK[chunk.row_slice, start - layers.start : stop - layers.start]
    if target.flags.c_contiguous and stop - start == chunk.layers:
        CODECS[chunk.codec].decode_into(memoryview(chunk.wire), target)
        return
    like = np.broadcast_to(out_TLK[:1, :1], (chunk.rows, chunk.layers, out_TLK.shape[-1]))
    part = _whole(chunk, like=like)
    np.copyto(target, part[:, start - chunk.moe_index : stop - chunk.moe_index])


def _whole(chunk: Chunk, *, like: Ids) -> Ids:
    """A chunk's ids in the shape and dtype of `like`: a view of stored bytes, else decoded into fresh memory."""
    if chunk.codec == STORED.codec_id:
        return STORED.view(memoryview(chunk.wire), like=like)
    out_TLK = np.empty(like.shape, like.dtype)
    CODECS[chunk.codec].decode_into(memoryview(chunk.wire), out_TLK)
    return out_TLK
