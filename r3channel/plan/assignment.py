"""Which samples, in which order and micro-batches, go to which DP rank. Knows lengths, not routing."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from r3channel.errors import ConfigError, SampleTwice

Microbatches = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """DP ranks -> micro-batches -> sample ids. Every rank has the same number of micro-batches, none empty.

    >>> Assignment.round_robin(["a", "b", "c", "d"], dp=2, microbatch_size=1).ranks
    ((('a',), ('c',)), (('b',), ('d',)))
    """

    ranks: tuple[Microbatches, ...]
    steps: tuple[int, ...] = ()
    """Micro-batches of each optimizer step, in order, on every DP rank; empty means one step of all."""

    def __post_init__(self) -> None:
        counts = {len(microbatches) for microbatches in self.ranks}
        if len(counts) != 1 or counts == {0}:
            raise ConfigError(
                f"micro-batches per DP rank are {[len(r) for r in self.ranks]}; expected the same number, at least 1"
            )
        if not all(samples for microbatches in self.ranks for samples in microbatches):
            raise ConfigError("an assignment holds an empty micro-batch")
        (count,) = counts
        if not self.steps:
            object.__setattr__(self, "steps", (count,))
        elif min(self.steps) < 1 or sum(self.steps) != count:
            raise ConfigError(f"optimizer steps of {self.steps} micro-batches; expected a sum of {count}")
        ids = self.sample_ids
        if len(set(ids)) != len(ids):
            raise SampleTwice(f"assigned more than once: {sorted({i for i in ids if ids.count(i) > 1})}")

    @property
    def dp(self) -> int:
        return len(self.ranks)

    @property
    def optimizer_steps(self) -> tuple[range, ...]:
        """Indices of the micro-batches of each optimizer step."""
        ends = list(accumulate(self.steps))
        return tuple(range(end - count, end) for end, count in zip(ends, self.steps, strict=True))

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """All samples, rank by rank and micro-batch by micro-batch."""
        return tuple(sample for rank in self.ranks for microbatch in rank for sample in microbatch)

    @classmethod
    def given(
        cls, ranks: Sequence[Sequence[Sequence[str]]], *, steps: Sequence[int] | None = None
    ) -> Assignment:
        """The caller's own choice: `ranks[dp][microbatch]` is a list of sample ids."""
        cut = tuple(tuple(tuple(microbatch) for microbatch in rank) for rank in ranks)
        return cls(cut, tuple(steps or ()))

    @classmethod
    def round_robin(
        cls, sample_ids: Sequence[str], *, dp: int, microbatch_size: int, steps: int = 1
    ) -> Assignment:
        """Sample i goes to rank i mod dp; order is kept within a rank."""
        _check_count(
            len(sample_ids), parts=dp * microbatch_size * steps, what=_what(dp, microbatch_size, steps)
        )
        ranks = tuple(_cut(sample_ids[rank::dp], microbatch_size) for rank in range(dp))
        return cls(ranks, (len(ranks[0]) // steps,) * steps)

    @classmethod
    def balanced(
        cls, tokens: Mapping[str, int], *, dp: int, microbatch_size: int, steps: int = 1
    ) -> Assignment:
        """Equal counts per rank and nearly equal tokens (Karmarkar-Karp differencing); similar lengths share a micro-batch.

        With several optimizer steps the samples are cut into steps in the order given, then each step is balanced.
        """
        _check_count(len(tokens), parts=dp * microbatch_size * steps, what=_what(dp, microbatch_size, steps))
        return cls._of_steps([
            [
                _cut(sorted(part, key=lambda s: (-tokens[s], s)), microbatch_size)
                for part in karmarkar_karp(share, parts=dp)
            ]
            for share in _shares(tokens, steps)
        ])  # fmt: skip

    @classmethod
    def dynamic(cls, tokens: Mapping[str, int], *, dp: int, max_tokens: int, steps: int = 1) -> Assignment:
        """Balanced over ranks; micro-batches of any number of samples with at most `max_tokens` tokens together.

        Every rank gets as many micro-batches as the fullest one needs. A sample longer than `max_tokens` is alone.
        """
        _check_count(len(tokens), parts=dp * steps, what=f"{dp} DP ranks in {steps} optimizer step(s)")
        if max_tokens < 1:
            raise ConfigError(f"a token budget of {max_tokens} per micro-batch, expected at least 1")
        return cls._of_steps([
            _budgeted([{name: share[name] for name in part} for part in karmarkar_karp(share, parts=dp)], max_tokens)
            for share in _shares(tokens, steps)
        ])  # fmt: skip

    @classmethod
    def _of_steps(cls, steps: Sequence[Sequence[Microbatches]]) -> Assignment:
        """From `steps[step][dp]`."""
        ranks = tuple(sum(parts, ()) for parts in zip(*steps, strict=True))
        return cls(ranks, tuple(len(step[0]) for step in steps))


def names_of(lengths: Sequence[int]) -> dict[str, int]:
    """Tokens by sample name for processes that exchanged nothing but lengths: the name is the place in the exchange.

    Every process that holds the same lengths in the same order then computes the same assignment and plan digest.
    """
    return {str(index): int(length) for index, length in enumerate(lengths)}


def _what(dp: int, microbatch_size: int, steps: int) -> str:
    return f"{dp} DP ranks with micro-batches of {microbatch_size} in {steps} optimizer step(s)"


def _check_count(samples: int, *, parts: int, what: str) -> None:
    if parts < 1:
        raise ConfigError(f"{what}: expected at least 1 of each")
    if samples == 0 or samples % parts:
        raise ConfigError(
            f"{samples} samples do not fill {what}; expected a multiple of {parts}. Trim the batch (and `discard` the rest) "
            "before sealing"
        )


def _shares(tokens: Mapping[str, int], steps: int) -> list[dict[str, int]]:
    names, size = list(tokens), len(tokens) // steps
    return [{name: tokens[name] for name in names[at : at + size]} for at in range(0, len(names), size)]


def _cut(sample_ids: Sequence[str], size: int) -> Microbatches:
    return tuple(tuple(sample_ids[i : i + size]) for i in range(0, len(sample_ids), size))


def _budgeted(parts: Sequence[Mapping[str, int]], max_tokens: int) -> list[Microbatches]:
    """The fewest micro-batches, the same number on every rank, that keep every rank's bins within the budget."""
    count = max(-(-sum(part.values()) // max_tokens) for part in parts)
    most = len(parts[0])
    while count < most and not all(
        _fits(bins, part, max_tokens) for part in parts for bins in [_bins(part, count)]
    ):
        count += 1
    return [_bins(part, min(count, most)) for part in parts]


def _fits(bins: Microbatches, tokens: Mapping[str, int], max_tokens: int) -> bool:
    return all(len(names) == 1 or sum(tokens[name] for name in names) <= max_tokens for names in bins)


def _bins(tokens: Mapping[str, int], count: int) -> Microbatches:
    """Longest first, each into the lightest bin; ties go by bin number. No bin is empty for count <= len(tokens)."""
    heap = [(0, index) for index in range(count)]
    bins: list[list[str]] = [[] for _ in range(count)]
    for name in sorted(tokens, key=lambda name: (-tokens[name], name)):
        load, index = heap[0]
        bins[index].append(name)
        heapq.heapreplace(heap, (load + tokens[name], index))
    return tuple(map(tuple, bins))


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
