"""Codec 3: the set of experts of each row; the order within a row is lost. Opt-in, needs the extra `dense`.

    zstd frame (content size declared, content checksum) over
        low bytes    K x N x u8: slot-major; slot 0 is the smallest id, slot k the step from slot k-1
        high bytes   the same, for int16 ids only

Sorting with a network of whole-plane minima and maxima makes encoding five times faster than `np.sort` does (measured).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from r3channel.errors import FrameCorrupt
from r3channel.wire.codec.base import Codec, needed_by
from r3channel.wire.routing import Ids

_LEVEL = 1
"""Higher levels find nothing more: the gain is in zstd's entropy stage (measured)."""
_BLOCK_SETS = 1 << 14
"""Sets sorted at a time, so that all planes of a block stay in the cache."""


class ExpertSet(Codec):
    """Sorted ids, steps between them, zstd.

    >>> rows = np.array([[[9, 2, 5]], [[1, 0, 7]]], np.uint8)
    >>> out = np.empty_like(rows)
    >>> ExpertSet().decode_into(memoryview(ExpertSet().encode(rows)), out); out.tolist()
    [[[2, 5, 9]], [[0, 1, 7]]]
    >>> ExpertSet().encode(np.zeros((1, 1, 3), np.uint8)) is None  # not a set
    True
    """

    codec_id = 3
    name = "set"
    keeps_order = False
    costly = True
    needs, extra = "zstandard", "dense"

    def encode(self, ids_TLK: Ids) -> bytes | None:
        steps_KN = _steps(ids_TLK)
        if steps_KN is None:
            return None
        planes = steps_KN.view(np.uint8)
        if steps_KN.dtype == np.uint16:
            planes = np.stack((planes[:, 0::2], planes[:, 1::2]))
        zstd = needed_by(self)
        compressor = zstd.ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=True)
        return compressor.compress(planes.reshape(-1).data)

    def decode_into(self, wire: memoryview, out_TLK: Ids) -> None:
        slots = out_TLK.shape[-1]
        unsigned = np.dtype(f"u{out_TLK.itemsize}")
        plain = _decompress(needed_by(self), wire, out_TLK.nbytes)
        planes_BKN = plain.reshape(unsigned.itemsize, slots, -1)
        _accumulate(planes_BKN, out_NK=out_TLK.view(unsigned).reshape(-1, slots))


def _decompress(zstd: Any, wire: memoryview, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    try:
        # compared first: the library ignores `max_output_size` when the data declare a size
        declared = zstd.get_frame_parameters(wire)
        if declared.content_size != nbytes or declared.dict_id != 0:
            raise FrameCorrupt(f"set chunk declares {declared.content_size} bytes, expected {nbytes}")
        plain = zstd.ZstdDecompressor().decompress(wire, allow_extra_data=False)
    except zstd.ZstdError as error:
        raise FrameCorrupt(f"set chunk of {len(wire)} bytes does not decode to {nbytes}: {error}") from error
    if len(plain) != nbytes:
        raise FrameCorrupt(f"set chunk decodes to {len(plain)} bytes, expected {nbytes}")
    return np.frombuffer(plain, np.uint8)


def _steps(ids_TLK: Ids) -> Ids | None:
    """Return the smallest id and the steps of each sorted set.

    The result is [K, N] unsigned; it is None where some row repeats an id.
    """
    slots = ids_TLK.shape[-1]
    ids_NK = ids_TLK.view(f"u{ids_TLK.dtype.itemsize}").reshape(-1, slots)
    steps_KN = np.empty((slots, len(ids_NK)), ids_NK.dtype)
    for at in range(0, len(ids_NK), _BLOCK_SETS):
        part = slice(at, at + _BLOCK_SETS)
        # np.array copies always; ascontiguousarray would not copy a single set
        planes = _sorted_planes(np.array(ids_NK[part].T, order="C"))
        steps_KN[0, part] = planes[0]
        for slot in range(1, slots):
            np.subtract(planes[slot], planes[slot - 1], out=steps_KN[slot, part])
        if not steps_KN[1:, part].all():
            return None
    return steps_KN


def _sorted_planes(planes_KN: Ids) -> list[Ids]:
    """Sort the planes at each position, overwriting the argument."""
    planes, spare = list(planes_KN), np.empty_like(planes_KN[0])
    for low, high in _network(len(planes)):
        np.minimum(planes[low], planes[high], out=spare)
        np.maximum(planes[low], planes[high], out=planes[high])
        planes[low], spare = spare, planes[low]
    return planes


@cache
def _network(slots: int) -> tuple[tuple[int, int], ...]:
    """Return the comparators of a sorting network for `slots` items.

    It is Batcher's odd-even merge sort for any number of slots (Knuth, vol. 3, 5.2.2, algorithm M).

    >>> _network(3)
    ((0, 1), (0, 2), (1, 2))
    """
    found, run = list[tuple[int, int]](), 1
    while run < slots:
        step = run
        while step >= 1:
            for start in range(step % run, slots - step, 2 * step):
                for low in range(start, min(start + step, slots - step)):
                    if low // (2 * run) == (low + step) // (2 * run):
                        found.append((low, low + step))
            step //= 2
        run *= 2
    return tuple(found)


def _accumulate(planes_BKN: Ids, *, out_NK: Ids) -> None:
    _, slots, sets = planes_BKN.shape
    for at in range(0, sets, _BLOCK_SETS):
        part = slice(at, at + _BLOCK_SETS)
        sums_KN = planes_BKN[0, :, part].astype(out_NK.dtype)
        if len(planes_BKN) > 1:
            sums_KN |= planes_BKN[1, :, part].astype(out_NK.dtype) << 8
        for slot in range(1, slots):
            np.add(sums_KN[slot - 1], sums_KN[slot], out=sums_KN[slot])
        if not (sums_KN[1:] > sums_KN[:-1]).all():  # an id repeats, or a sum overflows
            raise FrameCorrupt("set chunk holds a row whose ids do not increase; made by a faulty encoder?")
        out_NK[part] = sums_KN.T
