"""Codec 0: the ids as they are."""

from __future__ import annotations

import numpy as np

from r3channel.errors import FrameCorrupt
from r3channel.wire.codec.base import bytes_of
from r3channel.wire.routing import Ids


class Stored:
    """Little-endian ids, token-major.

    >>> bytes(Stored().encode(np.array([[[3, 1]]], np.uint8)))
    b'\\x03\\x01'
    """

    codec_id = 0
    name = "stored"
    keeps_order = True

    def encode(self, ids_TLK: Ids) -> memoryview:
        return bytes_of(ids_TLK)

    def decode_into(self, wire: memoryview, out_TLK: Ids) -> None:
        np.copyto(out_TLK, self.view(wire, like=out_TLK))

    def view(self, wire: memoryview, *, like: Ids) -> Ids:
        """The wire bytes as a read-only array of `like`'s shape and dtype, without a copy."""
        if len(wire) != like.nbytes:
            raise FrameCorrupt(f"stored chunk has {len(wire)} bytes, expected {like.nbytes}")
        return np.frombuffer(wire.toreadonly(), like.dtype).reshape(like.shape)
