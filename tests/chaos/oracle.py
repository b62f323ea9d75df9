"""A second reading of the wire format, in plain Python, from its documentation: slow, and sharing no code with the package.

It reads frames that the package accepted, so it checks nothing; it only says which rows such bytes hold.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import zstandard

CHUNK_ROWS = 8192


class OracleRows(NamedTuple):
    first_row: int
    ids: list[list[list[int]]]
    """[rows][layers][K]."""
    valid: list[bool]
    spans: list[tuple[int, int, int, int]]


def read(data: bytes) -> OracleRows:
    flags, top_k, layers, width = data[7], *struct.unpack_from("<HHB", data, 20)
    rows, first_row, chunks, spans = struct.unpack_from("<IIII", data, 28)
    at = 104
    valid = [True] * rows
    if flags & 1:
        valid = [bool(data[at + row // 8] >> row % 8 & 1) for row in range(rows)]
        at += (rows + 7) // 8
    found: list[tuple[int, int, int, int]] = []
    for index in range(spans):
        start, end, version, kind = struct.unpack_from("<IIqB", data, at + 24 * index)
        found.append((start, end, version, kind))
    at += 24 * spans + 8 * layers
    body = -(-(at + 20 * chunks) // 16) * 16
    ids = [[[0] * top_k for _ in range(layers)] for _ in range(rows)]
    for index in range(chunks):
        row, height, low, wide, size, codec = struct.unpack_from("<IIHHIB", data, at + 20 * index)
        assert (low, wide) == (0, layers) and height <= CHUNK_ROWS
        flat = iter(DECODERS[codec](data[body : body + size], height * layers * top_k, width, top_k))
        for r in range(row, row + height):
            ids[r] = [[next(flat) for _ in range(top_k)] for _ in range(layers)]
        body += size
    assert body == len(data)
    return OracleRows(first_row, ids, valid, found)


def _stored(wire: bytes, count: int, width: int, top_k: int) -> list[int]:
    return list(struct.unpack(f"<{count}{'B' if width == 1 else 'h'}", wire))


def _lz4(wire: bytes, count: int, width: int, top_k: int) -> list[int]:
    """The block format: tokens of literals and matches."""
    out, at = bytearray(), 0
    while True:
        token, at = wire[at], at + 1
        literals, at = _length(wire, at, token >> 4)
        out += wire[at : at + literals]
        at += literals
        if at >= len(wire):
            return _stored(bytes(out), count, width, top_k)
        (offset,) = struct.unpack_from("<H", wire, at)
        matched, at = _length(wire, at + 2, token & 15)
        for _ in range(matched + 4):
            out.append(out[-offset])


def _length(wire: bytes, at: int, start: int) -> tuple[int, int]:
    total = start
    while start == 15:
        total, at = total + wire[at], at + 1
        if wire[at - 1] != 255:
            break
    return total, at


def _packed9(wire: bytes, count: int, width: int, top_k: int) -> list[int]:
    return [wire[i] | (wire[count + i // 8] >> i % 8 & 1) << 8 for i in range(count)]


def _set(wire: bytes, count: int, width: int, top_k: int) -> list[int]:
    plain = zstandard.ZstdDecompressor().decompressobj().decompress(wire)
    assert len(plain) == count * width
    sets, out = count // top_k, []
    for index in range(sets):
        total = 0
        for slot in range(top_k):
            place = slot * sets + index
            total += plain[place] + (plain[count + place] << 8 if width == 2 else 0)
            out.append(total)
    return out


DECODERS = {0: _stored, 1: _lz4, 2: _packed9, 3: _set}
