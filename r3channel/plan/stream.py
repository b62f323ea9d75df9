"""What the relay sends to one trainer process, and where each row lands. Pure: both ends compute it from the ticket.

A stream holds the rows that an engine computed, in the order (micro-batch, sample, position), each with the layers of the
receiver's stage: `[row][layer][k]`. Padding, last tokens and rows without routing do not travel; the receiver makes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise, product

import numpy as np

from r3channel.plan.row_order import Ints, Runs, RowTable
from r3channel.plan.shards import Shard, ShardKey
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
        begin = ticket.plan.microbatches.begin
        return cls(shard, ticket.sample_columns.part(begin[shard.dp], begin[shard.dp + 1]))

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
        return int(self.sent[2].sum()) * self.row_bytes

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
        edges, rows, start, end = self._invalid()
        return self._within(edges, np.insert(end, edges[:-1], 0), np.insert(start, edges[1:], rows))

    @cached_property
    def pads(self) -> Stretches:
        """What does not travel: last tokens, padding, tails of packs, rows without routing."""
        edges, rows, start, end = self._invalid()
        return self._within(
            edges, np.insert(start, edges[1:], rows), np.insert(end, edges[1:], _FAR), tails=True
        )

    @cached_property
    def sent(self) -> tuple[Ints, Ints, Ints]:
        """(sample, first position, rows) of what travels, neighbours joined: fewer pieces for the wire."""
        sample, position = self.sample_of[self.stretches.run], self.stretches.position
        rows, new = self.stretches.rows, np.ones(len(position), bool)
        new[1:] = (sample[1:] != sample[:-1]) | (position[1:] != position[:-1] + rows[:-1])
        first = np.flatnonzero(new)
        return sample[first], position[first], np.add.reduceat(rows, first) if len(first) else rows

    def sends(self) -> Iterator[tuple[int, int, int]]:
        """`sent`, one by one."""
        return zip(*(column.tolist() for column in self.sent), strict=True)

    def _invalid(self) -> tuple[Ints, Ints, Ints, Ints]:
        """The ranges of rows without routing: (those of the samples before each, and all), rows of each sample, start, end."""
        columns = Samples.of(self.samples).columns
        edges = np.concatenate([[0], np.cumsum(columns["invalid_count"], dtype=np.int64)])
        start, end = columns["invalid"].T.astype(np.int64)
        return edges, columns["tokens"].astype(np.int64) - 1, start, end

    def _within(self, edges: Ints, start: Ints, end: Ints, *, tails: bool = False) -> Stretches:
        """The parts of the runs that lie in the spans [start, end) of their sample, which has one more than invalid ranges; of
        tails all, or nothing."""
        count = np.append(np.diff(edges) + 1, int(tails))  # sample -1 is the last one
        start, end, first = np.append(start, 0), np.append(end, _FAR), np.cumsum(count) - count
        runs, sample = self.runs, self.sample_of
        repeat = count[sample]
        run = np.repeat(np.arange(len(sample)), repeat)
        number = np.arange(len(run)) - np.repeat(np.cumsum(repeat) - repeat, repeat)
        span = np.repeat(first[sample], repeat) + number
        position = np.maximum(runs.position[run], start[span])
        rows = np.minimum(runs.position[run] + runs.length[run], end[span]) - position
        keep = rows > 0
        return Stretches(run[keep], position[keep], rows[keep])


def all_streams(ticket: Ticket) -> dict[ShardKey, Stream]:
    """Those of all receivers, cut in one pass over the step: for the relay, which has hundreds."""
    plan, layout, found = ticket.plan, ticket.layout, dict[ShardKey, Stream]()
    batches, begin = tuple(chain.from_iterable(plan.microbatches)), plan.microbatches.begin
    table = RowTable(batches, replace(layout, sp=False))  # a TP rank's cuts are joined again on the wire
    samples = [ticket.sample_columns.part(first, end) for first, end in pairwise(begin)]
    for cp in range(layout.cp):
        shard = replace(plan.shard(dp=0, pp=0, cp=cp), microbatches=batches, table=table)
        sent = Stream(shard, ticket.sample_columns).sent
        edges = np.searchsorted(sent[0], begin)
        for dp, pp in product(range(layout.dp), range(layout.pp)):
            stream = found[dp, pp, cp] = Stream(plan.shard(dp=dp, pp=pp, cp=cp), samples[dp])
            own = slice(edges[dp], edges[dp + 1])
            stream.__dict__["sent"] = sent[0][own] - begin[dp], sent[1][own], sent[2][own]
    return found


_FAR = 1 << 40
"""Beyond any position."""
