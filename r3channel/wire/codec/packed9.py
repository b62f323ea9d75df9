"""Codec 2: nine bits per id, for 257 to 512 experts. Order is kept.

low bytes   N x u8, token-major
ninth bits  ceil(N / 8) bytes, little bit order; unused bits are zero
"""

from __future__ import annotations

import numpy as np

from r3channel.errors import FrameCorrupt
from r3channel.wire.codec.base import Codec
from r3channel.wire.digest import kernels
from r3channel.wire.routing import Ids

_BLOCK_IDS = 1 << 16
"""Ids worked on at a time, so that the steps between meet in the cache; a multiple of 8."""


class Packed9(Codec):
    """A byte plane and a bit plane.

    >>> wire = Packed9().encode(np.array([[[511, 2, 256]]], np.int16))
    >>> bytes(wire)
    b'\\xff\\x02\\x00\\x05'
    >>> out = np.empty((1, 1, 3), np.int16)
    >>> Packed9().decode_into(memoryview(wire), out); out.tolist()
    [[[511, 2, 256]]]
    """

    codec_id = 2
    name = "packed9"

    def holds(self, ids_TLK: Ids) -> bool:
        """Return whether all ids have nine bits.

        A -1 of a row that the engine does not have, or an id of another model, has more.
        """
        return ids_TLK.dtype == np.int16 and (not ids_TLK.size or int(ids_TLK.view(np.uint16).max()) < 512)

    def encode(self, ids_TLK: Ids) -> memoryview | None:
        if not self.holds(ids_TLK):
            return None
        ids_N = ids_TLK.reshape(-1)
        out_B = np.empty(_wire_bytes(ids_N.size), np.uint8)
        low_N, bits_B = out_B[: ids_N.size], out_B[ids_N.size :]
        for at in range(0, ids_N.size, _BLOCK_IDS):
            part = ids_N[at : at + _BLOCK_IDS]
            np.copyto(low_N[at : at + len(part)], part, casting="unsafe")
            packed = np.packbits(part > 255, bitorder="little")
            bits_B[at // 8 : at // 8 + len(packed)] = packed
        return out_B.data

    def decode_into(self, wire: memoryview, out_TLK: Ids) -> None:
        out_N = out_TLK.reshape(-1)
        if out_N.dtype != np.int16 or len(wire) != _wire_bytes(out_N.size):
            raise FrameCorrupt(
                f"packed9 chunk has {len(wire)} bytes for {out_N.size} ids of {out_N.dtype}, expected "
                f"{_wire_bytes(out_N.size)} and int16"
            )
        wire_B = np.frombuffer(wire, np.uint8)
        low_N, bits_B = wire_B[: out_N.size], wire_B[out_N.size :]
        compiled = kernels()
        if compiled is not None:
            compiled.unpack9(low_N, bits_B, out_N)
            return
        for at in range(0, out_N.size, _BLOCK_IDS):
            part = out_N[at : at + _BLOCK_IDS]
            high = np.unpackbits(bits_B[at // 8 : (at + _BLOCK_IDS) // 8], count=len(part), bitorder="little")
            np.left_shift(high, 8, out=part, dtype=np.int16, casting="unsafe")
            np.bitwise_or(part, low_N[at : at + len(part)], out=part)


def _wire_bytes(ids: int) -> int:
    return ids + -(-ids // 8)
