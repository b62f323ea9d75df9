"""Assignments: equal counts, balanced tokens, token budgets, optimizer steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3channel.errors import ConfigError, SampleTwice
from r3channel.plan.assignment import Assignment, karmarkar_karp


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=8), st.integers(1, 6))
def test_balanced_parts_have_equal_counts_and_beat_or_equal_the_trivial_bound(
    weights: list[int], parts: int
) -> None:
    items = {f"n{i}": w for i, w in enumerate(weights * parts)}
    result = karmarkar_karp(items, parts=parts)
    assert sorted(name for part in result for name in part) == sorted(items)
    assert {len(part) for part in result} == {len(weights)}
    sums = [sum(items[name] for name in part) for part in result]
    assert max(sums) - min(sums) <= max(weights)


def lognormal(count: int) -> dict[str, int]:
    rng = np.random.default_rng(0)
    return {f"s{i:03d}": int(n) for i, n in enumerate(rng.lognormal(7, 1, count))}


def test_balanced_is_better_than_round_robin_on_uneven_lengths() -> None:
    tokens = lognormal(64)

    def spread(assignment: Assignment) -> int:
        sums = [sum(tokens[s] for batch in rank for s in batch) for rank in assignment.ranks]
        return max(sums) - min(sums)

    fair = Assignment.balanced(tokens, dp=4, microbatch_size=4)
    assert spread(fair) < 0.1 * spread(Assignment.round_robin(sorted(tokens), dp=4, microbatch_size=4))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(50, 4000))
def test_dynamic_micro_batches_keep_the_budget_on_every_rank(
    seed: int, dp: int, steps: int, budget: int
) -> None:
    rng = np.random.default_rng(seed)
    tokens = {f"s{i}": int(n) for i, n in enumerate(rng.integers(2, 900, 4 * dp * steps))}
    assignment = Assignment.dynamic(tokens, dp=dp, max_tokens=budget, steps=steps)
    assert sorted(assignment.sample_ids) == sorted(tokens) and len(assignment.steps) == steps
    for rank in assignment.ranks:
        assert all(len(batch) == 1 or sum(tokens[s] for s in batch) <= budget for batch in rank)


def test_samples_of_an_optimizer_step_stay_in_it() -> None:
    tokens = lognormal(32)
    for assignment in (
        Assignment.balanced(tokens, dp=2, microbatch_size=4, steps=2),
        Assignment.dynamic(tokens, dp=2, max_tokens=8000, steps=2),
    ):
        first, second = assignment.optimizer_steps
        assert [*first, *second] == list(range(len(assignment.ranks[0])))
        names = {name for rank in assignment.ranks for index in first for name in rank[index]}
        assert names == set(list(tokens)[:16])


@pytest.mark.parametrize("ranks", [[[["a"]], [["b"], ["c"]]], [[["a"], []], [["b"], ["c"]]], []])
def test_assignments_with_uneven_or_empty_microbatches_are_refused(ranks: list) -> None:
    with pytest.raises(ConfigError):
        Assignment.given(ranks)


@pytest.mark.parametrize("steps", [[1], [3], [2, 0]])
def test_optimizer_steps_that_do_not_add_up_are_refused(steps: list[int]) -> None:
    with pytest.raises(ConfigError, match="optimizer steps"):
        Assignment.given([[["a"], ["b"]]], steps=steps)


def test_a_sample_assigned_twice_is_named() -> None:
    with pytest.raises(SampleTwice, match="'a'"):
        Assignment.given([[["a"]], [["a"]]])


def test_a_count_that_does_not_fill_the_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="5 samples do not fill 2 DP ranks"):
        Assignment.balanced({f"s{i}": 4 for i in range(5)}, dp=2, microbatch_size=2)
