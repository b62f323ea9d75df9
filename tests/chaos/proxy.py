"""A TCP proxy that spoils bytes on their way. Every spoilt piece is counted: what is not counted did not fire."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections import Counter
from contextlib import suppress

from tests.chaos.shim import LEGS, PREAMBLE

_PIECE, _LEAST, _PAUSE_S, _SILENT_S = 1 << 16, 16, 0.2, 25.0
"""Bytes taken at once; a smaller piece is not worth spoiling; how long a slow peer takes for each; keepalive's time."""


class Proxy:
    """Threads of its own, which end with the process."""

    def __init__(self, seed: int) -> None:
        self.fired = Counter[tuple[str, str]]()
        """(kind, leg) -> pieces."""
        self.orders = dict[str, tuple[str, range]]()
        """Leg -> kind of fault, and which of its pieces from now on have it. Any thread may write it."""
        self._random, self._server = random.Random(seed), socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            threading.Thread(target=self._join, args=self._server.accept()[:1], daemon=True).start()

    def _join(self, link: socket.socket) -> None:
        try:
            leg, port = PREAMBLE.unpack(link.recv(PREAMBLE.size, socket.MSG_WAITALL))
            ends, silent = (link, socket.create_connection(("127.0.0.1", port))), threading.Event()
        except (OSError, struct.error):
            _end(link)
            return
        for source, sink in (ends, ends[::-1]):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            call = (source, sink, [*LEGS.values()][leg], silent)
            threading.Thread(target=self._carry, args=call, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, leg: str, silent: threading.Event) -> None:
        """`silent`: nothing goes either way any more, and neither end learns it before keepalive would tell."""
        with suppress(OSError):
            while data := source.recv(_PIECE):
                kind = self._due(leg) if len(data) >= _LEAST else ""
                if kind == "half_open":
                    silent.set()
                    time.sleep(_SILENT_S)
                    silent.clear()
                    break
                if not silent.is_set():
                    sink.sendall(self._spoilt(kind, data))
                if kind == "cut":
                    break
        if not silent.is_set():
            _end(source)
            _end(sink)

    def _due(self, leg: str) -> str:
        """What happens to this piece, counted."""
        kind, pieces = self.orders.pop(leg, ("", range(0)))
        if pieces.stop > 1:
            self.orders[leg] = kind, range(max(0, pieces.start - 1), pieces.stop - 1)
        if pieces.start or not kind:
            return ""
        self.fired[kind, leg] += 1
        return kind

    def _spoilt(self, kind: str, data: bytes) -> bytes:
        half, at = len(data) // 2, self._random.randrange(len(data))
        time.sleep(_PAUSE_S if kind == "slow" else 0)
        flipped = data[:at] + bytes([data[at] ^ 1 << self._random.randrange(8)]) + data[at + 1 :]
        spoilt = {"cut": data[:half], "duplicated": 2 * data, "reordered": data[half:] + data[:half]}
        return (spoilt | {"corrupted": flipped}).get(kind, data)


def _end(link: socket.socket) -> None:
    with suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)  # wakes the other direction's thread
    link.close()
