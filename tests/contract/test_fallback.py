"""A group that fails: the next life, a life for those that still wait, and after enough lives the object store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.transport.base import Pending, Transport
from r3channel.transport.loopback import LoopbackTransport
from r3channel.transport.process_group import ProcessGroupTransport
from r3channel.wire.bucket import BUCKET_HEADER_BYTES
from tests.delivery import LIMIT_S, TOKENS, assignment, check_rows, fill, receivers_of, start
from tests.samples import SPEC

GROUPS: dict[str, type[Transport]] = {"loopback": LoopbackTransport, "gloo": ProcessGroupTransport}
MakeRelay = Callable[..., Relay]


class Cable:
    """Between relay and members: each of the next `cuts` lives of a group dies with its first payload."""

    def __init__(self, kind: type[Transport], monkeypatch: pytest.MonkeyPatch) -> None:
        self.cuts = 0
        self.cut: list[Transport] = []
        start_send = kind.start_send

        def cut_or_send(transport: Transport, dst: int, data_N: torch.Tensor) -> Pending:
            if len(data_N) != BUCKET_HEADER_BYTES and self.cuts > 0 and transport not in self.cut:
                self.cuts -= 1
                self.cut.append(transport)
                transport.abort()  # gloo closes its sockets; the peer is in the middle of its receives
            return start_send(transport, dst, data_N)

        monkeypatch.setattr(kind, "start_send", cut_or_send)


@pytest.fixture(params=sorted(GROUPS))
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def cable(backend: str, monkeypatch: pytest.MonkeyPatch) -> Cable:
    return Cable(GROUPS[backend], monkeypatch)


@pytest.fixture
def make_relay(backend: str, tmp_path: Path) -> Iterator[MakeRelay]:
    made: list[Relay] = []

    def make(layout: str, **changes: object) -> Relay:
        limits = {"join_timeout_s": LIMIT_S, "send_timeout_s": LIMIT_S, "store_dir": str(tmp_path / "store")}
        values = {"backend": backend, "bucket_bytes": 1024} | limits | changes
        config = ChannelConfig(**values)  # type: ignore[arg-type]
        made.append(Relay(SPEC, TrainerLayout.parse(layout), config))
        return made[-1]

    yield make
    for relay in made:
        with contextlib.suppress(errors.StepError):
            relay.close()


def lives(relay: Relay) -> list[tuple[int, str]]:
    return [(group["epoch"], group["backend"]) for group in relay.status()["groups"].values()]


def test_after_enough_failed_lives_the_step_goes_by_the_object_store_and_the_next_tries_the_group(
    make_relay: MakeRelay, cable: Cable, backend: str
) -> None:
    relay = make_relay("dp=2", max_group_failures=2)
    receivers = receivers_of(relay)
    fill(relay)
    first = relay.seal(0, assignment())
    check_rows(receivers[1].receive(first))
    cable.cuts = 2
    assert check_rows(receivers[0].receive(first)) > 0
    assert len(cable.cut) == 2 and relay.metrics.value("r3channel_fallback_shards_total") == 1
    relay.join_previous(timeout_s=LIMIT_S)
    assert lives(relay) == [(4, backend), (1, backend)]

    fill(relay, prefix="n-")
    second = relay.seal(1, assignment(prefix="n-"))
    for future in start(receivers, second):
        check_rows(future.result(LIMIT_S), prefix="n-")
    assert relay.metrics.value("r3channel_fallback_shards_total") == 1
    assert relay.metrics.value("r3channel_samples_total", outcome="delivered") == 8
    assert relay.status()["groups"][0]["failed_lives"] == {}


def test_without_a_fallback_the_step_fails_by_name_after_as_many_lives_and_is_kept(
    make_relay: MakeRelay, cable: Cable
) -> None:
    relay = make_relay("dp=1", max_group_failures=2, fallback="")
    fill(relay)
    ticket = relay.seal(0, assignment(dp=1))
    cable.cuts = 2
    with pytest.raises(errors.TransportError, match="rank"):
        receivers_of(relay)[0].receive(ticket)
    assert len(cable.cut) == 2 and relay.status()["steps"][0]["missing"] == [(0, 0, 0)]
    check_rows(receivers_of(relay)[0].receive(ticket))


def test_all_members_of_a_group_fall_back_together(make_relay: MakeRelay, cable: Cable, backend: str) -> None:
    relay = make_relay("dp=1,pp=2", max_group_failures=1)
    receivers = receivers_of(relay)
    cable.cuts = 1
    for step in range(2):
        fill(relay, prefix=f"{step}-")
        ticket = relay.seal(step, assignment(prefix=f"{step}-", dp=1))
        for future in start(receivers, ticket):
            check_rows(future.result(LIMIT_S), prefix=f"{step}-")
        relay.join_previous(timeout_s=LIMIT_S)
        assert relay.metrics.value("r3channel_fallback_shards_total") == 2
    assert lives(relay)[0][1] == backend


def test_a_life_that_fails_when_some_members_are_done_is_resumed_without_them(
    make_relay: MakeRelay, cable: Cable
) -> None:
    """Pipeline stage 0 has its shard and is in its forward pass, where it waits for stage 1: it does not come again."""
    relay = make_relay("dp=1,pp=2")
    done, waiting = receivers_of(relay)
    fill(relay)
    ticket = relay.seal(0, assignment(dp=1))
    joined = [ThreadPoolExecutor(1).submit(receiver.join, timeout_s=LIMIT_S) for receiver in (done, waiting)]
    for future in joined:
        future.result(LIMIT_S)
    check_rows(done.receive(ticket))
    cable.cuts = 1
    check_rows(waiting.receive(ticket))
    assert len(cable.cut) == 1
    relay.join_previous(timeout_s=LIMIT_S)

    fill(relay, prefix="n-")
    again = relay.seal(1, assignment(prefix="n-", dp=1))
    for future in start([done, waiting], again):
        check_rows(future.result(LIMIT_S), prefix="n-")


@pytest.mark.parametrize("staging", ["bucketed", "coalesced"])
def test_two_buckets_are_staged_at_any_size_and_the_whole_shard_only_when_asked(
    make_relay: MakeRelay, staging: str
) -> None:
    peaks, sizes = [], []
    for prefixes in ("ab", "abcd"):
        relay = make_relay("dp=1", staging=staging)
        for prefix in prefixes:
            fill(relay, prefix=prefix)
        names = [prefix + name for prefix in prefixes for name in TOKENS]
        ticket = relay.seal(0, Assignment.given([[names]]))
        receivers_of(relay)[0].receive(ticket)
        peaks.append(relay.peak_staging_bytes)
        sizes.append(ticket.plan.shards[0].nbytes)
    assert sizes[1] > sizes[0] >= 2 * 1024
    assert peaks == ([2 * 1024] * 2 if staging == "bucketed" else sizes)


def test_a_relay_without_the_device_that_it_is_to_use_is_refused_at_once(make_relay: MakeRelay) -> None:
    with pytest.raises(errors.ConfigError, match=r"device 99.*sees \d+ CUDA devices.*num_gpus"):
        make_relay("dp=1", device=99, backend="nccl")
