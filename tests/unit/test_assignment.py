"""Assignments: equal counts, balanced tokens, token budgets, optimizer steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3channel.errors import ConfigError, SampleTwice
from r3channel.plan.assignment import Assignment, balance, longest_first


@settings(max_examples=50)
@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=8), st.integers(1, 6))
def test_balanced_parts_have_equal_counts_and_hold_the_trivial_bound(weights: list[int], parts: int) -> None:
    items = {f"n{i}": w for i, w in enumerate(weights * parts)}
    result = balance(items, parts=parts)
    assert sorted(name for part in result for name in part) == sorted(items)
    assert {len(part) for part in result} == {len(weights)}
    sums = [sum(items[name] for name in part) for part in result]
    assert max(sums) - min(sums) <= max(weights)


SHAPES = {
    "uniform": lambda rng, n: rng.integers(2, 32769, n),
    "log-normal, sigma 1": lambda rng, n: np.clip(np.exp(rng.normal(8, 1, n)), 2, 32768),
    "log-normal, sigma .5": lambda rng, n: np.clip(np.exp(rng.normal(8, 0.5, n)), 2, 32768),
    "one in ten at the limit": lambda rng, n: np.where(
        rng.random(n) < 0.1, 32768, rng.integers(200, 3000, n)
    ),
}


@pytest.mark.parametrize(("samples", "dp"), [(32, 8), (64, 8), (256, 16), (512, 64), (1024, 32)])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_rank_is_fuller_than_greedy_or_much_fuller_than_possible(
    shape: str, samples: int, dp: int
) -> None:
    for seed in range(5):
        lengths = [int(n) for n in SHAPES[shape](np.random.default_rng([seed, samples]), samples)]
        tokens = {f"s{i}": n for i, n in enumerate(lengths)}
        ranks = Assignment.balanced(tokens, dp=dp, microbatch_size=1).ranks
        fullest = max(sum(tokens[name] for (name,) in rank) for rank in ranks)
        parts = longest_first(falling := sorted(lengths, reverse=True), dp, most=samples // dp)
        greedy, bound = max(sum(falling[i] for i in part) for part in parts), max(*lengths, sum(lengths) / dp)
        assert fullest <= greedy and (fullest <= 1.05 * bound or greedy > 1.05 * bound)


@pytest.mark.parametrize(
    ("weights", "parts", "fullest"),
    [
        pytest.param([20, 16, 14, 12, 10, 7, 7, 7, 6, 6, 5, 3], 3, 38, id="longest-first would end at 39"),
        pytest.param([20, 20, 12, 10, 10, 9, 8, 6, 4, 4, 2, 1], 4, 27, id="a snake would end at 28"),
        pytest.param([16, 16, 13, 10, 9, 1], 2, 33, id="both begin with 35"),
    ],
)
def test_the_better_beginning_is_mended_by_exchanges(weights: list[int], parts: int, fullest: int) -> None:
    tokens = {f"s{i}": n for i, n in enumerate(weights)}
    assert max(sum(tokens[name] for name in part) for part in balance(tokens, parts=parts)) == fullest


@settings(max_examples=100)
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 8), st.sampled_from([9, 100, 10_000]))
def test_no_exchange_is_left_that_would_lower_the_fullest_part(
    seed: int, parts: int, count: int, most: int
) -> None:
    lengths = np.random.default_rng(seed).integers(1, most, parts * count)
    tokens = {f"s{i}": int(n) for i, n in enumerate(lengths)}
    ranks = [[tokens[name] for name in part] for part in balance(tokens, parts=parts)]
    sums = [sum(rank) for rank in ranks]
    full = sums.index(max(sums))
    left = [
        (mine, theirs)
        for rank, load in zip(ranks, sums, strict=True)
        for mine in ranks[full]
        for theirs in rank
        if max(sums[full] - mine + theirs, load + mine - theirs) < sums[full]
    ]
    assert not left or sums[full] <= 1.001 * sum(sums) / parts


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 8))
def test_balance_does_not_depend_on_the_order_of_samples(seed: int, parts: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    items = [(f"n{i}", int(n)) for i, n in enumerate(rng.integers(1, 20, parts * count))]
    shuffled = [items[index] for index in rng.permutation(len(items))]
    assert balance(dict(items), parts=parts) == balance(dict(shuffled), parts=parts)


def lognormal(count: int) -> dict[str, int]:
    rng = np.random.default_rng(0)
    return {f"s{i:03d}": int(n) for i, n in enumerate(rng.lognormal(7, 1, count))}


def test_samples_of_an_optimizer_step_stay_in_it() -> None:
    tokens = lognormal(32)
    for assignment in (
        Assignment.balanced(tokens, dp=2, microbatch_size=4, steps=2),
        Assignment.dynamic(tokens, dp=2, max_tokens=8000, steps=2),
    ):
        assert len(assignment.steps) == 2
        first, second = assignment.optimizer_steps
        assert [*first, *second] == list(range(len(assignment.ranks[0])))
        names = {name for rank in assignment.ranks for index in first for name in rank[index]}
        assert names == set(list(tokens)[:16])


@pytest.mark.parametrize(
    ("ranks", "steps"),
    [
        ([[["a"]], [["b"], ["c"]]], None), ([[["a"], []], [["b"], ["c"]]], None), ([], None),
        *(([[["a"], ["b"]]], steps) for steps in ([1], [3], [2, 0])),
    ],
)  # fmt: skip
def test_uneven_or_empty_microbatches_and_steps_that_do_not_add_up_are_refused(
    ranks: list, steps: Any
) -> None:
    with pytest.raises(ConfigError, match="optimizer steps" if steps else "micro-batch"):
        Assignment.given(ranks, steps=steps)


def test_a_count_that_does_not_fill_the_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="5 samples do not fill 2 DP ranks"):
        Assignment.balanced({f"s{i}": 4 for i in range(5)}, dp=2, microbatch_size=2)
    with pytest.raises(ConfigError, match="0 samples do not fill"):
        Assignment.dynamic({}, dp=1, max_tokens=10)


@pytest.mark.parametrize("sizes", [{"dp": -1, "microbatch_size": -1}, {"dp": 0, "microbatch_size": 1}])
def test_sizes_below_one_are_refused(sizes: dict[str, int]) -> None:
    """Two negative ones have a positive product."""
    for names in ([], ["a"]):
        with pytest.raises(ConfigError, match="at least 1 of each"):
            Assignment.round_robin(names, **sizes)
        with pytest.raises(ConfigError, match="at least 1 of each"):
            Assignment.balanced(dict.fromkeys(names, 4), **sizes)
        with pytest.raises(ConfigError, match="at least 1 of each"):
            Assignment.dynamic(dict.fromkeys(names, 4), dp=sizes["dp"], max_tokens=9, steps=sizes["dp"])
    with pytest.raises(ConfigError, match=r"a token budget of .* per micro-batch, expected at least 1"):
        Assignment.dynamic({"a": 4}, dp=1, max_tokens=sizes["dp"])


def test_all_samples_assigned_twice_are_carried_by_the_error_and_found_fast() -> None:
    """Quadratic work on so many names would outlast the test's time."""
    names = [f"s{i:06d}" for i in range(200_000)]
    with pytest.raises(SampleTwice, match="200000 samples") as refusal:
        Assignment.given([[names, names]])
    assert refusal.value.samples == tuple(names) and len(str(refusal.value)) < 200


