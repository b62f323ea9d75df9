"""A process group that fails: the next connection, and after enough of them TCP alone; nobody else notices.

The other transport has no fallback: it is what the others fall back to.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from r3channel import errors
from r3channel.plan.assignment import Assignment
from r3channel.relay.send_buffers import HostPool
from r3channel.trainer.receiver import Receiver
from r3channel.trainer.relay_connection import RelayConnection
from r3channel.trainer.shard_buffer import ShardBuffer
from r3channel.transport.base import Pending, Rendezvous, Transport
from r3channel.transport.connection import Connection
from r3channel.transport.process_group import ProcessGroupTransport, RendezvousStore
from r3channel.transport.select import join
from tests.support.delivery import MakeRelay, check_rows, hand, lives, receive, receivers_of, sealed
from tests.support.samples import reply_for
from tests.support.waits import SOON_S, busy, until


class Cable:
    """Between relay and receivers: each of the next `cuts` connections ends in the middle of its rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cuts, self.only = 0, ""
        """`only`: the thread of one receiver's connection, else whichever sends first."""
        self.cut: list[object] = []
        self.grouped = set[str]()
        """Whose rows went over a process group: threads of the relay's connections."""
        start_send, send = ProcessGroupTransport.start_send, Connection.send

        def group(transport: ProcessGroupTransport, dst: int, data_N: torch.Tensor) -> Pending:
            if len(data_N) > 1:  # not the byte of a join
                self.grouped.add(threading.current_thread().name)
                if self._cuts(transport):
                    transport.abort()  # gloo closes its sockets; the peer is in the middle of its receives
            return start_send(transport, dst, data_N)

        def link(link: Connection, parts: Any, *, timeout_s: float | None) -> None:
            if any(isinstance(part, memoryview) for part in parts) and self._cuts(link):  # rows
                link.abort()
            send(link, parts, timeout_s=timeout_s)

        monkeypatch.setattr(ProcessGroupTransport, "start_send", group)
        monkeypatch.setattr(Connection, "send", link)

    def _cuts(self, connection: object) -> bool:
        ours = threading.current_thread().name.startswith(self.only or "r3channel-send")
        if not ours or self.cuts <= 0 or connection in self.cut:
            return False
        self.cuts -= 1
        self.cut.append(connection)
        return True


@pytest.fixture
def cable(monkeypatch: pytest.MonkeyPatch) -> Cable:
    return Cable(monkeypatch)


@pytest.fixture
def make_relay(make_relay: MakeRelay) -> MakeRelay:
    return partial(make_relay, transport="gloo")


def fallbacks(receiver: Receiver) -> float:
    return receiver.metrics.value("r3channel_fallback_shards_total")


def test_without_a_fallback_the_step_fails_by_name_and_is_kept(make_relay: MakeRelay, cable: Cable) -> None:
    relay = make_relay("dp=1", max_group_failures=2, fallback="")
    ticket, receiver = sealed(relay), receivers_of(relay)[0]
    cable.cuts = 2
    with pytest.raises(errors.TransportError, match="rank"):
        receiver.receive(ticket)
    assert len(cable.cut) == 2 and relay.status()["steps"][0]["missing"] == [(0, 0, 0)]
    check_rows(receiver.receive(ticket))
    assert lives(relay) == [3]


