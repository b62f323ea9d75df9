"""Are the ids of every row in range and distinct? Exact and vectorised, in blocks that stay in the cache. Knows arrays only.

A zero-filled row, or one of stale memory, names an expert twice, and Megatron-core would then silently use k-1 experts.

All pairs of a row are compared at once on the flat array: element i with element i + d, for every distance d < K. Pairs that
reach into the next row are cut out only after the comparisons of many rows were joined with `or`, so masking costs nothing.
With K = 8 on one core of an AMD EPYC (Zen 4) this takes as long as 6 copies of the ids in memory; np.sort takes 100, a
compiled loop over 64-bit words less than one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

Ids = np.ndarray[Any, np.dtype[Any]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]

_LANE_IDS = 4096
"""About this many ids, whole rows, are one lane; numpy's inner loop runs over one. Halves and doubles are slower (measured)."""
_LANES = 64
"""Lanes of a block: 256 kB of uint8 ids, worth the cost of a call and within a second-level cache (measured)."""


def out_of_range(expert_ids_TLK: Ids, *, num_experts: int) -> bool:
    """Whether some id is negative or >= `num_experts`."""
    unsigned = expert_ids_TLK.view(f"u{expert_ids_TLK.dtype.itemsize}")
    if not unsigned.size or num_experts > np.iinfo(unsigned.dtype).max:
        return False
    return int(unsigned.max()) >= num_experts


def find_duplicate(expert_ids_TLK: Ids) -> tuple[int, int] | None:
    """(row, moe_index) of the first row that repeats an id, or None. Takes about 2 MB of scratch memory.

    >>> find_duplicate(np.array([[[1, 2, 3]], [[4, 5, 4]]], np.uint8))
    (1, 0)
    """
    layers, slots = expert_ids_TLK.shape[1:]
    ids_NK = np.ascontiguousarray(expert_ids_TLK).reshape(-1, slots)
    if slots < 2 or not len(ids_NK):
        return None
    at, scratch = (
        0,
        np.empty(
            (slots - 1) * min(_LANES, len(ids_NK) // _lane_rows(slots) + 1) * _lane_rows(slots) * slots, bool
        ),
    )
    for block_NK, flat in _blocks(ids_NK):
        if _repeats(flat, slots=slots, scratch=scratch):
            row, moe_index = divmod(at + _first_repeat(block_NK), layers)
            return row, moe_index
        at += len(block_NK)
    return None


def _blocks(ids_NK: Ids) -> Iterator[tuple[Ids, Ids]]:
    """(rows, flat ids): whole lanes and K - 1 ids that follow them.

    The last rows are copied between rows of distinct ids, to have whole lanes and something behind them.
    """
    slots = ids_NK.shape[1]
    lane_rows = _lane_rows(slots)
    flat, at = ids_NK.reshape(-1), 0
    while (whole := min(_LANES, (len(ids_NK) - at - 1) // lane_rows)) > 0:
        rows = whole * lane_rows
        yield ids_NK[at : at + rows], flat[at * slots : (at + rows + 1) * slots - 1]
        at += rows
    rest = ids_NK[at:]
    padded = np.tile(np.arange(slots, dtype=ids_NK.dtype), lane_rows + 1)
    padded[: rest.size] = rest.reshape(-1)
    yield rest, padded[:-1]


def _repeats(flat: Ids, *, slots: int, scratch: Bools) -> bool:
    """Whether a row of these lanes repeats an id; `flat` is whole lanes and K - 1 more ids."""
    ids, step = len(flat) - slots + 1, flat.strides[0]
    later_DN = np.ndarray((slots - 1, ids), flat.dtype, flat.data, step, (step, step))
    equal_DN = np.equal(flat[:ids], later_DN, out=scratch[: (slots - 1) * ids].reshape(slots - 1, ids))
    inside_DI = _inside(slots)
    lanes_DI = np.logical_or.reduce(equal_DN.reshape(slots - 1, -1, inside_DI.shape[1]), axis=1)
    return bool((lanes_DI & inside_DI).any())


@lru_cache(maxsize=8)
def _inside(slots: int) -> Bools:
    """[distance - 1, ids of a lane]: True where the pair lies within one row."""
    slot_I = np.tile(np.arange(slots), _lane_rows(slots))
    return slot_I[None, :] + np.arange(1, slots)[:, None] < slots


def _lane_rows(slots: int) -> int:
    return max(1, _LANE_IDS // slots)


def _first_repeat(ids_NK: Ids) -> int:
    ordered = np.sort(ids_NK, axis=1)
    return int((ordered[:, 1:] == ordered[:, :-1]).any(axis=1).argmax())
