"""A digest of (position, ids) per MoE layer that can be added up over any split of the rows.

The engine computes it over the rows of a frame, each trainer rank over the rows and layers that it placed and consumed; the sums
must agree modulo 2**64. It stops accidents, not an attacker. For another implementation, all words unsigned, modulo 2**64:

    splitmix64(s)    z = s + 0x9E3779B97F4A7C15;  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
                     z = (z ^ z >> 27) * 0x94D049BB133111EB;  z ^ z >> 31
    coefficient(p)   splitmix64(p) | 1                     of a row's position p in its sample, from 0
    items            the K ids of one row and layer, uint8 up to 256 experts, else int16, in order, as little-endian words x_0,
                     x_1, ... of as many bytes as the largest power of two that divides the row's bytes, at most 8
    mixed(x)         x ^ x >> 32                           a change of the last slots is not confined to the top byte
    row word         sum of M_j * (mixed(x_j) + 0x9E3779B97F4A7C15)         M_0 = 1, M_j = splitmix64(2**64 - 1 - j) | 1
    digest[layer]    sum of coefficient(p) * row word, over the valid rows

Positions are absolute, so the digests of a sample's turns add up.

`check` looks at all ids of the rows in the same pass: each in range, and distinct in its row. A zero-filled row, or one of stale
memory, names an expert twice, and Megatron-core would then silently use k-1 experts. Only rows that are not sound are looked at
closely, to name the first. With numba (extra `fast`) both are one compiled pass; numpy compares slot against slot and then sums.
Both let other threads run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import xxhash

from r3channel.errors import UsageError
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


def item_bytes_of(spec: RoutingSpec) -> int:
    """Return the bytes of an item of this model's rows."""
    return item_bytes(spec.top_k * spec.id_dtype.itemsize)


def layer_digests(expert_ids_TLK: Ids, *, first_row: int, valid_T: Ids | None = None) -> Words:
    """Return the digest of each layer, [L].

    `check` gives the same digests, and judges the ids, too.

    Args:
        expert_ids_TLK: Rows at positions `first_row`, `first_row` + 1, ...
        first_row: Position of the first row in its sample.
        valid_T: Which rows count; None where all do.

    >>> ids = np.arange(48, dtype=np.uint8).reshape(3, 2, 8)
    >>> parts = [layer_digests(ids[row : row + 1], first_row=row) for row in range(3)]
    >>> bool((sum(parts) == layer_digests(ids, first_row=0)).all())
    True
    """
    coefficients_T = count_coefficients(len(expert_ids_TLK), first_row=first_row, valid_T=valid_T)
    return sum_digests(items_of(expert_ids_TLK), coefficients_T)


def range_digests(rows: Sequence[Ids], first_A: Ids, edges_P: Ids) -> Words:
    """Return the digests of ranges of rows, [P, L].

    The arrays are joined, so that many small arrays are one call.

    Args:
        rows: Arrays [T, L, K], whose rows lie one after another.
        first_A: Position of the first row of each array.
        edges_P: Range i is [edges_P[i], edges_P[i + 1]) of all rows.
    """
    count_A, low = np.asarray([*map(len, rows)]), int(first_A.min())
    begin_A = first_A - low - np.cumsum(count_A) + count_A
    position_T = np.repeat(begin_A, count_A) + np.arange(int(count_A.sum()), dtype=np.int64)
    coefficients_T = coefficients(low, int(position_T.max()) + 1)[position_T]
    items_TLI = items_of(rows[0] if len(rows) == 1 else np.concatenate(rows))
    return summed_pieces(items_TLI, coefficients_T, edges_P)


def fold(digests_L: Words) -> int:
    """Return 64 bits that stand for all layers of a sample.

    They are the xxh3 of the digests, little endian.
    """
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(digests_L, "<u8").tobytes())


# -- the check of the ids ---------------------------------------------------------------------------------------------------


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


# -- one layer's rows, as a router gets them --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostRuns:
    """Which sample each row of a micro-batch belongs to.

    It is built once and used for each layer. A layer then costs 2 us beside its rows instead of 10.
    """

    runs_N5: Ids
    """int64 columns sample, position of the first row, its index in R, step between rows (1 for packs, b for [b, s]), rows."""
    samples: int
    weights_PI: Words
    """What each item of a row adds to the digest: the coefficient of the row's position times the item's multiplier."""
    add: Callable[..., bool] | None
    """The compiled loop; None without numba."""

    @classmethod
    def of(cls, runs_N5: Ids, *, samples: int, spec: RoutingSpec) -> HostRuns:
        """Build the runs of one micro-batch.

        Args:
            runs_N5: The columns that `HostRuns.runs_N5` names.
            samples: The number of samples.
            spec: The model's spec.
        """
        runs_N5, compiled, item = np.ascontiguousarray(runs_N5, np.int64), kernels(), item_bytes_of(spec)
        end = int((runs_N5[:, 1] + runs_N5[:, 4]).max(initial=0))
        items, size = spec.top_k * spec.id_dtype.itemsize // item, spec.id_dtype.itemsize
        add = None if compiled is None else compiled.column_sums(item, size, items=items)
        return cls(runs_N5, samples, coefficients(0, end)[:, None] * multipliers(items), add)


_WIDE = np.dtype(np.int32), np.dtype(np.int64)
_NOTHING = np.empty((0, 0), np.int32)


