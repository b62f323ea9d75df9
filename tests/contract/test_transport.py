"""The contract of a transport: bytes arrive, in order, and every wait ends. Ranks are threads over gloo; sockets are real.

And of the lock on collectives: a step's routing and a weight update exclude each other, in the slot itself and in its two users.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from r3channel.config import ChannelConfig
from r3channel.errors import ConfigError, DeadlineExceeded, TransportError, UsageError
from r3channel.transport.base import Rendezvous, Transport
from r3channel.transport.collective_lock import PROCESS_SLOT, Slot
from r3channel.transport.process_group import ProcessGroupTransport, RendezvousStore, in_background
from r3channel.transport.select import TRANSPORTS, Kind, join
from r3channel.weights.groups import WeightGroup
from r3channel.weights.session import WeightSync
from tests.support.delivery import MakeRelay, check_rows, receivers_of, sealed
from tests.support.fake_engine import UPDATE, FakeEngine
from tests.support.waits import SOON_S, until

Joiner = Callable[..., list[Transport]]


class Meeting:
    """Where the ranks of a group of one name meet."""

    def __init__(self) -> None:
        self.name, self.store = uuid.uuid4().hex, RendezvousStore("127.0.0.1")

    def join(
        self, rank: int, size: int = 2, *, connection: int = 1, backend: str = "gloo", timeout_s: float = SOON_S,
    ) -> Any:  # fmt: skip
        place = {"name": f"{self.name}/{connection}", "host": self.store.host, "port": self.store.port}
        at = Rendezvous(backend=backend, connection=connection, rank=rank, world_size=size, **place)  # type: ignore[arg-type]
        return join(at, timeout_s=timeout_s)


@pytest.fixture
def meeting() -> Meeting:
    return Meeting()


@pytest.fixture
def group(meeting: Meeting) -> Iterator[Joiner]:
    opened: list[Transport] = []

    def open_group(*, connection: int = 1) -> list[Transport]:
        with ThreadPoolExecutor(2) as pool:
            opened.extend(pool.map(lambda rank: meeting.join(rank, connection=connection), range(2)))
        return opened[-2:]

    yield open_group
    for transport in opened:
        transport.close()


def data(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def check_next_message(sender: Transport, member: Transport) -> None:
    sent = in_background(lambda: sender.send(1, data(100), timeout_s=SOON_S), name="test-send")
    member.recv(0, out := torch.zeros(100, dtype=torch.uint8), timeout_s=SOON_S)
    sent.result(SOON_S)
    assert torch.equal(out, data(100))


def test_messages_arrive_in_order_as_they_were_sent_and_memory_may_be_reused_after(group: Joiner) -> None:
    relay, member = group()
    sizes = [1, 64, 1 << 16, 1 << 20]

    def send() -> None:
        buffers = [data(nbytes) for nbytes in sizes]
        for pending in [relay.start_send(1, buffer) for buffer in buffers]:
            pending.wait(timeout_s=SOON_S)
        for buffer in buffers:
            buffer.fill_(0)

    sent = in_background(send, name="test-send")
    out = [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in sizes]
    for pending in [member.start_recv(0, part) for part in out]:
        pending.wait(timeout_s=SOON_S)
    assert all(torch.equal(part, data(len(part))) for part in out)
    sent.result(SOON_S)


@pytest.mark.parametrize("side", ["send", "recv"])
def test_after_a_deadline_with_peer_and_seconds_the_group_is_dead_and_the_next_connection_works(
    group: Joiner, side: str
) -> None:
    relay, member = group()
    call = (relay.send, 1, data(1 << 20)) if side == "send" else (member.recv, 0, data(8))
    for said in (r"connection 1.*rank [01].*0\.5 s", "abandoned"):
        with pytest.raises(TransportError, match=said) as told:
            call[0](*call[1:], timeout_s=0.5)
        assert isinstance(told.value, DeadlineExceeded) is (said != "abandoned")
    relay.abort()
    check_next_message(*group(connection=2))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_join_that_nobody_answers_ends_by_its_deadline(meeting: Meeting, rank: int) -> None:
    with pytest.raises(DeadlineExceeded):
        meeting.join(rank, timeout_s=1.0)


def test_an_own_transport_needs_its_class_and_a_line_in_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[tuple[Rendezvous, float]] = []
    pigeon = Kind(lambda *given: joined.append(given), needs_gpu=True)  # pyright: ignore[reportArgumentType]
    monkeypatch.setitem(TRANSPORTS, "pigeon", pigeon)
    where = Rendezvous(backend="pigeon", name="x", connection=1, rank=0, world_size=2, host="", port=1)
    join(where, timeout_s=1.0)
    assert joined == [(where, 1.0)] and ChannelConfig(transport="pigeon").fallback == "tcp"


@pytest.mark.parametrize("side", ["send", "recv"])
def test_an_abort_with_messages_under_way_frees_the_peer_at_once(group: Joiner, side: str) -> None:
    relay, member = group()
    out = torch.zeros(1 << 16, dtype=torch.uint8)
    started = [member.start_recv(0, out) for _ in range(2)]
    threading.Timer(0.3, member.abort).start()
    with pytest.raises(TransportError) as told:
        if side == "recv":
            relay.recv(1, torch.empty(8, dtype=torch.uint8), timeout_s=SOON_S)
        for _ in range(8):
            relay.send(1, data(1 << 16), timeout_s=SOON_S)
    assert not isinstance(told.value, DeadlineExceeded)
    with pytest.raises(TransportError):
        started[1].wait(timeout_s=SOON_S)


# -- NCCL, and what a group is joined by ----------------------------------------------------------------------------------


def test_an_engine_process_may_not_join_over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "sglang.srt.model_executor.model_runner"
    monkeypatch.setitem(sys.modules, name, types.ModuleType("model_runner"))
    with pytest.raises(UsageError, match="SGLang engine"):
        Meeting().join(0, backend="nccl")


def test_the_rendezvous_store_listens_on_loopback_only() -> None:
    store = RendezvousStore("127.0.0.1")
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    listening = [address.split(":") for _, address, _, state, *_ in rows if state == "0A"]
    hosts = {host for host, port in listening if int(port, 16) == store.port}
    assert hosts == {socket.inet_aton("127.0.0.1")[::-1].hex().upper()}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_that_joins_and_stops_after_the_first_byte_ends_the_join_by_its_deadline(
    monkeypatch: pytest.MonkeyPatch, meeting: Meeting, rank: int
) -> None:
    """What connects at a first byte would else connect inside a step, out of reach of its deadlines. Over gloo, for NCCL."""
    warm = ProcessGroupTransport._warm

    def one_sided(transport: ProcessGroupTransport, limit: Any) -> None:
        """A byte goes each way, the lower rank's first."""
        if transport.rank == rank:
            return warm(transport, limit)
        return (transport.recv if rank == 0 else transport.send)(rank, data(1), timeout_s=SOON_S)

    monkeypatch.setattr(ProcessGroupTransport, "_warm", one_sided)
    silent = in_background(lambda: meeting.join(1 - rank), name="test-join")
    with pytest.raises(DeadlineExceeded, match=rf"rank {rank} of 2 could not join within 1\.0 s"):
        meeting.join(rank, timeout_s=1.0)
    silent.result(SOON_S).close()


