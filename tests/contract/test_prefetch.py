"""A step's rows come as soon as its ticket is known: while the step before trains, with the same checks; never over a group."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest

from r3channel import errors
from r3channel.plan.ticket import Ticket
from r3channel.relay.relay import Relay
from tests.support.delivery import MakeRelay, Slowly, check_rows, lives, receive, receivers_of
from tests.support.delivery import sealed as sealed_with
from tests.support.waits import SOON_S, until


@pytest.fixture
def relay(make_relay: MakeRelay) -> Relay:
    return make_relay("dp=1")


def sealed(relay: Relay, step: int) -> Ticket:
    return sealed_with(relay, step, prefix=f"{step}-")


def test_the_next_shard_arrives_beside_the_one_in_use(relay: Relay) -> None:
    (receiver,) = receivers_of(relay)
    shard = receiver.receive(sealed(relay, 0))
    assert len(receiver._buffers) == 1, "there is no memory for a second one until it is needed"
    for step in range(1, 4):
        ticket = sealed(relay, step)
        receiver.prefetch(ticket)
        relay.join_previous(timeout_s=SOON_S)  # it was received and acknowledged before anybody asked for it
        check_rows(shard, prefix=f"{step - 1}-")
        shard = receiver.receive(ticket)
        check_rows(shard, prefix=f"{step}-")
    assert len(receiver._buffers) == 2 and lives(relay) == [1]


def test_a_shard_that_is_handed_on_leaves_its_memory_to_the_next(make_relay: MakeRelay) -> None:
    relay = make_relay("tp=2")
    first, second = receivers_of(relay)
    for step in range(2):
        ticket = sealed(relay, step)
        first.prefetch(ticket)
        second.prefetch(ticket)
        for shard in receive([first, second], ticket):
            check_rows(shard, prefix=f"{step}-")
    assert sorted(first._buffers) == ["slot", "whole0"]


def test_over_a_process_group_rows_wait_for_their_receive(make_relay: MakeRelay) -> None:
    relay = make_relay("dp=1", transport="gloo")
    (receiver,) = receivers_of(relay)
    receiver.prefetch(ticket := sealed(relay, 0))
    assert relay.find_undelivered(wait_s=0.3) == {0: ((0, 0, 0),)}
    check_rows(receiver.receive(ticket), prefix="0-")


def test_an_error_of_the_transfer_surfaces_at_the_receive(relay: Relay) -> None:
    (receiver,) = receivers_of(relay)
    ticket = sealed(relay, 0)
    assert relay.abandon(0) == 4
    receiver.prefetch(ticket)
    with pytest.raises(errors.TicketMismatch, match="abandoned"):
        receiver.receive(ticket)
    check_rows(receiver.receive(sealed(relay, 1)), prefix="1-")


def test_a_new_seal_replaces_a_prefetch(make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch) -> None:
    relay, slowly = make_relay("dp=1"), Slowly(monkeypatch)
    (receiver,) = receivers_of(relay)
    receiver.prefetch(old := sealed(relay, 0))
    assert slowly.entered.wait(SOON_S)
    relay.abandon(0)
    new = relay.seal(0, old.assignment)
    receiver.prefetch(new)
    slowly.go_on.set()
    shard = receiver.receive(new)
    assert shard.ticket.seal == 1
    check_rows(shard, prefix="0-")


def test_a_receive_asks_again_where_a_prefetch_failed(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    (receiver,) = receivers_of(relay, replace(relay.config, step_timeout_s=0.4))
    ticket = sealed(relay, 0)
    with monkeypatch.context() as patch:
        patch.setattr("r3channel.trainer.relay_connection.connect", Mock(side_effect=errors.TransportError))
        receiver.prefetch(ticket)
        assert receiver._ahead is not None
        with pytest.raises(errors.TransportError):
            receiver._ahead[1].result(SOON_S)
    check_rows(receiver.receive(ticket), prefix="0-")


def test_only_the_prefetched_step_may_be_received_next(relay: Relay) -> None:
    (receiver,) = receivers_of(relay)
    first, second = sealed(relay, 0), sealed(relay, 1)
    receiver.prefetch(first)
    for call in (receiver.prefetch, receiver.receive):
        with pytest.raises(errors.UsageError, match="step 1 while step 0"):
            call(second)
        until(lambda: 0 not in relay.status()["steps"])
    # the relay has its acknowledgement and sends it no second time
    check_rows(receiver.receive(first), prefix="0-")
    check_rows(receiver.receive(second), prefix="1-")


def test_a_closed_receiver_ends_its_transfer(make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch) -> None:
    relay, slowly = make_relay("dp=1", step_timeout_s=10 * SOON_S), Slowly(monkeypatch)
    (receiver,) = receivers_of(relay)
    receiver.prefetch(sealed(relay, 0))
    assert slowly.entered.wait(SOON_S)
    receiver.close()
    assert receiver._ahead is not None
    with pytest.raises(errors.TransportError):
        receiver._ahead[1].result(SOON_S / 2)
    slowly.go_on.set()
