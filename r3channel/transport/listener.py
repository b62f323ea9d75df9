"""Opens a `Connection` only between processes that hold the run's token. Both prove it before anything else is read.

    connector -> listener   preface, nonce
    listener  -> connector  nonce
    connector -> listener   HMAC(token, "connects" nonces hello), hello
    listener  -> connector  HMAC(token, "listens " nonces hello)

All records are of fixed size, so a stranger can take no more than 330 bytes and five seconds. The HMAC is HMAC-SHA256. The
token itself never travels. What follows on the link is plaintext. This module does not know what the hello says.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable

from r3channel.errors import ConfigError, DeadlineExceeded, TransportError, UsageError
from r3channel.transport.connection import Connection

TOKEN_BYTES = 32
HELLO_BYTES = 256
"""The most that a connector can say of itself."""
GREETING_S = 5.0
MOST_STRANGERS = 512
"""Links that may wait for their greeting: the ranks of 64 engines, which all come to trainer 0 first, at one moment."""
_PREFACE = b"r3link\x00\x01"
_NONCE_BYTES = _PROOF_BYTES = 32
_CONNECTS, _LISTENS = b"connects", b"listens "
"""Each side's proof differs, so that a proof cannot be sent back to its maker."""
_HELLO = struct.Struct(f"<H{HELLO_BYTES}s")

log = logging.getLogger(__name__)


def connect(host: str, port: int, token: bytes, *, timeout_s: float, hello: bytes = b"") -> Connection:
    """Open a link to the listener at `host`.

    Args:
        host: the listener's address.
        port: the listener's port.
        token: the run's token.
        timeout_s: limit of the whole call.
        hello: bytes that the listener gets with the link, at most `HELLO_BYTES`.

    Raises:
        TransportError: the listener cannot be reached, or holds another token.
        DeadlineExceeded: it did not answer in time.
    """
    _check_token(token)
    if len(hello) > HELLO_BYTES:
        raise UsageError(f"a hello of {len(hello)} bytes, at most {HELLO_BYTES} fit")
    where, limit = f"{host}:{port}", time.monotonic() + timeout_s
    try:
        link = Connection(socket.create_connection((host, port), max(0.001, timeout_s)), where)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{where} did not answer within {timeout_s:.1f} s") from error
    except OSError as error:
        unreached = "; no other node reaches it: which interface does it listen on?" * host.startswith("127.")
        raise TransportError(f"cannot connect to {where}: {error}{unreached}") from error
    try:
        _introduce(link, token, _HELLO.pack(len(hello), hello), limit)
    except BaseException:
        link.close()
        raise
    return link


class Listener:
    """Accepts links on one interface until it is closed; links that it has handed over go on."""

    def __init__(
        self, interface: str, *, token: bytes, on_link: Callable[[Connection], None] | None = None
    ) -> None:
        """Bind the interface and start to listen.

        Args:
            interface: the address to listen on.
            token: the run's token.
            on_link: gets each link on a thread that it may keep; without it, `accept` hands the links out.
        """
        _check_token(token)
        self._token = token
        self._links: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()
        self._on_link = on_link or self._links.put
        self._lock = threading.Lock()
        self._strangers: dict[Connection, None] = {}
        """Links that have proved nothing yet, the oldest first."""
        self._closed = threading.Event()
        self._socket = bind(interface, backlog=2 * MOST_STRANGERS)
        self.host, self.port = self._socket.getsockname()[:2]
        self._where = f"{self.host}:{self.port}"
        self._thread = threading.Thread(target=self._listen, name="r3channel-listener", daemon=True)
        self._thread.start()

    def accept(self, timeout_s: float) -> Connection:
        """Take the next link.

        Raises:
            DeadlineExceeded: no link came within `timeout_s`.
            TransportError: the listener is closed.
        """
        try:
            link = self._links.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            raise DeadlineExceeded(f"nobody connected to {self._where} within {timeout_s:.1f} s") from None
        if link is None:
            self._links.put(None)  # for another thread that waits
            raise TransportError(f"the listener at {self._where} is closed")
        return link

    def close(self) -> None:
        """Stop listening; idempotent.

        Strangers and links that nobody has accepted are closed.
        """
        with self._lock:
            self._closed.set()
            for link in self._strangers:
                link.abort("the listener was closed")
        if self._thread.is_alive():
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread; closing alone would not
            self._thread.join()
        self._socket.close()
        while not self._links.empty():
            if link := self._links.get():
                link.close()
        self._links.put(None)

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                connected, address = self._socket.accept()
                self._receive(Connection(connected, f"{address[0]}:{address[1]}"))
            # no descriptor or no thread is left, or the peer is gone
            except (OSError, RuntimeError) as error:
                if not self._closed.wait(0.1):
                    log.warning("%s could not accept a connection: %s", self._where, error)

    def _receive(self, link: Connection) -> None:
        thread = threading.Thread(target=self._greet, args=(link,), name="r3channel-link", daemon=True)
        with self._lock:
            # who holds the token is no stranger after a round trip: the oldest is the likeliest not to have it
            if len(self._strangers) >= MOST_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.abort("it gave way to a newer stranger")
            try:
                thread.start()  # it takes the lock before it looks for its link
            except RuntimeError:
                link.close()
                raise
            self._strangers[link] = None

    def _greet(self, link: Connection) -> None:
        try:
            _admit(link, self._token, time.monotonic() + GREETING_S)
            with self._lock:
                if link not in self._strangers or self._closed.is_set():
                    raise TransportError(f"link to {link.peer}: the listener no longer waits for it")
                del self._strangers[link]
        except TransportError as error:
            with self._lock:
                self._strangers.pop(link, None)
            link.close()
            log.info("%s turned a connection away: %s", self._where, error)
            return
        try:
            self._on_link(link)
        except BaseException:
            link.close()
            raise


