"""The check of ids: exact for every shape, at every place of a block."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3channel.wire import validate as distinct
from r3channel.wire.validate import checked, sound, sound_rows
from tests.support.loops import numba


def judged(ids: np.ndarray, experts: int) -> np.ndarray:
    """[T, L]: by sorting."""
    ordered = np.sort(ids, axis=-1)
    repeats = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
    return ~repeats & (ordered[..., 0] >= 0) & (ordered[..., -1] < experts)


@pytest.fixture(params=[True, False], ids=["compiled", "numpy"])
def compiled(request: pytest.FixtureRequest) -> Iterator[bool]:
    with numba(request.param):
        yield request.param


@pytest.mark.parametrize("slots", [2, 3, 7, 8, 9, 10, 22])
def test_repeats_at_block_ends_are_found(slots: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distinct, "_BLOCK_ROWS", 256)
    for rows in (255, 256, 257, 513):
        ids = np.random.default_rng(rows).permuted(np.tile(np.arange(32, dtype=np.uint8), (rows, 1)), axis=1)[
            :, None, :slots
        ]
        assert sound_rows(ids, num_experts=32).all() and sound(ids, num_experts=32)
        for row in {0, 1, 254, rows // 2, rows - 2, rows - 1}:
            keep = ids[row, 0, -1]
            ids[row, 0, -1] = ids[row, 0, 0]
            assert np.flatnonzero(~sound_rows(ids, num_experts=32)).tolist() == [row], rows
            assert not sound(ids, num_experts=32), (rows, row)
            ids[row, 0, -1] = keep


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
@pytest.mark.parametrize("slots", [*range(1, 17), 22, 40])
def test_every_slot_and_every_pair_is_checked_at_every_place(dtype: type, slots: int, compiled: bool) -> None:
    """More lines than several vectors hold, and an odd number of them: the last ones are compared id by id."""
    edges = {np.uint8: (100, 128, 255, 256), np.int16: (257, 384, 511, 512, 32767)}[dtype]
    for row, (a, b) in enumerate(itertools.combinations_with_replacement(range(slots), 2)):
        for experts in edges if a == b else edges[row % 4 : row % 4 + 1]:
            ids = np.arange(experts - slots, experts, dtype=dtype)[None, None].repeat(149, axis=0)
            assert a < b or sound(ids, num_experts=experts)
            ends = {experts, np.iinfo(dtype).max, np.iinfo(dtype).min} - {*range(experts), 256}
            for value in ends if a == b else [ids[0, 0, b]]:
                ids[row * 7 % 149, 0, a] = value
                assert not sound(ids, num_experts=experts), (a, b, value)


@settings(max_examples=300)
@given(
    shape=st.tuples(st.integers(0, 40) | st.just(3000), st.integers(1, 4), st.sampled_from([1, 6, 8, 9, 10])),
    kind=st.sampled_from(
        [(np.uint8, 10), (np.uint8, 128), (np.uint8, 160), (np.uint8, 256), (np.int16, 300)]
    ),
    seed=st.integers(0, 2**31),
    there=st.booleans(),
)
def test_sorting_agrees(shape: tuple[int, int, int], kind: tuple[type, int], seed: int, there: bool) -> None:
    """`there`: numba is. Rows that are not valid are not judged, and count for no digest."""
    dtype, experts = kind
    rng = np.random.default_rng(seed)
    order = rng.random((*shape[:2], max(experts, shape[2]))).argsort(axis=-1)
    ids = order[..., : shape[2]].astype(dtype)
    if ids.size and seed % 2:
        ids[tuple(rng.integers(size) for size in shape)] = rng.integers(0, np.iinfo(dtype).max + 1)
    valid = rng.random(shape[0]) < 0.8 if seed % 3 else np.ones(shape[0], bool)
    good_TL = judged(ids, experts)
    with numba(there):
        assert np.array_equal(sound_rows(ids, num_experts=experts), good_TL)
        assert sound(ids, num_experts=experts, valid_T=valid) is bool(good_TL[valid].all())
        found = checked(ids, num_experts=experts, first_row=0, valid_T=valid)
        ids[~valid] = np.iinfo(dtype).max
        again = checked(ids, num_experts=experts, first_row=0, valid_T=valid)
    assert found[0] is again[0] is bool(good_TL[valid].all()) and np.array_equal(found[1], again[1])


def test_read_only_and_unaligned_ids_are_checked(compiled: bool) -> None:
    data = b"x" + np.tile(np.arange(8, dtype=np.int16), 5000).tobytes()
    ids = np.frombuffer(memoryview(data)[1:], np.int16).reshape(-1, 1, 8)
    assert sound_rows(ids, num_experts=300).all() and not sound_rows(ids, num_experts=7).any()
    assert sound(ids, num_experts=300) and not sound(ids, num_experts=7)
    bytes8 = np.frombuffer(memoryview(b"x" + bytes(range(8)))[1:], np.uint8).reshape(1, 1, 8)
    assert sound(bytes8, num_experts=8) and not sound(bytes8, num_experts=7)