@settings(max_examples=100)
@given(
    st.integers(0, 10**6), st.sampled_from([1, 2, 4]), st.integers(1, 24), st.sampled_from([300, 1000, 5000])
)
def test_dynamic_micro_batches_keep_the_budget_and_are_at_most_one_more(
    seed: int, dp: int, count: int, budget: int
) -> None:
    rng = np.random.default_rng(seed)
    tokens = {f"s{i}": int(n) for i, n in enumerate(np.clip(rng.lognormal(5, 1.2, dp * count), 2, 20000))}
    assignment = Assignment.dynamic(tokens, dp=dp, max_tokens=budget)
    ranks = assignment.ranks
    assert sorted(assignment.sample_ids) == sorted(tokens)
    assert all(len(b) == 1 or sum(tokens[name] for name in b) <= budget for rank in ranks for b in rank)
    needed = []
    for rank in ranks:
        lengths = [tokens[name] for batch in rank for name in batch]
        fit = [n for n in lengths if n <= budget]
        halves = sum(2 * n > budget for n in fit)
        needed.append(len(lengths) - len(fit) + max(halves, -(-sum(fit) // budget)))
    assert len(ranks[0]) <= max(needed) + 1


@pytest.mark.parametrize(
    ("lengths", "dp", "budget", "sums"),
    [
        pytest.param([6, 4, 3, 2, 1], 1, 10, [[8, 8]], id="even bins"),
        pytest.param([3, 3, 2, 2, 2], 1, 6, [[6, 6]], id="even bins are too full"),
        pytest.param([7, 6, 3, 2, 2], 1, 10, [[10, 10]], id="the fullest bin with room is taken"),
        pytest.param(
            [45, 30, *[15] * 18, *[10] * 15, 9], 2, 30,
            [[45, 30, 30, 30, 30, 30, 29, 20, 10], [30, 30, 30, 30, 30, 30, 30, 30, 10]],
            id="the first rank's bins are too few",
        ),
    ],
)  # fmt: skip
def test_a_ranks_micro_batches_are_even_where_that_needs_no_more(
    lengths: list[int], dp: int, budget: int, sums: list[list[int]]
) -> None:
    tokens = {f"s{i}": n for i, n in enumerate(lengths)}
    assignment = Assignment.dynamic(tokens, dp=dp, max_tokens=budget)
    found = [[sum(tokens[name] for name in batch) for batch in rank] for rank in assignment.ranks]
    assert sorted(assignment.sample_ids) == sorted(tokens) and [sorted(rank)[::-1] for rank in found] == sums


@pytest.mark.parametrize("make", ["balanced", "dynamic"])
def test_lengths_of_two_bytes_do_not_wrap(make: str) -> None:
    tokens = {f"s{i}": np.int16(n) for i, n in enumerate((30000, 30000, 20000, 2000))}
    sizes = {"balanced": {"microbatch_size": 2}, "dynamic": {"max_tokens": 40000}}[make]
    plain = {name: int(n) for name, n in tokens.items()}
    assert getattr(Assignment, make)(tokens, dp=1, **sizes) == getattr(Assignment, make)(plain, dp=1, **sizes)


@pytest.mark.parametrize("length", [0, -5, 2.5, "7", None, 1 << 50])
def test_lengths_that_no_sample_has_are_refused(length: object) -> None:
    with pytest.raises(ConfigError):
        Assignment.dynamic({"a": length}, dp=1, max_tokens=10)  # type: ignore[dict-item]
