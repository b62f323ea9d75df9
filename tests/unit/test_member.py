"""A receiver, and its connection to a relay that is played by the test: what it takes at its word, and for how long."""

from __future__ import annotations

import gc
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from xxhash import xxh3_64_intdigest

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.errors import BucketCorrupt, DeadlineExceeded, TransportError
from r3channel.observe.metrics import Metrics
from r3channel.observe.stage_clock import StageClock
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.stream import Stream
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.trainer import relay_connection as member_module
from r3channel.trainer.buckets import HostBuckets
from r3channel.trainer.receiver import Receiver
from r3channel.trainer.relay_connection import RelayConnection
from r3channel.trainer.shard_buffer import ShardBuffer
from r3channel.transport.connection import Connection
from r3channel.transport.listener import Listener
from r3channel.transport.tp_fanout import TensorParallelFanout
from r3channel.wire import row_protocol as wire
from r3channel.wire.routing import Ids
from r3channel.wire.token_tensors import TokenTensor
from tests.support.samples import SPEC, random_ids
from tests.support.waits import SOON_S

ROWS_TLK = random_ids(8)
LAYOUT = TrainerLayout()
TICKET = Ticket("run", 3, SPEC, LAYOUT, Assignment.given([[["a"]]]), (TicketSample("a", 9, 7, 0, ()),), 1024)
STREAM = Stream.of(TICKET, TICKET.plan.shard(dp=0, pp=0))
DIGESTS = bytes(range(2 * 8 * SPEC.num_moe_layers))
Scene = Callable[["Played"], None]
"""What a relay does on one connection."""


class Played:
    """A connection at the relay's end."""

    def __init__(self, link: Connection) -> None:
        self.link = link

    def hear(self, kind: int, **expected: Any) -> dict[str, Any]:
        found, body = self.link.recv_record(timeout_s=SOON_S)
        assert found == kind, found
        values = wire.unpack(found, body, expected=kind)
        assert expected.items() <= values.items()
        return values

    def say(self, kind: int, **values: Any) -> None:
        self.link.send_record(kind, wire.pack(**values), timeout_s=SOON_S)

    def announce(self, **changes: Any) -> None:
        self.hear(wire.READY, run="run", step=3, seal=0, group=False)
        honest = {"nbytes": STREAM.nbytes, "digests": len(DIGESTS), "hash": xxh3_64_intdigest(DIGESTS)}
        self.say(wire.ROWS, **(honest | changes))

    def rows(self) -> None:
        self.link.send([ROWS_TLK.tobytes(), DIGESTS], timeout_s=SOON_S)

    def send_all(self, **changes: Any) -> None:
        self.announce(**changes)
        self.rows()

    def thank(self) -> None:
        self.hear(wire.DONE, run="run", step=3, seal=0)
        self.say(wire.THANKS)

    def silent(self) -> None:
        """Until the other end has gone."""
        with suppress(TransportError):
            while True:
                self.link.recv_record(timeout_s=SOON_S)


def whole(relay: Played) -> None:
    relay.send_all()
    relay.thank()


class Stage:
    """A relay that plays one scene on each connection, in turn; the last one again and again."""

    def __init__(self, *scenes: Scene) -> None:
        self.token, self.left, self.played = secrets.token_bytes(32), list(scenes), 0
        self.failures: list[BaseException] = []
        self.hellos = 0
        self._lock = threading.Lock()
        self.listener = Listener("127.0.0.1", token=self.token, on_link=self._play)

    def _play(self, link: Connection) -> None:
        with self._lock:
            self.played += 1
            scene = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        relay = Played(link)
        try:
            scene(relay)
            relay.silent()
        except TransportError:
            pass
        except BaseException as error:
            self.failures.append(error)
        finally:
            link.close()

    def hello(self, **key: int) -> dict[str, Any]:
        assert key == {"dp": 0, "pp": 0, "cp": 0}
        self.hellos += 1
        where = {"host": self.listener.host, "port": self.listener.port, "token": self.token.hex()}
        return where | {"run": "run", "gpu": ""}


Play = Callable[..., Stage]


@pytest.fixture
def play() -> Iterator[Play]:
    stages: list[Stage] = []

    def begin(*scenes: Scene) -> Stage:
        stages.append(Stage(*scenes))
        return stages[-1]

    yield begin
    for stage in stages:
        stage.listener.close()
        assert not stage.failures


@dataclass
class Attempt:
    """What came in one attempt."""

    begins: list[int] = field(default_factory=list[int])
    data: bytes = b""
    taken: bytes = b""
    counted: float = 0
    """Bytes of rows that this attempt and those before it count."""
    digests: bytes = b""


