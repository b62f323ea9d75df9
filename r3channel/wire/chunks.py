"""Rows cut into chunks, each coded on its own. Knows codecs, and no headers.

Chunks lie in the order of their rows; the table in front of them is
    {row u32, rows u32, moe_index u16, layers u16, bytes u32, codec u8, 3 zero}
and must say exactly what the number of rows demands, so that it cannot lie. A chunk has all MoE layers: from 0 on, all of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from r3channel import errors
from r3channel.model.spec import RoutingSpec
from r3channel.wire.codec import CODECS, STORED, Codec, Wire, encode_chunk
from r3channel.wire.routing import Ids

CHUNK_ROWS = 8192
"""Rows per chunk at most: fixed-width data does not care, adaptive codecs are best at 4-8 k rows (measured)."""

_CHUNK = struct.Struct("<IIHHIB3x")
CHUNK_BYTES = _CHUNK.size


def chunk_count(rows: int) -> int:
    return -(-rows // CHUNK_ROWS)


def _blocks(rows: int) -> Iterator[tuple[int, int]]:
    for row in range(0, rows, CHUNK_ROWS):
        yield row, min(CHUNK_ROWS, rows - row)


def encode_chunks(ids_TLK: Ids, *, codecs: Sequence[Codec]) -> tuple[list[Entry], list[Wire]]:
    """Return the table and the bytes of all chunks.

    Args:
        ids_TLK: The ids; where they are contiguous, the bytes may be views of them.
        codecs: The codecs that each chunk is tried with.
    """
    entries, wires = list[Entry](), list[Wire]()
    for row, rows in _blocks(len(ids_TLK)):
        codec_id, wire = encode_chunk(np.ascontiguousarray(ids_TLK[row : row + rows]), codecs=codecs)
        entries.append(Entry(row, rows, codec_id, len(wire)))
        wires.append(wire)
    return entries, wires


class Entry(NamedTuple):
    """One line of the table: a block of rows, over all MoE layers, and its coded bytes. `row` counts from the frame's first."""

    row: int
    rows: int
    codec: int
    nbytes: int


def stored_entries(rows: int, *, row_bytes: int) -> list[Entry]:
    """Return the table of rows that are stored as they are."""
    return [Entry(row, size, STORED.codec_id, size * row_bytes) for row, size in _blocks(rows)]


def table_of(entries: Sequence[Entry], *, layers: int) -> bytes:
    return b"".join(
        [_CHUNK.pack(row, rows, 0, layers, nbytes, codec) for row, rows, codec, nbytes in entries]
    )


def read_table(
    table: memoryview, *, wire_bytes: int, rows: int, spec: RoutingSpec, where: str
) -> tuple[Entry, ...]:
    """Read and check the table of a frame's chunks.

    Args:
        table: The table, and the padding behind it.
        wire_bytes: Bytes of all chunks, which the chunks must fill exactly.
        rows: Rows of the frame, which the chunks must tile exactly.
        spec: The model's spec.
        where: Names the frame in error texts.

    Raises:
        FrameCorrupt: The table or the padding is not what `rows` and `wire_bytes` demand.
    """
    entries, left = list[Entry](), wire_bytes
    if any(table[chunk_count(rows) * CHUNK_BYTES :]):
        raise errors.FrameCorrupt(f"{where}: bytes of the padding before the chunks are not 0")
    for index, (row, height) in enumerate(_blocks(rows)):
        *place, size, codec = _CHUNK.unpack_from(table, index * CHUNK_BYTES)
        expected, raw_bytes = (row, height, 0, spec.num_moe_layers), height * spec.bytes_per_token
        least = raw_bytes if codec in CODECS and CODECS[codec].as_is else 0
        if tuple(place) != expected or codec not in CODECS or not least <= size <= min(raw_bytes, left):
            raise errors.FrameCorrupt(
                f"{where}: chunk {index} is {(*place, size, codec)}, expected {expected} in {least} to {raw_bytes} bytes"
            )
        entries.append(Entry(row, height, codec, size))
        left -= size
    if left:
        raise errors.FrameCorrupt(f"{where}: {left} bytes after the last chunk")
    return tuple(entries)
