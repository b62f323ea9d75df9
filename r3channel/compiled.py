"""Loops over ids that numpy has no fast form for, compiled by numba (extra `fast`) when this module is first imported.

Knows words and addresses; knows no samples, frames or shards. Callers import it lazily, through `distinct.kernels()`, and have
a numpy form of the same. All loops let other threads run. The compiled code is cached on disk: importing takes 0.5 s, or 2 s
the first time.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic as _numba_intrinsic

_intrinsic: Any = _numba_intrinsic  # the typing context that it passes is not in its annotations
_WORD = ir.IntType(64)
_LINE_BYTES = 64
_BLOCK_ROWS = 512
"""Rows whose columns are written one after another: 192 kB of 48 layers x 8 ids, within a level-2 cache (0.065 us per token
with 64 rows, 0.047 with 512, against 0.033 for memcpy of the same bytes)."""


def _jit(*signature: Any) -> Any:
    try:
        return numba.njit(*signature, nogil=True, cache=True)
    except RuntimeError:  # neither the package nor the user's cache folder can be written
        return numba.njit(*signature, nogil=True)


def _read_only(item: Any, dimensions: int = 1) -> Any:
    return types.Array(item, dimensions, "C", readonly=True)


@_intrinsic
def _load(_typing: Any, _address: Any) -> Any:
    """The word at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.load(builder.inttoptr(values[0], _WORD.as_pointer()), align=8)

    return types.uint64(types.int64), generate


@_intrinsic
def _store(_typing: Any, _address: Any, _word: Any) -> Any:
    """Write a word at an address."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        builder.store(values[1], builder.inttoptr(values[0], _WORD.as_pointer()), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64), generate


@_intrinsic
def _stream(_typing: Any, _address: Any, _word: Any) -> Any:
    """Write a word past the caches: the line is not read first, which is a third of the traffic."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        store = builder.store(values[1], builder.inttoptr(values[0], _WORD.as_pointer()), align=8)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64), generate


