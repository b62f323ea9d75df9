"""Which (sample, position) each row of a rank's routers is. Pure index arithmetic; knows no layers and no ids.

Megatron's order, measured on Megatron-core 0.16.1: the sequence is cut for context parallelism first; then the rows of
`[b, s]` are sequence-major (row = position * b + sample) and those of a pack follow its order; then, with sequence
parallelism, TP rank t takes the t-th contiguous part ("slot").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from r3channel.plan.layout import TrainerLayout
from r3channel.wire.mixing import Ids

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One micro-batch of one DP rank, over all its CP and TP ranks."""

    sample_ids: tuple[str, ...]
    tokens: tuple[int, ...]
    """Tokens of each sample, before padding."""
    padded: tuple[int, ...]
    """Positions that each sample fills; all equal in `[b, s]`."""
    tail: int = 0
    """Padding rows after the last sequence of a pack."""
    packed: bool = False

    @property
    def width(self) -> int:
        """Return b of the model's input [b, s]; 1 for a pack."""
        return 1 if self.packed else len(self.sample_ids)

    @property
    def seq_len(self) -> int:
        """Return s of the model's input over all CP ranks."""
        return sum(self.padded) + self.tail if self.packed else self.padded[0]

    @property
    def rows(self) -> int:
        """Return the rows over all CP and TP ranks, padding included."""
        return self.seq_len * self.width


def pad_batch(
    sample_ids: tuple[str, ...], tokens: tuple[int, ...], *, layout: TrainerLayout, floor: int = 0
) -> Microbatch:
    """Pad a micro-batch so that it divides over CP and TP.

    Args:
        sample_ids: The samples of the micro-batch.
        tokens: Tokens of each sample.
        layout: How the trainer is cut.
        floor: The least `seq_len`.
    """
    each = 2 * layout.cp if layout.cp > 1 and layout.cp_split == "zigzag" else layout.cp
    unit = math.lcm(each, layout.cp * layout.tp_slots * layout.pad_multiple)
    if layout.packing == "padded":
        padded = (_ceil(max(*tokens, floor), unit),) * len(tokens)
        return Microbatch(sample_ids=sample_ids, tokens=tokens, padded=padded)
    if layout.cp_split == "contiguous":  # the pack is cut as a whole
        each = 1
    padded = tuple(_ceil(count, each) for count in tokens)
    total = sum(padded)
    tail = _ceil(max(total, floor), unit) - total
    return Microbatch(sample_ids=sample_ids, tokens=tokens, padded=padded, tail=tail, packed=True)


