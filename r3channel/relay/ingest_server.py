"""The relay's ingest: receives the frames and hellos that engines send over HTTP, without buffering a body.

A thread serves each connection (an engine keeps one): it reads that connection's bodies and waits for no other's. h11 judges each
head: its framing, its size, its characters. Rows of a body are then received with `recv` to where they stay, so the store's
ceiling bounds the ingest, too. A connection that has not shown the token is a stranger; of too many strangers the oldest is
closed. `wire.parcel` describes paths and answers.
The protocol is plain HTTP: on any interface but the loopback one, use a private network. This module knows no frame, sample or
step: of the relay it calls `Intake.deliver`, and its engines.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from hmac import compare_digest
from ipaddress import ip_address

from r3channel import errors
from r3channel.observe.stage_clock import StageClock
from r3channel.relay.intake import Intake
from r3channel.transport.auth import is_authorized
from r3channel.wire.hello import MAX_HELLO_BYTES, Hello
from r3channel.wire.parcel import ADDRESS_HEADER, FRAMES_PATH, HELLO_PATH, SESSION_HEADER, Status, open_parcel
from r3channel.wire.source import Pieces

try:
    import h11
except ImportError as error:
    raise errors.UsageError('direct delivery needs h11: pip install "r3channel[direct]"') from error

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 16 << 10
STALL_S, BODY_S = 10.0, 60.0
"""Seconds after which a body is cut: `STALL_S` without a byte, `BODY_S` in all."""
MOST_STRANGERS = 1024
"""Most connections that have not shown the token; one more ends the oldest. All engines may connect at once when a relay
restarts."""
_MOST_CONNECTIONS = 4096
"""Most connections in all, a thread each. Further ones are closed at once, and engines connect again."""
_FIRST_HEAD_S, _IDLE_S = 10.0, 75.0
"""Seconds until the first head must be there, and between two requests of a connection that has shown the token."""
_SEND_S, _LINGER_S = 10.0, 2.0
_BACKLOG = 4096
"""Most connections that wait to be accepted, if the system's own limit is not lower. Beyond it a connection is tried again only
after seconds."""
_HEAD_BYTES, _SMALL_BYTES = 4096, 1 << 16
"""Bytes received at once of a head, and of a body where less is asked for. A parcel's entry has 16 bytes, a short frame 4 kB."""
_STATUS_OF: dict[type, Status] = {
    errors.PluginNotApplied: Status.HELLO_REFUSED,
    errors.StepError: Status.COME_AGAIN,
    errors.UsageError: Status.COME_AGAIN,
    errors.FrameCorrupt: Status.FRAME_DAMAGED,
    errors.FrameMagicMismatch: Status.FRAME_DAMAGED,
}
"""The status that answers each error; other errors of the package are answered with NO_PARCEL."""


class BodyLost(OSError):
    """The connection ended within a body, or the body stood still or took too long."""


class Body(Pieces):
    """A request's body. All calls raise `BodyLost`."""

    def __init__(self, sock: socket.socket, nbytes: int, *, ahead: memoryview, clock: StageClock) -> None:
        self.nbytes = self.left = nbytes
        self.sock, self._ahead, self._clock = sock, ahead, clock
        self._deadline_s = time.monotonic() + BODY_S

    def receive(self, out_N: memoryview) -> int:
        if len(out_N) >= _SMALL_BYTES:
            return self._receive(out_N)
        # never past the body: the bytes behind it are the next request's
        buffer = memoryview(bytearray(min(_SMALL_BYTES, self.left)))
        self._ahead = buffer[: self._receive(buffer)]
        return 0

    def _receive(self, out_N: memoryview) -> int:
        try:
            self.sock.settimeout(min(STALL_S, _seconds_left(self._deadline_s)))
            with self._clock.span("http"):
                received = self.sock.recv_into(out_N)
        except OSError as error:
            text = f"a body of {self.nbytes} bytes stood still for {STALL_S:g} s, took {BODY_S:g} s, or broke off"
            raise BodyLost(f"{text}: {error!r}") from error
        if not received:
            raise BodyLost(f"the peer closed with {self.left} of {self.nbytes} bytes of a body to come")
        return received


@dataclass(frozen=True, slots=True)
class Request:
    """The head of a request."""

    method: bytes
    path: str
    authorization: str = field(repr=False)
    session: str = field(repr=False)
    keep_alive: bool
    length: int | None
    """The body's bytes; None when they are missing, or not known before."""
    direct: bool = False
    """True where the peer's end of the connection is the engine's own: no proxy is between, and it ends with the engine."""


