"""Are the ids of every row in range and distinct? Exact; knows arrays only.

A zero-filled row, or one of stale memory, names an expert twice, and Megatron-core would then silently use k-1 experts.

Blocks of rows are searched for any repeat; only a block that has one is looked at closely. With numba (extra `fast`) eight
uint8 ids of a row are one 64-bit word, compared with itself rotated by 1 to 4 bytes: 25 ms per raw GB (ids counted as int16) on
one core of an AMD EPYC (Zen 4), against 300 for numpy's slot against slot. Both let other threads run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

Ids = np.ndarray[Any, np.dtype[Any]]
_BLOCK_ROWS = 32768
"""Rows searched at once: 256 kB of uint8 ids at K = 8, within a second-level cache."""


def out_of_range(expert_ids_TLK: Ids, *, num_experts: int) -> bool:
    """Whether some id is negative or >= `num_experts`."""
    unsigned = expert_ids_TLK.view(f"u{expert_ids_TLK.dtype.itemsize}")
    if not unsigned.size or num_experts > np.iinfo(unsigned.dtype).max:
        return False
    return int(unsigned.max()) >= num_experts


def find_duplicate(expert_ids_TLK: Ids) -> tuple[int, int] | None:
    """(row, moe_index) of the first row that repeats an id, or None.

    >>> find_duplicate(np.array([[[1, 2, 3]], [[4, 5, 4]]], np.uint8))
    (1, 0)
    """
    layers, slots = expert_ids_TLK.shape[1:]
    ids_NK = np.ascontiguousarray(expert_ids_TLK).reshape(-1, slots)
    words = slots == 8 and ids_NK.itemsize == 1
    repeats = (_word_search() if words else None) or _repeats
    for at in range(0, len(ids_NK), _BLOCK_ROWS):
        block_NK = ids_NK[at : at + _BLOCK_ROWS]
        if repeats(block_NK):
            ordered = np.sort(block_NK, axis=1)
            first = int((ordered[:, 1:] == ordered[:, :-1]).any(axis=1).argmax())
            return divmod(at + first, layers)
    return None


def _repeats(ids_NK: Ids) -> bool:
    """Whether any row repeats an id: slot against slot, K (K - 1) / 2 vectorised comparisons."""
    slots_KN = np.ascontiguousarray(ids_NK.T)
    equal_N = np.zeros(len(ids_NK), dtype=bool)
    for a in range(1, len(slots_KN)):
        for b in range(a):
            equal_N |= slots_KN[a] == slots_KN[b]
    return bool(equal_N.any())


@lru_cache(maxsize=1)
def _word_search() -> Callable[[Ids], bool] | None:
    """The compiled search of rows of eight uint8 ids; None without numba."""
    try:
        import numba
    except ImportError:
        return None
    compiled = numba.njit(nogil=True, cache=True)(_repeats_in_words)
    return lambda ids_NK: bool(compiled(_aligned(ids_NK).view(np.uint64).reshape(-1)))


def _aligned(ids_NK: Ids) -> Ids:
    """Rows at an address that a 64-bit load may take; a frame's chunk need not start at one."""
    return ids_NK if ids_NK.ctypes.data % 8 == 0 else ids_NK.copy()


def _repeats_in_words(words_N: Ids) -> np.uint64:
    """Not 0 where a byte equals another of its word: `(x - 0x01..) & ~x & 0x80..` marks zero bytes (exact as a test)."""
    ones, tops = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
    found = np.uint64(0)
    for index in range(words_N.shape[0]):
        word = words_N[index]
        for bits in (8, 16, 24, 32):
            turned = (word << np.uint64(bits)) | (word >> np.uint64(64 - bits))
            apart = word ^ turned
            found |= (apart - ones) & ~apart & tops
    return found
