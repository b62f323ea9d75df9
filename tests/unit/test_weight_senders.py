"""Who sends what: balanced by bytes, the same everywhere, within the bound."""

from __future__ import annotations

import heapq

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from r3channel.weights.plan import deal


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