class HttpConnection:
    """An HTTP connection: `next_request` -> `body` -> `answer`, again and again."""

    def __init__(self, sock: socket.socket, clock: StageClock) -> None:
        self._sock, self._clock = sock, clock
        self._peer = str(sock.getpeername()[:2]).encode()
        self._ahead = b""
        """Bytes that were received but not yet read."""

    def next_request(self, *, timeout_s: float) -> Request | None:
        """Return the next request's head, or None if the peer has closed.

        Raises:
            h11.RemoteProtocolError: What came is no HTTP.
            TimeoutError: The head was not whole within `timeout_s` seconds.
            OSError: The connection failed.
        """
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        deadline_s = time.monotonic() + timeout_s
        if self._ahead:
            self._http.receive_data(self._ahead)
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._sock.settimeout(_seconds_left(deadline_s))
            self._http.receive_data(self._sock.recv(_HEAD_BYTES))
        self._ahead = self._http.trailing_data[0]
        if not isinstance(event, h11.Request):
            return None
        headers = dict(event.headers)
        length = None if b"transfer-encoding" in headers else headers.get(b"content-length")
        ends = b"close" in headers.get(b"connection", b"").lower()
        return Request(
            event.method,
            event.target.decode("latin-1"),
            headers.get(b"authorization", b"").decode("latin-1"),
            headers.get(SESSION_HEADER.lower().encode(), b"").decode("latin-1"),
            direct=headers.get(ADDRESS_HEADER.lower().encode()) == self._peer,
            keep_alive=event.http_version >= b"1.1" and not ends,
            length=None if length is None else int(length),
        )

    def body(self, nbytes: int) -> Body:
        """Return the body of the request that came last."""
        if self._http.they_are_waiting_for_100_continue:
            self._send(b"HTTP/1.1 100 Continue\r\n\r\n")
        ahead, self._ahead = memoryview(self._ahead)[:nbytes], self._ahead[nbytes:]
        return Body(self._sock, nbytes, ahead=ahead, clock=self._clock)

    def answer(self, status: Status, text: str, *, close: bool) -> None:
        data, end = text.encode(errors="replace"), "Connection: close\r\n" if close else ""
        head = f"HTTP/1.1 {status.value} {status.name}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        self._send(f"{head}Content-Length: {len(data)}\r\n{end}\r\n".encode() + data)
        if close:
            self._linger()

    def _linger(self) -> None:
        # read what the peer still sends: else it might see a reset and not the answer
        self._sock.shutdown(socket.SHUT_WR)
        deadline_s, scratch = time.monotonic() + _LINGER_S, bytearray(1 << 16)
        self._sock.settimeout(_LINGER_S)
        while self._sock.recv_into(scratch):
            self._sock.settimeout(_seconds_left(deadline_s))

    def _send(self, data: bytes) -> None:
        self._sock.settimeout(_SEND_S)
        self._sock.sendall(data)


