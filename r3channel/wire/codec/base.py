"""What a codec is: how the ids of one chunk become bytes and back. Knows arrays, and no rows, layers or hashes of a frame."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from r3channel.wire.routing import Ids

Wire = bytes | memoryview


class Codec(Protocol):
    """One coding of a chunk. A codec id is a promise: its bytes are decoded for ever."""

    codec_id: int
    name: str
    keeps_order: bool
    """False where the order of the ids within a row is lost."""

    def encode(self, ids_TLK: Ids) -> Wire | None:
        """Bytes of a C-contiguous chunk of uint8 or int16 ids; None where this codec cannot hold these ids."""
        ...

    def decode_into(self, wire: memoryview, out_TLK: Ids) -> None:
        """Fill a C-contiguous `out_TLK` entirely or raise `FrameCorrupt`.

        The output's size bounds the work: no size is taken from the wire, and nothing is written past `out_TLK`.
        """
        ...


def bytes_of(ids_TLK: Ids) -> memoryview:
    """The memory of a C-contiguous array."""
    return ids_TLK.reshape(-1).view(np.uint8).data
