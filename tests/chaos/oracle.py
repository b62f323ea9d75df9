"""A second reading of the wire format, from its documentation: slow, and sharing no code with the package.

It reads frames that the package accepted, so it checks nothing; it only says which rows such bytes hold.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import lz4.block
import numpy as np
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
    at, valid_T = 104, np.ones(rows, bool)
    if flags & 1:
        at += (rows + 7) // 8
        valid_T = _bits(data[104:at])[:rows].astype(bool)
    found = [*struct.iter_unpack("<IIqB7x", data[at : at + 24 * spans])]
    at += 24 * spans + 8 * layers
    body = -(-(at + 20 * chunks) // 16) * 16
    ids_TLK = np.zeros((rows, layers, top_k), np.int64)
    for row, height, low, wide, size, codec in struct.iter_unpack("<IIHHIB3x", data[at : at + 20 * chunks]):
        assert (low, wide) == (0, layers) and height <= CHUNK_ROWS
        flat = DECODERS[codec](data[body : body + size], height * layers * top_k, width, top_k)
        ids_TLK[row : row + height] = np.reshape(flat, (height, layers, top_k))
        body += size
    assert body == len(data)
    return OracleRows(first_row, ids_TLK.tolist(), valid_T.tolist(), found)


def _bits(data: bytes) -> Any:
    return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")


def _stored(wire: bytes, count: int, width: int, top_k: int) -> Any:
    return np.frombuffer(wire, {1: "u1", 2: "<i2"}[width], count)


def _lz4(wire: bytes, count: int, width: int, top_k: int) -> Any:
    return _stored(lz4.block.decompress(wire, uncompressed_size=count * width), count, width, top_k)


def _packed9(wire: bytes, count: int, width: int, top_k: int) -> Any:
    return np.frombuffer(wire, np.uint8, count) + 256 * _bits(wire[count:])[:count].astype(int)


def _set(wire: bytes, count: int, width: int, top_k: int) -> Any:
    plain = zstandard.ZstdDecompressor().decompressobj().decompress(wire)
    steps = np.frombuffer(plain, np.uint8).reshape(width, top_k, count // top_k).astype(int)
    values = 256 ** np.arange(width)
    return np.tensordot(values, steps, 1).cumsum(0).T  # steps from id to id, slot by slot


DECODERS = {0: _stored, 1: _lz4, 2: _packed9, 3: _set}