class IngestServer:
    """The HTTP server for engines. States: SERVING -> CLOSED.

    The constructor returns once the port is bound, or raises `ConfigError` or `UsageError`.
    """

    def __init__(self, intake: Intake, *, token: str, host: str, port: int, max_body_bytes: int) -> None:
        self._intake, self._token = intake, token
        self._limits = {HELLO_PATH: MAX_HELLO_BYTES, FRAMES_PATH: max_body_bytes}
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._strangers: dict[socket.socket, None] = {}
        """Connections that have not shown the token, the oldest first."""
        self._sessions: dict[int, tuple[str, socket.socket | None]] = {}
        """Boot id of an engine -> the session that answered its hello, and the connection on which it spoke last; None where
        that may be a proxy's."""
        self._closed = False
        self._listener = _listen(host, port)
        address, bound = self._listener.getsockname()[:2]
        self.url = f"http://{f'[{address}]' if ':' in address else address}:{bound}"
        """Base address; what engines get as R3CHANNEL_RELAY_URL."""
        intake.engines.hears, intake.engines.unreached = self.hears, self.unreached_address
        self._thread = threading.Thread(target=self._accept, name="r3channel-ingest", daemon=True)
        self._thread.start()

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Stop listening and cut requests under way; may be called again.

        Args:
            timeout_s: Seconds to wait for the threads, all together.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            for connection in self._open:
                _end(connection)
            threads = [self._thread, *self._open.values()]
        _end(self._listener)  # wakes the thread that accepts
        self._listener.close()
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def hears(self, boot_id: int) -> bool:
        """Return whether an engine's process still has its connection.

        The result is False only where the process had a connection of its own and has none now: the system ends a dead process's
        connection.
        """
        _, connection = self._sessions.get(boot_id, ("", None))
        return connection is None or connection in self._open

    def unreached_address(self, boot_id: int) -> str:
        """Return our address if this engine's process never said hello there.

        Its replies may have brought a hello. The result is empty if the process has said hello here.
        """
        return "" if boot_id in self._sessions else self.url

    # -- connections -----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    log.warning("r3channel: the ingest cannot accept a connection: %s", error)
                    time.sleep(0.1)  # no file descriptor is free; there may be one a moment later
                continue
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        name = "r3channel-ingest-one"
        thread = threading.Thread(target=self._serve, args=(connection,), name=name, daemon=True)
        with self._lock:
            if self._closed or len(self._open) >= _MOST_CONNECTIONS:
                connection.close()
                return
            try:
                thread.start()  # the thread takes the lock before it forgets the connection
            except RuntimeError as error:  # no thread can be started; there may be one a moment later
                log.warning("r3channel: the ingest turns a connection away: %s", error)
                connection.close()
                return
            self._open[connection] = thread
            self._strangers[connection] = None
            if len(self._strangers) > MOST_STRANGERS:
                _end(oldest := next(iter(self._strangers)))
                del self._strangers[oldest]

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                self._converse(connection)
        except OSError:  # the peer went away, or was silent for too long; an engine connects again
            pass
        except Exception:
            log.exception("r3channel: a connection of the ingest failed")
        finally:
            with self._lock:
                del self._open[connection]
                self._strangers.pop(connection, None)

    def _converse(self, connection: socket.socket) -> None:
        link = HttpConnection(connection, self._intake.clock)
        patience_s, close = _FIRST_HEAD_S, False
        while not close:
            try:
                request = link.next_request(timeout_s=patience_s)
            except h11.RemoteProtocolError as error:
                what = str(error).partition(":")[0]  # h11 shows the line behind it, which may hold a token
                link.answer(Status.NO_PARCEL, f"no HTTP that is understood here: {what}", close=True)
                return
            if request is None:
                return
            if refused := self._refusal(request):
                # the body is not read, and must not be taken for the next request
                link.answer(*refused, close=True)
                return
            with self._lock:
                self._strangers.pop(connection, None)
            status, text, close = self._take(link, request)
            link.answer(status, text, close=close)
            patience_s = _IDLE_S

    # -- requests --------------------------------------------------------------------------------------------------

    def _refusal(self, request: Request) -> tuple[Status, str] | None:
        if not is_authorized(request.authorization, self._token):
            return Status.NO_TOKEN, "the bearer token is missing or another one"
        limit = self._limits.get(request.path)
        if limit is None:
            return Status.NO_SUCH_PATH, f"expected one of {sorted(self._limits)}"
        if request.method != b"POST":
            return Status.NO_SUCH_METHOD, "expected POST"
        if request.length is None:
            return Status.NO_LENGTH, "Content-Length is missing"
        if request.length > limit:
            return Status.TOO_LARGE, f"{request.length} bytes, at most {limit}"
        return None

    def _take(self, link: HttpConnection, request: Request) -> tuple[Status, str, bool]:
        try:
            body = link.body(request.length or 0)
            status, text = self._judge(request, body)
            body.skip()  # an engine that still sends its body does not read an answer
            return status, text, not request.keep_alive
        except BodyLost as error:
            return Status.TOO_SLOW, str(error), True

    def _judge(self, request: Request, body: Body) -> tuple[Status, str]:
        try:
            return self._hello(request, body) if request.path == HELLO_PATH else self._frames(request, body)
        except errors.R3Error as error:
            known = (_STATUS_OF[kind] for kind in type(error).__mro__ if kind in _STATUS_OF)
            return next(known, Status.NO_PARCEL), str(error)
        except BodyLost:
            raise
        except Exception:
            log.exception("r3channel: the ingest failed on a request")
            return Status.FAILED, "the relay failed; its log says why"

    def _hello(self, request: Request, body: Body) -> tuple[Status, str]:
        try:
            hello, rest = Hello.split(body.take(body.left))
        except errors.FrameError as error:
            return Status.NO_PARCEL, str(error)
        if hello is None or rest:
            return Status.NO_PARCEL, "the body is no hello"
        self._intake.engines.greet(hello)
        session = secrets.token_hex(16)
        with self._lock:
            # the oldest belong to engines that have ended, or to invented names
            while len(self._sessions) >= _MOST_CONNECTIONS:
                del self._sessions[next(iter(self._sessions))]
            self._sessions[hello.boot_id] = session, body.sock if request.direct else None
        return Status.TAKEN, session

    def _frames(self, request: Request, body: Body) -> tuple[Status, str]:
        boot_id, count = open_parcel(body)
        session, _ = self._sessions.get(boot_id, ("", None))
        same = session and compare_digest(session.encode(), request.session.encode())
        # the session is the proof: nobody's frames are kept under another engine's name
        if not (same and self._intake.engines.knows(boot_id)):
            return Status.HELLO_FIRST, "no hello of this engine has that session, or it was refused"
        with self._lock:
            self._sessions[boot_id] = session, body.sock if request.direct else None
        self._intake.deliver(boot_id, count, body)
        return Status.TAKEN, "taken"


def _end(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host or "::", port, type=socket.SOCK_STREAM)[0]
        if ip_address(str(address[0])).is_unspecified:
            raise errors.ConfigError(
                f"the ingest cannot listen on {host!r}: engines cannot be told such an address; name one of this host's own"
            )
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        raise errors.UsageError(f"the ingest cannot listen on {host}:{port}: {error}") from error


def _seconds_left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
