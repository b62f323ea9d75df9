"""The digest and the check of ids: the definitions read a second time, and the same answer from every form of the loops."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from r3channel.errors import UsageError
from r3channel.wire import digest, mixing
from r3channel.wire.digest import (
    HostRuns,
    TorchRuns,
    check,
    coefficients,
    column_digests,
    column_digests_torch,
    fold,
    layer_digests,
    range_digests,
    sound,
    sound_rows,
)
from r3channel.wire.routing import Ids
from tests.support.loops import numba
from tests.support.samples import SPEC, random_ids, sparse

MASK = 2**64 - 1
GOLDEN_RATIO = 0x9E3779B97F4A7C15
SHAPES = [
    (128, 8), (256, 8), (200, 8), (384, 8), (512, 10), (128, 4), (60, 6), (64, 7), (40, 1), (256, 16), (512, 22), (300, 3),
]  # fmt: skip
"""(experts, top-k): items of every size, one and many to a row."""


def splitmix64(state: int) -> int:
    z = (state + GOLDEN_RATIO) & MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    return z ^ z >> 31


def row_word(row_K: Ids) -> int:
    data = row_K.astype(row_K.dtype.newbyteorder("<")).tobytes()
    size = next(size for size in (8, 4, 2, 1) if len(data) % size == 0)
    word = 0
    for j in range(len(data) // size):
        x = int.from_bytes(data[j * size : (j + 1) * size], "little")
        word += (splitmix64(2**64 - 1 - j) | 1 if j else 1) * ((x ^ x >> 32) + GOLDEN_RATIO)
    return word


def by_definition(ids_TLK: Ids, positions_T: list[int]) -> list[int]:
    return [
        sum((splitmix64(p) | 1) * row_word(ids_TLK[t, layer]) for t, p in enumerate(positions_T)) & MASK
        for layer in range(ids_TLK.shape[1])
    ]


@pytest.fixture(params=[True, False], ids=["compiled", "numpy"])
def form(request: pytest.FixtureRequest) -> Iterator[None]:
    with numba(request.param):
        yield


@pytest.mark.parametrize(("experts", "top_k"), SHAPES)
@pytest.mark.usefixtures("form")
def test_every_form_gives_what_the_definition_says(experts: int, top_k: int) -> None:
    ids, valid = random_ids(41, spec=sparse(3, experts=experts, top_k=top_k)), np.arange(41) % 5 != 2
    valid[20:25] = True
    wanted = by_definition(ids[valid], [7 + int(row) for row in np.flatnonzero(valid)])
    assert layer_digests(ids, first_row=7, valid_T=valid).tolist() == wanted
    sound, found = check(ids, num_experts=experts, first_row=7, valid_T=valid)
    assert sound and found.tolist() == wanted
    assert layer_digests(ids, first_row=7).tolist() == by_definition(ids, list(range(7, 48)))
    ids[3:] = 0  # unsound rows do not end the sum
    assert np.array_equal(check(ids, num_experts=experts, first_row=7)[1], layer_digests(ids, first_row=7))


@pytest.mark.parametrize(("experts", "top_k"), SHAPES)
@pytest.mark.usefixtures("form")
def test_a_router_s_rows_give_the_digest_of_their_sample(experts: int, top_k: int) -> None:
    spec = sparse(3, experts=experts, top_k=top_k)
    ids = random_ids(50, spec=spec)[:, 1]
    runs = np.array(
        [[0, 3, 0, 1, 10], [1, 0, 10, 2, 18], [2, 5, 11, 2, 15], [1, 40, 46, 1, 3], [0, 0, 0, 1, 0]]
    )
    wanted = [0, 0, 0]
    for sample, position, first, step, rows in runs.tolist():
        own, positions = ids[first : first + step * rows : step][:, None], [*range(position, position + rows)]
        wanted[sample] = (wanted[sample] + by_definition(own, positions)[0]) & MASK
    ids[49] = -1 if ids.dtype == np.int16 else 255  # nobody's row
    host = HostRuns.of(runs, samples=3, spec=spec)
    assert column_digests(ids, host).tolist() == wanted
    for wide in (np.full(ids.shape, -7, np.int32), np.full(ids.shape, -7, np.int64)):
        assert column_digests(ids, host, wide).tolist() == wanted and np.array_equal(wide, ids)
    with pytest.raises(UsageError, match="cannot be widened into int16"):
        column_digests(ids, host, ids.astype(np.int16))
    tensors = TorchRuns.of(runs, rows=50, samples=3, spec=spec, tensor=torch.from_numpy)
    shifted = torch.from_numpy(np.concatenate([ids.reshape(-1)[:1], ids.reshape(-1)]))[1:].view(50, top_k)
    for own in (torch.from_numpy(ids.copy()), shifted):
        assert column_digests_torch(own, tensors).numpy().view(np.uint64).tolist() == wanted


@pytest.mark.parametrize(
    "run", [[3, 0, 0, 1, 1], [-1, 0, 0, 1, 1], [0, -1, 0, 1, 1], [0, 0, 8, 1, 3], [0, 0, 0, 5, 3], [0, 0, 0, 0, 3]]
)  # fmt: skip
@pytest.mark.usefixtures("form")
def test_runs_outside_of_the_rows_are_refused(run: list[int]) -> None:
    with pytest.raises(UsageError, match="outside of 10 rows and 3 samples"):
        column_digests(random_ids(10)[:, 0], HostRuns.of(np.array([run]), samples=3, spec=SPEC))


@pytest.mark.usefixtures("form")
def test_any_split_of_the_rows_adds_up() -> None:
    ids = random_ids(300)
    whole = layer_digests(ids, first_row=1000)
    cuts = [0, *sorted(random.Random(1).sample(range(1, 300), 9)), 300]
    parts = [layer_digests(ids[a:b], first_row=1000 + a) for a, b in itertools.pairwise(cuts)]
    assert np.array_equal(sum(parts), whole)
    assert np.array_equal(range_digests([ids], np.array([1000]), np.array(cuts)), parts)
    joined = range_digests([ids[200:], ids[:200]], np.array([1200, 1000]), np.array([0, 100, 300]))
    assert np.array_equal(joined[0], layer_digests(ids[200:], first_row=1200))
    assert np.array_equal(joined.sum(axis=0), whole)


def test_coefficients_are_the_same_however_many_are_asked_for() -> None:
    for first, count in ((0, 3), (4090, 20), (100_000, 5), ((1 << 20) - 2, 4), (1 << 25, 2)):
        assert coefficients(first, count).tolist() == [splitmix64(first + i) | 1 for i in range(count)]
    with pytest.raises(ValueError, match="read-only"):
        coefficients(0, 4)[0] = 1
    assert len(mixing._coefficients) <= 1 << 20, "a position far beyond keeps no table"


def test_threads_that_ask_for_more_coefficients_at_once_get_the_same() -> None:
    start, found = threading.Barrier(8), []

    def ask(end: int) -> None:
        start.wait()
        found.append(int(coefficients(end - 1, 1)[0]) == splitmix64(end - 1) | 1)

    mixing._coefficients = mixing._coefficients[:16]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, [5000 << index for index in range(8)]))
    assert found == [True] * 8


def test_the_fold_tells_layers_apart() -> None:
    digests = layer_digests(random_ids(5, spec=SPEC), first_row=0)
    assert fold(digests) == fold(digests.copy()) != fold(digests[::-1])


# -- the check of ids: exact for every shape, at every place of a block ----------------------------------------------------


def judged(ids: np.ndarray, experts: int) -> np.ndarray:
    """[T, L]: by sorting."""
    ordered = np.sort(ids, axis=-1)
    repeats = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
    return ~repeats & (ordered[..., 0] >= 0) & (ordered[..., -1] < experts)


@pytest.mark.parametrize("slots", [2, 3, 7, 8, 9, 10, 22])
@pytest.mark.usefixtures("form")
def test_repeats_at_block_ends_are_found(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "_BLOCK_ROWS", 256)
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
@pytest.mark.usefixtures("form")
def test_every_slot_and_every_pair_is_checked_at_every_place(dtype: type, slots: int) -> None:
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
    shape=st.tuples(st.integers(0, 40) | st.just(300), st.integers(1, 4), st.sampled_from([1, 6, 8, 9, 10])),
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
        found = check(ids, num_experts=experts, first_row=0, valid_T=valid)
        ids[~valid] = np.iinfo(dtype).max
        again = check(ids, num_experts=experts, first_row=0, valid_T=valid)
    assert found[0] is again[0] is bool(good_TL[valid].all()) and np.array_equal(found[1], again[1])


@pytest.mark.usefixtures("form")
def test_read_only_and_unaligned_ids_are_checked() -> None:
    data = b"x" + np.tile(np.arange(8, dtype=np.int16), 5000).tobytes()
    ids = np.frombuffer(memoryview(data)[1:], np.int16).reshape(-1, 1, 8)
    assert sound_rows(ids, num_experts=300).all() and not sound_rows(ids, num_experts=7).any()
    assert sound(ids, num_experts=300) and not sound(ids, num_experts=7)
    bytes8 = np.frombuffer(memoryview(b"x" + bytes(range(8)))[1:], np.uint8).reshape(1, 1, 8)
    assert sound(bytes8, num_experts=8) and not sound(bytes8, num_experts=7)
