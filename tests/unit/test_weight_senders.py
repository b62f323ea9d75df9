"""Who sends what: balanced by bytes, the same everywhere, within the bound."""

from __future__ import annotations

import heapq
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3channel.errors import PlanInvalid
from r3channel.weights.senders import Item, deal, sender_table


def one_by_one(loads: dict[int, int], count: int, nbytes: int) -> list[int]:
    """The rule itself: a heap of (bytes, rank)."""
    heap = [(held, rank) for rank, held in loads.items()]
    heapq.heapify(heap)
    chosen = []
    for _ in range(count):
        held, rank = heap[0]
        heapq.heapreplace(heap, (held + nbytes, rank))
        chosen.append(rank)
    return chosen


@given(
    st.dictionaries(st.integers(0, 30), st.integers(0, 200), min_size=1, max_size=12),
    st.integers(1, 60),
    st.integers(1, 90),
)
def test_dealing_at_once_equals_dealing_one_by_one(loads: dict[int, int], count: int, nbytes: int) -> None:
    loads = dict(sorted(loads.items()))
    loads_R = np.zeros(31, dtype=np.int64)
    loads_R[list(loads)] = list(loads.values())
    senders = deal(loads_R, np.array(list(loads)), count=count, nbytes=nbytes)
    assert senders.tolist() == one_by_one(loads, count, nbytes)
    assert {rank: int(loads_R[rank]) for rank in loads} == {
        rank: held + nbytes * senders.tolist().count(rank) for rank, held in loads.items()
    }


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=200), st.integers(1, 40))
def test_free_holders_stay_within_the_mean_plus_the_largest_item(sizes: list[int], senders: int) -> None:
    ranks = tuple(range(senders))
    table = sender_table(Item(str(i), nbytes, ranks) for i, nbytes in enumerate(sizes))
    assert table.busiest_bytes <= table.mean_bytes + table.largest_bytes
    assert sum(table.bytes_of.values()) == sum(sizes) and len(table.sender_of) == len(sizes)


def test_uccl_greedy_byte_balanced_table_beats_first_come_under_restricted_holders() -> None:
    """32 senders, 400 (parameter, receiver) items of 4 holders each: the published rule takes them as they come."""
    rng = random.Random(5)
    items = [
        Item(f"p{i}", rng.choice((1, 3, 9, 40)) << 20, tuple(rng.sample(range(32), 4))) for i in range(400)
    ]
    first_come = dict.fromkeys(range(32), 0)
    for item in items:
        first_come[min(item.holders, key=lambda rank: (first_come[rank], rank))] += item.nbytes
    table = sender_table(items)
    assert all(table.sender_of[item.name] in item.holders for item in items)
    assert table.floor_bytes <= table.busiest_bytes < max(first_come.values())
    assert table.imbalance < 1.2


def test_the_table_does_not_depend_on_the_order_of_the_items() -> None:
    items = [Item(f"p{i}", 10 + i % 3, (i % 4, 4)) for i in range(50)]
    assert sender_table(items) == sender_table(reversed(items))


def test_the_floor_sees_a_group_that_holds_more_than_its_part() -> None:
    table = sender_table([Item("a", 100, (0,)), Item("b", 10, (0, 1)), Item("c", 10, (1,))])
    assert table.floor_bytes == 100 and table.busiest_bytes == 100


def test_an_item_that_nobody_holds_is_refused_by_name() -> None:
    with pytest.raises(PlanInvalid, match=r"model\.norm.*held by no sender"):
        sender_table([Item("model.norm", 8, ())])


def test_an_item_given_twice_is_refused() -> None:
    with pytest.raises(PlanInvalid, match="twice"):
        sender_table([Item("w", 8, (0,)), Item("w", 8, (1,))])
