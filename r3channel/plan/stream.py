"""What the relay sends to one trainer process, and where each row lands. Pure: both ends compute it from the ticket.

A stream holds the rows that an engine computed, in the order (micro-batch, sample, position), each with the layers of the
receiver's stage: `[row][layer][k]`. Padding, last tokens and rows without routing do not travel; the receiver makes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np

from r3channel.plan.row_order import Ints, RowTable, Runs
from r3channel.plan.shards import Shard
from r3channel.plan.ticket import Samples, Ticket, TicketSample


@dataclass(frozen=True, slots=True)
class Stretches:
    """Consecutive positions within runs of the plan: equally long columns, in the plan's order."""

    run: Ints
    """Index in the runs of the shard."""
    position: Ints
    rows: Ints

    @property
    def begin(self) -> Ints:
        """Return the rows before each stretch, and the rows of all."""
        return np.concatenate([[0], np.cumsum(self.rows)])


Sent = tuple[Ints, Ints, Ints]
"""Columns sample, first position, rows."""


@dataclass(frozen=True)
class Stream:
    """The rows of one shard as they travel."""

    shard: Shard
    samples: Sequence[TicketSample]
    """The DP rank's samples, in the plan's order; indices of samples below are into this."""
    known: Sent | None = None
    """`sent`, where it was computed together with that of other streams."""

    @classmethod
    def of(cls, ticket: Ticket, shard: Shard) -> Stream:
        begin = ticket.plan.microbatches.begin
        return cls(shard, ticket.sample_columns.part(begin[shard.dp], begin[shard.dp + 1]))

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """Return the positions on the MoE axis that travel, ascending.

        An MTP layer shares the position of the layer that it replays.
        """
        return tuple(sorted(set(self.shard.sources)))

    @property
    def row_bytes(self) -> int:
        spec = self.shard.spec
        return len(self.columns) * spec.top_k * spec.id_dtype.itemsize

    @property
    def nbytes(self) -> int:
        return int(self.sent[2].sum()) * self.row_bytes

    @cached_property
    def runs(self) -> Runs:
        """Return all runs of the shard's rows, padding and tails included."""
        return self.shard.table.of_rank(self.shard.cp)

    @cached_property
    def sample_of(self) -> Ints:
        """Return each run's sample as an index.

        The index is -1 for the tail of a pack.
        """
        first = np.cumsum([0, *(len(batch.sample_ids) for batch in self.shard.microbatches)])
        return np.where(self.runs.sample < 0, -1, first[self.runs.microbatch] + self.runs.sample)

    @cached_property
    def stretches(self) -> Stretches:
        """Return what travels: every row that an engine computed."""
        edges, rows, start, end = self._invalid()
        return self._clip_runs(edges, np.insert(end, edges[:-1], 0), np.insert(start, edges[1:], rows))

    @cached_property
    def pads(self) -> Stretches:
        """Return what does not travel.

        These are last tokens, padding, tails of packs, and rows without routing.
        """
        edges, rows, start, end = self._invalid()
        start, end = np.insert(start, edges[1:], rows), np.insert(end, edges[1:], _FAR)
        return self._clip_runs(edges, start, end, tails=True)

    @cached_property
    def sent(self) -> Sent:
        """Return what travels, with neighbours joined.

        Joining leaves fewer pieces for the wire.
        """
        if self.known is not None:
            return self.known
        sample, position = self.sample_of[self.stretches.run], self.stretches.position
        rows, new = self.stretches.rows, np.ones(len(position), bool)
        new[1:] = (sample[1:] != sample[:-1]) | (position[1:] != position[:-1] + rows[:-1])
        first = np.flatnonzero(new)
        return sample[first], position[first], np.add.reduceat(rows, first) if len(first) else rows

    def sends(self) -> Iterator[tuple[int, int, int]]:
        """Yield (sample, first position, rows) of what travels."""
        return zip(*(column.tolist() for column in self.sent), strict=True)

    def _invalid(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the ranges of rows without routing.

        The columns are: number of ranges in the samples before each sample, and in all; rows of each sample; start and end of
        each range.
        """
        columns = Samples.of(self.samples).columns
        edges = np.concatenate([[0], np.cumsum(columns["invalid_count"], dtype=np.int64)])
        start, end = columns["invalid"].T.astype(np.int64)
        return edges, columns["tokens"].astype(np.int64) - 1, start, end

    def _clip_runs(self, edges: Ints, start: Ints, end: Ints, *, tails: bool = False) -> Stretches:
        """Return the parts of runs that lie in spans of their sample.

        A span is [start, end); a sample has one span more than it has invalid ranges. With `tails` whole tails of packs are
        included, else none.
        """
        count = np.append(np.diff(edges) + 1, int(tails))  # sample -1 is the last one
        spans, position = (count, np.append(start, 0), np.append(end, _FAR)), self.runs.position
        run, _, begin, until = overlaps(self.sample_of, position, position + self.runs.length, *spans)
        return Stretches(run, begin, until - begin)


def step_streams(ticket: Ticket) -> list[Stream]:
    """Return a stream for each CP rank, with all DP ranks' rows.

    The rows of one DP rank follow those of the other. The relay serves hundreds of receivers, and so cuts a step in one pass.

    Args:
        ticket: The ticket of the step.
    """
    plan, layout, samples = ticket.plan, ticket.layout, ticket.sample_columns
    batches = tuple(chain.from_iterable(plan.microbatches))
    table = RowTable(batches, replace(layout, sp=False))  # a TP rank's cuts are joined again on the wire
    shards = (plan.shard(dp=0, pp=0, cp=cp) for cp in range(layout.cp))
    return [Stream(replace(shard, microbatches=batches, table=table), samples) for shard in shards]


def overlaps(
    sample: Ints, begin: Ints, end: Ints, count: Ints, start: Ints, until: Ints
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the parts of ranges that lie in spans of their sample.

    Args:
        sample: The sample of each range.
        begin: Begin of each range.
        end: End of each range; a range is [begin, end).
        count: The number of spans of each sample.
        start: Start of each span, sample by sample.
        until: End of each span; a span is [start, until).

    Returns:
        Columns (range, span, begin, end), a line for each part.
    """
    repeat, first = count[sample], np.cumsum(count) - count
    which = np.repeat(np.arange(len(sample)), repeat)
    span = np.arange(len(which)) + np.repeat(first[sample] - np.cumsum(repeat) + repeat, repeat)
    begin, end = np.maximum(begin[which], start[span]), np.minimum(end[which], until[span])
    keep = begin < end
    return which[keep], span[keep], begin[keep], end[keep]


_FAR = 1 << 40
"""Beyond any position."""
