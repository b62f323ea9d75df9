"""Loops over ids that numpy has no fast form for, compiled by numba (extra `fast`): each shape of row when it is first asked for.

Knows items, vectors and addresses; knows no samples, frames or shards. An item is as many ids of one row as fit an unsigned word;
digests are those that `wire.digest` defines. Callers import this module lazily, through `digest.kernels()`, and have a numpy
form of the same. All loops let other threads run, so none of them allocates: numba takes memory through Python's raw allocator,
and `tracemalloc.stop()` in another thread ends a process in which that happens without the GIL (CPython gh-128679, mended in
3.12.9). A loop takes about 1 s to compile, and is cached on disk where a folder can be written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from hashlib import sha256
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # pyright: ignore[reportMissingTypeStubs]
from numba import types
from numba.core import cgutils as _numba_cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic as _numba_intrinsic

from r3channel.wire.mixing import OFFSET, Ids

# Any: the types of numba and llvmlite do not cover what these return, nor the typing context that they pass
cgutils: Any = _numba_cgutils
_intrinsic: Any = _numba_intrinsic
Loop = Callable[..., Any]
"""A compiled loop."""
_LINE_BYTES = 64
_STREAMED_BYTES = 512
"""Runs of this size or more are written past the caches, a line at a time."""
_CHECKED_BYTES = 16 << 10
"""Bytes of rows that are checked and then summed at a time: they fit a level-1 cache."""
_VECTOR_BYTES = 64
"""Bytes of lines that are checked at once: one register with AVX-512, two with AVX2; 32 and 128 are slower with both."""
_GATHERED_ROWS = 32
"""Rows that are gathered, and then summed while they are in the level-1 cache."""
_HEADER_WORDS = 13
"""8-byte words of a frame's header."""
_NINE_BITS_AT_ONCE = 32
"""Ids whose ninth bits are one word."""
_BLOCK_ROWS = 128
"""Rows whose columns are written one after another. Of 48 layers x 8 ids they are 48 kB, as a level-1 cache has: 0.05 us per
token, and 0.08 with 512 rows (Intel Xeon; memcpy of the same bytes 0.03)."""


def _jit(*signature: Any) -> Callable[[Callable[..., Any]], Any]:
    def compile_loop(function: Callable[..., Any]) -> Any:
        function.__qualname__ += _form(function, signature)
        try:
            return numba.njit(*signature, nogil=True, cache=True)(function)
        except (RuntimeError, OSError):  # neither the package nor the user's cache folder can be written
            return numba.njit(*signature, nogil=True)(function)

    return compile_loop


def _form(function: Callable[..., Any], signature: tuple[Any, ...]) -> str:
    """Return a cache name that no other form of a loop has.

    numba keeps the forms of one name in one index and numbers them without a lock. Two processes that compile different forms at
    once take the same number, and later processes run one form's code on the other's rows.
    """
    fixed = [cell.cell_contents for cell in function.__closure__ or ()]
    context: Any = cpu_target.target_context
    target = (numba.__version__, *context.codegen().magic_tuple())
    return "-" + sha256(repr((fixed, signature, target)).encode()).hexdigest()[:16]


def _inline(function: Callable[..., Any]) -> Any:
    return numba.njit(nogil=True)(function)  # not cached itself: the loops that call it have its code


def _read_only(item: Any, dimensions: int = 1) -> Any:
    return types.Array(item, dimensions, "C", readonly=True)


def _item_type(item_bytes: int) -> Any:
    return {1: types.uint8, 2: types.uint16, 4: types.uint32, 8: types.uint64}[item_bytes]


# -- memory by address ------------------------------------------------------------------------------------------------------


