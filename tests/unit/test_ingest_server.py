"""The door for engines: broken, hostile and stalled connections end in an answer, and hold up nobody else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from r3channel import errors
from r3channel.config import EngineConfig
from r3channel.engine.frame_sender import Outlet
from r3channel.observe.stage_clock import StageClock
from r3channel.relay import ingest_server as door_module
from r3channel.relay.ingest_server import MAX_HEAD_BYTES, MOST_STRANGERS, IngestServer, Request
from r3channel.relay.intake import Intake
from r3channel.transport.auth import create_token, read_token
from r3channel.wire.hello import Hello
from r3channel.wire.parcel import Status, frames_in, pack_parcel
from r3channel.wire.source import Source
from tests.support.direct import Engine, hello_of
from tests.support.waits import SOON_S, until

NEVER_S = 1000.0
TOKEN, SESSION = "t" * 32, "5" * 32
HEAD = f"POST /v1/frames HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nR3-Session: {SESSION}\r\n".encode()
HELLO_HEAD = HEAD.replace(b"frames", b"hello")
FRAMES = [(1, bytes(range(250)) * 40), (2, b"abc"), (3, b"")]
BODY = b"".join(pack_parcel(7, FRAMES))
BOOT_IDS = (7, 9, hello_of().boot_id)


class Kept(Intake):
    """An intake that keeps every parcel's frames, unless it is told to fail."""

    def __init__(self) -> None:
        self.clock = StageClock("relay")
        self.engines: Any = self
        self.taken: list[list[tuple[int, bytes]]] = []
        self.tried: list[list[int]] = []
        """Serials of each parcel that was read, taken or not."""
        self.failures: list[Exception] = []
        """One for each of the next parcels."""
        self.refusal = ""
        self.begun = threading.Semaphore(0)

    def greet(self, hello: Hello) -> None:
        if self.refusal:
            raise errors.PluginNotApplied(self.refusal)

    def knows(self, boot_id: int) -> bool:
        return boot_id in BOOT_IDS

    def deliver(self, boot_id: int, count: int, body: Source) -> None:
        self.begun.release()
        parcel = frames_in(body, count, boot_id=boot_id)
        frames = [(serial, bytes(frame.take(frame.left))) for serial, frame in parcel]
        self.tried.append([serial for serial, _ in frames])
        if self.failures:
            raise self.failures.pop(0)
        self.taken.append(frames)


@pytest.fixture
def intake() -> Kept:
    return Kept()


Open = Callable[..., IngestServer]


@pytest.fixture
def open_door(intake: Kept) -> Iterator[Open]:
    """The options are set before the door is opened, and stay."""
    with ExitStack() as stack:

        def make(*, token: str = TOKEN, **options: Any) -> IngestServer:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for name, value in options.items():
                patch.setattr(door_module, name, value)
            door = IngestServer(intake, token=token, host="127.0.0.1", port=0, max_body_bytes=1 << 20)
            stack.callback(door.close)
            door._sessions.update(dict.fromkeys(BOOT_IDS, (SESSION, socket.socket())))
            return door

        yield make


@pytest.fixture
def door(open_door: Open) -> IngestServer:
    return open_door()


def ask(peer: socket.socket, data: bytes, *expected: int) -> None:
    """Sends on a connection that stays open, and holds the answer against what is expected."""
    peer.sendall(data)
    assert statuses(peer.recv(4096)) == [*expected]


def connect(door: IngestServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(door.url.rsplit(":", 1)[1])), timeout=SOON_S)


def all_of(peer: socket.socket) -> bytes:
    answer = b""
    while part := peer.recv(1 << 16):
        answer += part
    return answer


