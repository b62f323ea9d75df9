"""Loops over ids that numpy has no fast form for, compiled by numba (extra `fast`): each shape of row when it is first asked for.

Knows items and addresses; knows no samples, frames or shards. An item is as many ids of one row as fit an unsigned word; digests
are those that `wire.digest` defines. Callers import this module lazily, through `distinct.kernels()`, and have a numpy form of
the same. All loops let other threads run, so none of them allocates: numba takes memory through Python's raw allocator, and
`tracemalloc.stop()` in another thread ends a process in which that happens without the GIL (CPython gh-128679, mended in 3.12.9).
A loop takes about 1 s to compile, and is cached on disk where a folder can be written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic as _numba_intrinsic

from r3channel.errors import UsageError
from r3channel.wire.mixing import OFFSET, multipliers

_intrinsic: Any = _numba_intrinsic  # the typing context that it passes is not in its annotations
_LINE_BYTES = 64
_STREAMED_BYTES = 4
"""Items of this size or more are written past the caches."""
_CHECKED_BYTES = 16 << 10
"""Rows that are checked, and then summed, before the next ones: within a level-1 cache."""
_COMPARED_ITEMS = 7
"""Longer rows are checked with a table: pairs of items grow with the square."""
_BLOCK_ROWS = 512
"""Rows whose columns are written one after another: 192 kB of 48 layers x 8 ids, within a level-2 cache (0.065 us per token
with 64 rows, 0.047 with 512, against 0.033 for memcpy of the same bytes)."""


def _jit(*signature: Any) -> Callable[[Callable[..., Any]], Any]:
    def compiled(function: Callable[..., Any]) -> Any:
        function.__qualname__ += _form(function, signature)
        try:
            return numba.njit(*signature, nogil=True, cache=True)(function)
        except (RuntimeError, OSError):  # neither the package nor the user's cache folder can be written
            return numba.njit(*signature, nogil=True)(function)

    return compiled


def _form(function: Callable[..., Any], signature: tuple[Any, ...]) -> str:
    """What tells this form of a loop from all others: a name of its own in the cache.

    numba keeps the forms of one name in one index and numbers them without a lock. Two processes that compile different forms
    at once take the same number, and later ones run one form's code on the other's rows.
    """
    fixed = [cell.cell_contents for cell in function.__closure__ or ()]
    context: Any = cpu_target.target_context
    target = (numba.__version__, *context.codegen().magic_tuple())
    return "-" + sha256(repr((fixed, signature, target)).encode()).hexdigest()[:16]


def _inlined(function: Callable[..., Any]) -> Any:
    """Part of the loops that call it, and cached with them."""
    return numba.njit(nogil=True)(function)


def _read_only(item: Any, dimensions: int = 1) -> Any:
    return types.Array(item, dimensions, "C", readonly=True)


def _item_type(item_bytes: int) -> Any:
    return {1: types.uint8, 2: types.uint16, 4: types.uint32, 8: types.uint64}[item_bytes]


# -- memory by address: an item has the type of the array `like` ------------------------------------------------------------


@_intrinsic
def _load(_typing: Any, _address: Any, like: Any) -> Any:
    """The item at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        word = ir.IntType(like.dtype.bitwidth)
        return builder.load(builder.inttoptr(values[0], word.as_pointer()), align=word.width // 8)

    return like.dtype(types.int64, like), generate


def _writing(*, streamed: bool) -> Callable[..., Any]:
    def typed(_typing: Any, _address: Any, item: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            word = ir.IntType(item.bitwidth)
            store = builder.store(
                values[1], builder.inttoptr(values[0], word.as_pointer()), align=word.width // 8
            )
            if streamed:
                store.set_metadata(
                    "nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
                )
            return context.get_dummy_value()

        return types.void(types.int64, item), generate

    return typed


_store = _intrinsic(_writing(streamed=False))
_stream = _intrinsic(_writing(streamed=True))
"""Past the caches: the line is not read first, which is a third of the traffic."""


@_intrinsic
def _fence(_typing: Any) -> Any:
    """Streamed items are seen by other threads from here on."""

    def generate(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@_inlined
def _mixed(item: Any) -> Any:
    word = np.uint64(item)
    return word ^ (word >> np.uint64(32))


@_inlined
def _row_word(items_I: Any, multipliers_I: Any) -> Any:
    """What stands for one row of one layer in its digest."""
    word = np.uint64(0)
    for index in range(items_I.shape[0]):
        word += multipliers_I[index] * (_mixed(items_I[index]) + OFFSET)
    return word


# -- rows of all layers, one after another ----------------------------------------------------------------------------------


@_inlined
def _add_rows(items_N: Any, coefficients_T: Any, begin: int, end: int, sums_C: Any) -> None:
    """Rows [begin, end) of C items, mixed, each times its coefficient; two rows at once, for half the traffic with the sums."""
    width, paired = sums_C.shape[0], begin + (end - begin) // 2 * 2
    for row in range(begin, paired, 2):
        first_C, second_C = (
            items_N[row * width : (row + 1) * width],
            items_N[(row + 1) * width : (row + 2) * width],
        )
        first, second = coefficients_T[row], coefficients_T[row + 1]
        for index in range(width):
            at = np.uint64(index)
            sums_C[at] += _mixed(first_C[at]) * first + _mixed(second_C[at]) * second
    for row in range(paired, end):
        items_C, coefficient = items_N[row * width : (row + 1) * width], coefficients_T[row]
        for index in range(width):
            at = np.uint64(index)
            sums_C[at] += _mixed(items_C[at]) * coefficient


@_inlined
def _add_up(sums_C: Any, coefficients_T: Any, multipliers_I: Any, digests_L: Any) -> None:
    """From the sums of each item to the digests: the definition is linear in both, and this is the least work for each row."""
    items, factors, coefficients = multipliers_I.shape[0], np.uint64(0), np.uint64(0)
    for factor in multipliers_I:
        factors += factor
    for coefficient in coefficients_T:
        coefficients += coefficient
    for layer in range(digests_L.shape[0]):
        digests_L[layer] = OFFSET * factors * coefficients
        for index in range(items):
            digests_L[layer] += multipliers_I[index] * sums_C[layer * items + index]


@_inlined
def _counted_until(coefficients_T: Any, first: int, most: int) -> int:
    """The end of the rows from `first` on, `most` of them at most, whose coefficient is not 0."""
    end, last = first, min(coefficients_T.shape[0], first + most)
    while end < last and coefficients_T[end] != np.uint64(0):
        end += 1
    return end


@lru_cache(maxsize=4)
def row_sums(item_bytes: int) -> Any:
    """f(items_N, coefficients_T, multipliers_I, sums_C, digests_L): the digests of rows of all layers. `sums_C` are zeros."""

    def run(items_N: Any, coefficients_T: Any, multipliers_I: Any, sums_C: Any, digests_L: Any) -> None:
        _add_rows(items_N, coefficients_T, 0, coefficients_T.shape[0], sums_C)
        _add_up(sums_C, coefficients_T, multipliers_I, digests_L)

    return _jit(types.void(*_summed_arguments(item_bytes)))(run)


def checked_rows(item_bytes: int, id_bytes: int, *, items: int, num_experts: int) -> Any:
    """f(items_N, coefficients_T, multipliers_I, sums_C, digests_L, last_E): as `row_sums`, and are all ids in range and distinct?

    Rows of coefficient 0 count for nothing. `items` make a row of one layer. `last_E`: int64, -1 for each expert.
    """
    if items > _COMPARED_ITEMS:
        return _tabled_rows(item_bytes, id_bytes, items)
    return _compared_rows(item_bytes, id_bytes, items, num_experts <= 1 << 8 * id_bytes - 1)


@lru_cache(maxsize=16)
def _compared_rows(item_bytes: int, id_bytes: int, items: int, low: bool) -> Any:
    """All ids of an item are compared with all ids of another at once, and then with the other turned by one id, by two, ...

    `low`: no id in range has its top bit set. A block of rows is checked as one, which leaves no odd ends, and then summed.
    """
    item_of: Any = getattr(np, f"uint{8 * item_bytes}")
    bits, id_bits, ids = 8 * item_bytes, 8 * id_bytes, item_bytes // id_bytes
    ones = item_of(sum(1 << id_bits * index for index in range(ids)))
    tops = item_of(int(ones) << id_bits - 1)
    rest = item_of(~tops)
    limit, block_bytes = 1 << id_bits - int(low), _CHECKED_BYTES

    def run(
        items_N: Any, coefficients_T: Any, multipliers_I: Any, sums_C: Any, digests_L: Any, last_E: Any
    ) -> bool:
        width, rows, first = sums_C.shape[0], coefficients_T.shape[0], 0
        num_experts = last_E.shape[0]
        beyond, bad = item_of(item_of(limit - num_experts) * ones), item_of(0)
        while first < rows:
            end = _counted_until(coefficients_T, first, max(1, block_bytes // (width * item_bytes)))
            items_B = items_N[first * width : end * width]
            for line in range(items_B.shape[0] // items):
                at, wrong = np.uint64(line) * np.uint64(items), item_of(0)
                for a in range(items):
                    word = items_B[at + np.uint64(a)]
                    if low:
                        wrong |= item_of(word | item_of(word + beyond))
                    else:
                        wrong |= item_of(word & item_of(item_of(word & rest) + beyond))
                    for b in range(a + 1):
                        other = items_B[at + np.uint64(b)]
                        # Within one item turns by up to half make every pair.
                        for turn in range(int(a == b), ids // 2 + 1 if a == b else ids):
                            back = (bits - turn * id_bits) % bits
                            turned = item_of(
                                item_of(word << item_of(turn * id_bits)) | item_of(word >> item_of(back))
                            )
                            apart = item_of(other ^ turned)
                            # A top bit is set where two ids are equal: exact as a test of the whole item.
                            if low:
                                wrong |= item_of(~item_of(apart + rest))
                            else:
                                wrong |= item_of(item_of(apart - ones) & item_of(~apart))
                bad |= wrong
            _add_rows(items_N, coefficients_T, first, end, sums_C)
            first = max(end, first + 1)
        _add_up(sums_C, coefficients_T, multipliers_I, digests_L)
        return item_of(bad & tops) == item_of(0)

    return _jit(types.boolean(*_summed_arguments(item_bytes), types.int64[::1]))(run)


@_inlined
def _distinct(ids_N: Any, first: int, end: int, slots: int, last_E: Any) -> bool:
    """Whether the lines [first, end) of `slots` ids each are sound; the table remembers the last line that named each expert."""
    for line in range(first, end):
        for slot in range(slots):
            expert = np.uint64(ids_N[line * slots + slot])
            if expert >= np.uint64(last_E.shape[0]) or last_E[expert] == line:
                return False
            last_E[expert] = line
    return True


@lru_cache(maxsize=16)
def _tabled_rows(item_bytes: int, id_bytes: int, items: int) -> Any:
    id_of: Any = getattr(np, f"uint{8 * id_bytes}")
    slots = items * item_bytes // id_bytes

    def run(
        items_N: Any, coefficients_T: Any, multipliers_I: Any, sums_C: Any, digests_L: Any, last_E: Any
    ) -> bool:
        ids_N, layers, sound = items_N.view(id_of), digests_L.shape[0], True
        for row in range(coefficients_T.shape[0]):
            if sound and coefficients_T[row] != np.uint64(0):
                sound = _distinct(ids_N, row * layers, (row + 1) * layers, slots, last_E)
            _add_rows(items_N, coefficients_T, row, row + 1, sums_C)
        _add_up(sums_C, coefficients_T, multipliers_I, digests_L)
        return sound

    return _jit(types.boolean(*_summed_arguments(item_bytes), types.int64[::1]))(run)


def _summed_arguments(item_bytes: int) -> tuple[Any, ...]:
    words = _read_only(types.uint64)
    return _read_only(_item_type(item_bytes)), words, words, types.uint64[::1], types.uint64[::1]


# -- rows of one layer ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def column_sums(item_bytes: int) -> Any:
    """f(items_RI, runs_N5, coefficients_P, multipliers_I, digests_S): add each run of rows to the digest of its sample.

    False where a run lies outside of the arrays.

    runs_N5: sample, position of the first row, first row, rows between two of the run, rows; see `wire.digest.HostRuns`.
    """

    def run(items_RI: Any, runs_N5: Any, coefficients_P: Any, multipliers_I: Any, digests_S: Any) -> bool:
        items_N = items_RI.reshape(-1)
        for number in range(runs_N5.shape[0]):
            sample, position, first = runs_N5[number, 0], runs_N5[number, 1], runs_N5[number, 2]
            step, rows = runs_N5[number, 3], runs_N5[number, 4]
            inside = 0 <= sample < digests_S.shape[0] and 0 <= position <= coefficients_P.shape[0] - rows
            last = first + step * (rows - 1)  # of an empty run: before its first
            if not inside or first < 0 or step < 1 or rows < 0 or last >= items_RI.shape[0]:
                return False
            coefficients_T, total = coefficients_P[position : position + rows], np.uint64(0)
            if items_RI.shape[1] == 1 and step == 1:
                items_T = items_N[first : first + rows]
                for row in range(rows):
                    at = np.uint64(row)
                    total += (_mixed(items_T[at]) + OFFSET) * coefficients_T[at]
            else:
                for row in range(rows):
                    total += _row_word(items_RI[first + row * step], multipliers_I) * coefficients_T[row]
            digests_S[sample] += total
        return True

    words = _read_only(types.uint64)
    items, runs = _read_only(_item_type(item_bytes), 2), _read_only(types.int64, 2)
    return _jit(types.boolean(items, runs, words, words, types.uint64[::1]))(run)


# -- from rows of all layers to one layer after another ---------------------------------------------------------------------


@_inlined
def _line_from(address: int, row: int, row_bytes: int) -> int:
    """The first row from `row` on that begins a cache line (or lies in one that begins in the row before)."""
    return row + ((-(address + row * row_bytes)) & (_LINE_BYTES - 1)) // row_bytes


@_inlined
def _write(address: int, item: int, streamed: bool) -> None:
    if streamed:
        _stream(address, item)
    else:
        _store(address, item)


@_inlined
def _store_pads(to: int, step: int, begin: int, end: int, position: int, pads_EI: Any) -> None:
    for row in range(begin, end):
        pad = (position + row) % pads_EI.shape[0]
        for index in range(pads_EI.shape[1]):
            _store(to + row * step + index * pads_EI.itemsize, pads_EI[pad, index])


def _placing(item_bytes: int, items: int) -> Any:
    """`place_runs` for rows of so many items; that their number is known makes it twice as fast."""
    row_bytes, may_stream = items * item_bytes, item_bytes >= _STREAMED_BYTES

    def run(
        runs_R8: Any, sources_L: Any, source_row_bytes: int, pads_EI: Any, coefficients_P: Any, digests_SL: Any, factors_I: Any
    ) -> None:  # fmt: skip
        layers = sources_L.shape[0]
        for number in range(runs_R8.shape[0]):
            source, real, length = runs_R8[number, 0], runs_R8[number, 1], runs_R8[number, 2]
            target, layer_bytes, step = runs_R8[number, 3], runs_R8[number, 4], runs_R8[number, 5]
            position, sample = runs_R8[number, 6], runs_R8[number, 7]
            streamed = may_stream and step == row_bytes
            for first in range(0, real, _BLOCK_ROWS):
                last = min(real, first + _BLOCK_ROWS)
                for layer in range(layers):
                    to, begin, end = target + layer * layer_bytes, first, last
                    if streamed:  # whole lines: the next block's first rows belong to this one's last line
                        if first > 0:
                            begin = min(real, _line_from(to, first, row_bytes))
                        if last < real:
                            end = min(real, _line_from(to, last, row_bytes))
                    column, digest = source + sources_L[layer] * row_bytes, np.uint64(0)
                    for row in range(begin, end):
                        word = np.uint64(0)
                        for index in range(items):
                            item = _load(column + row * source_row_bytes + index * item_bytes, pads_EI)
                            _write(to + row * step + index * item_bytes, item, streamed)
                            part = _mixed(item) + OFFSET
                            word += part if index == 0 else factors_I[index] * part
                        digest += word * coefficients_P[np.uint64(position + row)]
                    digests_SL[sample, layer] += digest
            for layer in range(layers):
                _store_pads(target + layer * layer_bytes, step, real, length, position, pads_EI)
        _fence()

    word, number = types.uint64, types.int64
    arguments = (
        _read_only(number, 2), _read_only(number), number, _read_only(_item_type(item_bytes), 2), _read_only(word),
        types.Array(word, 2, "C"), _read_only(word),
    )  # fmt: skip
    return _jit(types.void(*arguments))(run)


@lru_cache(maxsize=8)
def place_runs(item_bytes: int, *, items: int) -> Callable[[Any, Any, int, Any, Any, Any], None]:
    """f(runs_R8, sources_L, source_row_bytes, pads_EI, coefficients_P, digests_SL): write runs of rows into their places.

    Every address and stride is a multiple of the item size and lies in memory that the caller holds.

    runs_R8         source, rows to copy, rows in all, target of the first row in the first layer, bytes between layers, bytes
                    between rows, position of the first row, sample; addresses and bytes
    sources_L       column of the source row that each target layer copies
    pads_EI         items of the row to write at position p, where there is none to copy: pads_EI[p % E]
    coefficients_P  those of `wire.digest`, of all positions
    digests_SL      [sample, target layer], added to: the digest of the rows that were copied
    """
    loop, factors_I = _placing(item_bytes, items), multipliers(items)

    def placed(
        runs_R8: Any,
        sources_L: Any,
        source_row_bytes: int,
        pads_EI: Any,
        coefficients_P: Any,
        digests_SL: Any,
    ) -> None:
        ends_R = np.where(runs_R8[:, 1] > 0, runs_R8[:, 6] + runs_R8[:, 1], 0)
        if ends_R.max(initial=0) > len(coefficients_P):
            raise UsageError(
                f"rows up to position {ends_R.max()}, expected at most {len(coefficients_P)} coefficients"
            )
        loop(runs_R8, sources_L, source_row_bytes, pads_EI, coefficients_P, digests_SL, factors_I)

    return placed


@_jit(types.void(_read_only(types.uint8), _read_only(types.uint8), types.Array(types.int16, 1, "C")))
def unpack9(low_N: Any, bits_B: Any, out_N: Any) -> None:
    """Ids of nine bits from their plane of low bytes and their plane of ninth bits, eight at a time."""
    whole = out_N.shape[0] // 8
    for index in range(whole):
        bits, at = np.int16(bits_B[index]), 8 * index
        for k in range(8):
            out_N[at + k] = np.int16(low_N[at + k]) | (((bits >> k) & np.int16(1)) << 8)
    for at in range(8 * whole, out_N.shape[0]):
        out_N[at] = np.int16(low_N[at]) | ((np.int16(bits_B[at >> 3]) >> (at & 7) & np.int16(1)) << 8)
