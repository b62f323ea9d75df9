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
from r3channel.wire.codec.base import Codec, Wire, bytes_of, needed_by
from r3channel.wire.codec.expert_set import ExpertSet
from r3channel.wire.codec.lz4 import Lz4
from r3channel.wire.codec.packed9 import Packed9
from r3channel.wire.codec.stored import Stored
from r3channel.wire.routing import Ids

__all__ = ["CODECS", "Codec", "Wire", "bytes_of", "codec_for", "codec_named", "encode_chunk", "written_as_is"]

_PROBE_BYTES = 32 << 10
"""Twice: 0.02 ms where nothing repeats, 0.2 ms where much does. Half as much misses repeats 100 tokens apart in 48 layers."""

STORED, LZ4, PACKED9, SET = Stored(), Lz4(), Packed9(), ExpertSet()
CODECS: dict[int, Codec] = {codec.codec_id: codec for codec in (STORED, LZ4, PACKED9, SET)}
AUTO = "auto"


def codec_named(name: str) -> Codec | None:
    """None for `auto`. Raises ConfigError for an unknown name, or one whose package is not installed."""
    if name == AUTO:
        return None
    for codec in CODECS.values():
        if codec.name == name:
            if codec.needs:
                needed_by(codec)
            return codec
    raise ConfigError(f"codec {name!r}, expected one of {(AUTO, *(codec.name for codec in CODECS.values()))}")


def written_as_is(name: str, *, num_experts: int) -> bool:
    """Does the codec of this name store valid ids as they are, without a look at them?

    Where ids fill their bytes `auto` does: asking whether lz4 would gain takes as long as all of a frame's head, and to
    take the gain, a quarter at best, 30 times as long (measured), which one thread pays for all requests.
    """
    codec = codec_named(name)
    return num_experts <= 256 if codec is None else codec.as_is


def codec_for(ids_TLK: Ids, *, codec: str) -> Codec:
    """What a frame is coded with, by the ids of its first chunk.

    >>> codec_for(np.zeros((9000, 3, 8), np.uint8), codec="auto").name
    'lz4'
    """
    named = codec_named(codec)
    if named is not None:
        return named
    if ids_TLK.dtype == np.int16:
        return PACKED9
    return LZ4 if _may_shrink(ids_TLK) else STORED


def encode_chunk(ids_TLK: Ids, *, codec: Codec) -> tuple[int, Wire]:
    """(codec id, bytes) of a C-contiguous chunk. Falls back to `stored`; the bytes may be a view of the chunk."""
    if not codec.as_is and len(ids_TLK):
        wire = codec.encode(ids_TLK)
        if wire is not None and len(wire) < codec.worth_it * ids_TLK.nbytes:
            return codec.codec_id, wire
    return STORED.codec_id, STORED.encode(ids_TLK)


def _may_shrink(ids_TLK: Ids) -> bool:
    """Whether lz4 gains on some of the first rows and some from the middle on."""
    rows = _PROBE_BYTES // max(1, ids_TLK[:1].nbytes) + 1
    if len(ids_TLK) <= 2 * rows:
        return True
    parts = [np.ascontiguousarray(ids_TLK[at : at + rows]) for at in (0, len(ids_TLK) // 2)]
    packed = sum(len(LZ4.encode(part)) for part in parts)
    return packed < LZ4.worth_it * sum(part.nbytes for part in parts)
