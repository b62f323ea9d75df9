"""What relays send to a receiver: over random layouts, turns at any relays and rows without routing, each row once, in order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.shards import Shard
from r3channel.plan.stream import Stream, Stretches, held_by, serves
from r3channel.plan.ticket import Ticket, TicketSample
from tests.plans import Step, steps
from tests.samples import SPEC

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


@settings(max_examples=150, deadline=None)
@given(step=steps())
def test_streams_of_all_relays_and_the_pads_name_each_row_of_the_shard_once(step: Step) -> None:
    for shard in step.shards:
        streams = step.streams(shard)
        first = streams[0]
        assert (counts(first, first.pads, *(stream.stretches for stream in streams)) == 1).all()
        assert (counts(first, first.pads, first.computed) == 1).all()
        assert first.runs.length.sum() * shard.row_bytes == shard.nbytes


@settings(max_examples=100, deadline=None)
@given(step=steps())
def test_a_stream_is_what_its_relay_holds_for_the_rank_in_the_plans_order(step: Step) -> None:
    for shard in step.shards:
        for stream in step.streams(shard):
            own = rows_of(stream, stream.stretches)
            holders = [step.holder(sample.sample_id) for sample in stream.samples]
            here = rows_of(stream, stream.computed)
            assert own == [row for row in here if holders[row[0]][row[1]] == stream.relay]
            assert own == sorted(own)
            assert stream.nbytes == len(own) * stream.row_bytes


@settings(max_examples=100, deadline=None)
@given(step=steps())
def test_every_stage_gets_each_row_with_routing_at_one_context_rank(step: Step) -> None:
    for pp in range(step.ticket.layout.pp):
        shards = [shard for shard in step.shards if shard.pp == pp]
        rows = [
            row
            for shard in shards
            for stream in step.streams(shard)
            for row in rows_of(stream, stream.stretches)
        ]
        names = [sample.sample_id for sample in Stream.of(step.ticket, shards[0]).samples]
        assert sorted(rows) == [
            (index, position)
            for index, name in enumerate(names)
            for position in np.flatnonzero(step.valid(name)).tolist()
        ]


@settings(max_examples=60, deadline=None)
@given(step=steps())
def test_what_is_sent_is_the_stream_in_as_few_pieces_as_can_be(step: Step) -> None:
    for shard in step.shards:
        for stream in step.streams(shard):
            sends = list(stream.sends())
            assert [
                (sample, position) for sample, first, rows in sends for position in range(first, first + rows)
            ] == rows_of(stream, stream.stretches)
            ends = {(sample, first + rows) for sample, first, rows in sends}
            assert not ends & {(sample, first) for sample, first, _ in sends[1:]}


@settings(max_examples=60, deadline=None)
@given(step=steps())
def test_a_relay_without_bytes_for_a_rank_is_left_alone_unless_it_counts_the_ranks(step: Step) -> None:
    for shard in step.shards:
        for stream in step.streams(shard):
            asked = serves(step.ticket, dp=step.dp, relay=stream.relay)
            assert asked or stream.nbytes == 0
            assert asked or stream.relay > 0
            holds = any(stream.relay in step.holder(sample.sample_id) for sample in stream.samples)
            assert asked or not holds


@settings(max_examples=60, deadline=None)
@given(step=steps())
def test_a_receiver_that_has_only_the_tickets_bytes_computes_the_same(step: Step) -> None:
    ticket = Ticket.from_bytes(step.ticket.to_bytes())
    for shard in step.shards:
        theirs = ticket.plan.shard(dp=shard.dp, pp=shard.pp, cp=shard.cp)
        for ours in step.streams(shard):
            stream = Stream.of(ticket, theirs, ours.relay)
            assert (stream.nbytes, stream.columns) == (ours.nbytes, ours.columns)
            for found, expected in zip(
                (stream.stretches, stream.pads), (ours.stretches, ours.pads), strict=True
            ):
                assert np.array_equal(found.run, expected.run)
                assert np.array_equal(found.position, expected.position)
                assert np.array_equal(found.rows, expected.rows)


def shard_of(layout: TrainerLayout, samples: list[TicketSample]) -> tuple[Ticket, Shard]:
    assignment = Assignment.given([[[sample.sample_id for sample in samples]]])
    ticket = Ticket("run", 1, SPEC, layout, assignment, samples, 1 << 20, ("peer",))
    return ticket, ticket.plan.shard(dp=0, pp=0)


def test_an_mtp_layer_costs_no_second_copy_on_the_wire() -> None:
    sample = TicketSample("a", 5, 0, 0, (), (), ((4, 0),))
    ticket, shard = shard_of(TrainerLayout(mtp=(3, 3)), [sample])
    assert len(shard.layers) == 5
    assert Stream.of(ticket, shard).row_bytes == SPEC.bytes_per_token


def test_pieces_of_one_sample_join_over_the_ranks_own_cuts_and_end_at_holes_and_other_relays() -> None:
    """Sequence parallelism cuts a sample into runs; it travels whole all the same."""
    sample = TicketSample("a", 17, 0, 0, (), ((3, 5),), ((10, 0), (14, 1), (16, 0)))
    ticket, shard = shard_of(TrainerLayout(tp=4), [sample])
    assert len(Stream.of(ticket, shard).stretches.run) > 3
    assert list(Stream.of(ticket, shard).sends()) == [(0, 0, 3), (0, 5, 5), (0, 14, 2)]
    assert list(Stream.of(ticket, shard, 1).sends()) == [(0, 10, 4)]


@given(
    rows=st.integers(1, 30),
    holes=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=4),
    cuts=st.lists(st.integers(1, 29), max_size=3),
    relay=st.integers(0, 2),
)
def test_what_a_relay_holds_is_its_segments_less_the_holes(
    rows: int, holes: list[Row], cuts: list[int], relay: int
) -> None:
    missing = sorted({position for low, high in holes for position in range(low, min(high, rows))})
    invalid = tuple((position, position + 1) for position in missing)
    ends = sorted({cut for cut in cuts if cut < rows} | {rows})
    segments = tuple((end, index % 3) for index, end in enumerate(ends))
    sample = TicketSample("a", rows + 1, 0, 0, (), invalid, segments)
    found = held_by(sample, relay)
    owner = [next(holder for end, holder in segments if position < end) for position in range(rows)]
    assert [position for low, high in found for position in range(low, high)] == [
        position for position in range(rows) if owner[position] == relay and position not in missing
    ]
    assert all(low < high for low, high in found)


@settings(max_examples=40, deadline=None)
@given(step=steps())
def test_a_step_without_any_routing_sends_nothing_and_pads_everything(step: Step) -> None:
    samples = [
        sample._replace(invalid=((0, sample.tokens - 1),), segments=()) for sample in step.ticket.samples
    ]
    ticket = replace(step.ticket, samples=samples)
    for shard in ticket.plan.shards:
        stream = Stream.of(ticket, shard)
        assert stream.nbytes == 0 and list(stream.sends()) == []
        assert (counts(stream, stream.pads) == 1).all()