def talk(door: IngestServer, data: bytes, *, pieces: int = 1) -> bytes:
    """All that comes back for these bytes, after which we say no more."""
    with connect(door) as peer:
        size = -(-len(data) // pieces)
        for at in range(0, len(data), size):
            peer.sendall(data[at : at + size])
        peer.shutdown(socket.SHUT_WR)
        return all_of(peer)


def request(body: bytes = BODY, *, head: bytes = HEAD) -> bytes:
    return head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


# -- requests --------------------------------------------------------------------------------------------------------------


def test_a_body_arrives_whole_however_it_is_cut_up(door: IngestServer, intake: Kept) -> None:
    for pieces in (1, 2, 7, 300):
        assert statuses(talk(door, request(), pieces=pieces)) == [200]
    assert intake.taken == [FRAMES] * 4


def test_a_request_behind_others_is_read_from_its_start_whatever_became_of_them(
    door: IngestServer, intake: Kept
) -> None:
    intake.failures = [errors.StoreFull("no room"), ZeroDivisionError()]
    unknown, small = (request(b"".join(pack_parcel(*it))) for it in ((8, FRAMES), (7, [(9, b"abc")])))
    answer = talk(door, request() * 2 + unknown + small + request() + small)
    assert statuses(answer) == [503, 500, 409, 200, 200, 200]
    assert [len(frames) for frames in intake.taken] == [1, 3, 1]


def test_who_waits_for_permission_to_send_a_body_gets_it(door: IngestServer, intake: Kept) -> None:
    with connect(door) as peer:
        ask(peer, HEAD + f"Expect: 100-continue\r\nContent-Length: {len(BODY)}\r\n\r\n".encode(), 100)
        ask(peer, BODY, 200)
    assert len(intake.taken) == 1


# -- answers ---------------------------------------------------------------------------------------------------------------


def failing(error: Exception) -> Callable[[IngestServer, Kept], bytes]:
    def answered(door: IngestServer, intake: Kept) -> bytes:
        intake.failures = [error]
        return talk(door, request())

    return answered


def refused(door: IngestServer, intake: Kept) -> bytes:
    intake.refusal = "num_experts 64, expected 128"
    return talk(door, request(hello_of().to_bytes(), head=HELLO_HEAD))


def stood_still(door: IngestServer, intake: Kept) -> bytes:
    with connect(door) as peer:
        peer.sendall(request()[:-1])
        return all_of(peer)


ANSWERS: list[tuple[Status, Callable[[IngestServer, Kept], bytes]]] = [
    (Status.TAKEN, lambda door, _: talk(door, request())),
    (Status.NO_PARCEL, lambda door, _: talk(door, request(b"R3P\x01 and so on"))),
    (Status.NO_TOKEN, lambda door, _: talk(door, request(head=HEAD.replace(b"tt\r", b"t\r")))),
    (Status.NO_SUCH_PATH, lambda door, _: talk(door, request(head=HEAD.replace(b"frames", b"x")))),
    (Status.NO_SUCH_METHOD, lambda door, _: talk(door, request(head=HEAD.replace(b"POST", b"PUT")))),
    (Status.TOO_SLOW, stood_still),
    (Status.HELLO_FIRST, lambda door, _: talk(door, request(b"".join(pack_parcel(8, FRAMES))))),
    (Status.NO_LENGTH, lambda door, _: talk(door, HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n")),
    (Status.TOO_LARGE, lambda door, _: talk(door, HEAD + b"Content-Length: 1048577\r\n\r\n")),
    (Status.HELLO_REFUSED, refused),
    (Status.FRAME_DAMAGED, failing(errors.FrameCorrupt("damaged on the way"))),
    (Status.FRAME_DAMAGED, failing(errors.FrameMagicMismatch("x"))),
    (Status.NO_PARCEL, failing(errors.EngineReported("x"))),
    (Status.NO_PARCEL, failing(errors.SpecMismatch("x"))),
    (Status.NO_PARCEL, failing(errors.ExpertIdInvalid("x"))),
    (Status.COME_AGAIN, failing(errors.BackgroundFailed("x"))),
    (Status.COME_AGAIN, failing(errors.UsageError("closed"))),
    (Status.FAILED, failing(OSError("a file of the relay's own"))),
    (Status.COME_AGAIN, failing(errors.StoreFull("of \ud800"))),  # no text, and told all the same
]


@pytest.mark.parametrize(("status", "answered"), ANSWERS, ids=[status.name for status, _ in ANSWERS])
def test_every_status_is_given_where_the_table_says(
    open_door: Open, intake: Kept, status: Status, answered: Callable[[IngestServer, Kept], bytes]
) -> None:
    assert {of for of, _ in ANSWERS} == set(Status)
    answer = answered(door := open_door(STALL_S=0.1), intake)
    assert statuses(answer) == [status] and answer.startswith(f"HTTP/1.1 {status} {status.name}\r\n".encode())
    assert statuses(talk(door, request())) == [200]


HOSTILE = {
    "no HTTP": b"R3P\x01" * 40 + b"\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "a head without end": HEAD + b"A: " + b"b" * (2 * MAX_HEAD_BYTES),
    "many headers": HEAD + b"".join(b"H%d: x\r\n" % n for n in range(4000)) + b"\r\n",
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + BODY,
    "a signed length": HEAD + b"Content-Length: +5\r\n\r\n" + BODY,
    "a negative length": HEAD + b"Content-Length: -5\r\n\r\n" + BODY,
    "an endless length": HEAD + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n",
    "a length that no number is read from": HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
    "chunks and a length": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\nhello",
    "another coding": HEAD + b"Transfer-Encoding: gzip\r\n\r\nhello",
    "a null in a header": HEAD + b"A: b\0c\r\nContent-Length: 5\r\n\r\nhello",
    "a space before the colon": HEAD + b"Content-Length : 5\r\n\r\nhello",
    "a space before the token's colon": request(head=HEAD.replace(b"ation:", b"ation :")),
    "two tokens": HEAD + f"Authorization: Bearer {TOKEN}x\r\n".encode() + b"Content-Length: 5\r\n\r\nhello",
    "a token that is no text": HEAD.replace(b"Bearer ttt", b"Bearer \xff\xfe") + b"Content-Length: 0\r\n\r\n",
    "another path": request(head=HEAD.replace(b"/v1/frames", b"/v1/../v1/frames")),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_heads_are_refused_and_connections_end(door: IngestServer, intake: Kept, name: str) -> None:
    answer = talk(door, HOSTILE[name])
    assert TOKEN[:8].encode() not in answer, "engines log what they are told"
    answers = statuses(answer)
    assert len(answers) == 1 and 400 <= answers[0] < 500 and answers[0] in set(Status)
    assert intake.taken == []
    assert statuses(talk(door, request())) == [200]


def test_a_request_does_not_print_its_token() -> None:
    assert TOKEN not in repr(Request(b"POST", "/", f"Bearer {TOKEN}", SESSION, keep_alive=True, length=5))


def test_without_the_token_no_body_is_waited_for(door: IngestServer, intake: Kept) -> None:
    with connect(door) as peer:
        ask(peer, b"POST /v1/frames HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n", 401)
    assert not intake.begun.acquire(blocking=False)


# -- connections that stand still ------------------------------------------------------------------------------------------


def test_eight_stalled_bodies_hold_up_nobody(open_door: Open, intake: Kept) -> None:
    door = open_door(STALL_S=NEVER_S, BODY_S=NEVER_S)
    with ExitStack() as stack:
        peers = [stack.enter_context(connect(door)) for _ in range(8)]
        for peer in peers:
            peer.sendall(request()[:-50])
            assert intake.begun.acquire(timeout=SOON_S)
        assert statuses(talk(door, request() * 3)) == [200] * 3
        for peer in peers:
            ask(peer, request()[-50:], 200)
    assert intake.taken == [FRAMES] * 11


def test_a_body_that_trickles_is_cut_in_the_end(open_door: Open) -> None:
    door = open_door(STALL_S=NEVER_S, BODY_S=0.3)
    with connect(door) as peer:
        peer.sendall(request()[: -len(BODY)])
        peer.settimeout(0.02)
        for at in range(len(BODY)):
            with suppress(TimeoutError):
                assert statuses(peer.recv(4096)) == [408]
                return
            peer.sendall(BODY[at : at + 1])
    raise AssertionError("the whole body was waited for")


def test_the_oldest_stranger_gives_way_and_engines_are_answered(open_door: Open, intake: Kept) -> None:
    """2,000 silent connections beside 512 engines that have shown the token, and 100 that come later."""
    door = open_door()
    with ExitStack() as stack:
        engines = [stack.enter_context(connect(door)) for _ in range(512)]
        for engine in engines:
            ask(engine, request(), 200)
        strangers = [stack.enter_context(connect(door)) for _ in range(2000)]
        for stranger in strangers[: 2000 - MOST_STRANGERS]:
            assert stranger.recv(1) == b""
        late = [stack.enter_context(connect(door)) for _ in range(100)]
        for engine in (*late, *engines):
            ask(engine, request(), 200)
        assert len(door._strangers) <= MOST_STRANGERS


def test_frames_need_the_session_of_their_engines_last_hello(door: IngestServer, intake: Kept) -> None:
    """Also where a proxy makes a new connection for each request."""
    hello, frames = hello_of().to_bytes(), b"".join(pack_parcel(hello_of().boot_id, FRAMES))
    sessions = [talk(door, request(hello, head=HELLO_HEAD)).rpartition(b"\r\n")[2] for _ in range(2)]
    for session, expected in zip((*sessions, b"", b"\xff"), (409, 200, 409, 409), strict=True):
        head = HEAD.replace(SESSION.encode(), session)
        assert statuses(talk(door, request(frames, head=head))) == [expected]
    assert intake.taken == [FRAMES]


def test_a_silent_peer_does_not_hold_a_thread_for_ever(open_door: Open) -> None:
    with connect(open_door(_FIRST_HEAD_S=0.05)) as peer:
        peer.sendall(b"POST /v1/frames HT")
        assert peer.recv(1) == b""


def test_more_connections_than_allowed_are_closed_at_once(open_door: Open) -> None:
    door = open_door(_MOST_CONNECTIONS=1)
    with connect(door) as first:
        ask(first, request(), 200)
        with connect(door) as second, suppress(ConnectionResetError):
            assert second.recv(4096) == b""


def test_a_door_that_closes_ends_its_connections(door: IngestServer) -> None:
    with connect(door) as peer:
        peer.sendall(HEAD)
        closing = threading.Thread(target=door.close)
        closing.start()
        with suppress(ConnectionResetError):
            assert peer.recv(4096) == b""
        closing.join(SOON_S)
        assert not closing.is_alive()
    with pytest.raises(OSError):
        connect(door).recv(1)


# -- where it listens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "error", "said"),
    [
        *((any_, errors.ConfigError, "name one of this host's own") for any_ in ("", "0.0.0.0", "0", "::", "0:0::0")),
        *((host, errors.UsageError, "cannot listen on") for host in ("203.0.113.7", "x" * 70, "no such name", "127.0.0.1")),
    ],
)  # fmt: skip
def test_an_address_of_all_or_of_others_and_a_port_that_is_taken_are_refused(
    door: IngestServer, intake: Kept, host: str, error: type[Exception], said: str
) -> None:
    port = int(door.url.rsplit(":", 1)[1]) if host == "127.0.0.1" else 0
    with pytest.raises(error, match=said):
        IngestServer(intake, token=TOKEN, host=host, port=port, max_body_bytes=1)


# -- the engine's end ------------------------------------------------------------------------------------------------------


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    create_token(tmp_path / "token")
    return tmp_path / "token"


@pytest.fixture
def engine_of(open_door: Open, token_file: Path) -> Callable[..., Engine]:
    """An engine that delivers to a door."""
    return partial(Engine, open_door(token=read_token(token_file)).url, token_file)


def test_a_parcel_that_is_always_damaged_is_given_up(
    engine_of: Callable[..., Engine], intake: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    intake.failures = [errors.FrameCorrupt("damaged on the way")] * 99
    with engine_of() as engine:
        engine.finish("r1", 9)
        for _ in range(3):
            assert intake.begun.acquire(timeout=SOON_S)
    assert set(map(tuple, intake.tried)) == {(1,)} and engine.frames("given_up") == 1
    assert "425" in caplog.text and "damaged on the way" in caplog.text


@pytest.mark.parametrize(
    ("failures", "waits_s"),
    [
        ([errors.FrameReferenceInvalid("x")], SOON_S),
        ([errors.StoreFull("x"), ZeroDivisionError(), errors.StoreFull("x")], SOON_S),
        ([errors.StoreFull("x")] * 5, 0.6),  # less than they take: waiting for room is not what it bounds
    ],
)
def test_a_parcel_whose_names_came_damaged_or_that_found_no_room_is_sent_again(
    engine_of: Callable[..., Engine], intake: Kept, failures: list[Exception], waits_s: float
) -> None:
    intake.failures = [*failures]
    with engine_of(deliver_timeout_s=waits_s) as engine:
        engine.finish("r1", 9)
        until(lambda: intake.taken)
    assert intake.tried == [[1]] * (1 + len(failures)) and engine.frames("given_up") == 0


def test_a_refused_hello_is_given_as_the_reason_for_frames_that_were_not_taken(
    engine_of: Callable[..., Engine], intake: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    intake.refusal = "num_experts 64, expected 128"
    with engine_of(deliver_timeout_s=0.1) as engine:
        engine.finish("r1", 9)
    assert engine.frames("given_up") == 1 and intake.tried == []
    assert "1 frames (serials 1 to 1)" in caplog.messages[-1] and "num_experts 64" in caplog.messages[-1]


URLS = ("10.0.0.1:9", "ftp://h:1", "http://", "http://h:99999", "http://h:x")


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("set R3CHANNEL_DELIVERY=direct", {"codec": "set"}), ("'zip', expected one of", {"codec": "zip"}),
        *(("expected http://host:port", {"delivery": "direct", "relay_url": url}) for url in URLS),
    ],
)  # fmt: skip
def test_a_codec_or_an_url_that_cannot_be_used_ends_the_start(
    token_file: Path, said: str, options: dict[str, str]
) -> None:
    with pytest.raises(errors.ConfigError, match=said):
        Outlet(EngineConfig(token_file=str(token_file), **options), hello_of())  # type: ignore[arg-type]
