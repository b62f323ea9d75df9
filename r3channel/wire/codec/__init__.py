"""How rows, cut into chunks, become bytes and back: one file per codec, which codec is used when, and the table of chunks.

| id | name    | order | for                                                                     |
|----|---------|-------|-------------------------------------------------------------------------|
| 0  | stored  | kept  | anything                                                                |
| 1  | lz4     | kept  | padding, and tokens that choose as before; only where at least 5 % less |
| 2  | packed9 | kept  | 257 to 512 experts: 9 bits per id instead of 16                         |
| 3  | set     | lost  | opt-in: two thirds of the bytes, 1/30 of the speed; extra `dense`       |

`auto` is packed9 for 257 to 512 experts, else stored; or lz4 where two samples of a frame's first chunk say that it pays. A chunk
that no chosen codec can hold or makes smaller is stored.

Chunks lie in the order of their rows; the table in front of them is
    {row u32, rows u32, moe_index u16, layers u16, bytes u32, codec u8, 3 zero}
and must say exactly what the number of rows demands, so that it cannot lie. A chunk has all MoE layers: from 0 on, all of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from r3channel.errors import ConfigError, FrameCorrupt
from r3channel.model.spec import RoutingSpec
from r3channel.wire.codec.base import Codec, Stored, Wire, bytes_of, needed_by
from r3channel.wire.codec.expert_set import ExpertSet
from r3channel.wire.codec.lz4 import Lz4
from r3channel.wire.codec.packed9 import Packed9
from r3channel.wire.routing import Ids

__all__ = ["CODECS", "Codec", "Wire", "bytes_of"]

CHUNK_ROWS = 8192
"""Rows per chunk at most: fixed-width data does not care, adaptive codecs are best at 4-8 k rows (measured)."""

_CHUNK = struct.Struct("<IIHHIB3x")
CHUNK_BYTES = _CHUNK.size
_PROBE_IDS = 32 << 10
"""Ids of each of the two parts that are probed. Both take 0.02 ms where nothing repeats, 0.2 ms where much does. Half as many ids
miss repeats 100 tokens apart in 48 layers."""
_DOUBTFUL = 0.65
"""Where lz4 leaves less than this share of the probe, it may leave less of the chunk than packed9's 9/16: the probe has fewer
repeats."""

STORED, LZ4, PACKED9, SET = Stored(), Lz4(), Packed9(), ExpertSet()
CODECS: dict[int, Codec] = {codec.codec_id: codec for codec in (STORED, LZ4, PACKED9, SET)}
AUTO = "auto"


def codec_named(name: str) -> Codec | None:
    """Return the codec of this name, or None for `auto`.

    Raises:
        ConfigError: No codec has this name, or its package is not installed.
    """
    if name == AUTO:
        return None
    for codec in CODECS.values():
        if codec.name == name:
            if codec.needs:
                needed_by(codec)
            return codec
    raise ConfigError(f"codec {name!r}, expected one of {(AUTO, *(codec.name for codec in CODECS.values()))}")


@lru_cache(maxsize=64)
def written_as_is(name: str, *, num_experts: int) -> bool:
    """Return whether a codec stores valid ids as they are.

    Such a codec does not look at the ids.

    `auto` does where ids fill their bytes. To ask whether lz4 would gain takes as long as all of a frame's head. To take the
    gain, a quarter at best, takes 30 times as long (measured). One thread pays that for all requests.

    Args:
        name: The codec's name, or `auto`.
        num_experts: Experts of the model.
    """
    codec = codec_named(name)
    return num_experts <= 256 if codec is None else codec.as_is


def codecs_for(ids_TLK: Ids, *, codec: str) -> tuple[Codec, ...]:
    """Return the codecs that each chunk of a frame is tried with.

    The shortest result is kept.

    Args:
        ids_TLK: The ids of the frame's first chunk, which decide for `auto`.
        codec: The codec's name, or `auto`.

    >>> [codec.name for codec in codecs_for(np.zeros((9000, 3, 8), np.uint8), codec="auto")]
    ['lz4']
    """
    named = codec_named(codec)
    if named is not None:
        return (named,)
    share = _lz4_share(ids_TLK)
    if not PACKED9.holds(ids_TLK):
        return (LZ4,) if share < LZ4.worth_it else (STORED,)
    return (PACKED9, LZ4) if share < _DOUBTFUL else (PACKED9,)


def encode_chunk(ids_TLK: Ids, *, codecs: Sequence[Codec]) -> tuple[int, Wire]:
    """Encode a chunk with the codec that makes it shortest.

    A chunk that no codec makes short enough is `stored`.

    Args:
        ids_TLK: The chunk, C-contiguous.
        codecs: The codecs to try.

    Returns:
        (codec id, bytes); the bytes may be a view of the chunk.
    """
    wires = [(codec, codec.encode(ids_TLK)) for codec in codecs if len(ids_TLK) and not codec.as_is]
    worth = [(c.codec_id, w) for c, w in wires if w is not None and len(w) < c.worth_it * ids_TLK.nbytes]
    stored: tuple[int, Wire] = STORED.codec_id, STORED.encode(ids_TLK)
    return min(worth, key=lambda each: len(each[1]), default=stored)


def _lz4_share(ids_TLK: Ids) -> float:
    rows = _PROBE_IDS // max(1, ids_TLK[:1].size) + 1
    # a sample stands for all: some of the first rows, and some from the middle on
    if len(ids_TLK) <= 2 * rows:
        return 0.0
    parts = [np.ascontiguousarray(ids_TLK[at : at + rows]) for at in (0, len(ids_TLK) // 2)]
    return sum(len(LZ4.encode(part)) for part in parts) / sum(part.nbytes for part in parts)


# -- the chunks of a frame --------------------------------------------------------------------------------------------------


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
        raise FrameCorrupt(f"{where}: bytes of the padding before the chunks are not 0")
    for index, (row, height) in enumerate(_blocks(rows)):
        *place, size, codec = _CHUNK.unpack_from(table, index * CHUNK_BYTES)
        expected, raw_bytes = (row, height, 0, spec.num_moe_layers), height * spec.bytes_per_token
        least = raw_bytes if codec in CODECS and CODECS[codec].as_is else 0
        if tuple(place) != expected or codec not in CODECS or not least <= size <= min(raw_bytes, left):
            raise FrameCorrupt(
                f"{where}: chunk {index} is {(*place, size, codec)}, expected {expected} in {least} to {raw_bytes} bytes"
            )
        entries.append(Entry(row, height, codec, size))
        left -= size
    if left:
        raise FrameCorrupt(f"{where}: {left} bytes after the last chunk")
    return tuple(entries)
