"""One of several relays, as their coordinator calls it: claims, answers and tickets, all small plain values; never frames.

`Peer` is the contract, `LocalPeer` the relay of this process; `relay.actor.RayPeer` is the same over calls to a Ray actor.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Protocol

from r3channel.plan.ticket import Ticket
from r3channel.relay.ingest import ROUTING_FIELD
from r3channel.relay.relay import Relay

PEER_CALLS = frozenset(
    {"introduce", "hellos", "claim", "holds", "rows_held", "discard", "look", "reserve", "start", "cancel"}
    | {"undelivered", "report", "finish"}
)
"""The methods of `Peer`: what one process may ask of another."""


class Peer(Protocol):
    """Any thread. Errors are the relay's own typed ones, or `TransportError` when it cannot be asked."""

    def introduce(self) -> dict[str, Any]:
        """{run, relay, relays, spec, layout}: what the coordinator compares before the first sample."""
        ...

    def hellos(self) -> list[bytes]:
        """`Hello.to_bytes()` of every engine whose frames come to this relay."""
        ...

    def claim(
        self,
        *,
        sample_id: str,
        receipt: bytes,
        request_id: str | None,
        tokens: int,
        engine: str,
        append: bool,
    ) -> None:
        """A reply held this receipt: as `Relay.add`, for a sample of `tokens` tokens."""
        ...

    def holds(self, *, sample_id: str) -> bool: ...

    def rows_held(self, *, sample_id: str) -> int: ...

    def discard(self, *, sample_ids: Sequence[str]) -> int: ...

    def look(self, *, step: int, sample_ids: Sequence[str], timeout_s: float) -> list[list[Any]]:
        """`TicketSample.to_values()` of each, when their frames are there; see `Relay.look`."""
        ...

    def reserve(self, *, ticket: bytes) -> None: ...

    def start(self, *, step: int) -> None: ...

    def cancel(self, *, step: int) -> None: ...

    def undelivered(self, *, wait_s: float) -> dict[int, list[tuple[int, ...]]]: ...

    def report(self) -> dict[str, Any]:
        """`Relay.status()`."""
        ...

    def finish(self, *, timeout_s: float) -> None:
        """`Relay.close()`."""
        ...


class LocalPeer:
    """`Peer` over a relay of this process."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def introduce(self) -> dict[str, Any]:
        relay = self._relay
        return {
            "run": relay.run,
            "relay": relay.config.relay,
            "relays": relay.config.relays,
            "spec": relay.spec.to_dict(),
            "layout": relay.layout.to_dict(),
        }

    def hellos(self) -> list[bytes]:
        return [hello.to_bytes() for hello in self._relay.bound]

    def claim(
        self,
        *,
        sample_id: str,
        receipt: bytes,
        request_id: str | None,
        tokens: int,
        engine: str,
        append: bool,
    ) -> None:
        reply = {"meta_info": {"id": request_id, ROUTING_FIELD: base64.b64encode(receipt).decode()}}
        # The coordinator has compared the tokens themselves with the earlier turns'; here only their number counts.
        self._relay.add(sample_id, reply, range(tokens), engine=engine, append=append)

    def holds(self, *, sample_id: str) -> bool:
        return self._relay.holds(sample_id)

    def rows_held(self, *, sample_id: str) -> int:
        return self._relay.rows_held(sample_id)

    def discard(self, *, sample_ids: Sequence[str]) -> int:
        return self._relay.discard(sample_ids)

    def look(self, *, step: int, sample_ids: Sequence[str], timeout_s: float) -> list[list[Any]]:
        samples = self._relay.look(sample_ids, step=step, timeout_s=timeout_s)
        return [sample.to_values() for sample in samples]

    def reserve(self, *, ticket: bytes) -> None:
        self._relay.reserve(Ticket.from_bytes(ticket))

    def start(self, *, step: int) -> None:
        self._relay.start(step)

    def cancel(self, *, step: int) -> None:
        self._relay.cancel(step)

    def undelivered(self, *, wait_s: float) -> dict[int, list[tuple[int, ...]]]:
        return {step: list(keys) for step, keys in self._relay.undelivered(wait_s=wait_s).items()}

    def report(self) -> dict[str, Any]:
        return self._relay.status()

    def finish(self, *, timeout_s: float) -> None:
        self._relay.close(timeout_s=timeout_s)
