"""The relay's ingest: frames and hellos that engines send over HTTP. Moves bytes; judges none of them itself.

    POST /v1/hello     a hello                 200, or 422 with the reason of its refusal
    POST /v1/frames    a parcel of frames      200 once they are verified and kept
    both               bearer token            401 without; 411, 413 without or with too large a Content-Length
                                               409 engine unknown: say hello; 503 no room: come again
                                               424 a shared prompt's rows are not here: send them again

A thread per connection (an engine keeps one), of which a few at a time read and verify bodies, without the interpreter's lock.
It binds the interface it is told, the loopback one by default. Plain HTTP: on any other interface it belongs on a private
network.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from r3channel.bearer import authorises
from r3channel.errors import PrefixMissing, R3Error, StoreFull, UsageError
from r3channel.wire.hello import MAX_HELLO_BYTES, Hello
from r3channel.wire.receipt import Source, open_parcel

try:
    import h11

    from r3channel.relay.request import Body, Link, Request
except ImportError as error:
    raise UsageError('the ingest of direct delivery needs h11: pip install "r3channel[direct]"') from error

log = logging.getLogger(__name__)

_BODIES_AT_ONCE = 4
_BODY_TIMEOUT_S = 60.0
_MAX_CONNECTIONS = 256
"""More are closed at once; engines come again."""
_FIRST_HEAD_S = 10.0
_IDLE_S = 75.0
"""Longest pause between two requests of a connection that has shown the token."""
_BACKLOG = 128


class Door(Protocol):
    """What is behind the ingest. All calls come from its threads."""

    def greet(self, hello: Hello) -> None: ...

    def knows(self, boot_id: int) -> bool: ...

    def has_room(self, nbytes: int) -> bool: ...

    def deliver(self, boot_id: int, count: int, body: Source) -> None: ...


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    text: str
    close: bool = False
    """A body that was not read must not be taken for the next request."""


class IngestServer:
    """SERVING -> CLOSED. The constructor returns once the port is bound, or raises `UsageError`."""

    def __init__(self, door: Door, *, token: str, host: str, port: int, max_body_bytes: int) -> None:
        self._door, self._token = door, token
        self._limits = {"/v1/hello": MAX_HELLO_BYTES, "/v1/frames": max_body_bytes}
        self._bodies = threading.Semaphore(_BODIES_AT_ONCE)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._closed = False
        try:
            self._listener = _listen(host, port)
        except OSError as error:
            raise UsageError(f"the ingest cannot listen on {host}:{port}: {error}") from error
        address, bound = self._listener.getsockname()[:2]
        self.url = f"http://{f'[{address}]' if ':' in address else address}:{bound}"
        """Base address; what engines get as R3CHANNEL_RELAY_URL."""
        self._thread = threading.Thread(target=self._accept, name="r3channel-ingest", daemon=True)
        self._thread.start()

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Stop listening; requests under way are cut. Idempotent."""
        with self._lock:
            self._closed = True
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            threads = [self._thread, *self._open.values()]
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for thread in threads:
            thread.join(timeout_s)

    # -- connections -----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    log.warning("r3channel: the ingest cannot accept a connection: %s", error)
                    time.sleep(0.1)  # out of file descriptors: a moment later there may be one
                continue
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="r3channel-ingest-one", daemon=True
        )
        with self._lock:
            if self._closed or len(self._open) >= _MAX_CONNECTIONS:
                connection.close()
                return
            try:
                thread.start()  # it waits for the lock before it forgets the connection
            except RuntimeError as error:  # no thread is to be had: a moment later there may be one
                log.warning("r3channel: the ingest turns a connection away: %s", error)
                connection.close()
                return
            self._open[connection] = thread

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                self._converse(Link(connection))
        except OSError:  # it went away, or was silent for too long; an engine comes again
            pass
        except Exception:
            log.exception("r3channel: a connection of the ingest failed")
        finally:
            with self._lock:
                del self._open[connection]

    def _converse(self, link: Link) -> None:
        patience_s = _FIRST_HEAD_S
        while (request := self._next(link, timeout_s=patience_s)) is not None:
            answer = self._refusal(request) or self._take(link, request)
            close = answer.close or not request.keep_alive
            link.answer(answer.status, answer.text, close=close)
            if close:
                link.linger()
                return
            patience_s = _IDLE_S

    def _next(self, link: Link, *, timeout_s: float) -> Request | None:
        try:
            return link.next_request(timeout_s=timeout_s)
        except h11.RemoteProtocolError as error:
            link.answer(error.error_status_hint, str(error), close=True)
            link.linger()
            return None

    # -- requests --------------------------------------------------------------------------------------------------

    def _refusal(self, request: Request) -> _Answer | None:
        """Token and size are judged before a byte of the body is read."""
        if not authorises(request.headers.get("authorization"), self._token):
            return _Answer(401, "the bearer token is missing or another one", close=True)
        limit = self._limits.get(request.path)
        if limit is None:
            return _Answer(404, f"expected one of {sorted(self._limits)}", close=True)
        if request.method != "POST":
            return _Answer(405, "expected POST", close=True)
        if request.content_length is None:
            return _Answer(411, "Content-Length is missing", close=True)
        if request.content_length > limit:
            return _Answer(413, f"{request.content_length} bytes, at most {limit}", close=True)
        return None

    def _take(self, link: Link, request: Request) -> _Answer:
        if not self._bodies.acquire(timeout=_BODY_TIMEOUT_S):
            return _Answer(503, "busy with other bodies", close=True)
        try:
            body = link.body(request, timeout_s=_BODY_TIMEOUT_S)
            answer = self._judge(request, body)
            body.skip()  # an engine in the middle of a body does not read an answer
            return answer
        except TimeoutError:
            return _Answer(408, f"the body did not come within {_BODY_TIMEOUT_S:g} s", close=True)
        finally:
            self._bodies.release()

    def _judge(self, request: Request, body: Body) -> _Answer:
        try:
            return self._hello(body) if request.path == "/v1/hello" else self._frames(body)
        except PrefixMissing as error:
            return _Answer(424, str(error))
        except StoreFull as error:
            return _Answer(503, str(error))
        except R3Error as error:
            return _Answer(400, str(error))
        except OSError:
            raise
        except Exception:
            log.exception("r3channel: the ingest failed on a request")
            return _Answer(500, "the relay failed; its log says why")

    def _hello(self, body: Body) -> _Answer:
        data = bytearray(body.nbytes)
        body.fill(memoryview(data))
        hello, rest = Hello.split(bytes(data))
        if hello is None or rest:
            return _Answer(400, "the body is no hello")
        try:
            self._door.greet(hello)
        except R3Error as error:
            return _Answer(422, str(error))
        return _Answer(200, "welcome")

    def _frames(self, body: Body) -> _Answer:
        boot_id, count = open_parcel(body)
        if not self._door.knows(boot_id):
            return _Answer(409, "this engine has not said hello, or its hello was refused")
        if not self._door.has_room(body.nbytes):
            return _Answer(503, "no room for more frames: unclaimed, or not delivered yet")
        self._door.deliver(boot_id, count, body)
        return _Answer(200, "taken")


def _listen(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