class Landed(ShardBuffer):
    """Keeps what comes in each attempt; says what it is told to."""

    def __init__(self, ticket: Ticket, damaged: Sequence[list[str]]) -> None:
        shard = ticket.plan.shard(dp=0, pp=0)
        super().__init__(ticket, shard, np.empty(shard.nbytes, np.uint8))
        self.damaged, self.attempts = list(damaged), list[Attempt]()

    def begin(self) -> None:
        self.attempts.append(Attempt())

    def rows(self, ids_TCK: Ids, *, begin: int) -> None:
        self.attempts[-1].begins.append(begin)
        self.attempts[-1].data += ids_TCK.tobytes()

    def tensor(self, tensor: TokenTensor, data: bytearray) -> None:
        self.attempts[-1].taken = bytes(data)

    def verify(self, digests: bytes) -> list[str]:
        self.attempts[-1].digests = digests
        return self.damaged.pop(0) if len(self.damaged) > 1 else self.damaged[0]


def receive(
    stage: Any, *, damaged: Sequence[list[str]] = ([],), ticket: Ticket = TICKET, **changes: Any
) -> list[Attempt]:
    """What came in each attempt; `damaged` is what is found in each of them."""
    landed = Landed(ticket, damaged)
    values: dict[str, Any] = {"step_timeout_s": SOON_S, "send_timeout_s": SOON_S} | changes
    clock = StageClock("trainer")
    member = RelayConnection(
        stage, coords=LAYOUT.coords(0), config=ChannelConfig(**values), buckets=HostBuckets(), clock=clock,
        metrics=(metrics := Metrics("trainer", clock=clock)),
    )  # fmt: skip
    try:
        member.receive(landed)
    finally:
        member.close()
    landed.attempts[-1].counted = metrics.value("r3channel_bytes_total", leg="wire_received")
    return landed.attempts


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bucket_rows", "begins"), [(1, list(range(8))), (3, [0, 3, 6]), (100, [0])])
def test_rows_come_bucket_by_bucket_whole_rows_only(play: Play, bucket_rows: int, begins: list[int]) -> None:
    row_bytes = ROWS_TLK[0].nbytes

    def half(relay: Played) -> None:
        relay.announce()
        relay.link.send([ROWS_TLK[:4].tobytes()], timeout_s=SOON_S)
        relay.link.close()

    _, sink = receive(play(half, whole), ticket=replace(TICKET, bucket_bytes=bucket_rows * row_bytes + 1))
    assert (sink.begins, sink.data, sink.digests) == (begins, ROWS_TLK.tobytes(), DIGESTS)
    assert sink.counted == ROWS_TLK.nbytes + 4 // bucket_rows * bucket_rows * row_bytes


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (wire.THANKS, b"{}"), (wire.ROWS, b"{}"), (wire.ROWS, b"no json"), (wire.ROWS, b"[1]"), (77, b"{}"),
        (wire.ROWS, b"[" * 100_000), (wire.GROUP, b'{"backend": 3}'), (wire.ERROR, b"[]"), (wire.ERROR, b"{}"),
    ],
)  # fmt: skip
def test_a_record_out_of_turn_or_shape_ends_only_the_connection(play: Play, kind: int, body: bytes) -> None:
    def nonsense(relay: Played) -> None:
        relay.hear(wire.READY)
        relay.link.send_record(kind, body, timeout_s=SOON_S)

    stage = play(nonsense, whole)
    (*_, sink) = receive(stage)
    assert stage.played == 2 and sink.data == ROWS_TLK.tobytes()


def damaged(relay: Played) -> None:
    relay.send_all()
    relay.hear(wire.DAMAGED, step=3)
    relay.say(wire.AGAIN)


MASKED = replace(TICKET, token_tensors=("sampling_masks",))
MASKS = bytes(2 * 9)  # a length of nothing for each token


def masked(relay: Played, **changes: Any) -> None:
    relay.send_all(**{"tensors": [[len(MASKS), xxh3_64_intdigest(MASKS)]]} | changes)
    relay.link.send([MASKS], timeout_s=SOON_S)


def test_digests_and_masks_that_come_damaged_are_asked_for_again(play: Play) -> None:
    first, second = receive(play(lambda relay: relay.send_all(hash=1), whole))
    assert first.digests == b"" and second.digests == DIGESTS

    def good(relay: Played) -> None:
        masked(relay)
        relay.thank()

    first, second = receive(play(lambda relay: masked(relay, tensors=[[len(MASKS), 1]]), good), ticket=MASKED)
    assert (first.taken, second.taken) == (b"", MASKS)