@_intrinsic(prefer_literal=True)
def _copy(_typing: Any, _to: Any, _from: Any, size: Any, streamed: Any) -> Any:
    """Copy `size` bytes from one address to another.

    `size` and `streamed` are literals in the calling code. Streamed bytes are written past the caches, and their target begins a
    line. A streamed line is not read first; that read is a third of the traffic. Other addresses need no alignment.
    """

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        begin = 0
        while begin < size.literal_value:
            left = size.literal_value - begin
            part = min(_LINE_BYTES, 1 << left.bit_length() - 1)
            kind, offset = ir.VectorType(ir.IntType(8), part), ir.Constant(values[0].type, begin)
            to, source = [builder.inttoptr(builder.add(v, offset), kind.as_pointer()) for v in values[:2]]
            store = builder.store(builder.load(source, align=1), to, align=1)
            if streamed.literal_value:
                store.align, one = part, ir.Constant(ir.IntType(32), 1)
                store.set_metadata("nontemporal", builder.module.add_metadata([one]))
            begin += part
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, size, streamed), generate


@_intrinsic(prefer_literal=True)
def _stack(_typing: Any, size: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        return builder.ptrtoint(
            cgutils.alloca_once(builder, ir.IntType(8), size.literal_value), ir.IntType(64)
        )

    return types.int64(size), generate


@_intrinsic
def _fence(_typing: Any) -> Any:
    """Make streamed lines visible to other threads."""

    def generate(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@_inline
def _mix(item: Any) -> Any:
    word = np.uint64(item)
    return word ^ (word >> np.uint64(32))


# -- rows of all layers, one after another ----------------------------------------------------------------------------------


@_inline
def _add_rows(items_N: Any, coefficients_T: Any, sums_C: Any) -> None:
    """Add rows of C items to the sums of the items.

    Each item is mixed and multiplied by its row's coefficient. Two rows are added at once, which halves the traffic with the
    sums.
    """
    width, rows = sums_C.shape[0], coefficients_T.shape[0]
    for row in range(0, rows - 1, 2):
        first_C = items_N[row * width : (row + 1) * width]
        second_C = items_N[(row + 1) * width : (row + 2) * width]
        first, second = coefficients_T[row], coefficients_T[row + 1]
        for index in range(width):
            at = np.uint64(index)
            sums_C[at] += _mix(first_C[at]) * first + _mix(second_C[at]) * second
    for row in range(rows - rows % 2, rows):
        items_C, coefficient = items_N[row * width : (row + 1) * width], coefficients_T[row]
        for index in range(width):
            at = np.uint64(index)
            sums_C[at] += _mix(items_C[at]) * coefficient


@_inline
def _add_up(sums_C: Any, coefficients_T: Any, multipliers_I: Any, digests_L: Any) -> None:
    """Compute the digests of all layers from the sums of items.

    The digest is linear in coefficients and in multipliers. This order of the sums takes the least work for each row.
    """
    items, factors, coefficients = multipliers_I.shape[0], np.uint64(0), np.uint64(0)
    for factor in multipliers_I:
        factors += factor
    for coefficient in coefficients_T:
        coefficients += coefficient
    for layer in range(digests_L.shape[0]):
        digests_L[layer] = OFFSET * factors * coefficients
        for index in range(items):
            digests_L[layer] += multipliers_I[index] * sums_C[layer * items + index]


@_inline
def _counted_until(coefficients_T: Any, first: int, most: int) -> int:
    """Return the end of the counted rows that begin at `first`.

    A row counts if its coefficient is not 0. At most `most` rows are looked at.
    """
    end, last = first, min(coefficients_T.shape[0], first + most)
    while end < last and coefficients_T[end] != np.uint64(0):
        end += 1
    return end


@lru_cache(maxsize=4)
def piece_sums(item_bytes: int) -> Loop:
    """Return a compiled loop that computes the digests of row ranges.

    The loop is f(items_N, coefficients_T, multipliers_I, edges_P, sums_C, digests_PL). A piece has rows of all layers, from the
    row at its own edge to the row at the next edge. `sums_C` has a word for each item of a row, for the loop's own use.

    Args:
        item_bytes: Bytes of one item.
    """

    def run(
        items_N: Any, coefficients_T: Any, factors_I: Any, edges_P: Any, sums_C: Any, out_PL: Any
    ) -> None:
        for piece in range(out_PL.shape[0]):
            begin, end, width = edges_P[piece], edges_P[piece + 1], sums_C.shape[0]
            sums_C[:] = np.uint64(0)
            _add_rows(items_N[begin * width : end * width], coefficients_T[begin:end], sums_C)
            _add_up(sums_C, coefficients_T[begin:end], factors_I, out_PL[piece])

    words, edges = _read_only(types.uint64), _read_only(types.int64)
    items, sums = _read_only(_item_type(item_bytes)), types.uint64[::1]
    return _jit(types.void(items, words, words, edges, sums, types.uint64[:, ::1]))(run)


@lru_cache(maxsize=16)
def row_sums(item_bytes: int, id_bytes: int, *, slots: int) -> Loop:
    """Return a compiled loop that checks ids and computes their digests.

    The loop is f(items_TLI, coefficients_T, multipliers_I, words_W, num_experts). It returns whether all ids are in range and
    distinct. It writes the digests of all layers to the first words of `words_W`. Behind these digests `words_W` has a word for
    each item of a row, for the loop's own use. Rows of coefficient 0 count for nothing. A block of rows is checked as one, and
    then summed while the block is in the cache.

    Args:
        item_bytes: Bytes of one item.
        id_bytes: Bytes of one id.
        slots: Ids of a line.
    """
    id_of: Any = getattr(np, f"uint{8 * id_bytes}")
    lanes = max(_VECTOR_BYTES, 1 << (slots * id_bytes - 1).bit_length()) // id_bytes
    lines, block_bytes = lanes // slots, _CHECKED_BYTES

    def run(items_TLI: Any, coefficients_T: Any, multipliers_I: Any, words_W: Any, num_experts: int) -> bool:
        rows, layers = items_TLI.shape[:2]
        items_N, first, sound = items_TLI.reshape(-1), 0, True
        ids_N, sums_C = items_N.view(id_of), words_W[layers:]
        sums_C[:] = np.uint64(0)
        width = sums_C.shape[0]
        most = 2 * max(1, block_bytes // (2 * width * item_bytes))  # they are summed in pairs
        while first < rows:
            end, loads = _counted_until(coefficients_T, first, most), 0
            ids_B = ids_N[first * layers * slots : end * layers * slots]
            if ids_B.shape[0] >= lanes:  # no vector reads past the block
                loads = (ids_B.shape[0] - lanes) // (lines * slots) + 1
                sound &= _all_sound(ids_B, loads, num_experts, slots, lanes)
            for line in range(loads * lines, ids_B.shape[0] // slots):
                sound &= _is_sound(ids_B[line * slots : (line + 1) * slots], num_experts)
            _add_rows(items_N[first * width : end * width], coefficients_T[first:end], sums_C)
            first = max(end, first + 1)
        _add_up(sums_C, coefficients_T, multipliers_I, words_W[:layers])
        return sound

    items, words = _read_only(_item_type(item_bytes), 3), _read_only(types.uint64)
    return _jit(types.boolean(items, words, words, types.uint64[::1], types.int64))(run)


@_inline
def _is_sound(ids_K: Any, num_experts: int) -> Any:
    sound = True
    for slot in range(ids_K.shape[0]):
        sound &= np.int64(ids_K[slot]) < num_experts
        for other in range(slot):
            sound &= ids_K[slot] != ids_K[other]
    return sound


@_intrinsic(prefer_literal=True)
def _all_sound(_typing: Any, ids_N: Any, loads: Any, num_experts: Any, slots: Any, lanes: Any) -> Any:
    """Return whether all ids of `loads` vectors are sound.

    A sound id is in range and distinct within its line. A vector has whole lines, and a rest that is not judged.
    """
    width, used = lanes.literal_value, lanes.literal_value // slots.literal_value * slots.literal_value
    item: Any = ir.IntType(ids_N.dtype.bitwidth)
    vector = ir.VectorType(item, width)
    zeros, rest = ir.Constant(vector, [0] * width), ir.Constant(vector, [0] * used + [-1] * (width - used))

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        def call(name: str, result: Any, *arguments: Any) -> Any:
            kind = ir.FunctionType(result, [vector] * len(arguments))
            name = f"llvm.{name}.v{width}i{item.width}"
            return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)

        begin = context.make_array(signature.args[0])(context, builder, values[0]).data
        least, most = (cgutils.alloca_once(builder, vector) for _ in range(2))
        builder.store(ir.Constant(vector, [-1] * width), least)
        builder.store(zeros, most)
        with cgutils.for_range(builder, values[1]) as loop:
            first = builder.gep(begin, [builder.mul(loop.index, ir.Constant(loop.index.type, used))])
            ids = builder.load(builder.bitcast(first, vector.as_pointer()), align=item.width // 8)
            for difference in _differences(builder, ids, slots.literal_value):
                builder.store(call("umin", vector, builder.load(least), difference), least)
            builder.store(call("umax", vector, builder.load(most), ids), most)
        closest = call("vector.reduce.umin", item, builder.or_(builder.load(least), rest))
        highest = call("vector.reduce.umax", item, builder.and_(builder.load(most), builder.not_(rest)))
        in_range = builder.icmp_unsigned("<", builder.zext(highest, values[2].type), values[2])
        return builder.and_(in_range, builder.icmp_unsigned("!=", closest, ir.Constant(item, 0)))

    return types.boolean(ids_N, types.int64, types.int64, slots, lanes), generate


def _differences(builder: Any, ids: Any, slots: int) -> Iterator[Any]:
    """Yield vectors with the differences of ids within each line.

    A difference is 0 where two ids of a line are equal; a line is `slots` ids. Each line is compared with itself, rotated by one
    id, by two, and so on up to half of the line: that makes every pair. Rotating is fastest within 16 bytes. A line is therefore
    rotated within units of up to 16 bytes that divide the line, and then by whole units.
    """
    lanes, id_bytes = ids.type.count, ids.type.element.width // 8
    unit = min(16, slots * id_bytes & -(slots * id_bytes)) // id_bytes
    units = slots // unit

    def rotate_lanes(source: Callable[[int], int]) -> Any:  # moves lane `source(i)` of each line to lane i
        whole = lanes - lanes % slots
        places = [i - i % slots + source(i % slots) if i < whole else i for i in range(lanes)]
        return builder.shuffle_vector(ids, ids, ir.Constant(ir.VectorType(ir.IntType(32), lanes), places))

    within = [rotate_lanes(lambda i, by=by: i - i % unit + (i + by) % unit) for by in range(unit)]
    for by in range(1, unit // 2 + 1):
        yield builder.xor(ids, within[by])
    for by in range(1, units // 2 + 1):
        other = rotate_lanes(lambda i, by=by: (i + by * unit) % slots)
        for own in within[: unit // 2 + 1 if 2 * by == units else unit]:
            yield builder.xor(own, other)


# -- rows of all layers, by slot --------------------------------------------------------------------------------------------


@_inline
def _write_head(words_H: Any, spans: int, end: Any, digests_L: Any, blank_W: Any, sizes: Any) -> int:
    """Write a frame's head and return the word at which it begins.

    `wire.header` and `wire.frame` describe the layout: header, spans, digests, table of stored chunks, zeros. At first the spans
    lie behind the header's room, each with its first row. This call moves the spans to where they stay; the last span ends at
    `end`. The header is `blank_W`, which has no rows, with the sizes of these.
    """
    rows, row_bytes, chunk_rows = sizes
    layers, chunks = digests_L.shape[0], -(-rows // chunk_rows)
    begin = words_H.shape[0] - (3 * spans + layers + (5 * chunks + 1) // 2)
    begin -= (begin + 1) % 2  # the header has 13 words, and chunks begin at a multiple of 16 bytes
    for span in range(spans - 1, -1, -1):
        own, to = _HEADER_WORDS + 3 * span, begin + 3 * span
        start = words_H[own]
        words_H[to + 2], words_H[to + 1] = words_H[own + 2], words_H[own + 1]
        words_H[to], end = start | np.uint64(end) << np.uint64(32), np.int64(start)
    rest_H = words_H[begin + 3 * spans :]
    rest_H[:layers], rest_H[layers:] = digests_L, np.uint64(0)
    table_C = rest_H[layers:].view(np.uint32)
    for chunk in range(chunks):
        at, height = 5 * chunk, min(chunk_rows, rows - chunk * chunk_rows)
        table_C[at], table_C[at + 1] = chunk * chunk_rows, height
        table_C[at + 2], table_C[at + 3] = layers << 16, height * row_bytes
    header_W = words_H[begin - _HEADER_WORDS : begin]
    header_W[:] = blank_W[:_HEADER_WORDS]
    header_W[6] = header_W[7] = rows * row_bytes
    header_C = header_W.view(np.uint32)
    header_C[7], header_C[8], header_C[9] = rows, end, chunks  # `end` is where the first span begins now
    header_C[10], header_C[11] = spans, 8 * (words_H.shape[0] - begin)
    return begin - _HEADER_WORDS


@lru_cache(maxsize=4)
def gather_frame(
    item_bytes: int, *, row_bytes: int, weights_at: int, weight_bytes: int, chunk_rows: int
) -> Loop:
    """Return a compiled loop that gathers rows of slots into a frame.

    The loop is f(bytes_SN, stamps_S, makers_M2, slots_T, coefficients_T, fixed_W, words_W, frame_N, payload, first_row,
    sample_key, room). It copies the rows into a frame that stores ids as they are, and writes the frame's head before the ids,
    but for the two hashes of its header. It returns where the frame begins, its spans and the oldest weight version; no head is
    written where `room` is for fewer spans. It raises IndexError for a slot that does not exist.

    bytes_SN        rows of slots: ids, and from `weights_at` on their weights
    makers_M2       of each stamp: weight version, kind
    coefficients_T  those of `wire.digest`; of no rows where no digest is asked for
    fixed_W         the header of a frame without rows; behind it the multipliers of `wire.digest`
    words_W         as in `row_sums`
    frame_N         room for the head; from `payload` on the ids of all rows; the weights of all rows, behind a header's room

    Args:
        item_bytes: Bytes of one item.
        row_bytes: Bytes of the ids of one row.
        weights_at: Offset of a row's weights in its slot, in bytes.
        weight_bytes: Bytes of the weights of one row.
        chunk_rows: Rows of a chunk at most.
    """
    items, block_rows = row_bytes // item_bytes, _GATHERED_ROWS
    item_of: Any = getattr(np, f"uint{8 * item_bytes}")

    def run(
        bytes_SN: Any, stamps_S: Any, makers_M2: Any, slots_T: Any, coefficients_T: Any, fixed_W: Any, words_W: Any,
        frame_N: Any, payload: int, first_row: int, sample_key: Any, room: int,
    ) -> tuple[int, int, int]:  # fmt: skip
        rows, spans, stamp, multipliers_I = slots_T.shape[0], 0, -1, fixed_W[_HEADER_WORDS:]
        layers = items // multipliers_I.shape[0]
        head_H, ids_N = frame_N[:payload].view(np.uint64), frame_N[payload:]
        source, target, step = bytes_SN.ctypes.data, ids_N.ctypes.data, bytes_SN.shape[1]
        behind, begin = target + rows * row_bytes + 8 * _HEADER_WORDS, 0
        newest, oldest = -1, 1 << 62
        items_N, sums_C = ids_N[: rows * row_bytes].view(item_of), words_W[layers:]
        sums_C[:] = np.uint64(0)
        for first in range(0, rows, block_rows):
            end = min(first + block_rows, rows)
            for row in range(first, end):
                slot = np.int64(slots_T[row])
                if not 0 <= slot < stamps_S.shape[0]:
                    raise IndexError("a slot that there is not")
                if stamps_S[slot] != stamp:
                    stamp, at = np.int64(stamps_S[slot]), _HEADER_WORDS + 3 * spans
                    version, spans = makers_M2[stamp, 0], spans + 1
                    newest, oldest = max(newest, version), min(oldest, version)
                    if spans <= room:
                        head_H[at], head_H[at + 1] = first_row + row, version
                        head_H[at + 2] = makers_M2[stamp, 1]
                _copy(target + row * row_bytes, source + slot * step, row_bytes, False)
                _copy(behind + row * weight_bytes, source + slot * step + weights_at, weight_bytes, False)
            _add_rows(items_N[first * items : end * items], coefficients_T[first:end], sums_C)
        _add_up(sums_C, coefficients_T, multipliers_I, words_W[:layers])
        if spans <= room:
            sizes = rows, row_bytes, chunk_rows
            begin = _write_head(head_H, spans, first_row + rows, words_W[:layers], fixed_W, sizes)
            head_H[begin + 8], head_H[begin + 9], head_H[begin + 10] = sample_key, newest, 0
        return 8 * begin, spans, oldest

    words, number, byte, own = _read_only(types.uint64), types.int64, types.uint8, types.uint64[::1]
    held = _read_only(byte, 2), _read_only(types.int16), _read_only(number, 2), _read_only(types.int32)
    filled, numbers = (own, byte[::1]), (number, number, types.uint64, number)
    return _jit(types.UniTuple(number, 3)(*held, words, words, *filled, *numbers))(run)


@lru_cache(maxsize=4)
def scatter_rows(row_bytes: int) -> Loop:
    """Return a compiled loop that copies rows to slots and stamps them.

    The loop is f(bytes_TN, slots_T, bytes_SN, stamps_S, stamp). Each row is contiguous. The loop raises IndexError for a slot
    that does not exist; the rows before that slot have been written.

    Args:
        row_bytes: Bytes of one row.
    """

    def run(bytes_TN: Any, slots_T: Any, bytes_SN: Any, stamps_S: Any, stamp: int) -> None:
        rows, source, target = slots_T.shape[0], bytes_TN.ctypes.data, bytes_SN.ctypes.data
        streamed, step = (target | row_bytes) % _LINE_BYTES == 0, bytes_TN.strides[0]
        for row in range(rows):
            slot = slots_T[row]
            if not 0 <= slot < stamps_S.shape[0]:
                raise IndexError("a slot that there is not")
            stamps_S[slot] = stamp
            own, to = source + row * step, target + slot * row_bytes
            if streamed:
                for at in range(0, row_bytes, _LINE_BYTES):
                    _copy(to + at, own + at, _LINE_BYTES, True)
            else:
                _copy(to, own, row_bytes, False)
        _fence()

    byte, slots = types.uint8, types.Array(types.int64, 1, "A", readonly=True)
    rows, all_rows = types.Array(byte, 2, "A", readonly=True), types.Array(byte, 2, "C")
    return _jit(types.void(rows, slots, all_rows, types.int16[::1], types.int64))(run)


# -- rows of one layer ------------------------------------------------------------------------------------------------------


@_inline
def _widen(ids_N: Any, wide_N: Any) -> None:
    for index in range(ids_N.shape[0]):
        at = np.uint64(index)
        wide_N[at] = ids_N[at]


@lru_cache(maxsize=4)
def column_sums(item_bytes: int, id_bytes: int, *, items: int) -> Loop:
    """Return a compiled loop that adds runs of rows to digests.

    The loop is f(items_RI, runs_N5, weights_PI, digests_S, words_RW). It adds each run of rows to the digest of the run's sample,
    and widens all ids. It returns False where a run lies outside of the arrays.

    runs_N5     sample, position of the first row, first row, rows between two of the run, rows; see `wire.digest.HostRuns`
    weights_PI  of each position and item: the coefficient times the multiplier
    words_RW    int32: no words, or one or two for each id, which are then that id as int32 or int64

    Args:
        item_bytes: Bytes of one item.
        id_bytes: Bytes of one id.
        items: Items of one row.
    """
    id_of: Any = {1: np.uint8, 2: np.int16}[id_bytes]

    def run(items_RI: Any, runs_N5: Any, weights_PI: Any, digests_S: Any, words_RW: Any) -> bool:
        items_N, weights_N = items_RI.reshape(-1), weights_PI.reshape(-1)
        ids_N, words_N = items_N.view(id_of), words_RW.reshape(-1)
        if words_N.shape[0] == ids_N.shape[0]:
            _widen(ids_N, words_N)
        elif words_N.shape[0] > 0:
            _widen(ids_N, words_N.view(np.int64))
        for number in range(runs_N5.shape[0]):
            sample, position, first = runs_N5[number, 0], runs_N5[number, 1], runs_N5[number, 2]
            step, rows = runs_N5[number, 3], runs_N5[number, 4]
            inside = 0 <= sample < digests_S.shape[0] and 0 <= position <= weights_PI.shape[0] - rows
            last = first + step * (rows - 1)  # an empty run's lies before its first
            if not inside or first < 0 or step < 1 or rows < 0 or last >= items_RI.shape[0]:
                return False
            total, weights_R = np.uint64(0), weights_N[position * items : (position + rows) * items]
            if step == 1:
                items_R = items_N[first * items : (first + rows) * items]
                for index in range(rows * items):
                    at = np.uint64(index)
                    total += (_mix(items_R[at]) + OFFSET) * weights_R[at]
            else:
                for row in range(rows):
                    for index in range(items):
                        item = items_N[np.uint64((first + row * step) * items + index)]
                        total += (_mix(item) + OFFSET) * weights_R[np.uint64(row * items + index)]
            digests_S[sample] += total
        return True

    rows, runs = _read_only(_item_type(item_bytes), 2), _read_only(types.int64, 2)
    weights, words = _read_only(types.uint64, 2), types.Array(types.int32, 2, "C")
    return _jit(types.boolean(rows, runs, weights, types.uint64[::1], words))(run)


# -- from rows of all layers to one layer after another ---------------------------------------------------------------------


@_inline
def _line_from(address: int, row: int, row_bytes: int) -> int:
    """Return the first row, from `row` on, in which a line begins."""
    return row + ((-(address + row * row_bytes)) & (_LINE_BYTES - 1)) // row_bytes


@lru_cache(maxsize=8)
def place_runs(item_bytes: int, *, items: int) -> Loop:
    """Return a compiled loop that places runs of rows by layer.

    The loop is f(items_TCI, runs_R8, sources_L, target_N, pads_EI, coefficients_P, multipliers_I, digests_SL, words_W). It checks
    nothing: rows, columns, places and positions must be within the arrays.

    items_TCI       rows of C source columns
    runs_R8         first row in T, rows to copy, rows in all, where the first row of the first layer goes in `target_N`, bytes
                    between layers, bytes between rows, position of the first row, sample
    sources_L       column of the source row that each target layer copies
    pads_EI         items of the row to write at position p, where there is none to copy: pads_EI[p % E]
    coefficients_P  those of `wire.digest`, of all positions
    digests_SL      [sample, target layer], added to: the digest of the rows that were copied
    words_W         as in `row_sums`

    Args:
        item_bytes: Bytes of one item.
        items: Items of one row of one layer.
    """
    row_bytes, block_rows = items * item_bytes, _BLOCK_ROWS
    scratch_bytes = (block_rows + _LINE_BYTES) * row_bytes + 2 * _LINE_BYTES

    def run(
        items_TCI: Any, runs_R8: Any, sources_L: Any, target_N: Any, pads_EI: Any, coefficients_P: Any, multipliers_I: Any,
        digests_SL: Any, words_W: Any,
    ) -> None:  # fmt: skip
        layers, columns, items_N = sources_L.shape[0], items_TCI.shape[1], items_TCI.reshape(-1)
        digests_C, sums_C, source_bytes = words_W[:columns], words_W[columns:], columns * row_bytes
        scratch = _stack(scratch_bytes)
        for number in range(runs_R8.shape[0]):
            source, real, length = runs_R8[number, 0], runs_R8[number, 1], runs_R8[number, 2]
            target, layer_bytes, step = runs_R8[number, 3], runs_R8[number, 4], runs_R8[number, 5]
            position, sample = runs_R8[number, 6], runs_R8[number, 7]
            target += target_N.ctypes.data
            streamed = step == row_bytes and real * row_bytes >= _STREAMED_BYTES and target % item_bytes == 0
            own_N = items_N[source * columns * items : (source + real) * columns * items]
            coefficients_T = coefficients_P[position : position + real]
            sums_C[:] = np.uint64(0)
            for first in range(0, real, block_rows):
                last = min(real, first + block_rows)
                width = columns * items
                _add_rows(own_N[first * width : last * width], coefficients_T[first:last], sums_C)
                for layer in range(layers):
                    to, begin, end = target + layer * layer_bytes, first, last
                    if streamed:  # whole lines: the next block's first rows belong to this one's last line
                        begin = min(real, _line_from(to, first, row_bytes)) if first > 0 else first
                        end = min(real, _line_from(to, last, row_bytes)) if last < real else real
                    column = own_N.ctypes.data + sources_L[layer] * row_bytes
                    to += begin * step
                    near = scratch + (to - scratch & (_LINE_BYTES - 1)) if streamed else to
                    for row in range(begin, end):
                        _copy(near + (row - begin) * step, column + row * source_bytes, row_bytes, False)
                    at, size = 0, (end - begin) * row_bytes if streamed else 0
                    while at < size:
                        if (to + at) % _LINE_BYTES == 0 and at + _LINE_BYTES <= size:
                            _copy(to + at, near + at, _LINE_BYTES, True)
                            at += _LINE_BYTES
                        else:
                            _copy(to + at, near + at, item_bytes, False)
                            at += item_bytes
            if real > 0:
                _add_up(sums_C, coefficients_T, multipliers_I, digests_C)
                for layer in range(layers):
                    digests_SL[sample, layer] += digests_C[sources_L[layer]]
            for row in range(real, length):
                pad = pads_EI.ctypes.data + (position + row) % pads_EI.shape[0] * row_bytes
                for layer in range(layers):
                    _copy(target + layer * layer_bytes + row * step, pad, row_bytes, False)
        _fence()

    word, number, item = types.uint64, types.int64, _item_type(item_bytes)
    arguments = (
        _read_only(item, 3), _read_only(number, 2), _read_only(number), types.uint8[::1], _read_only(item, 2),
        _read_only(word), _read_only(word), types.Array(word, 2, "C"), word[::1],
    )  # fmt: skip
    return _jit(types.void(*arguments))(run)


@_intrinsic
def _unpack(_typing: Any, low: Any, bits: Any, to: Any) -> Any:
    """Decode as many nine-bit ids as one instruction makes.

    The arguments are addresses: of the low bytes, of the ninth bits, and of the decoded ids.
    """
    count = _NINE_BITS_AT_ONCE
    ids, lows = (ir.VectorType(ir.IntType(bits), count) for bits in (16, 8))

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        def read(address: Any, kind: Any) -> Any:
            return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)

        ninth = builder.bitcast(read(values[1], ir.IntType(count)), ir.VectorType(ir.IntType(1), count))
        high = builder.shl(builder.zext(ninth, ids), ir.Constant(ids, [8] * count))
        whole = builder.or_(builder.zext(read(values[0], lows), ids), high)
        builder.store(whole, builder.inttoptr(values[2], ids.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@_jit(types.void(_read_only(types.uint8), _read_only(types.uint8), types.Array(types.int16, 1, "C")))
def unpack9(low_N: Ids, bits_B: Ids, out_N: Ids) -> None:
    """Decode nine-bit ids from low bytes and ninth bits.

    The second vector may begin within the first, so that from there on no vector is written across two cache lines.

    Args:
        low_N: The plane of low bytes; it need not be aligned.
        bits_B: The plane of ninth bits; it need not be aligned.
        out_N: int16, filled with the ids.
    """
    low, bits, out, ids = low_N.ctypes.data, bits_B.ctypes.data, out_N.ctypes.data, out_N.shape[0]
    at, aligned = 0, (-out & (_LINE_BYTES - 1)) // 2
    while at <= ids - _NINE_BITS_AT_ONCE:
        _unpack(low + at, bits + at // 8, out + 2 * at)
        at = aligned if at == 0 and aligned > 0 and aligned % 8 == 0 else at + _NINE_BITS_AT_ONCE
    for rest in range(at, ids):
        out_N[rest] = np.int16(low_N[rest]) | ((np.int16(bits_B[rest >> 3]) >> (rest & 7) & np.int16(1)) << 8)