def _ceil(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class Runs(NamedTuple):
    """Consecutive positions of one sample that lie one after another in one slot. Equally long int64 columns.

    Ordered by (cp, micro-batch, sample, position), so that one sample of one rank is a slice. Together they tile every
    row of every slot exactly once.
    """

    cp: Ints
    microbatch: Ints
    sample: Ints
    """Index in the micro-batch; -1 for the tail of a pack."""
    position: Ints
    """The first row's position in its sample."""
    slot: Ints
    local: Ints
    """The first row's place within the slot, in positions: row = local * width + sample in `[b, s]`, local in a pack."""
    length: Ints
    real: Ints
    """Leading rows that an engine computed: the positions before the sample's last token."""

    def take(self, index: Ids | slice) -> Runs:
        return Runs(*[column[index] for column in self])


class RowTable:
    """All runs of some micro-batches, with look-up by rank, micro-batch and sample.

    The runs are cut when first asked for: not every process that knows of a rank needs its rows.
    """

    def __init__(self, batches: Sequence[Microbatch], layout: TrainerLayout) -> None:
        self._batches, self._layout = batches, layout
        self._most = max(len(batch.sample_ids) for batch in batches) + 1

    @cached_property
    def runs(self) -> Runs:
        """Return all runs, ascending."""
        runs = _cut_slots(_cut_context(self._batches, self._layout), self._batches, self._layout)
        return runs.take(np.lexsort((runs.position, self._key(runs.cp, runs.microbatch, runs.sample))))

    @cached_property
    def _keys(self) -> Ints:
        return self._key(self.runs.cp, self.runs.microbatch, self.runs.sample)

    def _key(self, cp: Any, microbatch: Any, sample: Any) -> Any:
        return (cp * len(self._batches) + microbatch) * self._most + sample + 1

    def of_sample(self, *, cp: int, microbatch: int, sample: int) -> list[tuple[int, ...]]:
        """Return the runs of one sample on one CP rank, ascending.

        Args:
            cp: The CP rank.
            microbatch: Number of the micro-batch.
            sample: Index in the micro-batch; -1 for the tail.

        Returns:
            (position, slot, local, length, real) of each run.
        """
        key = self._key(cp, microbatch, sample)
        first, last = np.searchsorted(self._keys, (key, key + 1))
        found = self.runs.take(slice(first, last))
        columns = (found.position, found.slot, found.local, found.length, found.real)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def of_rank(self, cp: int) -> Runs:
        """Return all runs of one CP rank, tails included, in order."""
        begin, end = np.searchsorted(self.runs.cp, (cp, cp + 1))
        return self.runs.take(slice(begin, end))

    def row_map(self, *, cp: int, microbatch: int) -> tuple[Ints, Ints]:
        """Return the sample and position of every row of a micro-batch.

        Args:
            cp: The CP rank.
            microbatch: Number of the micro-batch.

        Returns:
            (sample, position), each [slots, rows per slot]. Sample is -1 in the tail; padding has its position.
        """
        batch = self._batches[microbatch]
        slots = self._layout.tp_slots
        per_slot = batch.seq_len // self._layout.cp // slots
        sample = np.full((slots, per_slot, batch.width), -1, dtype=np.int64)
        position = np.zeros_like(sample)
        for index in range(-1, len(batch.sample_ids)):
            column = index if not batch.packed else 0
            for start, slot, local, length, _ in self.of_sample(cp=cp, microbatch=microbatch, sample=index):
                sample[slot, local : local + length, column] = index
                position[slot, local : local + length, column] = np.arange(start, start + length)
        return sample.reshape(slots, -1), position.reshape(slots, -1)


def _sequences(batches: Sequence[Microbatch]) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Return columns of every sequence and every tail.

    The columns are micro-batch, sample, tokens, padded, start in the pack. A tail has sample -1.
    """
    columns = microbatch, sample, tokens, padded, start = [list[int]() for _ in range(5)]
    for number, batch in enumerate(batches):
        tails = 1 if batch.tail else 0
        lengths = [*batch.padded, *[batch.tail] * tails]
        microbatch += [number] * len(lengths)
        sample += [*range(len(batch.tokens)), *[-1] * tails]
        tokens += [*batch.tokens, *[0] * tails]
        padded += lengths
        start += accumulate(lengths[:-1], initial=0) if batch.packed else [0] * len(lengths)
    return tuple(np.asarray(column, dtype=np.int64) for column in columns)  # type: ignore[return-value]


def _cut_context(batches: Sequence[Microbatch], layout: TrainerLayout) -> Runs:
    """Return each CP rank's runs, not yet cut for TP.

    `local` counts over all slots, and `slot` is 0.
    """
    if layout.cp_split == "contiguous" and layout.packing == "thd":
        return _cut_whole_packs(batches, layout)
    microbatch, sample, tokens, padded, start = _sequences(batches)
    parts = 2 if layout.cp > 1 and layout.cp_split == "zigzag" else 1
    found = list[Runs]()
    for cp in range(layout.cp):
        size = padded // (parts * layout.cp)
        for half, chunk in enumerate((cp, 2 * layout.cp - 1 - cp)[:parts]):
            local = start // layout.cp + half * size
            found.append(_runs(cp, microbatch, sample, tokens, chunk * size, local, size))
    return _join(found)


def _cut_whole_packs(batches: Sequence[Microbatch], layout: TrainerLayout) -> Runs:
    microbatch, sample, tokens, padded, start = _sequences(batches)
    share = np.asarray([batch.seq_len // layout.cp for batch in batches], dtype=np.int64)[microbatch]
    found = list[Runs]()
    for cp in range(layout.cp):
        # rank `cp` holds that part of the pack, wherever sequences begin and end
        first = np.maximum(start, cp * share)
        size = np.minimum(start + padded, (cp + 1) * share) - first
        runs = _runs(cp, microbatch, sample, tokens, first - start, first - cp * share, size)
        found.append(runs.take(size > 0))
    return _join(found)


def _runs(
    cp: int, microbatch: Ints, sample: Ints, tokens: Ints, position: Ints, local: Ints, length: Ints
) -> Runs:
    real = np.clip(tokens - 1 - position, 0, length)
    zeros = np.zeros_like(sample)
    return Runs(zeros + cp, microbatch, sample, position, zeros, local, length, real)


def _join(parts: Sequence[Runs]) -> Runs:
    return Runs(*[np.concatenate(columns) for columns in zip(*parts, strict=True)])


def _cut_slots(runs: Runs, batches: Sequence[Microbatch], layout: TrainerLayout) -> Runs:
    if layout.tp_slots == 1:
        return runs
    parts = layout.cp * layout.tp_slots
    share = np.asarray([batch.seq_len // parts for batch in batches], dtype=np.int64)[runs.microbatch]
    first, last = runs.local // share, (runs.local + runs.length - 1) // share
    repeat = last - first + 1
    wide, share = runs.take(np.repeat(np.arange(len(runs.cp)), repeat)), np.repeat(share, repeat)
    number = np.arange(len(wide.cp)) - np.repeat(np.cumsum(repeat) - repeat, repeat)
    slot = np.repeat(first, repeat) + number
    begin = np.maximum(wide.local, slot * share)
    length = np.minimum(wide.local + wide.length, (slot + 1) * share) - begin
    skipped = begin - wide.local
    real = np.clip(wide.real - skipped, 0, length)
    position, local = wide.position + skipped, begin - slot * share  # `local` counts within its slot
    return wide._replace(position=position, slot=slot, local=local, length=length, real=real)
