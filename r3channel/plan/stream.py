"""What the relay sends to one trainer process, and where each row lands. Pure: both ends compute it from the ticket.

A stream holds the rows that an engine computed, in the order (micro-batch, sample, position), each with the layers of the
receiver's stage: `[row][layer][k]`. Padding, last tokens and rows without routing do not travel; the receiver makes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from r3channel.plan.row_order import Ints, Runs
from r3channel.plan.shards import Shard
from r3channel.plan.ticket import Ticket, TicketSample


@dataclass(frozen=True, slots=True)
class Stretches:
    """Consecutive positions within runs of the plan: equally long columns, in the plan's order."""

    run: Ints
    """Index in the runs of the shard."""
    position: Ints
    rows: Ints

    @property
    def begin(self) -> Ints:
        """Rows before each stretch, and the rows of all."""
        return np.concatenate([[0], np.cumsum(self.rows)])


@dataclass(frozen=True)
class Stream:
    """The rows of one shard as they travel."""

    shard: Shard
    samples: Sequence[TicketSample]
    """The DP rank's samples, in the plan's order; indices of samples below are into this."""

    @classmethod
    def of(cls, ticket: Ticket, shard: Shard) -> Stream:
        names = (name for batch in shard.microbatches for name in batch.sample_ids)
        return cls(shard, tuple(map(ticket.sample, names)))

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """Positions on the MoE axis that travel, ascending; an MTP layer shares those of the layer that it replays."""
        return tuple(sorted(set(self.shard.sources)))

    @property
    def row_bytes(self) -> int:
        spec = self.shard.spec
        return len(self.columns) * spec.top_k * spec.id_dtype.itemsize

    @property
    def nbytes(self) -> int:
        return int(self.stretches.rows.sum()) * self.row_bytes

    @cached_property
    def runs(self) -> Runs:
        """All runs of the shard's rows, padding and tails included."""
        shard = self.shard
        return shard.table.of_microbatches(cp=shard.cp, first=0, last=len(shard.microbatches))

    @cached_property
    def sample_of(self) -> Ints:
        """Each run's sample as an index, -1 for the tail of a pack."""
        first = np.cumsum([0, *(len(batch.sample_ids) for batch in self.shard.microbatches)])
        return np.where(self.runs.sample < 0, -1, first[self.runs.microbatch] + self.runs.sample)

    @cached_property
    def stretches(self) -> Stretches:
        """What travels: every row that an engine computed."""
        return self._within([list(_without(0, sample.tokens - 1, sample.invalid)) for sample in self.samples])

    @cached_property
    def pads(self) -> Stretches:
        """What does not travel: last tokens, padding, tails of packs, rows without routing."""
        spans = [[*sample.invalid, (sample.tokens - 1, _FAR)] for sample in self.samples]
        return self._within(spans, tails=True)

    def sends(self) -> Iterator[tuple[int, int, int]]:
        """(sample, first position, rows) of what travels, neighbours joined: fewer pieces for the wire."""
        sample, position = self.sample_of[self.stretches.run], self.stretches.position
        rows = self.stretches.rows
        if not len(rows):
            return
        new = np.ones(len(rows), bool)
        new[1:] = (sample[1:] != sample[:-1]) | (position[1:] != position[:-1] + rows[:-1])
        first = np.flatnonzero(new)
        yield from zip(
            sample[first].tolist(),
            position[first].tolist(),
            np.add.reduceat(rows, first).tolist(),
            strict=True,
        )

    def _within(self, spans: Sequence[Sequence[tuple[int, int]]], *, tails: bool = False) -> Stretches:
        """The parts of the runs that lie in the spans [start, end) of their sample; of tails all, or nothing."""
        spans = [*spans, [(0, _FAR)] if tails else []]  # sample -1 is the last one
        count = np.asarray([len(own) for own in spans], np.int64)
        bounds = np.asarray([span for own in spans for span in own], np.int64).reshape(-1, 2)
        first = np.cumsum(count) - count
        runs, sample = self.runs, self.sample_of
        repeat = count[sample]
        run = np.repeat(np.arange(len(sample)), repeat)
        number = np.arange(len(run)) - np.repeat(np.cumsum(repeat) - repeat, repeat)
        start, end = bounds[np.repeat(first[sample], repeat) + number].T
        position = np.maximum(runs.position[run], start)
        rows = np.minimum(runs.position[run] + runs.length[run], end) - position
        keep = rows > 0
        return Stretches(run[keep], position[keep], rows[keep])


_FAR = 1 << 40
"""Beyond any position."""


def _without(start: int, end: int, holes: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """[start, end) less the holes, which ascend.

    >>> list(_without(0, 9, [(2, 3), (5, 9)]))
    [(0, 2), (3, 5)]
    """
    for low, high in holes:
        if low < end and high > start:
            if low > start:
                yield start, low
            start = max(start, high)
    if start < end:
        yield start, end