def test_a_connection_that_has_ended_leaves_no_key_in_any_store(
    make_relay: MakeRelay, cable: Cable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a relay that lives for weeks grows with every reconnection; `test_long_run` measures it, in minutes."""
    stores, opened = list[RendezvousStore](), RendezvousStore.__init__

    def noted(store: RendezvousStore, interface: str) -> None:
        opened(store, interface)
        stores.append(store)

    def keys() -> int:
        return sum(known.num_keys() for store in stores if (known := store._store) is not None)

    monkeypatch.setattr(RendezvousStore, "__init__", noted)
    relay = make_relay("dp=1", max_group_failures=2)
    ticket, receiver = sealed(relay), receivers_of(relay)[0]
    receiver.join()
    cable.cuts, before = 1, keys()
    check_rows(receiver.receive(ticket))
    assert lives(relay) == [2] and before > 0
    until(lambda: keys() == before)


@pytest.mark.parametrize("transport", ["gloo", "tcp"])
@pytest.mark.parametrize("text", ["dp=2", "dp=1,pp=2", "dp=1,cp=2"])
def test_the_failure_of_one_receiver_touches_no_other(
    make_relay: MakeRelay, cable: Cable, transport: str, text: str
) -> None:
    relay = make_relay(text, transport=transport, max_group_failures=2)
    receivers = receivers_of(relay)
    for step in range(2):
        cable.grouped.clear()
        cable.cuts, cable.only = (2 if transport == "gloo" else 1) * (step == 0), "r3channel-send-0-0-0"
        for shard in receive(receivers, sealed(relay, step, prefix=f"{step}-")):
            check_rows(shard, prefix=f"{step}-")
        relay.join_previous(timeout_s=SOON_S)
    assert len(cable.cut) == (2 if transport == "gloo" else 1)
    assert lives(relay) == ([3, 1] if transport == "gloo" else [2, 1])
    assert [fallbacks(receiver) for receiver in receivers] == [float(transport == "gloo"), 0]
    assert len(cable.grouped) == (2 if transport == "gloo" else 0), "in the next step both in a group again"


@pytest.mark.parametrize(
    "hangs", [(RelayConnection, "_receive_rows"), (ShardBuffer, "rows")], ids=["early", "late"]
)
def test_a_receiver_that_hangs_in_its_turn_holds_up_the_others_for_a_moment(
    make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch, hangs: tuple[type, str]
) -> None:
    """Before its first receive is posted, or behind it. One turn for all, as where staging is one GPU's: who posts receives
    before its turn would occupy a trainer's GPU."""
    monkeypatch.setattr("r3channel.relay.row_server._TAKEN_S", busy())
    relay, go_on, told, inner = make_relay("dp=2"), threading.Event(), list[int](), getattr(*hangs)
    relay.row_server.staging = HostPool(1)
    for name in "ab":
        relay.add(name, reply_for(name, 300), range(300))  # seven buckets
    ticket = relay.seal(0, Assignment.given([[["a"]], [["b"]]]))

    def slow(self: Any, *args: Any, **kwargs: Any) -> None:
        told.append(1)
        if len(told) == 1:
            assert go_on.wait(SOON_S)
        inner(self, *args, **kwargs)

    monkeypatch.setattr(*hangs, slow)
    with ThreadPoolExecutor(2) as pool:
        receiving = [pool.submit(receiver.receive, ticket) for receiver in receivers_of(relay)]
        until(lambda: len(lives(relay)) == 2 and told)
        time.sleep(0.3)
        assert len(told) == 1
        until(lambda: len(relay.find_undelivered(wait_s=0)[0]) == 1)
        go_on.set()
        for future in receiving:
            hand(future.result(SOON_S))  # the one that hung came again
    assert sum(lives(relay)) == 3


def test_rows_over_tcp_wait_for_no_groups_turn(make_relay: MakeRelay) -> None:
    relay = make_relay("pp=2")
    relay.row_server.staging = HostPool(1)  # a GPU's
    receivers = receivers_of(relay, replace(relay.config, transport="tcp"))
    with relay.row_server.staging.turn(lambda: None, every_s=1.0):
        for shard in receive(receivers, sealed(relay)):
            check_rows(shard)


def test_a_receiver_that_wants_a_group_of_a_relay_without_one_is_refused(make_relay: MakeRelay) -> None:
    relay = make_relay("dp=1", transport="tcp")
    (receiver,) = receivers_of(relay, make_relay("dp=1").config)
    with pytest.raises(
        errors.TicketMismatch, match="asks for a process group; this relay's transport is tcp"
    ):
        receiver.receive(sealed(relay))


def test_a_relay_without_the_device_that_it_is_to_use_is_refused_at_once(make_relay: MakeRelay) -> None:
    with pytest.raises(errors.ConfigError, match=r"device 99.*sees \d+ CUDA devices.*num_gpus"):
        make_relay("dp=1", device=99, transport="nccl")


def test_a_group_is_made_when_a_receiver_joins_and_its_first_step_makes_none(
    make_relay: MakeRelay, cable: Cable, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = make_relay("dp=1")
    (receiver,) = receivers_of(relay)
    receiver.join(timeout_s=SOON_S)
    monkeypatch.setattr("r3channel.trainer.relay_connection.join", None)  # whoever joins now fails
    for step, prefix in enumerate("ab"):
        check_rows(receiver.receive(sealed(relay, step, prefix=prefix)), prefix=prefix)
    assert cable.grouped and lives(relay) == [1] and fallbacks(receiver) == 0


def test_a_group_that_is_late_fails_the_join(make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch) -> None:
    relay, ended = make_relay("dp=1"), threading.Event()

    def hangs(*_: Any, **__: Any) -> Any:
        ended.wait(SOON_S)
        raise errors.TransportError("the relay's end was given up")

    monkeypatch.setattr("r3channel.relay.row_server.join", hangs)
    (receiver,) = receivers_of(relay)
    with pytest.raises(errors.DeadlineExceeded, match=r"rank 1 of 2 could not join"):
        receiver.join(timeout_s=0.5)
    ended.set()
    monkeypatch.undo()
    check_rows(receiver.receive(sealed(relay)))


@pytest.mark.parametrize(("transport", "joined"), [("nccl", ["nccl", "nccl"]), ("tcp", [])])
def test_rows_go_over_nccl_where_both_ends_ask_for_it(
    make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch, transport: str, joined: list[str]
) -> None:
    backends: list[str] = []

    def over_gloo(rendezvous: Rendezvous, *, timeout_s: float) -> Transport:
        backends.append(rendezvous.backend)
        return join(replace(rendezvous, backend="gloo"), timeout_s=timeout_s)

    monkeypatch.setattr("r3channel.relay.row_server.DeviceStaging", lambda device: HostPool())
    monkeypatch.setattr("r3channel.relay.row_server.gpu_of", lambda device: "the relay's")
    monkeypatch.setattr("r3channel.trainer.relay_connection.gpu_of", lambda: "its own")
    monkeypatch.setattr("r3channel.relay.row_server.join", over_gloo)
    monkeypatch.setattr("r3channel.trainer.relay_connection.join", over_gloo)
    relay = make_relay("dp=1", transport="nccl")
    (receiver,) = receivers_of(relay, replace(relay.config, transport=transport))
    receiver.join(timeout_s=SOON_S)
    check_rows(receiver.receive(sealed(relay)))
    assert backends == joined and fallbacks(receiver) == 0


def test_a_receiver_on_the_relays_gpu_fails(make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL itself would fail on both sides, without naming either."""
    monkeypatch.setattr("r3channel.relay.row_server.DeviceStaging", lambda device: HostPool())
    monkeypatch.setattr("r3channel.relay.row_server.gpu_of", lambda device: f"GPU-{device}")
    monkeypatch.setattr("r3channel.trainer.relay_connection.gpu_of", lambda: "GPU-3")
    relay = make_relay("dp=1", transport="nccl", device=3)
    (receiver,) = receivers_of(relay)
    for call in (lambda: receiver.join(timeout_s=SOON_S), lambda: receiver.receive(sealed(relay))):
        with pytest.raises(errors.ConfigError, match=r"\(0, 0, 0\) uses GPU GPU-3.*transport='tcp'") as told:
            call()
        assert told.value.ranks == ((0, 0, 0),)