def test_samples_that_always_come_damaged_are_all_named(play: Play) -> None:
    names = [f"s{index}" for index in range(300)]
    stage = play(damaged)
    with pytest.raises(BucketCorrupt, match="rows of 300 samples came damaged") as told:
        receive(stage, damaged=(names,))
    assert told.value.samples == tuple(names) and stage.played == 3


def test_masks_come_in_pieces_of_a_bucket(play: Play) -> None:
    lengths = np.array([300, *[0] * 8], "<u2").tobytes()
    masks = lengths + np.arange(300, dtype="<u4").tobytes()

    def pieces(relay: Played) -> None:
        relay.send_all(tensors=[[len(masks), xxh3_64_intdigest(masks)]])
        for part in (masks[:18], masks[18:1000], masks[1000:]):
            relay.link.send([part], timeout_s=SOON_S)
        relay.thank()

    (sink,) = receive(play(pieces), ticket=MASKED)
    assert sink.taken == masks


@pytest.mark.parametrize(
    "announced",
    [
        *({"nbytes": 1 << 50}, {"nbytes": 0}, {"digests": 1 << 50}, {"digests": -1}),
        *({"tensors": [[size, 0]]} for size in (-1, 0, 17, 22, 1 << 50, "18", None)),
    ],
    ids=str,
)
def test_other_sizes_are_refused_before_memory_is_taken(play: Play, announced: dict[str, Any]) -> None:
    rows = TICKET, Played.send_all, r"announces .*the ticket says 192 bytes.*r3channel version"
    masks = MASKED, masked, "lengths of 9 rows say 18 bytes"
    ticket, sends, said = masks if "tensors" in announced else rows
    stage = play(lambda relay: sends(relay, **announced))
    with pytest.raises(BucketCorrupt, match=said) as told:
        receive(stage, ticket=ticket, max_group_failures=2)
    assert stage.played == 2 and told.value.step == 3


# -- errors ------------------------------------------------------------------------------------------------------------


def test_every_error_of_this_package_crosses_the_wire_whole_and_nothing_else_does() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    ours = [kind for kind in kinds if issubclass(kind, errors.R3Error)]
    assert len(ours) > 40
    for kind in ours:
        error = kind("what ✓", samples=["a"], engines=["e"], ranks=[(1, 2, 3)], step=4)
        again = wire.error_of(wire.values_of(error))
        assert type(again) is kind and wire.values_of(again) == wire.values_of(error)
    for name in ("OSError", "SystemExit", "annotations", "Iterable", "__builtins__", ""):
        values = wire.values_of(errors.R3Error("x")) | {"error": name}
        assert type(wire.error_of(values)) is TransportError


# -- time --------------------------------------------------------------------------------------------------------------


def test_a_join_ends_where_nobody_answers_and_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        where = {"host": host, "port": port, "token": "00" * 32, "run": "run"}
        nobody = SimpleNamespace(hello=lambda **_: where)
        with pytest.raises(DeadlineExceeded):
            receive(nobody, join_timeout_s=0.2, step_timeout_s=0.5)
    with pytest.raises(TransportError):
        receive(nobody, step_timeout_s=0.3)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between attempts are short."""
    monkeypatch.setattr(member_module, "_PAUSE_S", 0.01)


@pytest.mark.usefixtures("hasty")
def test_an_outage_and_connections_that_are_cut_cost_time_and_nothing_else(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(relay: Played) -> None:
        relay.announce()
        relay.link.close()

    stage, tries, inner = play(cut, cut, cut, whole), list[int](), member_module.connect

    def refused_at_first(*args: Any, **options: Any) -> Connection:
        tries.append(1)
        if len(tries) <= 4:
            raise TransportError("connection refused")
        return inner(*args, **options)

    monkeypatch.setattr(member_module, "connect", refused_at_first)
    *_, sink = receive(stage, max_group_failures=1)
    assert sink.data == ROWS_TLK.tobytes() and (len(tries), stage.played) == (8, 4)


@pytest.mark.parametrize("silent_after", ["hello", "half a record", "announcement", "some rows", "rows"])
def test_a_silent_relay_is_met_again(play: Play, silent_after: str) -> None:
    """It costs `send_timeout_s`, and the step has much more."""

    def falls_silent(relay: Played) -> None:
        if silent_after == "half a record":
            relay.link.send(
                [b"R3L\x01" + bytes([wire.ROWS]) + bytes(3) + bytes([9, 0, 0, 0])], timeout_s=SOON_S
            )
        elif silent_after != "hello":
            relay.announce()
        if silent_after == "some rows":
            relay.link.send([ROWS_TLK.tobytes()[:50]], timeout_s=SOON_S)
        elif silent_after == "rows":
            relay.rows()

    stage = play(falls_silent, Played.thank if silent_after == "rows" else whole)
    *_, sink = receive(stage, send_timeout_s=0.2, step_timeout_s=SOON_S / 2)
    assert sink.data == ROWS_TLK.tobytes() and stage.played == 2
    with pytest.raises(DeadlineExceeded):
        receive(play(Played.silent), send_timeout_s=0.2, step_timeout_s=0.5)


@pytest.fixture
def spend(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has a tenth of a step's time go by, for the receiver."""
    spent_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + spent_s[0])
    monkeypatch.setattr(member_module, "time", clock)
    return lambda: spent_s.append(spent_s.pop() + SOON_S / 10)