class NcclGroup:
    """As torch 2.13's `ProcessGroupNCCL`, as far as its failures reach others: settings are read from the environment when one
    is made; an operation beyond the group's timeout, or whose peer dies, is an error for its watchdog, which then ends the
    process, or has the monitor of the default group end it."""

    @staticmethod
    def Options() -> Any:
        return types.SimpleNamespace(config=types.SimpleNamespace(blocking=None, max_ctas=None))

    made: ClassVar[list[NcclGroup]] = []
    shuts_down = True
    peer_comes = True

    def __init__(self, _store: object, _rank: int, _size: int, options: Any) -> None:
        time.sleep(0.05)
        self.ends_process = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") != "0"
        self.watched = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") != "1"
        self.timeout, self.aborted, self.ended = options._timeout, 0, threading.Event()
        self.config, self.connected = options.config, list[tuple[torch.device, str]]()
        NcclGroup.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Waits for the peer as long as NCCL itself does; nobody can end it."""
        self.connected.append((device, threading.current_thread().name))
        assert self.peer_comes or self.ended.wait(SOON_S)

    def broadcast(self, _tensors: list[torch.Tensor], options: Any) -> Any:
        """Its peer is gone: the operation never ends."""
        assert min(self.timeout, options.timeout) > timedelta(days=1)
        return types.SimpleNamespace(is_completed=lambda: False, wait=lambda: None)

    def abort(self) -> None:
        self.aborted += 1
        self.ended.set()
        raise RuntimeError("ncclCommAbort failed")

    def shutdown(self) -> None:
        assert self.shuts_down or self.ended.wait(SOON_S)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """Makes a group of one rank on the stand-in."""
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", NcclGroup, raising=False)
    monkeypatch.setattr("r3channel.transport.process_group.device_of", lambda _: torch.device("cpu"))
    monkeypatch.setattr(NcclGroup, "made", [])
    yield lambda **limits: Meeting().join(0, 1, backend="nccl", **limits)
    assert not {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT"} & set(os.environ)


def test_an_nccl_communicator_whose_peer_does_not_come_ends_the_join_by_its_deadline(
    nccl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NcclGroup, "peer_comes", False)
    with pytest.raises(DeadlineExceeded, match=r"within 0\.5 s: .*while NCCL connects"):
        nccl(timeout_s=0.5)
    assert NcclGroup.made[0].aborted == 1


def test_nccl_groups_that_form_at_once_are_quiet_and_do_not_block(nccl: Callable[[], Any]) -> None:
    """A relay joins one group per receiver, each on its own thread; torch reads how from the process's environment."""

    def form(number: int) -> None:
        time.sleep(0.02 * number)
        nccl().close()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(form, range(3)))
    assert len(NcclGroup.made) == 3
    for made in NcclGroup.made:
        assert (made.ends_process, made.watched) == (False, False)
        assert made.connected == [(torch.device("cpu"), "r3channel-nccl-connect")]
        assert (made.config.blocking, made.config.max_ctas) == (0, 4)


