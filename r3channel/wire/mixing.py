"""The numbers that a digest is made of: a factor for each position and each item. `wire.digest` says how they are used."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

Ids = np.ndarray[Any, np.dtype[Any]]
Valid = np.ndarray[Any, np.dtype[np.bool_]]
Words = np.ndarray[Any, np.dtype[np.uint64]]
OFFSET = np.uint64(0x9E3779B97F4A7C15)
"""C of the digest: 2**64 / golden ratio. Also the step of SplitMix64."""
_KEPT_POSITIONS = 1 << 20
"""Coefficients are kept up to here (8 MiB); positions beyond come from a wire, or from samples of more than a million tokens."""


def coefficients(first: int, count: int) -> Words:
    """Return the coefficients of positions [first, first + count), read-only."""
    global _coefficients
    end = first + count
    if end > _KEPT_POSITIONS:
        return _odd(np.arange(first, end, dtype=np.uint64))
    table = _coefficients
    if end > table.size:
        # Threads that come here at once make equal tables, and each goes on with its own.
        _coefficients = table = _odd(np.arange(1 << max(12, (end - 1).bit_length()), dtype=np.uint64))
    return table[first:end]


@lru_cache(maxsize=64)
def multipliers(items: int) -> Words:
    """Return M_0, M_1, ... for this many items, read-only."""
    found = _odd(~np.arange(items, dtype=np.uint64))
    found.flags.writeable = True
    found[:1] = 1
    found.flags.writeable = False
    return found


def mix(items: Ids) -> Words:
    """Return the items mixed, as words.

    A change of the last slots then reaches the lower half of a word, too. Items of 4 bytes or less have no upper half, and are
    not changed.
    """
    words = items.astype(np.uint64, copy=False)
    return words ^ (words >> np.uint64(32)) if items.itemsize == 8 else words


def _odd(states: Words) -> Words:
    # SplitMix64 (Steele et al. 2014), its lowest bit set
    words = states + OFFSET
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words = (words ^ (words >> np.uint64(31))) | np.uint64(1)
    words.flags.writeable = False
    return words


_coefficients = _odd(np.arange(1 << 12, dtype=np.uint64))
