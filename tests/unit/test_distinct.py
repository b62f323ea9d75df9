"""The check of ids: exact for every shape, at every place of a block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3channel import distinct
from r3channel.distinct import find_duplicate, out_of_range


def first_by_sorting(ids: np.ndarray) -> tuple[int, int] | None:
    ordered = np.sort(ids, axis=-1)
    bad = np.argwhere((ordered[..., 1:] == ordered[..., :-1]).any(axis=-1))
    return (int(bad[0][0]), int(bad[0][1])) if len(bad) else None


@settings(max_examples=300, deadline=None)
@given(
    rows=st.integers(0, 40),
    layers=st.integers(1, 4),
    slots=st.integers(1, 12),
    dtype=st.sampled_from([np.uint8, np.int16]),
    experts=st.sampled_from([12, 60, 256]),
    seed=st.integers(0, 2**31),
)
def test_the_first_repeat_is_the_one_that_sorting_finds(
    rows: int, layers: int, slots: int, dtype: type, experts: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.random((rows, layers, experts)).argsort(axis=-1)[..., :slots].astype(dtype)
    assert find_duplicate(ids) is None
    if rows:
        ids[rng.integers(rows), rng.integers(layers), :] = rng.integers(0, experts, slots)
    assert find_duplicate(ids) == first_by_sorting(ids)


@pytest.mark.parametrize("slots", [2, 3, 8, 10, 22])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_repeat_is_found_at_the_edges_of_blocks(
    slots: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distinct, "_BLOCK_ROWS", 256)
    if not compiled:
        monkeypatch.setattr(distinct, "_word_search", lambda: None)
    for rows in (255, 256, 257, 513):
        ids = np.random.default_rng(rows).permuted(np.tile(np.arange(32, dtype=np.uint8), (rows, 1)), axis=1)[
            :, None, :slots
        ]
        assert find_duplicate(ids) is None
        for row in {0, 1, 254, rows // 2, rows - 2, rows - 1}:
            keep = ids[row, 0, -1]
            ids[row, 0, -1] = ids[row, 0, 0]
            assert find_duplicate(ids) == (row, 0), (rows, row)
            ids[row, 0, -1] = keep


def test_every_pair_of_slots_is_compared() -> None:
    assert distinct._word_search() is not None, "numba is part of the locked environment"
    for a in range(8):
        for b in range(a):
            ids = np.arange(8, dtype=np.uint8)[None, None] + np.uint8(248)
            ids[0, 0, a] = ids[0, 0, b]
            assert find_duplicate(ids) == (0, 0), (a, b)


def test_equal_ids_of_neighbouring_rows_are_no_repeat() -> None:
    ids = np.tile(np.array([[[7, 1, 2]], [[2, 1, 7]]], np.uint8), (3000, 1, 1))
    assert find_duplicate(ids) is None


def test_read_only_and_unaligned_ids_are_checked() -> None:
    data = b"x" + np.tile(np.arange(8, dtype=np.int16), 5000).tobytes()
    ids = np.frombuffer(memoryview(data)[1:], np.int16).reshape(-1, 1, 8)
    assert find_duplicate(ids) is None and not out_of_range(ids, num_experts=300)


@pytest.mark.parametrize(
    ("value", "dtype", "experts", "bad"),
    [(127, np.uint8, 128, False), (128, np.uint8, 128, True), (255, np.uint8, 256, False), (-1, np.int16, 300, True),
     (299, np.int16, 300, False), (300, np.int16, 300, True)],
)  # fmt: skip
def test_an_id_out_of_range_is_found(value: int, dtype: type, experts: int, bad: bool) -> None:
    ids = np.array([[[1, value]]], dtype)
    assert out_of_range(ids, num_experts=experts) is bad