def _introduce(link: Connection, token: bytes, hello: bytes, limit: float) -> None:
    mine = secrets.token_bytes(_NONCE_BYTES)
    try:
        link.send((_PREFACE, mine), timeout_s=limit - time.monotonic())
        nonces = mine + _read(link, _NONCE_BYTES, limit)
        link.send((_proof(token, _CONNECTS, nonces, hello), hello), timeout_s=limit - time.monotonic())
        answer = _read(link, _PROOF_BYTES, limit)
    except DeadlineExceeded:
        raise
    except TransportError as error:
        raise TransportError(
            f"{error}; {link.peer} closed the connection while it was greeted: it holds another run's token, or is closing"
        ) from error
    if not hmac.compare_digest(answer, _proof(token, _LISTENS, nonces, hello)):
        raise TransportError(f"{link.peer} does not hold this run's token")


def _admit(link: Connection, token: bytes, limit: float) -> None:
    opening = _read(link, len(_PREFACE) + _NONCE_BYTES, limit)
    if opening[: len(_PREFACE)] != _PREFACE:
        raise TransportError(f"link to {link.peer}: it speaks another protocol")
    mine = secrets.token_bytes(_NONCE_BYTES)
    link.send((mine,), timeout_s=limit - time.monotonic())
    nonces = opening[len(_PREFACE) :] + mine
    reply = _read(link, _PROOF_BYTES + _HELLO.size, limit)
    proof, hello = reply[:_PROOF_BYTES], reply[_PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, _CONNECTS, nonces, hello)):
        raise TransportError(f"link to {link.peer}: it does not hold this run's token")
    link.send((_proof(token, _LISTENS, nonces, hello),), timeout_s=limit - time.monotonic())
    nbytes, padded = _HELLO.unpack(hello)
    link.hello = padded[:nbytes]


def _read(link: Connection, nbytes: int, limit: float) -> bytes:
    data = bytearray(nbytes)
    link.recv_into(memoryview(data), timeout_s=limit - time.monotonic())
    return bytes(data)


def _proof(token: bytes, side: bytes, nonces: bytes, hello: bytes) -> bytes:
    return hmac.digest(token, side + nonces + hello, "sha256")


def _check_token(token: bytes) -> None:
    if len(token) != TOKEN_BYTES:
        raise ConfigError(f"a token of {len(token)} bytes, expected {TOKEN_BYTES} random ones")


def bind(interface: str, *, backlog: int | None = None) -> socket.socket:
    """Open a listening socket on one interface.

    Raises:
        ConfigError: the interface cannot be bound, or means every interface: nobody can be told to connect to that.
    """
    if not interface:
        raise ConfigError("no interface to listen on: name one, 127.0.0.1 for this machine only")
    try:
        family, _, _, _, address = socket.getaddrinfo(interface, 0, type=socket.SOCK_STREAM)[0]
        if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_unspecified:
            raise ConfigError(f"{interface} means every interface and cannot be advertised: name one")
        return socket.create_server(address, family=family, backlog=backlog)
    except OSError as error:
        raise ConfigError(f"cannot listen on {interface}: {error}") from error
