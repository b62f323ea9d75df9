"""How the ids of one chunk become bytes and back: one file per codec, and which codec is used when.

| id | name    | order | for                                                                     |
|----|---------|-------|-------------------------------------------------------------------------|
| 0  | stored  | kept  | anything                                                                |
| 1  | lz4     | kept  | padding, and tokens that choose as before; only where at least 5 % less |
| 2  | packed9 | kept  | 257 to 512 experts: 9 bits per id instead of 16                         |
| 3  | set     | lost  | opt-in: two thirds of the bytes, 1/30 of the speed; extra `dense`       |

`auto` is packed9 for 257 to 512 experts, else stored, or lz4 where two samples of a frame's first chunk say that it pays. A
chunk that the chosen codec cannot hold, or that it does not make smaller, is stored.
"""

from __future__ import annotations

import numpy as np

from r3channel.errors import ConfigError
from r3channel.wire.codec.base import Codec, Wire, bytes_of
from r3channel.wire.codec.expert_set import ExpertSet, zstandard
from r3channel.wire.codec.lz4 import Lz4
from r3channel.wire.codec.packed9 import Packed9
from r3channel.wire.codec.stored import Stored
from r3channel.wire.routing import Ids

__all__ = ["CODECS", "CODEC_NAMES", "Codec", "Wire", "bytes_of", "check_codec", "codec_for", "encode_chunk"]

LZ4_WORTH_IT = 0.95
"""lz4 is kept only when a chunk shrinks below this share. Ids captured from a model with random weights shrink to 0.58, from one
trained for seven minutes to 0.78 (8 layers, top-8 of 128), synthetic ones of `bench.routing_data` not at all. What it gains is
paid with 2 to 4 ms per MB of encoding where ids repeat, and with next to nothing where they do not (measured)."""

_PROBE_BYTES = 32 << 10
"""Twice: 0.02 ms where nothing repeats, 0.2 ms where much does. Half as much misses repeats 100 tokens apart in 48 layers."""

STORED, LZ4, PACKED9, SET = Stored(), Lz4(), Packed9(), ExpertSet()
CODECS: dict[int, Codec] = {codec.codec_id: codec for codec in (STORED, LZ4, PACKED9, SET)}
_BY_NAME = {codec.name: codec for codec in CODECS.values()}
CODEC_NAMES = ("auto", *_BY_NAME)


def check_codec(codec: str) -> None:
    """Raise ConfigError for an unknown name, or one whose package is not installed."""
    if codec not in CODEC_NAMES:
        raise ConfigError(f"codec {codec!r}, expected one of {CODEC_NAMES}")
    if codec == SET.name:
        zstandard()


def codec_for(ids_TLK: Ids, *, codec: str) -> Codec:
    """What a frame is coded with, by the ids of its first chunk.

    >>> codec_for(np.zeros((9000, 3, 8), np.uint8), codec="auto").name
    'lz4'
    """
    check_codec(codec)
    if codec != "auto":
        return _BY_NAME[codec]
    if ids_TLK.dtype == np.int16:
        return PACKED9
    return LZ4 if _may_shrink(ids_TLK) else STORED


def encode_chunk(ids_TLK: Ids, *, codec: Codec) -> tuple[int, Wire]:
    """(codec id, bytes) of a C-contiguous chunk. Falls back to `stored`; the bytes may be a view of the chunk."""
    if codec is not STORED and len(ids_TLK):
        wire = codec.encode(ids_TLK)
        limit = LZ4_WORTH_IT * ids_TLK.nbytes if codec is LZ4 else ids_TLK.nbytes
        if wire is not None and len(wire) < limit:
            return codec.codec_id, wire
    return STORED.codec_id, STORED.encode(ids_TLK)


def _may_shrink(ids_TLK: Ids) -> bool:
    """Whether lz4 gains on some of the first rows and some from the middle on."""
    rows = _PROBE_BYTES // max(1, ids_TLK[:1].nbytes) + 1
    if len(ids_TLK) <= 2 * rows:
        return True
    parts = [np.ascontiguousarray(ids_TLK[at : at + rows]) for at in (0, len(ids_TLK) // 2)]
    packed = sum(len(LZ4.encode(part)) for part in parts)
    return packed < LZ4_WORTH_IT * sum(part.nbytes for part in parts)