def column_digests(rows_RK: Ids, runs: HostRuns, wide_RK: Ids | None = None) -> Words:
    """Return the digest of each sample's rows of one layer, [samples].

    Args:
        rows_RK: The ids of one layer's rows, [R, K].
        runs: Which row belongs to which sample.
        wide_RK: All ids are written to it in the same pass: C-contiguous [R, K] of int32 or int64.

    Raises:
        UsageError: `wide_RK` has another shape or dtype, or a run lies outside of the rows or samples.
    """
    if wide_RK is not None and (wide_RK.shape != rows_RK.shape or wide_RK.dtype not in _WIDE):
        raise UsageError(
            f"ids {list(rows_RK.shape)} cannot be widened into {wide_RK.dtype}{list(wide_RK.shape)}"
        )
    items_RI, digests_S = items_of(rows_RK), np.zeros(runs.samples, np.uint64)
    if runs.add is not None:
        words_RW = _NOTHING if wide_RK is None else wide_RK.view(np.int32)
        if not runs.add(items_RI, runs.runs_N5, runs.weights_PI, digests_S, words_RW):
            raise _outside(runs.runs_N5, rows=len(items_RI), samples=runs.samples)
        return digests_S
    _check_runs(runs.runs_N5, rows=len(items_RI), samples=runs.samples)
    if wide_RK is not None:
        wide_RK[:] = rows_RK
    words_RI = mix(items_RI) + OFFSET
    for sample, position, first, step, rows in runs.runs_N5.tolist():
        own_TI = words_RI[first : first + step * rows : step]
        weights_TI = runs.weights_PI[position : position + rows]
        digests_S[sample : sample + 1] += (own_TI * weights_TI).sum(dtype=np.uint64)
    return digests_S


def _check_runs(runs_N5: Ids, *, rows: int, samples: int) -> None:
    # the compiled loop checks its runs itself, in the same way
    sample, _, first, step, count = runs_N5.T
    inside = (sample < samples) & (step > 0) & (first + step * (count - 1) < rows)
    if not inside.all() or (runs_N5 < 0).any():
        raise _outside(runs_N5, rows=rows, samples=samples)


def _outside(runs_N5: Ids, *, rows: int, samples: int) -> UsageError:
    return UsageError(f"some of {len(runs_N5)} runs lie outside of {rows} rows and {samples} samples")


@dataclass(frozen=True, slots=True)
class TorchRuns:
    """Which sample each row of a micro-batch belongs to, as tensors on the device of the rows.

    It is built once and used for each pass. An item has 8 bytes, or is an id where items are smaller.
    """

    samples: int
    sample_N: Any
    """int64: the sample of each item, row by row; `samples` where a row does not count."""
    factor_N: Any
    """int64: the bits of the coefficient of its row, times the item's multiplier."""
    offset_N: Any
    """int64: what its offset adds to the digest."""

    @classmethod
    def of(
        cls, runs_N5: Ids, *, rows: int, samples: int, spec: RoutingSpec, tensor: Callable[[Ids], Any]
    ) -> TorchRuns:
        """Build the runs of one micro-batch as tensors on a device.

        Args:
            runs_N5: The columns that `HostRuns.runs_N5` names.
            rows: The number of rows, R.
            samples: The number of samples.
            spec: The model's spec.
            tensor: Brings an int64 array to the device.

        Raises:
            UsageError: A run lies outside of the rows or samples.
        """
        _check_runs(runs_N5, rows=rows, samples=samples)
        sample_R, coefficient_R = np.full(rows, samples, np.int64), np.zeros(rows, np.uint64)
        for sample, position, first, step, count in runs_N5.tolist():
            own = slice(first, first + step * count, step)
            sample_R[own], coefficient_R[own] = sample, coefficients(position, count)
        ids, size = item_bytes_of(spec) // spec.id_dtype.itemsize, spec.id_dtype.itemsize
        factors_I = multipliers(spec.top_k // ids)
        offsets_I = OFFSET * factors_I
        if item_bytes_of(spec) < 8:  # an item is a sum of ids, each shifted to its place
            shifts = np.arange(ids, dtype=np.uint64) * np.uint64(8 * size)
            factors_I = (factors_I[:, None] << shifts).reshape(-1)
            offsets_I = np.where(np.arange(spec.top_k) % ids, np.uint64(0), np.repeat(offsets_I, ids))
        sample_N = np.repeat(sample_R, len(factors_I))
        words = ((coefficient_R[:, None] * each_I).reshape(-1) for each_I in (factors_I, offsets_I))
        return cls(samples, tensor(sample_N), *(tensor(own_N.view(np.int64)) for own_N in words))


def column_digests_torch(rows_RK: Any, runs: TorchRuns) -> Any:
    """Return the digest of each sample's rows, as `column_digests` does.

    This call does not wait for the device.

    Args:
        rows_RK: A tensor of the spec's id dtype, [row, K] or [layer, row, K].
        runs: Which row belongs to which sample.

    Returns:
        [samples] int64 with the same bits as those of `column_digests`; of [layer, row, K] a line for each layer.
    """
    words_N = rows_RK.contiguous().flatten(-2)
    if len(runs.sample_N) < words_N.shape[-1]:
        if words_N.storage_offset() * words_N.itemsize % 8:
            words_N = words_N.clone()
        items_N = words_N.view(runs.sample_N.dtype)
        # A signed shift brings copies of the sign down with it.
        words_N = (items_N >> 32).bitwise_and_(0xFFFFFFFF).bitwise_xor_(items_N)
    words_N = runs.offset_N.addcmul(words_N, runs.factor_N)
    sums_S = words_N.new_zeros(*words_N.shape[:-1], runs.samples + 1)
    return sums_S.index_add_(-1, runs.sample_N, words_N)[..., : runs.samples]
