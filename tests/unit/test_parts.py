"""Parts: over random layouts, assignments and relays, what the relays send makes the one relay's shard, byte for byte."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3channel.errors import ConfigError, SampleUnknown, TicketMismatch
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.parts import Parts
from r3channel.plan.place import place_samples
from r3channel.plan.shards import Plan, Shard
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.spec import RoutingSpec
from tests.samples import SPEC
from tests.unit.test_plan import DEEP, layouts, make_plan, specs


def parts_of(plan: Plan, *, relays: int, seed: int) -> Parts:
    """Any relay for any sample; some relays may hold none."""
    names = [name for rank in plan.microbatches for batch in rank for name in batch.sample_ids]
    chosen = np.random.default_rng(seed).integers(0, relays, len(names)).tolist()
    return Parts(plan, relays, dict(zip(names, chosen, strict=True)))


def by_mask(parts: Parts, shard: Shard, whole_N: np.ndarray, *, relay: int) -> bytes:
    """The oracle: a relay's rows, picked out of the whole shard one slot at a time."""
    found = []
    for number, view_SLRK in enumerate(shard.views(whole_N)):
        batch = shard.microbatches[number]
        owner = np.asarray([*(parts.relay_of[name] for name in batch.sample_ids), 0])  # the last: a tail
        sample_SR, _ = shard.table.row_map(cp=shard.cp, microbatch=number)
        for slot, view_LRK in enumerate(view_SLRK):
            found.append(view_LRK[:, owner[sample_SR[slot]] == relay].tobytes())
    return b"".join(found)


@settings(max_examples=200, deadline=None)
@given(
    layout=layouts(),
    spec=specs(),
    size=st.integers(1, 4),
    relays=st.integers(1, 3),
    seed=st.integers(0, 10**6),
)
def test_parts_are_a_relays_rows_in_order_and_together_the_shard(
    layout: TrainerLayout, spec: RoutingSpec, size: int, relays: int, seed: int
) -> None:
    plan, ids = make_plan(layout, spec=spec, size=size, batches=2, seed=seed)
    parts, dp = parts_of(plan, relays=relays, seed=seed), seed % layout.dp
    whole = place_samples(plan, dp=dp, ids_of=ids.__getitem__)
    placed = [parts.place(relay, dp=dp, ids_of=ids.__getitem__) for relay in range(relays)]
    for key, expected in whole.items():
        shard = plan.shard(dp=dp, pp=key[1], cp=key[2])
        sent = [
            (parts.part(shard, relay), parts_N[key]) for relay, parts_N in enumerate(placed) if key in parts_N
        ]
        assert sum(part.nbytes for part, _ in sent) == shard.nbytes  # with the next: each byte once
        for background in (0, 255):
            merged = np.full(shard.nbytes, background, np.uint8)
            for part, part_N in sent:
                assert part_N.nbytes == part.nbytes
                part.merge(part_N, merged)
            assert np.array_equal(merged, expected)
        for part, part_N in sent:
            assert part_N.tobytes() == by_mask(parts, shard, expected, relay=part.relay)


@settings(max_examples=50, deadline=None)
@given(layout=layouts(), relays=st.integers(1, 3), seed=st.integers(0, 10**6))
def test_a_relay_serves_the_dp_ranks_of_its_samples_and_the_first_one_the_tails(
    layout: TrainerLayout, relays: int, seed: int
) -> None:
    plan, _ = make_plan(layout, spec=DEEP, size=1, batches=2, seed=seed)
    parts = parts_of(plan, relays=relays, seed=seed)
    for relay in range(relays):
        served = {part.key[0] for part in parts.of_relay(relay)}
        holds = {dp for dp in range(layout.dp) if parts.samples_of(relay, dp=dp)}
        tails = {dp for dp, rank in enumerate(plan.microbatches) if any(batch.tail for batch in rank)}
        assert served == (holds | tails if relay == 0 else holds)
        assert all(parts.serves(relay, dp) == (dp in served) for dp in range(layout.dp))


def test_with_one_relay_the_part_is_the_shard_and_the_digest_the_plans() -> None:
    plan, ids = make_plan(TrainerLayout(dp=2, tp=2, packing="thd"), size=2, batches=1, seed=5)
    parts = parts_of(plan, relays=1, seed=5)
    assert parts.digest == plan.digest
    for shard in plan.shards:
        assert parts.part(shard, 0).whole
    whole, part = (
        place_samples(plan, dp=0, ids_of=ids.__getitem__),
        parts.place(0, dp=0, ids_of=ids.__getitem__),
    )
    assert {key: data.tobytes() for key, data in whole.items()} == {
        key: data.tobytes() for key, data in part.items()
    }


def test_a_sample_of_no_relay_or_of_one_that_is_not_there_is_refused() -> None:
    plan, _ = make_plan(TrainerLayout(), size=2, batches=1, seed=0)
    with pytest.raises(SampleUnknown, match="'s1'"):
        Parts(plan, 2, {"s0": 0})
    with pytest.raises(ConfigError, match=r"'s1': 2.*0\.\.1"):
        Parts(plan, 2, {"s0": 0, "s1": 2})


def ticket_of_two() -> Ticket:
    samples = (TicketSample("a", 9, 7, (), ((2, 4),), relay=1), TicketSample("b", 5, 7, ()))
    assignment = Assignment.given([[["a"], ["b"]]])
    return Ticket("run0", 3, SPEC, TrainerLayout(tp=2), assignment, samples, 1 << 20, peers=("run1",))


def test_a_ticket_says_which_relay_sends_which_sample() -> None:
    ticket = Ticket.from_bytes(ticket_of_two().to_bytes())
    assert ticket == ticket_of_two() and ticket.runs == ("run0", "run1")
    assert ticket.parts.samples_of(0) == ("b",) and ticket.parts.samples_of(1) == ("a",)
    assert ticket.parts.digest != ticket.plan.digest


def test_a_ticket_whose_relays_were_changed_is_refused() -> None:
    data = ticket_of_two().to_bytes()
    with pytest.raises(TicketMismatch, match="plan digest"):
        Ticket.from_bytes(data.replace(b"[[2,4]],1]", b"[[2,4]],0]"))
    with pytest.raises(TicketMismatch, match=r"expected 0\.\.1"):
        Ticket.from_bytes(data.replace(b"[[2,4]],1]", b"[[2,4]],7]"))
    with pytest.raises(TicketMismatch, match=r"expected 0\.\.0"):
        Ticket.from_bytes(data.replace(b'"peers":["run1"]', b'"peers":[]'))


def test_equal_tickets_are_equal_bytes_whatever_made_them() -> None:
    ticket = ticket_of_two()
    assert replace(ticket).to_bytes() == ticket.to_bytes()
    assert Ticket.from_bytes(ticket.to_bytes()).to_bytes() == ticket.to_bytes()
