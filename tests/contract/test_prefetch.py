"""The next step arrives while this one trains: into other memory, with the same checks, and never over NCCL."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket
from r3channel.relay.relay import Relay
from r3channel.trainer.receiver import Receiver
from tests.delivery import LIMIT_S, assignment, check_rows, fill, receivers_of
from tests.samples import SPEC


@pytest.fixture(params=["loopback", "gloo"])
def relay(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Relay]:
    config = ChannelConfig(
        backend=request.param,
        bucket_bytes=1024,
        prefetch=True,
        step_timeout_s=LIMIT_S,
        store_dir=str(tmp_path),
    )
    relay = Relay(SPEC, TrainerLayout(dp=1), config)
    yield relay
    with contextlib.suppress(errors.StepError):
        relay.close()


def sealed(relay: Relay, step: int) -> Ticket:
    fill(relay, prefix=f"{step}-")
    return relay.seal(step, assignment(prefix=f"{step}-", dp=1))


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
    receivers_of(relay)[0].receive(ticket)
    receiver.prefetch(ticket)
    time.sleep(0.2)
    with pytest.raises(errors.TicketMismatch, match="already acknowledged"):
        receiver.receive(ticket)
    check_rows(receiver.receive(sealed(relay, 1)), prefix="1-")


def test_only_the_prefetched_step_may_be_received_next(relay: Relay) -> None:
    receiver = receivers_of(relay)[0]
    first, second = sealed(relay, 0), sealed(relay, 1)
    receiver.prefetch(first)
    with pytest.raises(errors.UsageError, match="prefetch of step 1 while step 0"):
        receiver.prefetch(second)
    deadline_s = time.monotonic() + LIMIT_S
    while 0 in relay.status()["steps"] and time.monotonic() < deadline_s:
        time.sleep(0.01)
    with pytest.raises(errors.UsageError, match="receive of step 1, but step 0"):
        receiver.receive(second)
    check_rows(
        receiver.receive(first), prefix="0-"
    )  # the relay has its acknowledgement and sends it no second time
    check_rows(receiver.receive(second), prefix="1-")


def test_prefetch_is_off_unless_asked_for_and_refused_for_nccl(relay: Relay) -> None:
    plain = Receiver(
        relay, spec=SPEC, layout=relay.layout, coords=relay.layout.coords(0), config=ChannelConfig()
    )
    with pytest.raises(errors.ConfigError, match="prefetch is off"):
        plain.prefetch(sealed(relay, 0))
    with pytest.raises(errors.ConfigError, match="deadlock"):
        ChannelConfig(backend="nccl", prefetch=True)
