"""Are the ids of every row in range and distinct? And what do they add up to? Exact, in one pass; knows arrays only.

A zero-filled row, or one of stale memory, names an expert twice, and Megatron-core would then silently use k-1 experts.

`checked` answers for all rows and gives their digest, which `wire.digest` defines; only rows that are not sound are looked at
closely, to name the first. With numba (extra `fast`) both are one compiled pass; numpy compares slot against slot and then sums.
Both let other threads run.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

import numpy as np

from r3channel.model.spec import RoutingSpec
from r3channel.wire.mixing import OFFSET, Ids, Words, coefficients, mixed, multipliers

_BLOCK_ROWS = 32768
"""Rows searched at once by numpy: 256 kB of uint8 ids at K = 8, within a second-level cache."""
_SUMMED_BYTES = 256 << 10
_WORDS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


@lru_cache(maxsize=1)
def kernels() -> ModuleType | None:
    """`r3channel.wire.kernels`, or None without numba. The first call imports it."""
    try:
        from r3channel.wire import kernels as compiled_kernels
    except ImportError:
        return None
    return compiled_kernels


def checked(
    expert_ids_TLK: Ids, *, num_experts: int, first_row: int, valid_T: Ids | None = None
) -> tuple[bool, Words]:
    """(whether every id is in 0..num_experts - 1 and no row of a layer repeats one, the digest of each layer).

    The rows' positions are `first_row`, `first_row` + 1, ...; rows that are not valid count for neither answer.

    >>> ids = np.array([[[1, 2, 3]], [[4, 5, 4]]], np.uint8)
    >>> checked(ids, num_experts=6, first_row=0)[0], checked(ids[:1], num_experts=6, first_row=0)[0]
    (False, True)
    """
    compiled, items_TLI = kernels(), items_of(expert_ids_TLK)
    coefficients_T = counted(len(items_TLI), first_row=first_row, valid_T=valid_T)
    if compiled is None:
        valid_TLK = expert_ids_TLK if valid_T is None else expert_ids_TLK[valid_T]
        sound = not out_of_range(valid_TLK, num_experts=num_experts) and find_duplicate(valid_TLK) is None
        return sound, summed(items_TLI, coefficients_T)
    layers, items = items_TLI.shape[1:]
    check = compiled.row_sums(items_TLI.itemsize, expert_ids_TLK.itemsize, slots=expert_ids_TLK.shape[2])
    words_W = np.empty(layers * (1 + items), np.uint64)
    return check(items_TLI, coefficients_T, multipliers(items), words_W, num_experts), words_W[:layers]


def warm(spec: RoutingSpec) -> None:
    """Compile what a relay does with rows of this model, now and not while a frame waits or a step is sealed."""
    ids_TLK = np.zeros((1, spec.num_moe_layers, spec.top_k), spec.id_dtype)
    checked(ids_TLK, num_experts=spec.num_experts, first_row=0)
    summed(items_of(ids_TLK), coefficients(0, 1))


def sound(expert_ids_TLK: Ids, *, num_experts: int, valid_T: Ids | None = None) -> bool:
    """The first answer of `checked`.

    >>> sound(np.array([[[1, 2, 6]]], np.uint8), num_experts=6)
    False
    """
    return checked(expert_ids_TLK, num_experts=num_experts, first_row=0, valid_T=valid_T)[0]


def sound_rows(expert_ids_TLK: Ids, *, num_experts: int) -> Ids:
    """[T] bool, for each row the first answer of `checked`. Slow: for frames that have such rows."""
    sound_T = np.empty(len(expert_ids_TLK), bool)
    for row in range(0, len(sound_T), _BLOCK_ROWS):
        ordered_TLK = np.sort(expert_ids_TLK[row : row + _BLOCK_ROWS], axis=-1)
        wrong_TLK = (ordered_TLK >= num_experts) | (ordered_TLK < 0)
        wrong_TLK[..., 1:] |= ordered_TLK[..., 1:] == ordered_TLK[..., :-1]
        sound_T[row : row + _BLOCK_ROWS] = ~wrong_TLK.any((1, 2))
    return sound_T


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
    for at in range(0, len(ids_NK), _BLOCK_ROWS):
        block_NK = ids_NK[at : at + _BLOCK_ROWS]
        if _repeats(block_NK):
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


# -- the digest's arithmetic ------------------------------------------------------------------------------------------------


def item_bytes(row_bytes: int) -> int:
    """The largest power of two that divides the bytes of one layer's row, at most 8.

    >>> [item_bytes(size) for size in (8, 16, 20, 6, 7)]
    [8, 8, 4, 2, 1]
    """
    return min(8, row_bytes & -row_bytes)


def items_of(ids: Ids) -> Ids:
    """[..., items]: each row's ids as unsigned words; a view where they are contiguous and aligned."""
    items = np.ascontiguousarray(ids).view(_WORDS[item_bytes(ids.shape[-1] * ids.itemsize)])
    return items if items.flags.aligned else items.copy()


def row_words(items: Ids) -> Words:
    """[...] of [..., items]: what stands for each row in the digest of its layer."""
    return (mixed(items) + OFFSET) @ multipliers(items.shape[-1])


def summed(items_TLI: Ids, coefficients_T: Words) -> Words:
    """[L]: the digest of each layer; rows whose coefficient is 0 do not count."""
    compiled, (rows, layers, items) = kernels(), items_TLI.shape
    if not layers:  # a stage whose layers are all dense
        return np.zeros(0, np.uint64)
    factors_I = multipliers(items)
    if compiled is not None:
        words_W = np.empty(layers * (1 + items), np.uint64)
        sums = compiled.row_sums(items_TLI.itemsize, items_TLI.itemsize, slots=0)
        sums(items_TLI, coefficients_T, factors_I, words_W, 0)
        return words_W[:layers]
    sums_LI, step = np.zeros((layers, items), np.uint64), max(1, _SUMMED_BYTES // (8 * layers * items))
    for at in range(0, rows, step):
        block_TC = mixed(items_TLI[at : at + step]).reshape(-1, sums_LI.size)
        sums_LI += (coefficients_T[at : at + step] @ block_TC).reshape(sums_LI.shape)
    totals = [words.sum(dtype=np.uint64, keepdims=True) for words in (factors_I, coefficients_T)]
    return sums_LI @ factors_I + OFFSET * totals[0] * totals[1]


def counted(rows: int, *, first_row: int, valid_T: Ids | None) -> Words:
    """[T]: the rows' coefficients, 0 where a row is not valid."""
    found = coefficients(first_row, rows)
    return found if valid_T is None or valid_T.all() else np.where(valid_T, found, np.uint64(0))
