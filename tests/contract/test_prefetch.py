"""The next step arrives while this one trains: into other memory, with the same checks, and never over NCCL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.plan.ticket import Ticket
from r3channel.relay.relay import Relay
from r3channel.trainer.receiver import Receiver
from tests.delivery import LIMIT_S, check_rows, receivers_of, relays, until
from tests.delivery import sealed as sealed_with


@pytest.fixture(params=["tcp", "gloo"])
def relay(request: pytest.FixtureRequest) -> Iterator[Relay]:
    with relays(transport=request.param, prefetch=True) as make:
        yield make("dp=1")


def sealed(relay: Relay, step: int) -> Ticket:
    return sealed_with(relay, step, prefix=f"{step}-")


def test_the_next_shard_arrives_beside_the_one_in_use(relay: Relay) -> None:
    receiver: Receiver = receivers_of(relay)[0]
    shard = receiver.receive(sealed(relay, 0))
    for step in range(1, 4):
        ticket = sealed(relay, step)
        receiver.prefetch(ticket)
        relay.join_previous(timeout_s=LIMIT_S)  # it was received and acknowledged before anybody asked for it
        check_rows(shard, prefix=f"{step - 1}-")
        shard = receiver.receive(ticket)
        check_rows(shard, prefix=f"{step}-")


def test_an_error_of_the_transfer_surfaces_at_the_receive(relay: Relay) -> None:
    receiver = receivers_of(relay)[0]
    ticket = sealed(relay, 0)
    assert relay.abandon(0) == 4
    receiver.prefetch(ticket)
    with pytest.raises(errors.TicketMismatch, match="abandoned"):
        receiver.receive(ticket)
    check_rows(receiver.receive(sealed(relay, 1)), prefix="1-")


def test_only_the_prefetched_step_may_be_received_next(relay: Relay) -> None:
    receiver = receivers_of(relay)[0]
    first, second = sealed(relay, 0), sealed(relay, 1)
    receiver.prefetch(first)
    with pytest.raises(errors.UsageError, match="prefetch of step 1 while step 0"):
        receiver.prefetch(second)
    until(lambda: 0 not in relay.status()["steps"])
    with pytest.raises(errors.UsageError, match="receive of step 1, but step 0"):
        receiver.receive(second)
    # the relay has its acknowledgement and sends it no second time
    check_rows(receiver.receive(first), prefix="0-")
    check_rows(receiver.receive(second), prefix="1-")


def test_prefetch_is_off_unless_asked_for(relay: Relay) -> None:
    (plain,) = receivers_of(relay, ChannelConfig())
    with pytest.raises(errors.ConfigError, match="prefetch is off"):
        plain.prefetch(sealed(relay, 0))
