"""Codec 0: the ids as they are."""

from __future__ import annotations

import numpy as np

from r3channel.errors import FrameCorrupt
from r3channel.wire.codec.base import Codec, bytes_of
from r3channel.wire.routing import Ids


class Stored(Codec):
    """Little-endian ids, token-major.

    >>> bytes(Stored().encode(np.array([[[3, 1]]], np.uint8)))
    b'\\x03\\x01'
    """

    codec_id = 0
    name = "stored"
    as_is = True

    def encode(self, ids_TLK: Ids) -> memoryview:
        return bytes_of(ids_TLK)

    def decode_into(self, wire: memoryview, out_TLK: Ids) -> None:
        if len(wire) != out_TLK.nbytes:
            raise FrameCorrupt(f"stored chunk has {len(wire)} bytes, expected {out_TLK.nbytes}")
        np.copyto(out_TLK, np.frombuffer(wire, out_TLK.dtype).reshape(out_TLK.shape))
