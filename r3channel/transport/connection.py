"""One connection between two processes: bytes and small checked records, in order, with waits that another thread can end.

It knows no token and no group: `transport.listener` decides who may connect, and the caller knows what the bytes mean.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from xxhash import xxh3_64_intdigest

from r3channel.errors import DeadlineExceeded, TransportError, UsageError

MAX_RECORD_BYTES = 1 << 20
_HEAD = struct.Struct("<4sB3xII")
"""Magic, kind, bytes of the body, the low half of its hash."""
_MAGIC = b"R3L\x01"
_MOST_BUFFERS = 512
"""Buffers of one system call at most; Linux takes 1,024."""
_WAKE_BYTES = 256 << 10
"""A receiver of many bytes is not woken for less than this: a fifth of the wake-ups, measured on Linux 6.18."""
_LEFT = "the peer has left"
_LONGEST_WAIT_S = 1e6  # poll counts milliseconds in 32 bits
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""Socket options. A receiver whose peer's host vanished learns it within 25 s, a sender by its own deadline. TCP_USER_TIMEOUT is
left alone, because it also ends the link to a live peer that reads nothing for that long, such as a trainer between two steps.
The buffers are left alone too: a size that is set ends the kernel's own tuning, and 4 MiB were no faster."""


class Connection:
    """One thread at a time sends, one receives or waits; `abort` and `close` may come from any other.

    `timeout_s` bounds a whole call; None leaves it to the peer, or to `abort`. Any failure ends the link, for half
    a message may have passed: later calls raise `TransportError` with the first reason.
    """

    def __init__(self, connected: socket.socket, peer: str) -> None:
        """Take ownership of a connected socket.

        Args:
            connected: the socket.
            peer: the other side's name in messages.
        """
        self.peer, self.hello = peer, b""
        self._socket = connected
        connected.setblocking(False)
        for option in _OPTIONS:
            connected.setsockopt(*option)
        # a sender whose peer's buffers are full learns only from RDHUP that the peer has shut down
        self._writable = _poller(connected, select.POLLOUT | select.POLLRDHUP)
        self._readable = _poller(connected, select.POLLIN)
        self._left = _poller(connected, select.POLLRDHUP)
        self._wake_bytes = 1
        self._lock = threading.Lock()
        """Guards the three attributes below."""
        self._end = ""
        self._calls = 0
        self._closed = False

    @property
    def alive(self) -> bool:
        """Return whether neither side has ended the link.

        It tells also where no call is under way that would notice. What the peer sent before it left may still be there to read.
        """
        with self._lock:
            return not self._end and not self._left.poll(0)

    # -- bytes -----------------------------------------------------------------------------------------------------------

    def send(self, parts: Sequence[memoryview | bytes], *, timeout_s: float | None) -> None:
        """Send the bytes of all parts as one message without a frame.

        Args:
            parts: memory to send. It may be reused afterwards.
            timeout_s: limit of the whole call; None for no limit.
        """
        views = [view.cast("B") for part in parts if (view := memoryview(part)).nbytes]
        total = sum(map(len, views))
        with self._call(f"send {total} bytes", timeout_s) as limit:
            self._send(views, total, limit)

    def recv_into(self, out: memoryview, *, timeout_s: float | None) -> None:
        """Fill `out` with the bytes that come next.

        Args:
            out: writable and contiguous memory.
            timeout_s: limit of the whole call; None for no limit.
        """
        with self._call(f"receive {out.nbytes} bytes", timeout_s) as limit:
            self._recv(out.cast("B") if out.nbytes else memoryview(b""), limit)

    # -- records ---------------------------------------------------------------------------------------------------------

    def send_record(self, kind: int, body: bytes = b"", *, timeout_s: float | None) -> None:
        if not 0 <= kind < 256 or len(body) > MAX_RECORD_BYTES:
            text = f"record of kind {kind} and {len(body)} bytes; expected 0 to 255 and <= {MAX_RECORD_BYTES}"
            raise UsageError(text)
        self.send((_HEAD.pack(_MAGIC, kind, len(body), _digest(kind, body)), body), timeout_s=timeout_s)

    def recv_record(self, *, timeout_s: float | None) -> tuple[int, bytes]:
        """Receive the kind and the body of the next record.

        A record that is damaged or longer than `MAX_RECORD_BYTES` ends the link.
        """
        with self._call("receive a record", timeout_s) as limit:
            head = bytearray(_HEAD.size)
            self._recv(memoryview(head), limit)
            magic, kind, nbytes, digest = _HEAD.unpack(head)
            if magic != _MAGIC or head[5:8] != bytes(3):
                raise TransportError("no record where one was expected: the two sides speak out of turn")
            if nbytes > MAX_RECORD_BYTES:
                raise TransportError(
                    f"a record announces {nbytes} bytes, at most {MAX_RECORD_BYTES} are taken"
                )
            body = bytearray(nbytes)
            self._recv(memoryview(body), limit)
            if _digest(kind, body) != digest:
                raise TransportError(f"a record of kind {kind} and {nbytes} bytes came damaged")
            return kind, bytes(body)

    # -- end -------------------------------------------------------------------------------------------------------------

    def abort(self, why: str = "it was aborted") -> None:
        """End the link; idempotent.

        Calls under way, here and at the peer, raise at once.

        Args:
            why: the reason that later calls give.
        """
        with self._lock:
            if not self._end:
                self._end = why
                with suppress(OSError):  # the peer may have ended it before
                    self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the link and give its descriptor back.

        What was sent still arrives, unless the peer's own bytes lie unread.
        """
        self.abort("it was closed")
        with self._lock:
            self._closed = True
            self._give_back()

    def _give_back(self) -> None:
        if self._closed and not self._calls:  # afterwards the descriptor's number may name another file
            self._socket.close()

    # -- within a call ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _call(self, what: str, timeout_s: float | None) -> Iterator[float]:
        """Yield the time by which a call must have ended.

        A failure inside becomes the link's failure.
        """
        with self._lock:
            if self._end:
                raise TransportError(f"link to {self.peer}: cannot {what}: {self._end}")
            self._calls += 1
        try:
            yield time.monotonic() + min(_LONGEST_WAIT_S if timeout_s is None else timeout_s, _LONGEST_WAIT_S)
        except (OSError, TransportError) as error:
            kind = DeadlineExceeded if isinstance(error, DeadlineExceeded) else TransportError
            within = "" if timeout_s is None or kind is TransportError else f" within {timeout_s:.1f} s"
            message = f"could not {what}{within}: {self._end or error}"
            self.abort(message)
            raise kind(f"link to {self.peer}: {message}") from error
        except BaseException:
            self.abort("a call was interrupted")
            raise
        finally:
            with self._lock:
                self._calls -= 1
                self._give_back()

    def _send(self, views: list[memoryview], left: int, limit: float) -> None:
        at = 0
        while left:
            done = 0
            with suppress(BlockingIOError):
                done = self._socket.sendmsg(views[at : at + _MOST_BUFFERS], (), socket.MSG_NOSIGNAL)
            left -= done
            while done and done >= len(views[at]):
                done -= len(views[at])
                at += 1
            if done:
                views[at] = views[at][done:]
            if left:
                self._block(self._writable, limit, left)

    def _recv(self, out: memoryview, limit: float) -> None:
        while out:
            with suppress(BlockingIOError):
                got = self._socket.recv_into(out)
                if not got:
                    raise TransportError(_LEFT)
                out = out[got:]
            if out:
                self._wake_at(min(len(out), _WAKE_BYTES))
                self._block(self._readable, limit, len(out))

    def _wake_at(self, nbytes: int) -> None:
        if nbytes != self._wake_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._wake_bytes = nbytes

    def _block(self, poller: select.poll, limit: float, left: int) -> None:
        if time.monotonic() > limit or not self._wait(poller, limit):
            raise DeadlineExceeded(f"{left} bytes were left at the deadline")

    def _wait(self, poller: select.poll, limit: float) -> bool:
        events = poller.poll(max(0.0, limit - time.monotonic()) * 1000)
        if self._end:
            raise TransportError(self._end)
        if events and events[0][1] & select.POLLRDHUP:
            raise TransportError(_LEFT)
        return bool(events)


def _poller(connected: socket.socket, events: int) -> select.poll:
    poller = select.poll()
    poller.register(connected, events)
    return poller


def _digest(kind: int, body: bytes | bytearray) -> int:
    return xxh3_64_intdigest(body, kind) & 0xFFFFFFFF