def test_what_was_left_of_a_join_is_no_limit_of_an_nccl_groups_operations(nccl: Callable[..., Any]) -> None:
    transport = nccl(timeout_s=0.5)
    with pytest.raises(DeadlineExceeded, match=r"broadcast .* within 0\.2 s"):
        transport.broadcast(0, torch.zeros(8, dtype=torch.uint8), timeout_s=0.2)
    (transport := nccl()).alive = lambda: False
    with pytest.raises(TransportError, match="the peer has left"):
        transport.broadcast(0, torch.zeros(8, dtype=torch.uint8), timeout_s=SOON_S)
    assert NcclGroup.made[0].aborted == 1
    with pytest.raises(TransportError, match="abandoned"):
        transport.broadcast(0, torch.zeros(8, dtype=torch.uint8), timeout_s=0.2)


def test_a_weight_group_whose_member_dies_does_not_end_the_trainer(nccl: Callable[..., Any]) -> None:
    group = WeightGroup("test-nccl", world_size=2, backend="nccl")
    group.join(timeout_s=SOON_S)
    with pytest.raises(DeadlineExceeded, match=r"could not broadcast 4 bytes of rank 0 within 0\.2 s"):
        group.broadcast(torch.zeros(4, dtype=torch.uint8), timeout_s=0.2)
    group.close()
    assert not NcclGroup.made[0].ends_process and NcclGroup.made[0].ended.wait(SOON_S)


def test_a_hanging_nccl_group_is_aborted(nccl: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NcclGroup, "shuts_down", False)
    monkeypatch.setattr("r3channel.transport.process_group._CLOSE_S", 0.2)
    transport = nccl()
    transport.close()
    transport.close()
    assert NcclGroup.made[0].aborted == 1


def test_an_abort_beside_a_waits_end_raises_nothing(monkeypatch: pytest.MonkeyPatch, group: Joiner) -> None:
    """What is not a TransportError ends the relay's sending thread, and the relay with it."""

    class Started(list[object]):
        """The group is aborted between the look whether an operation is there and its removal."""

        def __contains__(self, item: object) -> bool:
            found = super().__contains__(item)
            one.abort()
            return found

        def remove(self, item: object) -> None:
            one.abort()
            super().remove(item)

    one, two = group()
    monkeypatch.setattr(one, "_started", Started())
    check_next_message(one, two)


# -- the lock ------------------------------------------------------------------------------------------------------------


def test_uses_of_one_kind_may_overlap() -> None:
    slot, met = Slot(), threading.Barrier(2, timeout=SOON_S)

    def user() -> None:
        with slot.use("routing", "routing", timeout_s=SOON_S):
            met.wait()  # breaks where the other is not let in

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(user) for _ in range(2)]:
            done.result(2 * SOON_S)


