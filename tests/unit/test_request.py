"""Hostile and broken HTTP at the ingest: every one of these ends in an answer or a closed connection, none in a taken body."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import h11
import pytest

from r3channel.relay.http import IngestServer
from r3channel.relay.request import MAX_HEAD_BYTES, BodyCut, Link, Request
from r3channel.wire.hello import Hello
from r3channel.wire.receipt import Source, pack_parcel, read_frames

LIMIT_S = 10.0
TOKEN = "t" * 32
HEAD = f"POST /v1/frames HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
BODY = b"".join(pack_parcel(7, [(1, bytes(range(250)) * 40), (2, b"abc"), (3, b"")]))


class Door:
    """Takes every parcel and keeps its frames' bytes."""

    def __init__(self) -> None:
        self.taken: list[list[tuple[int, bytes]]] = []

    def greet(self, hello: Hello) -> None: ...

    def knows(self, boot_id: int) -> bool:
        return boot_id == 7

    def has_room(self, nbytes: int) -> bool:
        return True

    def deliver(self, boot_id: int, count: int, body: Source) -> None:
        frames = read_frames(body, count, place=lambda serial, size, head: memoryview(bytearray(size)))
        self.taken.append([(serial, bytes(frame)) for serial, frame in frames])


@pytest.fixture
def door() -> Door:
    return Door()


@pytest.fixture
def server(door: Door) -> Iterator[IngestServer]:
    server = IngestServer(door, token=TOKEN, host="127.0.0.1", port=0, max_body_bytes=1 << 20)
    yield server
    server.close()


def connect(server: IngestServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=LIMIT_S)


def talk(server: IngestServer, data: bytes, *, pieces: int = 1) -> bytes:
    """All that comes back for these bytes, after which we say no more."""
    with connect(server) as peer:
        size = -(-len(data) // pieces)
        for at in range(0, len(data), size):
            peer.sendall(data[at : at + size])
        peer.shutdown(socket.SHUT_WR)
        answer = b""
        while part := peer.recv(1 << 16):
            answer += part
        return answer


def request(body: bytes = BODY, *, head: bytes = HEAD) -> bytes:
    return head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


def test_a_body_arrives_whole_however_it_is_cut_up(server: IngestServer, door: Door) -> None:
    for pieces in (1, 2, 7, 300):
        assert statuses(talk(server, request(), pieces=pieces)) == [200]
    assert door.taken == [[(1, bytes(range(250)) * 40), (2, b"abc"), (3, b"")]] * 4


def test_one_connection_carries_many_requests(server: IngestServer, door: Door) -> None:
    with connect(server) as peer:
        for _ in range(3):
            peer.sendall(request())
            assert statuses(peer.recv(4096)) == [200]
    assert len(door.taken) == 3


def test_a_request_may_lie_right_behind_another(server: IngestServer, door: Door) -> None:
    small = request(b"".join(pack_parcel(7, [(9, b"abc")])))
    assert statuses(talk(server, small + request() + small)) == [200, 200, 200]
    assert [len(frames) for frames in door.taken] == [1, 3, 1]


def test_who_waits_for_permission_to_send_a_body_gets_it(server: IngestServer, door: Door) -> None:
    with connect(server) as peer:
        peer.sendall(HEAD + f"Expect: 100-continue\r\nContent-Length: {len(BODY)}\r\n\r\n".encode())
        assert statuses(peer.recv(4096)) == [100]
        peer.sendall(BODY)
        assert statuses(peer.recv(4096)) == [200]
    assert len(door.taken) == 1


HOSTILE = {
    "no HTTP": b"R3P\x01" * 40 + b"\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "a head without end": HEAD + b"A: " + b"b" * (2 * MAX_HEAD_BYTES),
    "many headers": HEAD + b"".join(b"H%d: x\r\n" % n for n in range(4000)) + b"\r\n",
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + BODY,
    "a signed length": HEAD + b"Content-Length: +5\r\n\r\n" + BODY,
    "a negative length": HEAD + b"Content-Length: -5\r\n\r\n" + BODY,
    "an endless length": HEAD + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n",
    "a huge length": HEAD + b"Content-Length: 9999999999\r\n\r\n",
    "chunks": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "chunks and a length": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\nhello",
    "a null in a header": HEAD + b"A: b\0c\r\nContent-Length: 5\r\n\r\nhello",
    "a space before the colon": HEAD + b"Content-Length : 5\r\n\r\nhello",
    "two tokens": HEAD + f"Authorization: Bearer {TOKEN}x\r\n".encode() + b"Content-Length: 5\r\n\r\nhello",
    "another method": request(head=HEAD.replace(b"POST", b"PUT")),
    "another path": request(head=HEAD.replace(b"/v1/frames", b"/v1/../v1/frames")),
    "no token": request(head=b"POST /v1/frames HTTP/1.1\r\nHost: x\r\n"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_heads_are_refused_and_the_connection_ends(
    server: IngestServer, door: Door, name: str
) -> None:
    answers = statuses(talk(server, HOSTILE[name]))
    assert len(answers) == 1 and 400 <= answers[0] < 500
    assert door.taken == []
    assert statuses(talk(server, request())) == [200]


def test_any_damaged_request_is_answered_or_dropped(server: IngestServer, door: Door) -> None:
    rng, whole = random.Random(3), request(BODY[:64])
    for _ in range(300):
        data = bytearray(whole[: rng.randrange(1, len(whole) + 1)])
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        assert all(200 <= status < 500 for status in statuses(talk(server, bytes(data))))
    assert statuses(talk(server, request())) == [200]


def test_a_body_that_is_cut_is_no_body() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(request()[:-1])
        theirs.shutdown(socket.SHUT_WR)
        head = Link(ours).next_request(timeout_s=LIMIT_S)
        assert isinstance(head, Request)
        body = Link(ours).body(head, timeout_s=LIMIT_S)
        with pytest.raises(BodyCut, match="closed with"):
            body.skip()


def test_a_silent_peer_does_not_hold_a_thread_for_ever() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"POST /v1/frames HT")
        with pytest.raises(TimeoutError):
            Link(ours).next_request(timeout_s=0.05)
        theirs.sendall(b"\r\n\r\n")
        with pytest.raises(h11.RemoteProtocolError):
            Link(ours).next_request(timeout_s=LIMIT_S)


def test_a_server_that_closes_ends_its_connections(server: IngestServer) -> None:
    with connect(server) as peer:
        peer.sendall(HEAD)
        closing = threading.Thread(target=server.close)
        closing.start()
        with suppress(ConnectionResetError):
            assert peer.recv(4096) == b""
        closing.join(LIMIT_S)
        assert not closing.is_alive()
    with pytest.raises(OSError):
        connect(server).recv(1)
