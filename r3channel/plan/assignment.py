"""Which samples, in which order and micro-batches, go to which DP rank. Knows lengths, not routing."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from r3channel.errors import ConfigError, SampleTwice

Microbatches = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """DP ranks -> micro-batches -> sample ids. Every rank has the same number of micro-batches, none empty.

    >>> Assignment.round_robin(["a", "b", "c", "d"], dp=2, microbatch_size=1).ranks
    ((('a',), ('c',)), (('b',), ('d',)))
    """

    ranks: tuple[Microbatches, ...]

    def __post_init__(self) -> None:
        counts = {len(microbatches) for microbatches in self.ranks}
        if len(counts) != 1 or counts == {0}:
            raise ConfigError(
                f"micro-batches per DP rank are {[len(r) for r in self.ranks]}; expected the same number, at least 1"
            )
        if not all(samples for microbatches in self.ranks for samples in microbatches):
            raise ConfigError("an assignment holds an empty micro-batch")
        ids = self.sample_ids
        if len(set(ids)) != len(ids):
            raise SampleTwice(f"assigned more than once: {sorted({i for i in ids if ids.count(i) > 1})}")

    @property
    def dp(self) -> int:
        return len(self.ranks)

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """All samples, rank by rank and micro-batch by micro-batch."""
        return tuple(sample for rank in self.ranks for microbatch in rank for sample in microbatch)

    @classmethod
    def given(cls, ranks: Sequence[Sequence[Sequence[str]]]) -> Assignment:
        """The caller's own choice: `ranks[dp][microbatch]` is a list of sample ids."""
        return cls(tuple(tuple(tuple(microbatch) for microbatch in rank) for rank in ranks))

    @classmethod
    def round_robin(cls, sample_ids: Sequence[str], *, dp: int, microbatch_size: int) -> Assignment:
        """Sample i goes to rank i mod dp; order is kept within a rank."""
        _check_count(len(sample_ids), dp=dp, microbatch_size=microbatch_size)
        return cls(tuple(_cut(sample_ids[rank::dp], microbatch_size) for rank in range(dp)))

    @classmethod
    def balanced(cls, tokens: Mapping[str, int], *, dp: int, microbatch_size: int) -> Assignment:
        """Equal counts per rank and nearly equal tokens (Karmarkar-Karp differencing); similar lengths share a micro-batch."""
        _check_count(len(tokens), dp=dp, microbatch_size=microbatch_size)
        parts = karmarkar_karp(tokens, parts=dp)
        return cls(
            tuple(_cut(sorted(part, key=lambda s: (-tokens[s], s)), microbatch_size) for part in parts)
        )


def _check_count(samples: int, *, dp: int, microbatch_size: int) -> None:
    if samples == 0 or samples % (dp * microbatch_size):
        raise ConfigError(
            f"{samples} samples do not fill {dp} DP ranks with micro-batches of {microbatch_size}; expected a multiple of "
            f"{dp * microbatch_size}. Trim the batch (and `discard` the rest) before sealing"
        )


def _cut(sample_ids: Sequence[str], size: int) -> Microbatches:
    return tuple(tuple(sample_ids[i : i + size]) for i in range(0, len(sample_ids), size))


def karmarkar_karp(weights: Mapping[str, int], *, parts: int) -> list[list[str]]:
    """Split into `parts` lists of equal count with nearly equal sums; len(weights) must be a multiple of `parts`.

    Largest differencing method of Karmarkar and Karp (1982) in its multi-way form: each state is one group of `parts` items,
    one per part; the two states with the largest spread are merged, heaviest part onto lightest. Ties go by name, so every
    process computes the same answer.

    >>> karmarkar_karp({"a": 8, "b": 7, "c": 2, "d": 1}, parts=2)
    [['a', 'd'], ['b', 'c']]
    """
    if not weights or len(weights) % parts:
        raise ConfigError(f"{len(weights)} items do not divide into {parts} parts of equal count")
    order = sorted(weights, key=lambda name: (-weights[name], name))
    heap: list[tuple[int, int, list[tuple[int, list[str]]]]] = []
    for index in range(0, len(order), parts):
        group = [(weights[name], [name]) for name in order[index : index + parts]]
        heap.append((group[-1][0] - group[0][0], index, group))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, index, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], index, merged))
    return [sorted(names) for _, names in heap[0][2]]
