"""A digest of (position, layer, ids) that can be added up over any split of the rows.

The engine computes it over a whole sample, each trainer rank over the rows and layers it consumed; the sums must agree
modulo 2**64. It stops accidents, not an attacker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_Array = np.ndarray[Any, np.dtype[Any]]
_SLOT = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, the odd constant of Fibonacci hashing
_MIX_A, _MIX_B = (
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)  # SplitMix64 finaliser (Steele et al. 2014)
_BLOCK_ROWS = 4096


def _mix(values: _Array) -> _Array:
    values = (values ^ (values >> np.uint64(30))) * _MIX_A
    values = (values ^ (values >> np.uint64(27))) * _MIX_B
    return values ^ (values >> np.uint64(31))


def layer_digests(expert_ids_TLK: _Array, *, positions_T: _Array, layers_L: Sequence[int]) -> _Array:
    """[L] uint64: for each layer the wrapping sum over rows of a 64-bit hash of (position, layer, ids in order).

    `expert_ids_TLK` [T, L, K] of any integer dtype, `positions_T` 0-based token positions, `layers_L` global layers.

    >>> ids = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    >>> whole = layer_digests(ids, positions_T=np.arange(3), layers_L=(1, 4))
    >>> parts = [layer_digests(ids[i : i + 1], positions_T=np.array([i]), layers_L=(1, 4)) for i in range(3)]
    >>> bool((sum(parts) == whole).all())
    True
    """
    total = np.zeros(len(layers_L), dtype=np.uint64)
    layers_1L = np.asarray(layers_L, dtype=np.uint64)[None, :]
    for start in range(0, len(expert_ids_TLK), _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        positions_T1 = np.asarray(positions_T[block], dtype=np.uint64)[:, None]
        state_TL = _mix((positions_T1 << np.uint64(16)) + layers_1L + _SLOT)
        for slot in range(expert_ids_TLK.shape[-1]):
            state_TL = _mix(state_TL + _SLOT + expert_ids_TLK[block, :, slot].astype(np.uint64))
        total += state_TL.sum(axis=0, dtype=np.uint64)
    return total