def test_a_thread_that_would_wait_for_itself_is_refused_at_once() -> None:
    slot = Slot()
    with (
        slot.use("routing", "step 3", timeout_s=SOON_S),
        pytest.raises(UsageError, match="the update inside step 3"),
        slot.use("weights", "the update", timeout_s=SOON_S),
    ):
        pass


@pytest.mark.parametrize("transport", ["tcp", "gloo"])
def test_a_receive_waits_for_the_end_of_a_weight_update_and_rows_over_tcp_do_not(
    make_relay: MakeRelay, transport: str
) -> None:
    relay = make_relay("dp=1", transport=transport, step_timeout_s=10 * SOON_S)
    ticket, receiver = sealed(relay), receivers_of(relay)[0]
    with ThreadPoolExecutor(1) as pool, PROCESS_SLOT.use("weights", "an update", timeout_s=SOON_S):
        receiving = pool.submit(receiver.receive, ticket)
        until(lambda: PROCESS_SLOT._changed._waiters)  # type: ignore[attr-defined]
        wait_s = SOON_S if transport == "tcp" else 1.0
        assert (relay.find_undelivered(wait_s=wait_s) == {}) is (transport == "tcp")
        assert not receiving.done()
    check_rows(receiving.result(SOON_S))


def test_a_weight_update_waits_for_the_end_of_a_receive() -> None:
    sync = WeightSync.whole(["http://127.0.0.1:9"], bucket_bytes=1 << 10)
    read: list[str] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        read.append("begun")
        yield "w", torch.zeros(4)

    with ThreadPoolExecutor(1) as pool, PROCESS_SLOT.use("routing", "step 3", timeout_s=SOON_S):
        updating = pool.submit(sync.update, tensors(), version=1, timeout_s=0.3)
        with pytest.raises(DeadlineExceeded, match=r"update to weight version 1 waited 0\.3 s for step 3"):
            updating.result(SOON_S)
    until(lambda: read == ["begun"])  # drained on a thread, because other ranks may be in step with it


# -- the group that carries weight buckets, and an engine's end of it; SGLang's own joins it in tests/engine/test_weight_sync ---


@pytest.mark.long
def test_bytes_arrive_and_a_close_frees_a_waiting_peer() -> None:
    group, engine = WeightGroup("test-weights-1", world_size=2), FakeEngine()

    def answering(route: str, **body: Any) -> Future[Any]:
        return in_background(lambda: engine.answer(route, body), name="test-engine")

    def receiving(size: int) -> Future[Any]:
        """The engine's answer to an update of so many bytes."""
        told = {"names": ["w"], "dtypes": ["uint8"], "shapes": [[size]], "flush_cache": False}
        return answering(UPDATE, **told, group_name=group.name)

    joined = answering("/init_weights_update_group", **group.where, rank_offset=1)
    group.join(timeout_s=SOON_S)
    assert joined.result(SOON_S) == {"success": True}
    payload = torch.arange(1000).to(torch.uint8)
    answer = receiving(1000)
    group.broadcast(payload, timeout_s=SOON_S)
    assert answer.result(SOON_S) == {"success": True} and torch.equal(engine.tensors["w"], payload)

    answer = receiving(10)
    until(lambda: engine.calls.count(UPDATE) == 2)
    group.close()
    group.close()
    # whether the kernel calls it closed or reset depends on whether the peer had begun to read
    assert re.search("(closed|reset) by peer", answer.result(SOON_S)["message"])
    with pytest.raises(UsageError, match="closed"):
        group.broadcast(payload, timeout_s=SOON_S)


@pytest.mark.long
def test_who_stands_in_for_a_member_stays_until_all_have_met_it() -> None:
    group = WeightGroup("test-weights-5", world_size=2)
    joining = in_background(lambda: group.join(timeout_s=SOON_S), name="test-join")
    group.join(1, timeout_s=SOON_S)
    joining.result(SOON_S)
    (stand_in,) = group._stand_ins
    assert not stand_in._dead
    group.close()
    until(lambda: stand_in._dead)


@pytest.mark.long
def test_a_join_without_the_other_member_ends_at_the_deadline_and_a_wildcard_host_is_refused() -> None:
    group = WeightGroup("test-weights-2", world_size=2)
    with pytest.raises(DeadlineExceeded, match=r"rank 0 of 2 could not join within 0\.5 s"):
        group.join(timeout_s=0.5)
    group.close()
    with pytest.raises(ConfigError, match="every interface"):
        WeightGroup("test-weights-3", world_size=1, host="0.0.0.0")
