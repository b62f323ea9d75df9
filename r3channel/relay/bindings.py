"""Which relay each engine's frames come to: engines say hello to the relay of their node, the coordinator asks the relays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from r3channel.errors import EngineSilent, TransportError
from r3channel.relay.engines import EngineRegistry
from r3channel.relay.peer import Peer
from r3channel.wire.hello import Hello

_POLL_S = 0.05


@dataclass
class Bindings:
    """Boot id of an engine's life -> number of its relay. Any thread; a relay that does not answer is left out."""

    peers: Sequence[Peer]
    engines: EngineRegistry
    """The coordinator's; every hello is told to it."""
    silent: set[int] = field(default_factory=set)
    """Relays that did not answer when they were asked last."""
    _relay_of: dict[int, int] = field(default_factory=dict)
    _asking: threading.Lock = field(default_factory=threading.Lock)
    _asked_s: float = float("-inf")

    def relay_of(self, boot_id: int) -> int | None:
        """None when no relay has had this engine's hello (yet)."""
        if boot_id not in self._relay_of:
            self.ask()
        return self._relay_of.get(boot_id)

    def ask(self) -> None:
        """Ask every relay who said hello; at most every 50 ms."""
        with self._asking:
            if time.monotonic() < self._asked_s + _POLL_S:
                return
            for number, peer in enumerate(self.peers):
                for data in self._hellos(number, peer):
                    self._learn(number, data)
            self._asked_s = time.monotonic()

    def wait(self, done: Callable[[], bool], *, timeout_s: float) -> bool:
        """Keep asking until `done()`, `timeout_s` at most; says whether it is."""
        deadline_s = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)
            self.ask()
        return True

    def await_engine(self, engine: str) -> None:
        """Return if the engine may be used; wait for its hello until its deadline, then raise `EngineSilent`."""
        while self.engines.awaits(engine):
            self.ask()
            if self.engines.awaits(engine):
                time.sleep(_POLL_S)
        self.engines.check(engine)

    def _hellos(self, number: int, peer: Peer) -> list[bytes]:
        self.silent.discard(number)
        try:
            return peer.hellos()
        except TransportError:
            self.silent.add(number)  # named where its samples are asked for
            return []

    def _learn(self, number: int, data: bytes) -> None:
        hello, _ = Hello.split(data)
        if hello is None or hello.boot_id in self._relay_of:
            return
        try:
            self.engines.greet(hello)
        except EngineSilent:
            return  # the registry keeps the reason, and tells it to whoever wants this engine
        self._relay_of[hello.boot_id] = number
