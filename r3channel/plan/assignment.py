"""Which samples, in which order and micro-batches, go to which DP rank. Knows lengths, not routing."""

from __future__ import annotations

import heapq
import operator
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

import numpy as np

from r3channel.errors import ConfigError, SampleTwice
from r3channel.typed import check_types

Microbatches = tuple[tuple[str, ...], ...]
Ints = np.ndarray[Any, np.dtype[np.int64]]

_ENOUGH = 0.001
"""A part that exceeds the mean by less than this share is not worth an exchange."""
_SWAPS, _SWAPPED_ITEMS = 256, 1 << 19
"""The most exchanges, and the most items that all exchanges look at together: about 60 ms."""
_LONGEST = 1 << 40
"""Tokens of one sample; sums of millions of them still fit 64 bits."""


@dataclass(frozen=True)
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
        if not all(map(all, self.ranks)):
            raise ConfigError("an assignment holds an empty micro-batch")
        (count,) = counts
        object.__setattr__(self, "steps", tuple(map(int, self.steps)) or (count,))
        if min(self.steps) < 1 or sum(self.steps) != count:
            raise ConfigError(f"optimizer steps of {self.steps} micro-batches; expected a sum of {count}")
        ids = self.sample_ids
        if len(set(ids)) != len(ids):
            twice = sorted(name for name, times in Counter(ids).items() if times > 1)
            raise SampleTwice(f"{len(twice)} samples assigned more than once: {twice[:5]}", samples=twice)

    @property
    def dp(self) -> int:
        return len(self.ranks)

    @property
    def optimizer_steps(self) -> tuple[range, ...]:
        """Return the indices of the micro-batches of each optimizer step."""
        ends = list(accumulate(self.steps))
        return tuple(range(end - count, end) for end, count in zip(ends, self.steps, strict=True))

    @cached_property
    def sample_ids(self) -> tuple[str, ...]:
        """Return all samples, rank by rank and micro-batch by micro-batch."""
        return tuple(chain.from_iterable(chain.from_iterable(self.ranks)))

    @classmethod
    @check_types
    def given(
        cls, ranks: Sequence[Sequence[Sequence[str]]], *, steps: Sequence[int] | None = None
    ) -> Assignment:
        """Return the assignment that the caller chose.

        Args:
            ranks: `ranks[dp][microbatch]` is a list of sample ids.
            steps: Micro-batches of each optimizer step; None means one step of all.
        """
        cut = tuple(tuple(tuple(microbatch) for microbatch in rank) for rank in ranks)
        return cls(cut, () if steps is None else tuple(steps))

    @classmethod
    @check_types
    def round_robin(
        cls, sample_ids: Sequence[str], *, dp: int, microbatch_size: int, steps: int = 1
    ) -> Assignment:
        """Assign sample i to rank i mod dp, keeping a rank's order.

        Args:
            sample_ids: All samples.
            dp: The number of DP ranks.
            microbatch_size: Samples of each micro-batch.
            steps: The number of optimizer steps.

        Raises:
            ConfigError: The samples do not divide evenly.
        """
        _check_count(len(sample_ids), dp=dp, microbatch_size=microbatch_size, steps=steps)
        ranks = tuple(_cut(sample_ids[rank::dp], microbatch_size) for rank in range(dp))
        return cls(ranks, (len(ranks[0]) // steps,) * steps)

    @classmethod
    @check_types
    def balanced(
        cls, tokens: Mapping[str, int], *, dp: int, microbatch_size: int, steps: int = 1
    ) -> Assignment:
        """Assign equal counts and nearly equal tokens to each rank.

        Samples of similar lengths share a micro-batch; `balance` makes the ranks. With several optimizer steps the samples are
        cut into steps in the order given, then each step is balanced.

        Args:
            tokens: Tokens of each sample, by name.
            dp: The number of DP ranks.
            microbatch_size: Samples of each micro-batch.
            steps: The number of optimizer steps.

        Raises:
            ConfigError: The samples do not divide evenly, or a length is not a positive whole number.
        """
        lengths = checked_lengths(tokens)
        _check_count(len(lengths), dp=dp, microbatch_size=microbatch_size, steps=steps)
        return cls._of_steps([
            [_cut(part, microbatch_size) for part in balance(share, parts=dp)] for share in _shares(lengths, steps)
        ])  # fmt: skip

    @classmethod
    @check_types
    def dynamic(cls, tokens: Mapping[str, int], *, dp: int, max_tokens: int, steps: int = 1) -> Assignment:
        """Assign balanced ranks, and cut micro-batches by a token budget.

        A micro-batch has any number of samples. Every rank gets as many micro-batches as the fullest rank needs. A sample longer
        than `max_tokens` is alone.

        Args:
            tokens: Tokens of each sample, by name.
            dp: The number of DP ranks.
            max_tokens: The most tokens of all samples of a micro-batch together.
            steps: The number of optimizer steps.

        Raises:
            ConfigError: The samples do not divide evenly, a length is not a positive whole number, or the budget is below 1.
        """
        lengths = checked_lengths(tokens)
        _check_count(len(lengths), dp=dp, steps=steps)
        if max_tokens < 1:
            raise ConfigError(f"a token budget of {max_tokens} per micro-batch, expected at least 1")
        return cls._of_steps([
            _cut_by_budget([{name: share[name] for name in part} for part in balance(share, parts=dp)], int(max_tokens))
            for share in _shares(lengths, steps)
        ])  # fmt: skip

    @classmethod
    def _of_steps(cls, steps: Sequence[Sequence[Microbatches]]) -> Assignment:
        # `steps[step][dp]`
        ranks = tuple(tuple(chain.from_iterable(parts)) for parts in zip(*steps, strict=True))
        return cls(ranks, tuple(len(step[0]) for step in steps))


def names_of(lengths: Sequence[int]) -> dict[str, int]:
    """Return tokens by sample name, for samples that have no names.

    This serves processes that exchanged nothing but lengths: a sample's name is its place in the exchange. Every process that
    holds the same lengths in the same order then computes the same assignment and plan digest.

    Args:
        lengths: Tokens of each sample.
    """
    return {str(index): int(length) for index, length in enumerate(lengths)}


def checked_lengths(tokens: Mapping[str, int]) -> dict[str, int]:
    """Return the lengths as plain integers.

    Sums of numpy's int16 would wrap.

    Args:
        tokens: Tokens of each sample, by name.

    Raises:
        ConfigError: A length is no whole number, is below 1, or is too large.
    """
    try:
        lengths = dict(zip(tokens, map(operator.index, tokens.values()), strict=True))
    except TypeError as error:
        raise ConfigError(f"a number of tokens is no whole number: {error}") from error
    wrong = [name for name, length in lengths.items() if not 0 < length <= _LONGEST]
    if wrong:
        raise ConfigError(
            f"{len(wrong)} samples have no or too many tokens: {[(name, lengths[name]) for name in wrong[:5]]}",
            samples=wrong,
        )
    return lengths


def _check_count(samples: int, *, dp: int, steps: int, microbatch_size: int = 1) -> None:
    what = f"{dp} DP ranks with micro-batches of {microbatch_size} in {steps} optimizer step(s)"
    parts = dp * microbatch_size * steps
    if min(dp, microbatch_size, steps) < 1:
        raise ConfigError(f"{what}: expected at least 1 of each")
    if samples == 0 or samples % parts:
        raise ConfigError(
            f"{samples} samples do not fill {what}; expected a multiple of {parts}. Trim the batch (and `discard` the rest) "
            "before sealing"
        )


def _shares(tokens: Mapping[str, int], steps: int) -> list[dict[str, int]]:
    items, size = list(tokens.items()), len(tokens) // steps
    return [dict(items[at : at + size]) for at in range(0, len(items), size)]


def _cut(sample_ids: Sequence[str], size: int) -> Microbatches:
    return tuple(tuple(sample_ids[i : i + size]) for i in range(0, len(sample_ids), size))


# -- equal counts, nearly equal sums -----------------------------------------------------------------------------------


def balance(weights: Mapping[str, int], *, parts: int) -> list[list[str]]:
    """Split names into lists of equal count and nearly equal sums.

    Each list has its heaviest name first. The result is the better of longest-first and of a snake (dealt out to the parts there
    and back), improved by exchanges between the fullest part and the others. A snake wins on few even lengths, longest-first on
    lengths with a long tail. Ties go by name and number, so every process computes the same answer.

    Args:
        weights: The weight of each name; `len(weights)` must be a multiple of `parts`.
        parts: The number of lists.

    Raises:
        ConfigError: The names do not divide into the parts.

    >>> balance({"a": 8, "b": 7, "c": 2, "d": 1}, parts=2)
    [['a', 'd'], ['b', 'c']]
    """
    if not weights or parts < 1 or len(weights) % parts:
        raise ConfigError(f"{len(weights)} items do not divide into {parts} parts of equal count")
    names = sorted(weights, key=lambda name: (-weights[name], name))
    weights_S = np.asarray([weights[name] for name in names], np.int64)
    if parts == 1:
        return [names]
    longest_PC = np.asarray(longest_first(weights_S.tolist(), parts, most=len(names) // parts))
    snake_CP = np.arange(len(names)).reshape(-1, parts)
    snake_CP[1::2] = snake_CP[1::2, ::-1]
    best_PC = min(longest_PC, snake_CP.T, key=lambda index_PC: int(weights_S[index_PC].sum(axis=1).max()))
    exchange(weights_S, best_PC)
    return [[names[index] for index in part] for part in np.sort(best_PC, axis=1).tolist()]


def longest_first(weights: Sequence[int], parts: int, *, most: int) -> list[list[int]]:
    """Place each item in the lightest part that has room.

    Ties go by number. No part is empty where there are as many items.

    Args:
        weights: Weights, descending.
        parts: The number of parts.
        most: The most items of a part.

    Returns:
        Indices into `weights`, a list for each part.
    """
    found: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, part) for part in range(parts)]
    for index, weight in enumerate(weights):
        load, part = heap[0]
        found[part].append(index)
        if len(found[part]) < most:
            heapq.heapreplace(heap, (load + weight, part))
        else:
            heapq.heappop(heap)
    return found


def exchange(weights_S: Ints, index_PC: Ints) -> None:
    """Exchange items of the fullest part for lighter ones of other parts.

    This goes on while an exchange lowers the larger of both sums, up to a bound.

    Args:
        weights_S: Weights of all items.
        index_PC: [parts, count] indices into `weights_S`, changed in place.
    """
    sums = weights_S[index_PC].sum(axis=1)
    enough = int(sums.sum()) // len(sums) * (1 + _ENOUGH)
    for _ in range(min(_SWAPS, _SWAPPED_ITEMS // len(weights_S))):
        full = int(sums.argmax())
        swap = _best_swap(weights_S[index_PC], sums, full) if sums[full] > enough else None
        if swap is None:
            return
        part, mine, theirs = swap
        a, b = index_PC[full, mine], index_PC[part, theirs]
        index_PC[full, mine], index_PC[part, theirs] = b, a
        moved = weights_S[a] - weights_S[b]
        sums[full] -= moved
        sums[part] += moved


def _best_swap(weights_PC: Ints, sums_P: Ints, full: int) -> tuple[int, int, int] | None:
    """Find the swap that lowers the larger of both sums most.

    The result is (part, place in the fullest part, place in the part), or None.
    """
    parts, count = weights_PC.shape
    order = np.argsort(weights_PC, axis=1, kind="stable")
    sorted_PC = np.take_along_axis(weights_PC, order, axis=1)
    part_P = np.arange(parts, dtype=np.int64)[:, None]
    first_P = part_P * count
    # For one item of the fullest part, the best item of another part is a neighbour of the item that would halve the
    # difference. All parts are on one line, so that one search serves them.
    line_P = part_P * (int(weights_PC.max()) + 1)
    gap_P = (sums_P[full] - sums_P)[:, None]
    wanted_PC: Ints = np.maximum(weights_PC[full] - gap_P // 2, 0)
    place_PC = np.searchsorted((sorted_PC + line_P).ravel(), wanted_PC + line_P)
    near_2PC = np.clip(np.stack((place_PC - 1, place_PC)), first_P, first_P + count - 1)
    moved_2PC = weights_PC[full] - sorted_PC.ravel()[near_2PC]
    gain_2PC = np.minimum(moved_2PC, gap_P - moved_2PC)
    best = int(gain_2PC.argmax())
    if gain_2PC.ravel()[best] <= 0:
        return None
    part, theirs = divmod(int(near_2PC.ravel()[best]), count)
    return part, best % count, int(order[part, theirs])


# -- a token budget ----------------------------------------------------------------------------------------------------


def _cut_by_budget(parts: Sequence[Mapping[str, int]], max_tokens: int) -> list[Microbatches]:
    """Cut each rank into the same, smallest number of micro-batches.

    A sample beyond the budget is alone.
    """
    alone = [[name for name, length in part.items() if length > max_tokens] for part in parts]
    rest = [{name: length for name, length in part.items() if length <= max_tokens} for part in parts]
    packed = [_tight(part, max_tokens) for part in rest]
    count = max(
        len(own) + -(-sum(part.values()) // max_tokens) for own, part in zip(alone, rest, strict=True)
    )
    while True:
        found = [
            _bins_of_count(count - len(own), part, tight, max_tokens)
            for own, part, tight in zip(alone, rest, packed, strict=True)
        ]
        if all(bins is not None for bins in found):
            singles = [tuple((name,) for name in own) for own in alone]
            return [own + bins for own, bins in zip(singles, found, strict=True) if bins is not None]
        count += 1


def _bins_of_count(
    count: int, tokens: Mapping[str, int], tight: Microbatches, max_tokens: int
) -> Microbatches | None:
    if not 0 < count <= len(tokens):
        return () if count == len(tokens) else None
    even = _even_bins(tokens, count)
    if all(sum(tokens[name] for name in names) <= max_tokens for names in even):
        return even
    return _split(tight, count) if len(tight) <= count else None  # None: these ways need more bins


def _even_bins(tokens: Mapping[str, int], count: int) -> Microbatches:
    names = sorted(tokens, key=lambda name: (-tokens[name], name))
    bins = longest_first([tokens[name] for name in names], count, most=len(names))
    return tuple(tuple(map(names.__getitem__, part)) for part in bins)


def _tight(tokens: Mapping[str, int], max_tokens: int) -> Microbatches:
    room: list[tuple[int, int]] = []
    bins: list[list[str]] = []
    for name in sorted(tokens, key=lambda name: (-tokens[name], name)):
        at = bisect_left(room, (tokens[name], 0))  # the fullest bin with room
        left, index = room.pop(at) if at < len(room) else (max_tokens, len(bins))
        if index == len(bins):
            bins.append([])
        bins[index].append(name)
        insort(room, (left - tokens[name], index))
    return tuple(map(tuple, bins))


def _split(bins: Microbatches, count: int) -> Microbatches:
    found = list(bins)
    while len(found) < count:
        names = max(found, key=len)
        at = found.index(names)
        found[at : at + 1] = names[::2], names[1::2]
    return tuple(found)
