"""What a codec is: how the ids of one chunk become bytes and back. Knows arrays, and no rows, layers or hashes of a frame.

The plainest one is here: codec 0, the ids as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any

import numpy as np

from r3channel.errors import ConfigError, FrameCorrupt
from r3channel.wire.routing import Ids

Wire = bytes | memoryview


class Codec(ABC):
    """One coding of a chunk. A codec id is a promise: its bytes are decoded for ever."""

    codec_id: int
    name: str
    keeps_order: bool = True
    """False where the order of the ids within a row is lost; invalid rows are then written as sets."""
    as_is: bool = False
    """Whether the bytes are the ids as they lie in memory; a frame can then be filled in place and read without a copy."""
    costly: bool = False
    """Whether it costs more than a scheduler's thread can pay per request (about 1 GB/s of int16: `r3channel bench wire`)."""
    worth_it: float = 1.0
    """A chunk is kept in this coding only when it shrinks below this share."""
    needs: str = ""
    """Package that it imports, empty for none, and the extra of r3channel that brings it."""
    extra: str = ""

    @abstractmethod
    def encode(self, ids_TLK: Ids) -> Wire | None:
        """Return the bytes of a chunk of ids.

        Args:
            ids_TLK: C-contiguous uint8 or int16 ids.

        Returns:
            The bytes; None where this codec cannot hold these ids.
        """

    @abstractmethod
    def decode_into(self, wire: memoryview, out_TLK: Ids) -> None:
        """Fill `out_TLK` entirely, or raise.

        The output's size bounds the work: no size is taken from the wire, and nothing is written past `out_TLK`.

        Args:
            wire: The bytes of one chunk.
            out_TLK: C-contiguous.

        Raises:
            FrameCorrupt: `wire` does not decode to exactly `out_TLK`.
        """


def needed_by(codec: Codec) -> Any:
    """Return the module that a codec needs.

    Raises:
        ConfigError: The extra that brings the module is not installed.
    """
    try:
        return import_module(codec.needs)
    except ImportError as error:
        raise ConfigError(
            f"codec {codec.name!r} needs the {codec.needs} package: install r3channel[{codec.extra}], or use another codec"
        ) from error


def bytes_of(ids_TLK: Ids) -> memoryview:
    """Return the memory of a C-contiguous array."""
    return ids_TLK.reshape(-1).view(np.uint8).data


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
