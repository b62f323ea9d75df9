"""Checks that the ids of every row are in range and distinct, and adds them up. Exact, in one pass; knows arrays only.

A zero-filled row, or one of stale memory, names an expert twice, and Megatron-core would then silently use k-1 experts.

`check` answers for all rows and gives their digest, which `wire.digest` defines; only rows that are not sound are looked at
closely, to name the first. With numba (extra `fast`) both are one compiled pass; numpy compares slot against slot and then sums.
Both let other threads run.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from types import ModuleType

import numpy as np

from r3channel.model.spec import RoutingSpec
from r3channel.wire.mixing import OFFSET, Ids, Words, coefficients, mix, multipliers

_BLOCK_ROWS = 32768
"""Rows searched at once by numpy: 256 kB of uint8 ids at K = 8, within a second-level cache."""
_SUMMED_BYTES = 256 << 10
_WORDS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


@lru_cache(maxsize=1)
def kernels() -> ModuleType | None:
    """Return `r3channel.wire.kernels`, or None without numba.

    The first call imports the module.
    """
    try:
        from r3channel.wire import kernels as compiled_kernels
    except ImportError:
        return None
    return compiled_kernels


def check(
    expert_ids_TLK: Ids, *, num_experts: int, first_row: int, valid_T: Ids | None = None
) -> tuple[bool, Words]:
    """Check all ids, and compute the digest of each layer.

    Args:
        expert_ids_TLK: Rows at positions `first_row`, `first_row` + 1, ...
        num_experts: Ids must be in 0..num_experts - 1.
        first_row: Position of the first row in its sample.
        valid_T: Which rows count for both answers; None where all do.

    Returns:
        (whether every id is in range and no row of a layer repeats one, the digest of each layer).

    >>> ids = np.array([[[1, 2, 3]], [[4, 5, 4]]], np.uint8)
    >>> check(ids, num_experts=6, first_row=0)[0], check(ids[:1], num_experts=6, first_row=0)[0]
    (False, True)
    """
    compiled, items_TLI = kernels(), items_of(expert_ids_TLK)
    coefficients_T = count_coefficients(len(items_TLI), first_row=first_row, valid_T=valid_T)
    if compiled is None:
        sound_TL = sound_rows(expert_ids_TLK, num_experts=num_experts)
        return bool(sound_TL[coefficients_T > 0].all()), sum_digests(items_TLI, coefficients_T)
    layers, items = items_TLI.shape[1:]
    check = compiled.row_sums(items_TLI.itemsize, expert_ids_TLK.itemsize, slots=expert_ids_TLK.shape[2])
    words_W = np.empty(layers * (1 + items), np.uint64)
    return check(items_TLI, coefficients_T, multipliers(items), words_W, num_experts), words_W[:layers]


def warm(spec: RoutingSpec) -> None:
    """Compile what a relay does with rows of this model.

    This is done now, and not while a frame waits or a step is sealed.

    Args:
        spec: The model's spec.
    """
    ids_TLK = np.zeros((1, spec.num_moe_layers, spec.top_k), spec.id_dtype)
    check(ids_TLK, num_experts=spec.num_experts, first_row=0)
    sum_digests(items_of(ids_TLK), coefficients(0, 1))


def sound(expert_ids_TLK: Ids, *, num_experts: int, valid_T: Ids | None = None) -> bool:
    """Return whether all ids are sound, the first answer of `check`.

    >>> sound(np.array([[[1, 2, 6]]], np.uint8), num_experts=6)
    False
    """
    return check(expert_ids_TLK, num_experts=num_experts, first_row=0, valid_T=valid_T)[0]


def sound_rows(expert_ids_TLK: Ids, *, num_experts: int) -> Ids:
    """Return for each row of each layer whether its ids are sound.

    This compares slot against slot: K (K - 1) / 2 vectorised comparisons.

    Returns:
        [T, L] bool, each the first answer of `check`.

    >>> sound_rows(np.array([[[1, 2, 3]], [[4, 5, 4]]], np.uint8), num_experts=6).tolist()
    [[True], [False]]
    """
    rows, layers, slots = expert_ids_TLK.shape
    ids_NK = np.ascontiguousarray(expert_ids_TLK).view(f"u{expert_ids_TLK.itemsize}").reshape(-1, slots)
    sound_N = np.empty(len(ids_NK), np.bool_)
    for at in range(0, len(ids_NK), _BLOCK_ROWS):
        slots_KN = np.ascontiguousarray(ids_NK[at : at + _BLOCK_ROWS].T)
        sound_B = sound_N[at : at + _BLOCK_ROWS]
        np.less(slots_KN.max(0), num_experts, out=sound_B)
        for slot in range(1, slots):
            for other in range(slot):
                sound_B &= slots_KN[slot] != slots_KN[other]
    return sound_N.reshape(rows, layers)


# -- the digest's arithmetic ------------------------------------------------------------------------------------------------


def item_bytes(row_bytes: int) -> int:
    """Return the bytes of an item of one layer's row.

    This is the largest power of two that divides the bytes of the row, at most 8.

    >>> [item_bytes(size) for size in (8, 16, 20, 6, 7)]
    [8, 8, 4, 2, 1]
    """
    return min(8, row_bytes & -row_bytes)


def items_of(ids: Ids) -> Ids:
    """Return each row's ids as unsigned words, [..., items].

    The words are a view where the ids are contiguous and aligned, else a copy.
    """
    items = np.ascontiguousarray(ids).view(_WORDS[item_bytes(ids.shape[-1] * ids.itemsize)])
    return items if items.flags.aligned else items.copy()


def row_words(items: Ids) -> Words:
    """Return what stands for each row in its layer's digest.

    Args:
        items: [..., items], as `items_of` makes them.

    Returns:
        [...] uint64.
    """
    return (mix(items) + OFFSET) @ multipliers(items.shape[-1])


def sum_digests(items_TLI: Ids, coefficients_T: Words) -> Words:
    """Return the digest of each layer, [L].

    Args:
        items_TLI: As `items_of` makes them.
        coefficients_T: A row whose coefficient is 0 does not count.
    """
    return summed_pieces(items_TLI, coefficients_T, np.array([0, len(items_TLI)]))[0]


def summed_pieces(items_TLI: Ids, coefficients_T: Words, edges_P: Ids) -> Words:
    """Return the digest of each layer of each piece, [P, L].

    Args:
        items_TLI: As `items_of` makes them.
        coefficients_T: A row whose coefficient is 0 does not count.
        edges_P: int64; a piece has the rows between an edge and the next.
    """
    compiled, (_, layers, items) = kernels(), items_TLI.shape
    factors_I, digests_PL = multipliers(items), np.empty((len(edges_P) - 1, layers), np.uint64)
    if not layers:  # a stage whose layers are all dense
        return digests_PL
    if compiled is not None:
        sums, sums_C = compiled.piece_sums(items_TLI.itemsize), np.empty(layers * items, np.uint64)
        sums(items_TLI.reshape(-1), coefficients_T, factors_I, edges_P, sums_C, digests_PL)
        return digests_PL
    step = max(1, _SUMMED_BYTES // (8 * layers * items))
    for digests_L, (begin, end) in zip(digests_PL, pairwise(edges_P.tolist()), strict=True):
        digests_L[:] = OFFSET * factors_I.sum(keepdims=True) * coefficients_T[begin:end].sum(keepdims=True)
        for at in range(begin, end, step):
            block_TC = mix(items_TLI[at : min(at + step, end)]).reshape(-1, layers * items)
            sums_C = coefficients_T[at : min(at + step, end)] @ block_TC
            digests_L += sums_C.reshape(layers, items) @ factors_I
    return digests_PL


def count_coefficients(rows: int, *, first_row: int, valid_T: Ids | None) -> Words:
    """Return the rows' coefficients, 0 where a row is not valid, [T]."""
    found = coefficients(first_row, rows)
    return found if valid_T is None or valid_T.all() else np.where(valid_T, found, np.uint64(0))