@pytest.mark.usefixtures("hasty")
def test_connections_end_with_the_steps_deadline(play: Play, spend: Callable[[], None]) -> None:
    stage = play(lambda relay: (spend(), relay.link.close()))
    with pytest.raises(TransportError):
        receive(stage, max_group_failures=1)
    assert 3 < stage.played <= 10


# -- the acknowledgement -----------------------------------------------------------------------------------------------


def closes(relay: Played) -> None:
    relay.hear(wire.DONE, step=3)
    relay.link.close()


def loses_it(relay: Played) -> None:
    relay.send_all()
    closes(relay)


@pytest.mark.usefixtures("hasty")
def test_acknowledgements_repeat_until_the_deadline(
    play: Play, monkeypatch: pytest.MonkeyPatch, spend: Callable[[], None]
) -> None:
    stage = play(loses_it, closes, closes, closes, closes, Played.thank)
    (sink,) = receive(stage)  # its rows come once
    assert sink.data == ROWS_TLK.tobytes() and stage.played == stage.hellos == 6
    monkeypatch.setattr(member_module, "_ACK_S", 0.3)
    stage = play(loses_it, lambda relay: (spend(), closes(relay)))
    with pytest.raises(TransportError):
        receive(stage)
    assert 3 < stage.played <= 12


# -- what a receiver tells its TP group, the memory that it makes, what a failed receive leaves -------------------------------

NOBODY: Any = None


def nobody_else() -> TensorParallelFanout:
    return TensorParallelFanout(None, device=torch.device("cpu"))


@pytest.mark.parametrize("sp", [True, False])
def test_a_rank_without_memory_says_so_in_the_vote(monkeypatch: pytest.MonkeyPatch, sp: bool) -> None:
    layout, group, told = TrainerLayout(tp=2, sp=sp), nobody_else(), Mock(side_effect=errors.PeerFailed)
    monkeypatch.setattr(group, "vote", told)
    receiver = Receiver(NOBODY, spec=SPEC, layout=layout, coords=layout.coords(1), fanout=group)
    monkeypatch.setattr(receiver, "_buffer", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(errors.PeerFailed):
        receiver.receive(replace(TICKET, layout=layout))
    assert isinstance(told.call_args.args[0], torch.OutOfMemoryError)


def test_a_failed_receive_leaves_no_cycle_that_keeps_groups_and_buffers() -> None:
    """What only a collection frees may live until the interpreter ends, and gloo's threads then end the process."""
    layout = TrainerLayout()
    group = nobody_else()
    receiver = Receiver(NOBODY, spec=SPEC, layout=layout, coords=layout.coords(0), fanout=group)
    gone = weakref.ref(group)
    gc.disable()
    try:
        with suppress(errors.TicketMismatch):
            receiver.receive(replace(TICKET, layout=TrainerLayout(tp=2)))
        del receiver, group
        assert gone() is None
    finally:
        gc.enable()


def test_a_reason_of_any_characters_reaches_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_global_rank", lambda _group, rank: rank)
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: None)
    assert nobody_else()._share("no file \udcff", source=0) == "no file ?"


def test_a_shard_that_is_handed_on_without_a_group_is_a_usage_error() -> None:
    parts = [torch.zeros(4, dtype=torch.uint8)] * 2
    with pytest.raises(errors.UsageError, match="scatter over 1 TP ranks got 2 parts"):
        nobody_else().scatter(parts, torch.empty_like(parts[0]))
