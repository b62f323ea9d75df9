"""Are the ids of every row in range and distinct? Exact; knows arrays only.

A zero-filled row, or one of stale memory, names an expert twice, and Megatron-core would then silently use k-1 experts.
With numba (extra `fast`) a compiled loop over pairs takes 25 ms per raw GB (ids as int16) on one core of an AMD EPYC; without
it numpy takes ten times as long. Both let other threads run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

Ids = np.ndarray[Any, np.dtype[Any]]


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
    found = _finder()(np.ascontiguousarray(expert_ids_TLK).reshape(-1, slots))
    return None if found < 0 else divmod(found, layers)


@lru_cache(maxsize=1)
def _finder() -> Callable[[Ids], int]:
    try:
        import numba
    except ImportError:
        return _first_repeat
    compiled = numba.njit(nogil=True, cache=True)(_first_repeat_loop)
    return lambda ids_NK: int(compiled(ids_NK))


def _first_repeat_loop(ids_NK: Ids) -> int:
    rows, slots = ids_NK.shape
    for row in range(rows):
        equal = False
        for a in range(1, slots):
            for b in range(a):
                equal |= ids_NK[row, a] == ids_NK[row, b]
        if equal:
            return row
    return -1


_BLOCK_ROWS = 32768


def _first_repeat(ids_NK: Ids) -> int:
    """Slot against slot: K (K - 1) / 2 vectorised comparisons, in blocks that stay in the cache."""
    for at in range(0, len(ids_NK), _BLOCK_ROWS):
        slots_KN = np.ascontiguousarray(ids_NK[at : at + _BLOCK_ROWS].T)
        equal = np.zeros(slots_KN.shape[1], dtype=bool)
        for a in range(1, len(slots_KN)):
            for b in range(a):
                equal |= slots_KN[a] == slots_KN[b]
        if equal.any():
            return at + int(equal.argmax())
    return -1
