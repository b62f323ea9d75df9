"""Links and who may open one: order, deadlines, wake-ups, and strangers that get nothing and cost nobody anything."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from r3channel.errors import ConfigError, DeadlineExceeded, TransportError, UsageError
from r3channel.transport import listener as listening
from r3channel.transport.connection import MAX_RECORD_BYTES, Connection
from r3channel.transport.listener import HELLO_BYTES, MOST_STRANGERS, Listener, connect
from r3channel.transport.process_group import in_background
from r3channel.weights.rank_link import receive_blob, send_blob
from tests.support.memory import growth_of
from tests.support.samples import flipped
from tests.support.waits import SOON_S, until

TOKEN = bytes(range(32))
SHORT_S, FAR_S = 0.2, 60.0
MIB = 1 << 20
Pair = tuple[Connection, Connection]
Half = tuple[Connection, socket.socket]
in_thread = partial(in_background, name="test")


@pytest.fixture
def door() -> Iterator[Listener]:
    with closing(Listener("127.0.0.1", token=TOKEN)) as door:
        yield door


@pytest.fixture
def pair(door: Listener) -> Iterator[Pair]:
    one = connected(door)
    with closing(one), closing(door.accept(SOON_S)) as other:
        yield one, other


@contextmanager
def half_of_a_link() -> Iterator[Half]:
    """A link, and the bare other end of its connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as bare,
        closing(Connection(server.accept()[0], "the peer")) as link,
    ):
        yield link, bare


@pytest.fixture
def half() -> Iterator[Half]:
    with half_of_a_link() as ends:
        yield ends


def connected(door: Listener, token: bytes = TOKEN, *, hello: bytes = b"") -> Connection:
    return connect(door.host, door.port, token, timeout_s=SOON_S, hello=hello)


def stranger(door: Listener) -> socket.socket:
    return socket.create_connection((door.host, door.port), SOON_S)


def receive(link: Connection, timeout_s: float | None = None) -> None:
    link.recv_into(memoryview(bytearray(MIB)), timeout_s=timeout_s)


