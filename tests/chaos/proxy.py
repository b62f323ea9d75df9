"""A TCP proxy that spoils bytes on their way, on one leg at a time. Every spoilt piece is counted: only what is counted has fired."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from tests.chaos.shim import LEGS, PREAMBLE

LASTING = ("delayed", "slow")
KINDS = ("cut", "half_open", "corrupted", "duplicated", "reordered", *LASTING)
_PIECE, _LEAST = 1 << 16, 16
"""Bytes taken at once; a smaller piece is not worth spoiling."""
_SLOW_BYTES_S = 200_000


@dataclass
class _Order:
    kind: str
    skip: int
    lasts_s: float
    until_s: float = 0.0


class Proxy:
    """OPEN -> CLOSED. Threads of its own; any thread may give orders."""

    def __init__(self, seed: int) -> None:
        self.fired = Counter[tuple[str, str]]()
        """(kind, leg) -> pieces."""
        self.carried = Counter[str]()
        """Leg -> bytes."""
        self._random, self._orders = random.Random(seed), dict[str, _Order]()
        self._server = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def order(self, kind: str, leg: str, *, skip: int = 0, lasts_s: float = 0.0) -> None:
        """Spoil the piece after the next `skip` ones of the leg; delayed and slow: all for `lasts_s` from that one on."""
        self._orders[leg] = _Order(kind, skip, lasts_s)

    def withdraw(self) -> None:
        """Forget what has not fired yet, and what lasts."""
        self._orders.clear()

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                link, _ = self._server.accept()
                threading.Thread(target=self._join, args=(link,), daemon=True).start()

    def _join(self, link: socket.socket) -> None:
        try:
            leg, port = PREAMBLE.unpack(link.recv(PREAMBLE.size, socket.MSG_WAITALL))
            far, silent = socket.create_connection(("127.0.0.1", port)), threading.Event()
        except (OSError, struct.error):
            return _end(link)
        for ends in ((link, far), (far, link)):
            ends[0].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            call = (*ends, [*LEGS.values()][leg], silent)
            threading.Thread(target=self._carry, args=call, daemon=True).start()
        return None

    def _carry(self, source: socket.socket, sink: socket.socket, leg: str, silent: threading.Event) -> None:
        """`silent`: nothing goes either way any more, and neither end learns it."""
        try:
            while data := source.recv(_PIECE):
                self.carried[leg] += len(data)
                kind = self._due(leg, len(data))
                if kind == "cut":
                    sink.sendall(data[: len(data) // 2])
                    break
                if kind == "half_open":
                    silent.set()
                for piece in () if silent.is_set() else self._spoilt(kind, data):
                    sink.sendall(piece)
        except OSError:
            pass
        if not silent.is_set():
            _end(source)
            _end(sink)

    def _due(self, leg: str, nbytes: int) -> str:
        """What happens to a piece, counted."""
        order = self._orders.get(leg)
        if order is None or nbytes < _LEAST:
            return ""
        if order.skip:
            order.skip -= 1
            return ""
        order.until_s = order.until_s or time.monotonic() + order.lasts_s
        if order.kind not in LASTING or time.monotonic() > order.until_s:
            self._orders.pop(leg, None)
        self.fired[order.kind, leg] += 1
        return order.kind

    def _spoilt(self, kind: str, data: bytes) -> list[bytes]:
        middle = len(data) // 2
        if kind in LASTING:
            time.sleep(0.3 if kind == "delayed" else len(data) / _SLOW_BYTES_S)
        if kind == "corrupted":
            at = self._random.randrange(len(data))
            return [data[:at], bytes([data[at] ^ 1 << self._random.randrange(8)]), data[at + 1 :]]
        return {"duplicated": [data, data], "reordered": [data[middle:], data[:middle]]}.get(kind, [data])


def _end(link: socket.socket) -> None:
    with suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)  # wakes the other direction's thread
    link.close()
