"""What the relay sends to a receiver: over random layouts and rows without routing, each row once, in order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings

from r3channel.plan.stream import Stream, Stretches, step_streams
from r3channel.plan.ticket import Ticket
from tests.support.plans import Step, steps

Row = tuple[int, int]
"""(sample of the DP rank, position)."""


def rows_of(stream: Stream, stretches: Stretches) -> list[Row]:
    """One after another; the tail of a pack is sample -1."""
    sample = stream.sample_of[stretches.run].tolist()
    return [
        (own, position)
        for own, first, rows in zip(sample, stretches.position.tolist(), stretches.rows.tolist(), strict=True)
        for position in range(first, first + rows)
    ]


def counts(stream: Stream, *parts: Stretches) -> np.ndarray:
    """How often each row of all runs is named."""
    runs = stream.runs
    begin = np.cumsum(runs.length) - runs.length
    found = np.zeros(int(runs.length.sum()), int)
    for part in parts:
        for run, position, rows in zip(part.run, part.position, part.rows, strict=True):
            first = begin[run] + position - runs.position[run]
            assert begin[run] <= first and first + rows <= begin[run] + runs.length[run]
            found[first : first + rows] += 1
    return found


@settings(max_examples=150)
@given(step=steps())
def test_a_stream_is_the_ranks_rows_with_routing_in_order_and_the_pads_are_the_rest(step: Step) -> None:
    """Together they name each row of the shard once."""
    for shard in step.shards:
        stream = Stream.of(step.ticket, shard)
        assert (counts(stream, stream.pads, stream.stretches) == 1).all()
        assert stream.runs.length.sum() * shard.row_bytes == shard.nbytes
        own = rows_of(stream, stream.stretches)
        valid = [step.valid(sample.sample_id) for sample in stream.samples]
        assert own == sorted(own) and all(valid[sample][position] for sample, position in own)
        assert stream.nbytes == len(own) * stream.row_bytes
        sends = list(stream.sends())
        assert [(sample, at) for sample, first, rows in sends for at in range(first, first + rows)] == own
        ends = {(sample, first + rows) for sample, first, rows in sends}
        assert not ends & {(sample, first) for sample, first, _ in sends[1:]}


@settings(max_examples=60)
@given(step=steps())
def test_a_receiver_that_has_only_the_tickets_bytes_computes_the_same(step: Step) -> None:
    ticket = Ticket.from_bytes(step.ticket.to_bytes())
    of_step = step_streams(ticket)
    for shard in step.shards:
        ours = Stream.of(step.ticket, shard)
        theirs = Stream.of(ticket, ticket.plan.shard(dp=shard.dp, pp=shard.pp, cp=shard.cp))
        assert (theirs.nbytes, theirs.columns) == (ours.nbytes, ours.columns)
        sent, (begin, end) = of_step[shard.cp].sent, ticket.plan.microbatches.begin[shard.dp : shard.dp + 2]
        part = slice(*np.searchsorted(sent[0], (begin, end)))
        assert np.array_equal([sent[0][part] - begin, sent[1][part], sent[2][part]], ours.sent)
        for found, expected in ((theirs.stretches, ours.stretches), (theirs.pads, ours.pads)):
            assert np.array_equal(found.run, expected.run)
            assert np.array_equal(found.position, expected.position)
            assert np.array_equal(found.rows, expected.rows)


@settings(max_examples=40)
@given(step=steps())
def test_a_step_without_any_routing_sends_nothing_and_pads_everything(step: Step) -> None:
    samples = [sample._replace(invalid=((0, sample.tokens - 1),)) for sample in step.ticket.samples]
    ticket = replace(step.ticket, samples=samples)
    for shard in ticket.plan.shards:
        stream = Stream.of(ticket, shard)
        assert stream.nbytes == 0 and list(stream.sends()) == []
        assert (counts(stream, stream.pads) == 1).all()