def noise(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


# -- links ----------------------------------------------------------------------------------------------------------------


def test_records_and_bytes_arrive_in_the_order_in_which_they_were_sent(pair: Pair) -> None:
    for here, there in (pair, pair[::-1]):
        here.send_record(7, b"ticket", timeout_s=SOON_S)
        here.send((b"raw",), timeout_s=SOON_S)
        here.send_record(8, timeout_s=SOON_S)
        assert there.recv_record(timeout_s=SOON_S) == (7, b"ticket")
        out = bytearray(3)
        there.recv_into(memoryview(out), timeout_s=SOON_S)
        assert out == b"raw"
        assert there.recv_record(timeout_s=None) == (8, b"")
        here.send((), timeout_s=SOON_S)  # nothing can be sent and received, too
        there.recv_into(memoryview(bytearray()), timeout_s=SOON_S)
        here.send_record(0, timeout_s=SOON_S)
        assert there.recv_record(timeout_s=SOON_S) == (0, b"")


def test_thousands_of_stretches_arrive_as_one_message(pair: Pair) -> None:
    """More buffers than one call takes, more bytes than the kernel holds, empty ones, and ones that are no bytes."""
    here, there = pair
    whole = noise(24 * MIB)
    parts: list[Any] = [memoryview(whole)[i : i + 8192] for i in range(0, len(whole), 8192)]
    parts[5:5] = [b"", np.zeros((0, 3), np.int16).data]
    tail = np.arange(12, dtype=np.int32).reshape(3, 4)
    sent = in_thread(lambda: here.send([*parts, tail.data], timeout_s=SOON_S))
    out = np.zeros(len(whole) + tail.nbytes, np.uint8)
    there.recv_into(out[: 8 * MIB].data, timeout_s=SOON_S)
    there.recv_into(out[8 * MIB :].data, timeout_s=SOON_S)
    sent.result(SOON_S)
    assert out.tobytes() == whole + tail.tobytes()


def test_a_receive_beyond_its_deadline_ends_the_link_and_says_what_was_left(pair: Pair) -> None:
    here, there = pair
    here.send((b"123",), timeout_s=SOON_S)
    with pytest.raises(DeadlineExceeded, match=r"receive 10 bytes within 0\.2 s: 7 bytes were left"):
        there.recv_into(memoryview(bytearray(10)), timeout_s=SHORT_S)
    with pytest.raises(TransportError, match="cannot receive a record: could not receive 10 bytes within"):
        there.recv_record(timeout_s=SOON_S)
    with pytest.raises(TransportError, match="the peer has left"):
        here.recv_record(timeout_s=SOON_S)


def test_a_trickle_stretches_no_deadline(half: Half, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half[0], "_wait", lambda *_: True)  # as it answers when there is always something
    with pytest.raises(DeadlineExceeded):
        receive(half[0], SHORT_S)


def test_a_send_that_nobody_reads_ends_by_its_deadline(pair: Pair) -> None:
    data = bytes(64 * MIB)
    with pytest.raises(DeadlineExceeded, match=r"send 67108864 bytes within 0\.2 s"):
        pair[0].send((data,), timeout_s=SHORT_S)
    with pytest.raises(TransportError, match="cannot send 1 bytes"):
        pair[0].send((b"x",), timeout_s=SHORT_S)


BLOCKED: dict[str, Callable[[Connection], object]] = {
    "a record": lambda link: link.recv_record(timeout_s=FAR_S),
    "bytes": receive,
    "a send": lambda link: link.send((bytes(64 * MIB),), timeout_s=FAR_S),
}


@pytest.mark.parametrize("ends", ["abort", "close"])
@pytest.mark.parametrize("blocked", BLOCKED)
@pytest.mark.parametrize("side", [0, 1])
def test_who_blocks_is_woken_when_either_side_ends_the_link(
    pair: Pair, blocked: str, side: int, ends: str
) -> None:
    waiting = in_thread(lambda: BLOCKED[blocked](pair[0]))
    threading.Timer(0.1, getattr(pair[side], ends)).start()
    said = "aborted|closed" if side == 0 else "left|reset|Broken"
    with pytest.raises(TransportError, match=said) as caught:
        waiting.result(SOON_S)
    assert not isinstance(caught.value, DeadlineExceeded)


def test_a_closed_link_keeps_its_descriptor_until_the_call_under_way_has_ended(
    half: Half, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, _ = half
    inside, go, still_open = threading.Event(), threading.Event(), []
    descriptor = link._socket.fileno()

    def wait(*_: object) -> bool:
        inside.set()
        go.wait(SOON_S)
        still_open.append(os.fstat(descriptor))
        raise TransportError("woken")

    monkeypatch.setattr(link, "_wait", wait)
    waiting = in_thread(lambda: receive(link))
    assert inside.wait(SOON_S)
    link.close()
    go.set()
    assert isinstance(waiting.exception(SOON_S), TransportError) and len(still_open) == 1
    assert link._socket.fileno() == -1


def test_one_byte_wakes_a_long_wait(half: Half, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver of many bytes asks the kernel not to wake it for few."""
    link, bare = half
    link._wake_at(256 << 10)
    wait, inside = link._wait, threading.Event()

    def told(*arguments: Any) -> bool:
        inside.set()
        return wait(*arguments)

    monkeypatch.setattr(link, "_wait", told)
    waiting = in_thread(lambda: link.recv_into(memoryview(bytearray(1)), timeout_s=FAR_S))
    assert inside.wait(SOON_S)
    bare.send(b"x")
    waiting.result(SOON_S)


def test_an_interrupted_call_ends_the_link(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pair[0], "_block", interrupt)
    with pytest.raises(KeyboardInterrupt):
        receive(pair[0])
    with pytest.raises(TransportError, match="interrupted"):
        pair[0].send((b"x",), timeout_s=SOON_S)


def test_a_link_whose_peer_has_left_is_not_alive_although_nobody_waits_on_it(pair: Pair) -> None:
    """An engine's thread that a busy machine has not woken yet must not keep the engine for a trainer that is gone."""
    here, there = pair
    assert here.alive and there.alive
    there.send_record(5, b"last words", timeout_s=SOON_S)
    there.close()
    assert not there.alive
    until(lambda: not here.alive)
    assert here.recv_record(timeout_s=SOON_S) == (5, b"last words")
    with pytest.raises(TransportError, match="could not receive a record: the peer has left"):
        here.recv_record(timeout_s=SOON_S)


# -- records --------------------------------------------------------------------------------------------------------------


def test_a_changed_bit_anywhere_in_a_record_and_what_it_announces_is_noticed(pair: Pair) -> None:
    bare_out: list[bytes] = []
    pair[0].send = lambda parts, **_: bare_out.append(b"".join(parts))  # type: ignore[method-assign]
    send_blob(pair[0], 5, b"what is announced", head=b"some body", timeout_s=SOON_S)
    good = b"".join(bare_out)
    for bit in range(8 * len(good)):
        with half_of_a_link() as (link, bare):
            bare.sendall(flipped(good, bit))
            bare.shutdown(socket.SHUT_WR)
            with pytest.raises(TransportError):
                _, body = link.recv_record(timeout_s=SOON_S)
                receive_blob(link, body.removeprefix(b"some body"), timeout_s=SOON_S)


@pytest.mark.parametrize(("kind", "nbytes"), [(-1, 0), (256, 0), (1, MAX_RECORD_BYTES + 1)])
def test_a_record_that_nobody_would_take_is_not_sent(pair: Pair, kind: int, nbytes: int) -> None:
    with pytest.raises(UsageError):
        pair[0].send_record(kind, bytes(nbytes), timeout_s=SOON_S)
    pair[0].send_record(1, bytes(MAX_RECORD_BYTES), timeout_s=SOON_S)
    assert len(pair[1].recv_record(timeout_s=SOON_S)[1]) == MAX_RECORD_BYTES


# -- who may connect --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hello", [b"", b"rank 3", noise(HELLO_BYTES)])
def test_the_listener_gets_what_the_connector_says_of_itself(door: Listener, hello: bytes) -> None:
    with closing(connected(door, hello=hello)), closing(door.accept(SOON_S)) as link:
        assert link.hello == hello


def test_a_hello_or_a_token_of_another_length_is_refused(door: Listener) -> None:
    with pytest.raises(UsageError, match="257 bytes"):
        connected(door, hello=bytes(HELLO_BYTES + 1))
    for nbytes in (0, 16, 31, 33):
        for call in (lambda token: Listener("127.0.0.1", token=token), partial(connected, door)):
            with pytest.raises(ConfigError, match=f"{nbytes} bytes"):
                call(bytes(nbytes))


def test_a_connector_with_another_token_learns_nothing_but_a_closed_socket() -> None:
    links: SimpleQueue[Connection] = SimpleQueue()
    with closing(Listener("127.0.0.1", token=TOKEN, on_link=links.put)) as door:
        with pytest.raises(TransportError, match="another run's token"):
            connected(door, bytes(32))
        with closing(connected(door)):
            links.get(timeout=SOON_S).close()
    assert links.empty()


def greeting(nonce: bytes, hello: bytes, token: bytes = TOKEN, side: bytes = b"connects") -> bytes:
    padded = struct.pack("<H256s", len(hello), hello)
    return listening._proof(token, side, b"n" * 32 + nonce, padded) + padded


def greet(
    door: Listener, change: Callable[[bytes], bytes] = bytes, opening: bytes = b"r3link\x00\x01" + b"n" * 32
) -> bytes:
    """Greets by hand; what the listener answered to the proof, which is nothing once it has closed."""
    with stranger(door) as bare:
        try:
            bare.sendall(opening)
            nonce = bare.recv(32, socket.MSG_WAITALL)
            bare.sendall(change(greeting(nonce, b"me")) if nonce else b"")
            return bare.recv(64, socket.MSG_WAITALL if not nonce else 0)
        except (ConnectionResetError, BrokenPipeError):
            return b""


def test_a_greeting_with_any_byte_changed_is_turned_away_without_an_answer(door: Listener) -> None:
    assert len(greet(door)) == 32, "a greeting by hand is answered with the listener's proof"
    door.accept(SOON_S).close()
    good = b"r3link\x00\x01" + b"n" * 32
    for at in range(len(good)):
        assert greet(door, opening=flipped(good, 8 * at)) == b"", at
    for at in range(len(greeting(bytes(32), b"me"))):
        assert greet(door, partial(flipped, bit=8 * at)) == b"", at
    with pytest.raises(DeadlineExceeded, match="nobody connected"):
        door.accept(0.0)


def test_a_greeting_that_was_overheard_cannot_be_used_again(door: Listener) -> None:
    heard: list[bytes] = []
    assert greet(door, lambda reply: heard.append(reply) or reply)
    assert greet(door, lambda _: heard[0]) == b""


@pytest.mark.parametrize("answer", ["echo", "noise"])
def test_a_listener_without_the_token_gets_no_link(answer: str) -> None:
    """Neither one that sends back what it gets, nor one that guesses."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as bare:
                bare.recv(40, socket.MSG_WAITALL)
                bare.sendall(noise(32))
                reply = bare.recv(290, socket.MSG_WAITALL)
                bare.sendall(reply[:32] if answer == "echo" else noise(32))
                bare.recv(1)

        serving = in_thread(serve)
        with pytest.raises(TransportError, match="does not hold this run's token"):
            connect("127.0.0.1", server.getsockname()[1], TOKEN, timeout_s=SOON_S)
        serving.exception(SOON_S)


def refusing_records_and_strangers_of_any_size() -> Iterator[None]:
    flood, record = bytes(32 * MIB), struct.pack("<4sB3xII", b"R3L\x01", 1, 0xFFFFFFF0, 0)
    with half_of_a_link() as (link, peer), closing(Listener("127.0.0.1", token=TOKEN)) as door:
        peer.sendall(record)
        yield
        with pytest.raises(TransportError, match="announces 4294967280 bytes, at most 1048576"):
            link.recv_record(timeout_s=SOON_S)
        for opening in (b"", b"r3link\x00\x01" + b"n" * 32):
            with stranger(door) as bare, pytest.raises((ConnectionResetError, BrokenPipeError)):
                bare.sendall(opening)
                bare.sendall(flood)


def test_what_a_record_announces_or_a_stranger_sends_makes_nobody_take_memory() -> None:
    assert growth_of(refusing_records_and_strangers_of_any_size).peak < MIB


def test_silent_strangers_cost_nobody_else_anything_and_the_oldest_give_way(
    door: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "GREETING_S", 1000.0)  # none of them goes by itself
    silent = [stranger(door) for _ in range(MOST_STRANGERS + 9)]
    try:
        with closing(connected(door)):
            door.accept(SOON_S).close()
        for bare in silent[:9]:
            assert bare.recv(1) == b""
        with door._lock:
            assert len(door._strangers) <= MOST_STRANGERS
    finally:
        for bare in silent:
            bare.close()


def test_all_ranks_of_a_large_fleet_may_open_before_the_first_has_proved_anything(door: Listener) -> None:
    limit = time.monotonic() + SOON_S
    with ExitStack() as stack:
        links = [stack.enter_context(closing(Connection(stranger(door), "fleet"))) for _ in range(500)]
        for link in links:
            listening._introduce(link, TOKEN, listening._HELLO.pack(0, b""), limit)


SILENT = listening, "GREETING_S", 0.1
NO_THREAD = threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread"))


@pytest.mark.parametrize("why", [SILENT, NO_THREAD], ids=["it is silent", "no thread greets it"])
def test_a_stranger_that_stays_silent_or_that_no_thread_greets_is_sent_away(
    door: Listener, monkeypatch: pytest.MonkeyPatch, why: tuple[Any, str, Any]
) -> None:
    monkeypatch.setattr(*why)
    with stranger(door) as bare:
        assert bare.recv(1) == b""


def test_a_closed_listener_lets_all_go_but_its_links(pair: Pair, door: Listener) -> None:
    with stranger(door) as unknown:
        waiting = in_thread(lambda: door.accept(FAR_S))
        door.close()
        door.close()
        with pytest.raises(TransportError, match="is closed"):
            waiting.result(SOON_S)
        with pytest.raises(TransportError, match="is closed"):
            door.accept(FAR_S)
        with suppress(ConnectionResetError):  # it was never accepted
            assert unknown.recv(1) == b""
    with pytest.raises(TransportError, match="cannot connect"):
        connected(door)
    pair[0].send_record(1, timeout_s=SOON_S)
    assert pair[1].recv_record(timeout_s=SOON_S) == (1, b"")


def test_a_listener_that_answers_nothing_is_left_by_the_deadline() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(DeadlineExceeded, match=r"receive 32 bytes within 0\.[12] s"),
    ):
        connect("127.0.0.1", server.getsockname()[1], TOKEN, timeout_s=SHORT_S)
