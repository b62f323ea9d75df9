"""Over random layouts and rows without routing: each row is sent once, each byte of a shard written once.

What stands where is compared with the oracle in tests/support/plans.py, which cuts whole samples as the default path does.
Digests: the device's are the host's here, and the host's are those of what routers are handed in test_rank_shard.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.embedded.bench.operations import Operations
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.placement import Placement, place_samples, place_shard, spread_ids
from r3channel.plan.shards import Shard
from r3channel.plan.stream import Stream, Stretches, step_streams
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.trainer import buckets as buckets_module
from r3channel.trainer.buckets import DevicePlacement
from r3channel.wire.routing import Ids
from tests.support.loops import numba
from tests.support.plans import Step, oracle_rows, steps
from tests.support.samples import random_ids, sparse

EXAMPLES = int(os.environ.get("R3TEST_LAYOUTS", "200"))
"""Layouts in which a device is held against the host."""


def on_device(step: Step, shard: Shard, *, bucket_rows: int) -> tuple[np.ndarray, Ids]:
    """As `filled`, by torch; the CPU stands for a GPU."""
    whole_N, stream = torch.full((shard.nbytes,), 0xEE, dtype=torch.uint8), Stream.of(step.ticket, shard)
    placement = DevicePlacement(stream, whole_N)
    placement.pads()
    source = torch.from_numpy(step.source(stream))
    for attempt in (bucket_rows + 1, bucket_rows):
        digests = placement.new_digests()
        for begin in range(0, len(source) if source.numel() else 0, attempt):
            placement.rows(source[begin : begin + attempt].clone(), digests, begin=begin)
    table_CSL = placement.table(digests)
    return whole_N.numpy(), table_CSL.numpy().view(np.uint64)


def filled(step: Step, shard: Shard, *, bucket_rows: int) -> tuple[np.ndarray, Ids]:
    """The shard and its digests [slot, sample, layer], from its stream in buckets of so many rows."""
    buffer_N = np.full(shard.nbytes, 0xEE, np.uint8)
    stream = Stream.of(step.ticket, shard)
    placement = Placement(stream, buffer_N)
    digests = placement.new_digests()
    source, bucket = step.source(stream), np.empty_like(step.source(stream)[:bucket_rows])
    for at in range(0, len(source), bucket_rows):
        part = bucket[: len(source[at : at + bucket_rows])]
        part[:] = source[at : at + bucket_rows]
        placement.rows(part, digests, begin=at)
        part[:] = 0x55  # the memory is reused
    placement.pads()
    return buffer_N, digests


def routed(step: Step, name: str, source: int) -> np.ndarray:
    """[T, K] of one layer; -1 where there is no routing."""
    return np.where(step.valid(name)[:, None], step.ids[name][:, source].astype(int), -1)


@settings(max_examples=120)
@given(step=steps(), bucket_rows=st.integers(1, 50) | st.just(10**6))
def test_each_router_finds_its_rows_in_order_and_spread_ids_elsewhere(step: Step, bucket_rows: int) -> None:
    spec, layout = step.ticket.spec, step.ticket.layout
    for shard in step.shards:
        buffer_N, _ = filled(step, shard, bucket_rows=bucket_rows)
        for number, view in enumerate(shard.views(buffer_N)):
            batch = shard.microbatches[number]
            _, position_SR = shard.table.row_map(cp=shard.cp, microbatch=number)
            for slot in range(layout.tp_slots):
                pads_RK = spread_ids(spec, positions_T=position_SR[slot])
                for index, source in enumerate(shard.sources):
                    values = [routed(step, name, source) for name in batch.sample_ids]
                    line_RK = oracle_rows(values, batch, layout, cp=shard.cp, tp=slot)
                    assert np.array_equal(view[slot, index], np.where(line_RK < 0, pads_RK, line_RK))


@settings(max_examples=60)
@given(step=steps(), there=st.booleans())
def test_whole_samples_place_what_the_relay_sends(step: Step, there: bool) -> None:
    """As recordings and benchmarks place: every row has routing."""
    samples = [sample._replace(invalid=()) for sample in step.ticket.samples]
    step = replace(step, ticket=replace(step.ticket, samples=samples))
    with numba(there):
        placed = place_samples(step.ticket.plan, dp=step.dp, ids_of=step.ids.__getitem__)
        assert list(placed) == [shard.key for shard in step.shards]
        for shard in step.shards:
            stream = Stream.of(step.ticket, shard)
            assert np.array_equal(placed[shard.key], filled(step, shard, bucket_rows=11)[0])
            assert np.array_equal(placed[shard.key], place_shard(stream, ids_of=step.ids.__getitem__))


@settings(max_examples=EXAMPLES)
@given(step=steps(top_k=(1, 2, 3, 4, 6, 8, 10, 22)), bucket_rows=st.integers(1, 50), kept=st.integers(1, 90))
def test_a_device_places_the_same_bytes_and_finds_the_same_digests(
    step: Step, bucket_rows: int, kept: int
) -> None:
    """`kept`: rows whose places are worked out at once."""
    with numba(False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets_module, "_ROWS_AT_ONCE", kept)
        for shard in step.shards:
            expected = filled(step, shard, bucket_rows=bucket_rows)
            found = on_device(step, shard, bucket_rows=bucket_rows)
            assert all(map(np.array_equal, found, expected))


def test_large_batches_of_rows_are_the_same_over_the_compiled_blocks_and_past_the_caches() -> None:
    """A thousand rows and more: several blocks of a run, and lines that two blocks share."""
    spec = sparse(3, experts=300, top_k=8)
    tokens = {"a": 3001, "b": 1777}
    ids = {name: np.resize(random_ids(64, spec=spec), (count - 1, 3, 8)) for name, count in tokens.items()}
    samples = [TicketSample(name, n, 0, 0, (), ((500, 1300),)) for name, n in tokens.items()]
    for text in ("tp=2", "cp=2,packing=thd", ""):
        assignment = Assignment.given([[["a", "b"]]])
        ticket = Ticket("run", 1, spec, TrainerLayout.parse(text), assignment, samples, 1 << 20)
        step = Step(ticket, ids, 0)
        for shard in step.shards:
            compiled = [filled(step, shard, bucket_rows=rows) for rows in (10**6, 777)]
            with numba(False):
                plain = filled(step, shard, bucket_rows=2048)
            assert all(np.array_equal(a, b) for found in compiled for a, b in zip(found, plain, strict=True))


def test_a_bucket_costs_a_device_five_operations_and_the_places_of_many_nine() -> None:
    spec = sparse(3, experts=300, top_k=8)
    samples = [TicketSample("a", 9001, 0, 0, ())]
    ticket = Ticket("run", 1, spec, TrainerLayout(), Assignment.given([[["a"]]]), samples, 1)
    (shard,) = ticket.plan.shards
    stream = Stream.of(ticket, shard)
    placement = DevicePlacement(stream, torch.empty(shard.nbytes, dtype=torch.uint8))
    digests, bucket = placement.new_digests(), torch.from_numpy(random_ids(300, spec=spec))
    for begin, most in ((0, 15), (300, 5), (8700, 5)):  # the first makes its memory, too
        with Operations() as operations:
            placement.rows(bucket.clone(), digests, begin=begin)
        assert len(operations.names) == most + 1, operations.names  # and the clone


# -- what the relay sends to a receiver: each row once, in order -------------------------------------------------------

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
@given(step=steps(), none=st.integers(0, 4).map(lambda number: not number))
def test_a_stream_is_the_ranks_rows_with_routing_in_order_and_the_pads_are_the_rest(
    step: Step, none: bool
) -> None:
    """Together they name each row of the shard once. `none`: no row of the step has routing."""
    if none:
        samples = [sample._replace(invalid=((0, sample.tokens - 1),)) for sample in step.ticket.samples]
        step = replace(step, ticket=replace(step.ticket, samples=samples))
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
def test_what_the_relay_works_out_for_all_receivers_is_what_each_does_for_itself(step: Step) -> None:
    ticket = Ticket.from_bytes(step.ticket.to_bytes())
    of_step = step_streams(ticket)
    assert ticket == step.ticket
    for shard in step.shards:
        sent, (begin, end) = of_step[shard.cp].sent, ticket.plan.microbatches.begin[shard.dp : shard.dp + 2]
        part = slice(*np.searchsorted(sent[0], (begin, end)))
        theirs = Stream.of(ticket, ticket.plan.shard(dp=shard.dp, pp=shard.pp, cp=shard.cp))
        assert np.array_equal([sent[0][part] - begin, sent[1][part], sent[2][part]], theirs.sent)
