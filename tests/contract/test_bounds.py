"""Ceilings and ranks that never answer: bounded waits and typed errors that name the cause; nothing is lost."""

from __future__ import annotations

import threading

import pytest

from r3channel import errors
from r3channel.plan.assignment import Assignment
from r3channel.plan.capacity import beside_bytes
from r3channel.plan.ticket import Ticket
from r3channel.relay.relay import Relay
from tests.support.delivery import MakeRelay, receivers_of
from tests.support.samples import SPEC, reply_for
from tests.support.waits import SOON_S, until

TOKENS = 1000  # 24 kB of ids


@pytest.fixture
def relay(make_relay: MakeRelay) -> Relay:
    """Room for 4 samples."""
    relay = make_relay("dp=2", backpressure_timeout_s=0.1)
    frame_bytes = (TOKENS - 1) * SPEC.bytes_per_token + beside_bytes(SPEC, spans=2)
    relay.samples.store.ceiling_bytes = 4 * frame_bytes + 1000
    return relay


def add(relay: Relay, *names: str) -> None:
    for name in names:
        relay.add(name, reply_for(name, TOKENS), range(TOKENS))


def seal(relay: Relay, step: int, *names: str) -> Ticket:
    return relay.seal(step, Assignment.given([[[name] for name in names[dp::2]] for dp in range(2)]))


def deliver(relay: Relay, ticket: Ticket, *ranks: int) -> None:
    receivers = receivers_of(relay)
    for dp in ranks:
        receivers[dp].receive(ticket)


def test_at_the_ceiling_add_says_so_by_name_and_keeps_what_it_holds(relay: Relay) -> None:
    add(relay, "a", "b")
    ticket = seal(relay, 7, "a", "b")
    deliver(relay, ticket, 1)
    add(relay, "c", "d")
    with pytest.raises(errors.StoreFull, match=r"sample e .*waited 0\.1 s .*4 blocks hold .*store_bytes"):
        add(relay, "e")
    status = relay.status()
    assert status["pending"] == ["c", "d"] and status["store"]["frames"] == 4
    in_the_way = {"state": "PREPARED", "missing": [(0, 0, 0)], "acknowledged": [(1, 0, 0)], "samples": 2}
    assert status["steps"] == {7: in_the_way}
    deliver(relay, ticket, 0)
    add(relay, "e", "f")
    assert relay.status()["pending"] == ["c", "d", "e", "f"]


def test_add_goes_on_when_a_step_is_delivered(relay: Relay) -> None:
    relay.samples.config = relay.config.__class__(backpressure_timeout_s=SOON_S)
    add(relay, "a", "b", "c", "d")
    ticket = seal(relay, 0, "a", "b")
    waiting = threading.Thread(target=add, args=(relay, "e"))
    waiting.start()
    until(lambda: relay.samples.store._waiting)
    assert relay.status()["pending"] == ["c", "d"]
    deliver(relay, ticket, 0, 1)
    waiting.join(SOON_S)
    assert relay.status()["pending"] == ["c", "d", "e"]


@pytest.mark.parametrize(("transport", "buckets"), [("tcp", 1), ("gloo", 2)])
def test_staged_bytes_do_not_grow_with_tokens(make_relay: MakeRelay, transport: str, buckets: int) -> None:
    peaks, sizes = [], []
    for tokens in (400, 2000):
        relay = make_relay("pp=2", transport=transport)
        relay.add("a", reply_for("a", tokens), range(tokens))
        ticket = relay.seal(0, Assignment.given([[["a"]]]))
        for receiver in receivers_of(relay):
            receiver.receive(ticket)
        peaks.append(relay.row_server.peak_staging_bytes)
        sizes.append(min(shard.nbytes for shard in ticket.plan.shards))
    assert sizes[1] > sizes[0] > buckets * 1024 >= peaks[0] == peaks[1] > (buckets - 1) * 1024
    relay = make_relay("dp=2")
    add(relay, "a", "b")
    deliver(relay, seal(relay, 0, "a", "b"), 0, 1)
    assert relay.row_server.peak_staging_bytes == 0, "with one stage rows go from where they lie"
