"""HTTP requests of one connection, read so that a body goes straight to where it shall lie. Knows no path and no token.

h11 judges the head (its framing, its size, its characters); the body of a request with a Content-Length is then `recv`d into the
caller's memory. Chunked bodies are not read at all. One thread per connection calls all of this.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from http import HTTPStatus

import h11

MAX_HEAD_BYTES = 16 << 10
_SMALL_BYTES = 4096
"""Reads below it go through a buffer of this size: an entry of a parcel is 16 bytes."""
_SEND_TIMEOUT_S = 10.0
_LINGER_S = 2.0


class BodyCut(ConnectionError):
    """The peer closed the connection within a body."""


@dataclass
class Body:
    """A request's body. `fill` until `left` is 0, or `skip`. Raises `BodyCut`, or `TimeoutError` past the deadline."""

    nbytes: int
    left: int
    """Bytes not taken yet."""
    _sock: socket.socket
    _ahead: memoryview
    _deadline_s: float

    def fill(self, out_N: memoryview) -> None:
        """The next `len(out_N)` bytes, of which there must be so many `left`."""
        at = 0
        while at < len(out_N):
            if not self._ahead and len(out_N) - at < _SMALL_BYTES:
                self._ahead = memoryview(self._recv(min(_SMALL_BYTES, self.left - at)))
            if self._ahead:
                part = self._ahead[: len(out_N) - at]
                out_N[at : at + len(part)] = part
                self._ahead = self._ahead[len(part) :]
                at += len(part)
            else:
                at += self._recv_into(out_N[at:])
        self.left -= at

    def skip(self) -> None:
        """Read the rest and forget it."""
        scratch = memoryview(bytearray(min(self.left, 1 << 16)))
        while self.left:
            self.fill(scratch[: self.left])

    def _recv(self, nbytes: int) -> bytes:
        _set_deadline(self._sock, self._deadline_s)
        data = self._sock.recv(nbytes)
        if not data:
            raise BodyCut(f"the peer closed with {self.left} of {self.nbytes} bytes of a body to come")
        return data

    def _recv_into(self, out_N: memoryview) -> int:
        _set_deadline(self._sock, self._deadline_s)
        received = self._sock.recv_into(out_N)
        if not received:
            raise BodyCut(f"the peer closed with {self.left} of {self.nbytes} bytes of a body to come")
        return received


@dataclass(frozen=True)
class Request:
    """The head of a request. Strings are latin-1, header names in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    keep_alive: bool
    ahead: bytes
    """What was received behind the head already."""

    @property
    def content_length(self) -> int | None:
        """None when it is missing, or when the body is not of a length that is known before."""
        length = self.headers.get("content-length")
        return None if length is None or "transfer-encoding" in self.headers else int(length)


class Link:
    """One connection: next_request -> body -> answer, again and again."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._http = h11.Connection(h11.SERVER)
        self._ahead = b""
        """Received behind the body of the last request."""

    def next_request(self, *, timeout_s: float) -> Request | None:
        """None when the peer has closed. Raises `h11.RemoteProtocolError` for what is no HTTP, `TimeoutError`, `OSError`."""
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        deadline_s = time.monotonic() + timeout_s
        if self._ahead:
            self._http.receive_data(self._ahead)
        while (event := self._http.next_event()) is h11.NEED_DATA:
            _set_deadline(self._sock, deadline_s)
            self._http.receive_data(self._sock.recv(_SMALL_BYTES))
        if not isinstance(event, h11.Request):
            return None
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
        return Request(
            method=event.method.decode("latin-1"),
            path=event.target.decode("latin-1"),
            headers=headers,
            keep_alive=event.http_version >= b"1.1" and "close" not in headers.get("connection", "").lower(),
            ahead=self._http.trailing_data[0],
        )

    def body(self, request: Request, *, timeout_s: float) -> Body:
        """The body, whose length is known and allowed."""
        if self._http.they_are_waiting_for_100_continue:
            self._send(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = request.content_length or 0
        self._ahead = request.ahead[length:]
        ahead = memoryview(request.ahead)[:length]
        return Body(length, length, self._sock, ahead, time.monotonic() + timeout_s)

    def answer(self, status: int, text: str, *, close: bool) -> None:
        body, end = text.encode(), "Connection: close\r\n" if close else ""
        self._send(
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n"
            f"Content-Length: {len(body)}\r\n{end}\r\n".encode()
            + body
        )

    def linger(self) -> None:
        """Take what the peer is still sending, for a moment, so that it reads the answer and not a reset."""
        self._sock.shutdown(socket.SHUT_WR)
        deadline_s = time.monotonic() + _LINGER_S
        _set_deadline(self._sock, deadline_s)
        while self._sock.recv(1 << 16):
            _set_deadline(self._sock, deadline_s)

    def _send(self, data: bytes) -> None:
        self._sock.settimeout(_SEND_TIMEOUT_S)
        self._sock.sendall(data)


def _set_deadline(sock: socket.socket, deadline_s: float) -> None:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    sock.settimeout(left_s)