@_intrinsic
def _fence(_typing: Any) -> Any:
    """Streamed words are seen by other threads from here on."""

    def generate(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@_jit(types.boolean(_read_only(types.uint64), types.int64))
def sound_bytes8(words_N: Any, num_experts: int) -> bool:
    """Are the 8 uint8 ids of every word below `num_experts` (at most 256) and distinct?

    A word is compared with itself turned by 1 to 4 bytes, which is every pair; ids below 128 leave the top bits to carry into.
    """
    ones, tops = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
    low = ~tops
    apart, over = tops, np.uint64(0)
    if num_experts <= 128:
        beyond = np.uint64(128 - num_experts) * ones
        for index in range(words_N.shape[0]):
            word = words_N[index]
            apart &= (word ^ ((word << np.uint64(8)) | (word >> np.uint64(56)))) + low
            apart &= (word ^ ((word << np.uint64(16)) | (word >> np.uint64(48)))) + low
            apart &= (word ^ ((word << np.uint64(24)) | (word >> np.uint64(40)))) + low
            apart &= (word ^ ((word << np.uint64(32)) | (word >> np.uint64(32)))) + low
            over |= word | (word + beyond)
        return apart & tops == tops and over & tops == 0
    beyond, equal = np.uint64(256 - num_experts) * ones, np.uint64(0)
    for index in range(words_N.shape[0]):
        word = words_N[index]
        over |= word & ((word & low) + beyond)
        for bits in (8, 16, 24, 32):
            other = word ^ ((word << np.uint64(bits)) | (word >> np.uint64(64 - bits)))
            equal |= (
                other - ones
            ) & ~other  # a top bit is set where some byte is 0: exact as a test of the word
    return equal & tops == 0 and over & tops == 0


@_jit(types.boolean(_read_only(types.uint64, 2), types.int64))
def sound_shorts8(words_N2: Any, num_experts: int) -> bool:
    """As `sound_bytes8`, for rows of 8 int16 ids, two words each."""
    ones, tops = np.uint64(0x0001000100010001), np.uint64(0x8000800080008000)
    low = ~tops
    beyond = np.uint64(32768 - num_experts) * ones
    apart, over = tops, np.uint64(0)
    for index in range(words_N2.shape[0]):
        first, second = words_N2[index, 0], words_N2[index, 1]
        over |= first | second | (first + beyond) | (second + beyond)
        turned = (second << np.uint64(16)) | (second >> np.uint64(48))
        half = (second << np.uint64(32)) | (second >> np.uint64(32))
        apart &= (first ^ ((first << np.uint64(16)) | (first >> np.uint64(48)))) + low
        apart &= (first ^ ((first << np.uint64(32)) | (first >> np.uint64(32)))) + low
        apart &= (second ^ turned) + low
        apart &= (second ^ half) + low
        apart &= (first ^ second) + low
        apart &= (first ^ turned) + low
        apart &= (first ^ half) + low
        apart &= (first ^ ((second << np.uint64(48)) | (second >> np.uint64(16)))) + low
    return apart & tops == tops and over & tops == 0


@_jit([types.boolean(_read_only(item, 2), types.int64) for item in (types.uint8, types.int16)])
def sound_rows(ids_NK: Any, num_experts: int) -> bool:
    """As `sound_bytes8`, for rows of any length: a table remembers the last row that named each expert."""
    last_E = np.full(num_experts, -1, np.int64)
    for row in range(ids_NK.shape[0]):
        for slot in range(ids_NK.shape[1]):
            expert = np.int64(ids_NK[row, slot])
            if expert < 0 or expert >= num_experts or last_E[expert] == row:
                return False
            last_E[expert] = row
    return True


@_jit(types.int64(types.int64, types.int64, types.int64))
def _line_from(address: int, row: int, row_bytes: int) -> int:
    """The first row from `row` on that begins a cache line (or lies in one that begins in the row before)."""
    return row + ((-(address + row * row_bytes)) & (_LINE_BYTES - 1)) // row_bytes


@_jit(types.void(*[types.int64] * 6))
def _stream_column(to: int, source: int, begin: int, end: int, source_row_bytes: int, words: int) -> None:
    """Rows [begin, end) of one layer, one after another, past the caches; the common row of one word has its own loop."""
    if words == 1:
        for row in range(begin, end):
            _stream(to + row * 8, _load(source + row * source_row_bytes))
    else:
        for row in range(begin, end):
            for word in range(words):
                value = _load(source + row * source_row_bytes + 8 * word)
                _stream(to + (row * words + word) * 8, value)


@_jit(types.void(*[types.int64] * 7))
def _store_column(
    to: int, step: int, source: int, begin: int, end: int, source_row_bytes: int, words: int
) -> None:
    """The same with `step` bytes between the rows: other samples' rows lie between them."""
    for row in range(begin, end):
        for word in range(words):
            _store(to + row * step + 8 * word, _load(source + row * source_row_bytes + 8 * word))


@_jit(types.void(*[types.int64] * 5, _read_only(types.uint64, 2)))
def _store_pads(to: int, step: int, begin: int, end: int, position: int, pads_EW: Any) -> None:
    for row in range(begin, end):
        pad = (position + row) % pads_EW.shape[0]
        for word in range(pads_EW.shape[1]):
            _store(to + row * step + 8 * word, pads_EW[pad, word])


@_jit(
    types.void(_read_only(types.int64, 2), _read_only(types.int64), types.int64, _read_only(types.uint64, 2))
)
def place_runs(runs_R7: Any, sources_L: Any, source_row_bytes: int, pads_EW: Any) -> None:
    """Write runs of rows into their places. Every address and stride is a multiple of 8 and lies in memory that the caller holds.

    runs_R7    source, rows to copy, rows in all, target of the first row in the first layer, bytes between layers, bytes between
               rows, position of the first row; addresses and bytes
    sources_L  column of the source row that each target layer copies
    pads_EW    words of the row to write at position p, where there is none to copy: pads_EW[p % E]
    """
    words, layers = pads_EW.shape[1], sources_L.shape[0]
    row_bytes = 8 * words
    for run in range(runs_R7.shape[0]):
        source, real, length = runs_R7[run, 0], runs_R7[run, 1], runs_R7[run, 2]
        target, layer_bytes, step = runs_R7[run, 3], runs_R7[run, 4], runs_R7[run, 5]
        for first in range(0, real, _BLOCK_ROWS):
            last = min(real, first + _BLOCK_ROWS)
            for layer in range(layers):
                to, column = target + layer * layer_bytes, source + sources_L[layer] * row_bytes
                if step != row_bytes:
                    _store_column(to, step, column, first, last, source_row_bytes, words)
                    continue
                begin, end = (
                    first,
                    last,
                )  # whole lines: the next block's first rows belong to this one's last line
                if first > 0:
                    begin = min(real, _line_from(to, first, row_bytes))
                if last < real:
                    end = min(real, _line_from(to, last, row_bytes))
                _stream_column(to, column, begin, end, source_row_bytes, words)
        for layer in range(layers):
            _store_pads(target + layer * layer_bytes, step, real, length, runs_R7[run, 6], pads_EW)
    _fence()
