"""How the ids of one chunk become bytes and back: one file per codec, and which codec is used when.

| id | name    | order | for                                                                     |
|----|---------|-------|-------------------------------------------------------------------------|
| 0  | stored  | kept  | anything                                                                |
| 1  | lz4     | kept  | padding and repetition; used only where it is at least 5 % smaller      |
| 2  | packed9 | kept  | 257 to 512 experts: 9 bits per id instead of 16                         |
| 3  | set     | lost  | opt-in: two thirds of the bytes, 1/30 of the speed; extra `dense`       |

`auto` is packed9 for 257 to 512 experts, else stored, or lz4 where three samples of the chunk say that it pays. A chunk
that the chosen codec cannot hold, or that it does not make smaller, is stored.
"""

from __future__ import annotations

import numpy as np

from r3channel.errors import ConfigError
from r3channel.routing import Ids
from r3channel.wire.codec.base import Codec, Wire, bytes_of
from r3channel.wire.codec.expert_set import ExpertSet, zstandard
from r3channel.wire.codec.lz4 import Lz4
from r3channel.wire.codec.packed9 import Packed9
from r3channel.wire.codec.stored import Stored

__all__ = ["CODECS", "CODEC_NAMES", "Codec", "Wire", "bytes_of", "check_codec", "encode_chunk"]

LZ4_WORTH_IT = 0.95
"""lz4 is kept only when a chunk shrinks below this share: on real ids it gains nothing, on padding half (measured:
65,536 tokens x 48 layers x top-8)."""

_PROBE_BYTES = 16 << 10

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


def encode_chunk(ids_TLK: Ids, *, codec: str) -> tuple[int, Wire]:
    """(codec id, bytes) of a C-contiguous chunk. Falls back to `stored`; the bytes may be a view of the chunk.

    >>> encode_chunk(np.arange(96, dtype=np.uint8).reshape(4, 3, 8), codec="auto")[0] == STORED.codec_id
    True
    """
    check_codec(codec)
    chosen = _auto(ids_TLK) if codec == "auto" else _BY_NAME[codec]
    if chosen is not STORED and len(ids_TLK):
        wire = chosen.encode(ids_TLK)
        limit = LZ4_WORTH_IT * ids_TLK.nbytes if chosen is LZ4 else ids_TLK.nbytes
        if wire is not None and len(wire) < limit:
            return chosen.codec_id, wire
    return STORED.codec_id, STORED.encode(np.asarray(ids_TLK))


def _auto(ids_TLK: Ids) -> Codec:
    if np.asarray(ids_TLK).dtype == np.int16:
        return PACKED9
    return LZ4 if _may_shrink(np.asarray(ids_TLK)) else STORED


def _may_shrink(ids_TLK: Ids) -> bool:
    """Whether lz4 gains on the first, middle and last bytes: a try on all costs as much as storing (measured)."""
    raw = np.ascontiguousarray(ids_TLK).reshape(-1)
    starts = (0, raw.size // 2, raw.size - _PROBE_BYTES)
    if raw.nbytes <= len(starts) * _PROBE_BYTES:
        return True
    packed = sum(len(LZ4.encode(raw[at : at + _PROBE_BYTES])) for at in starts)
    return packed < LZ4_WORTH_IT * len(starts) * _PROBE_BYTES
