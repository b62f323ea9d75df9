"""Several relays as one: every relay has the rows of its node's engines, and the table of samples is relay 0's alone.

    relays = Coordinator(relay_0, [peer_1, peer_2])      # relay_0 is in this process
    relays.add(sample_id, reply, tokens)                 # its receipt names a frame, wherever that came
    ticket = relays.seal(step, assignment)               # one ticket; every relay sends the rows that it has
    relays.join_previous(timeout_s=...)

A frame at another relay enters the table as a description of its rows, when a step asks for it. So only small records cross
between relays, no call is made for a reply, and no lock is held while one is under way.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from r3channel.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineSilent,
    R3Error,
    RelayLost,
    TransportError,
    UsageError,
)
from r3channel.plan.assignment import Assignment
from r3channel.plan.ticket import Ticket
from r3channel.relay.arrival.rows import HeldRows
from r3channel.relay.intake import Share
from r3channel.relay.relay import Relay
from r3channel.routing import Ids, ProvenanceSpan, RowKind
from r3channel.wire.delivery import error_of, values_of
from r3channel.wire.digest import fold
from r3channel.wire.hello import Hello
from r3channel.wire.receipt import FrameName

log = logging.getLogger(__name__)

_POLL_S = 0.05
"""Between two questions for frames that have not come, or hellos that were not said."""
_JOIN_S = 1.0
"""One wait at a relay for its acknowledgements: short, so that a deadline is kept and a lost relay is noticed."""
PEER_CALLS = frozenset(
    {"introduce", "hellos", "frames", "hold", "abandon", "drop", "undelivered", "report", "finish"}
)
_Answer = TypeVar("_Answer")


class Peer(Protocol):
    """One of the other relays, as the coordinator calls it: small plain values. Any thread.

    Errors are the relay's own typed ones, or `TransportError` when it cannot be asked.
    """

    def introduce(self) -> dict[str, Any]: ...
    def hellos(self) -> list[bytes]: ...
    def frames(self, *, names: list[FrameName]) -> dict[FrameName, dict[str, Any]]: ...
    def hold(self, *, ticket: bytes, frames: dict[str, Share]) -> None: ...
    def abandon(self, *, step: int) -> None: ...
    def drop(self, *, sample_ids: list[str], names: list[FrameName]) -> None: ...
    def undelivered(self, *, wait_s: float) -> dict[int, list[tuple[int, ...]]]: ...
    def report(self) -> dict[str, Any]: ...
    def finish(self, *, timeout_s: float) -> None: ...


class LocalPeer:
    """`Peer` over a relay of this process: what `relay.actor` calls in another."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def introduce(self) -> dict[str, Any]:
        """What the coordinator compares before the first sample."""
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

    def frames(self, *, names: list[FrameName]) -> dict[FrameName, dict[str, Any]]:
        """What is known of those of these frames that are here."""
        return {name: _describe(what) for name, what in self._relay.intake.arrived(names).items()}

    def hold(self, *, ticket: bytes, frames: dict[str, Share]) -> None:
        self._relay.hold(Ticket.from_bytes(ticket), frames)

    def abandon(self, *, step: int) -> None:
        self._relay.abandon(step)

    def drop(self, *, sample_ids: list[str], names: list[FrameName]) -> None:
        self._relay.intake.drop_frames(sample_ids, names)

    def undelivered(self, *, wait_s: float) -> dict[int, list[tuple[int, ...]]]:
        return {step: list(keys) for step, keys in self._relay.undelivered(wait_s=wait_s).items()}

    def report(self) -> dict[str, Any]:
        return self._relay.status()

    def finish(self, *, timeout_s: float) -> None:
        self._relay.close(timeout_s=timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class FarRows:
    """Rows that lie at another relay; see `relay.rows.HeldRows`."""

    first_row: int
    end_row: int
    sample_key: int
    digests_L: Ids
    provenance: tuple[ProvenanceSpan, ...]
    invalid: tuple[tuple[int, int], ...]
    fold: int
    relay: int


def _describe(what: HeldRows | R3Error) -> dict[str, Any]:
    if isinstance(what, R3Error):
        return {"error": values_of(what)}
    return {
        "first_row": what.first_row,
        "end_row": what.end_row,
        "sample_key": what.sample_key,
        "digests": what.digests_L.tobytes(),
        "provenance": [(s.start, s.end, s.weight_version, int(s.kind)) for s in what.provenance],
        "invalid": list(what.invalid),
    }


def _far(values: Mapping[str, Any], *, relay: int) -> FarRows | R3Error:
    if "error" in values:
        return error_of(values["error"]).within(f"relay {relay}")
    digests_L = np.frombuffer(values["digests"], "<u8")
    return FarRows(
        first_row=values["first_row"],
        end_row=values["end_row"],
        sample_key=values["sample_key"],
        digests_L=digests_L,
        provenance=tuple(
            ProvenanceSpan(start=start, end=end, weight_version=version, kind=RowKind(kind))
            for start, end, version, kind in values["provenance"]
        ),
        invalid=tuple(map(tuple, values["invalid"])),
        fold=fold(digests_L),
        relay=relay,
    )


class Coordinator:
    """OPEN -> CLOSED. The calls of `Relay` that a rollout manager uses, over several relays. Any thread, as there.

    Raises:
        ConfigError: the relays differ in spec or layout, or are not numbered 0, 1, 2, ...
    """

    def __init__(self, relay: Relay, peers: Sequence[Peer]) -> None:
        """`relay` is relay 0; `peers` are relays 1, 2, ... in order."""
        if not peers:
            raise UsageError("one relay needs no coordinator; call it itself")
        self.relay, self._peers = relay, dict(enumerate(peers, 1))
        told = [
            LocalPeer(relay).introduce(),
            *(self._ask(number, lambda peer: peer.introduce()) for number in self._peers),
        ]
        _check_numbered(told)
        self._runs = tuple(its["run"] for its in told)
        self._relay_of: dict[int, int] = {}
        """Boot id of an engine's life -> the relay that its frames come to; 0 where that is this process's."""
        self._parts: dict[int, dict[int, list[str]]] = defaultdict(dict)
        """Relay -> step -> the samples of it that lie there, until they are delivered."""
        self._asked_s = 0.0

    def add(
        self,
        sample_id: str,
        reply: Mapping[str, Any],
        tokens: Any,
        *,
        engine: str = "?",
        append: bool = False,
    ) -> Any:
        """As `Relay.add`. A reply that holds its frame is kept by this process's relay."""
        while self.relay.engines.awaits(engine):
            self._learn()
            if self.relay.engines.awaits(engine):
                time.sleep(_POLL_S)
        return self.relay.add(sample_id, reply, tokens, engine=engine, append=append)

    def expect_engines(self, engines: Iterable[str], *, timeout_s: float) -> None:
        """As `Relay.expect_engines`; each may say hello to any of the relays."""
        self.relay.expect_engines(engines, timeout_s=timeout_s)

    def check_engine(self, reply: Mapping[str, Any], *, engine: str, tokens: int) -> None:
        """As `Relay.check_engine`."""
        self.relay.check_engine(reply, engine=engine, tokens=tokens)

    def rows_held(self, sample_id: str) -> int:
        """As `Relay.rows_held`."""
        return self.relay.rows_held(sample_id)

    def discard(self, sample_ids: Iterable[str]) -> int:
        """As `Relay.discard`. What a lost relay holds is lost with it."""
        names = list(sample_ids)
        frames = [turn.name for _, turn in self.relay.intake.turns_of(names) if turn.name]
        if any(name[0] not in self._relay_of for name in frames):
            self._learn()
        dropped = self.relay.discard(names)
        for number in self._peers:
            own = [name for name in frames if self._relay_of.get(name[0]) == number]
            self._try(number, lambda peer, own=own: peer.drop(sample_ids=names, names=own))
        return dropped

    # -- seal ------------------------------------------------------------------------------------------------------

    def seal(self, step: int, assignment: Assignment) -> Ticket:
        """As `Relay.seal`, over all relays: every relay that holds rows of it has its part of the step, or none has.

        Errors name the relay; `RelayLost` carries the samples that it held.
        """
        names, config = assignment.sample_ids, self.relay.config
        deadline_s = time.monotonic() + config.frame_timeout_s
        late = self._fetch(names, failed=True)  # a good copy of what came damaged may be there by now
        while late and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            late = self._fetch(names)
        self.relay.intake.await_frames(names, step=step, timeout_s=0.0)
        newest = self.relay.steps.newest
        ticket = self.relay.take(step, assignment, peers=self._runs[1:], start=False)
        data = ticket.to_bytes()
        try:
            for number, frames in self._holders(names).items():
                self._parts[number][step] = list(frames)  # before it answers: the answer may be what is lost
                self._ask(
                    number,
                    lambda peer, own=frames: peer.hold(ticket=data, frames=own),
                    held=list(frames),
                    step=step,
                )
        except R3Error:
            self.abandon(step)
            self.relay.steps.newest = newest  # nobody has its ticket: the number may be used again
            raise
        self.relay.steps.start(step)
        return ticket

    def _fetch(self, names: Sequence[str], *, failed: bool = False) -> bool:
        """Ask the other relays for frames that are not in the table. Are some still outstanding?"""
        late = self.relay.intake.awaited(names, failed=failed)
        if any(name[0] not in self._relay_of for name in late):
            self._learn()
        wanted: dict[int, list[FrameName]] = defaultdict(list)
        for name in late:
            wanted[self._relay_of.get(name[0], 0)].append(name)
        for number, own in wanted.items():
            if number:
                held = [late[name] for name in own]
                found = self._ask(number, lambda peer, own=own: peer.frames(names=own), held=held)
                for name, values in found.items():
                    self.relay.intake.arrive(name, _far(values, relay=number))
        return bool(self.relay.intake.awaited(names))

    def _holders(self, names: Sequence[str]) -> dict[int, dict[str, Share]]:
        """Relay -> sample -> what lies there of it."""
        found: dict[int, dict[str, Share]] = defaultdict(dict)
        for sample, turn in self.relay.intake.turns_of(names):
            if isinstance(turn.rows, FarRows) and turn.name is not None:
                _, frames = found[turn.rows.relay].setdefault(sample.name, (sample.prefix_hash, []))
                frames.append((sample.turns.index(turn), turn.name))
        return dict(found)

    # -- delivery --------------------------------------------------------------------------------------------------

    def join_previous(self, *, timeout_s: float | None = None) -> None:
        """As `Relay.join_previous`. Raises `RelayLost` for a relay that is lost while it has something to send."""
        limit = self.relay.config.step_timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + limit
        with self.relay.clock.span("wait_join"):
            while waiting := self._undelivered(min(_JOIN_S, max(0.0, deadline_s - time.monotonic()))):
                if time.monotonic() >= deadline_s:
                    raise DeadlineExceeded(
                        f"waited {limit:.1f} s for the send; not acknowledged (relay: step: (dp, pp, cp)): {waiting}. Have those "
                        "trainers entered the step? A send cannot finish before its receiver starts",
                        ranks=[key for steps in waiting.values() for keys in steps.values() for key in keys],
                    )

    def _undelivered(self, wait_s: float) -> dict[int, dict[int, list[tuple[int, ...]]]]:
        """Relay -> step -> receivers that have not acknowledged, after `wait_s` at most."""
        waiting: dict[int, dict[int, Any]] = {}
        if steps := self.relay.undelivered(wait_s=wait_s):
            waiting[0] = dict(steps)
        for number, parts in list(self._parts.items()):
            limit_s = 0.0 if waiting or not parts else wait_s
            steps = self._ask_undelivered(number, parts, limit_s) if parts else {}
            self._parts[number] = {step: held for step, held in parts.items() if step in steps}
            if self._parts[number]:
                waiting[number] = {step: steps[step] for step in self._parts[number]}
        return waiting

    def _ask_undelivered(
        self, number: int, parts: dict[int, list[str]], wait_s: float
    ) -> dict[int, list[tuple[int, ...]]]:
        """What a lost relay had to send is given up: the loop is told once, with its samples, and goes on."""
        held = [name for names in parts.values() for name in names]
        try:
            return self._ask(number, lambda peer: peer.undelivered(wait_s=wait_s), held=held, step=min(parts))
        except RelayLost:
            del self._parts[number]
            raise

    def abandon(self, step: int) -> int:
        """As `Relay.abandon`, at every relay that answers."""
        for number, parts in self._parts.items():
            if parts.pop(step, None) is not None:
                self._try(number, lambda peer: peer.abandon(step=step))
        return self.relay.abandon(step)

    def status(self) -> dict[str, Any]:
        """{"relays": {number: `Relay.status()`, or {"lost": why}}}."""
        found: dict[int, dict[str, Any]] = {0: self.relay.status()}
        for number in self._peers:
            try:
                found[number] = self._ask(number, lambda peer: peer.report())
            except RelayLost as error:
                found[number] = {"lost": str(error)}
        return {"relays": found, "waiting": found[0]["waiting"]}

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Close every relay that still answers, then raise the first error. Idempotent."""
        errors: list[R3Error] = []
        for number in (*self._peers, 0):
            try:
                if number:
                    self._ask(number, lambda peer: peer.finish(timeout_s=timeout_s))
                else:
                    self.relay.close(timeout_s=timeout_s)
            except RelayLost:
                continue
            except R3Error as error:
                errors.append(error)
        if errors:
            raise errors[0]

    # -- calls -----------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Ask every relay who said hello; at most every 50 ms."""
        if time.monotonic() < self._asked_s + _POLL_S:
            return
        self._relay_of.update({hello.boot_id: 0 for hello in self.relay.bound})
        for number in self._peers:
            for data in self._try(number, lambda peer: peer.hellos()) or ():
                hello, _ = Hello.split(data)
                if hello is None or hello.boot_id in self._relay_of:
                    continue
                self._relay_of[hello.boot_id] = number
                try:
                    self.relay.engines.greet(hello)
                except EngineSilent as error:  # the registry tells it to whoever wants this engine
                    log.warning("relay %d: %s", number, error)
        self._asked_s = time.monotonic()

    def _ask(
        self,
        number: int,
        call: Callable[[Peer], _Answer],
        *,
        held: Sequence[str] = (),
        step: int | None = None,
    ) -> _Answer:
        """Call one relay; its errors name it, and one that does not answer is `RelayLost`."""
        where = f"relay {number} of {len(self._peers) + 1}"
        try:
            return call(self._peers[number])
        except TransportError as error:
            what = f"; it holds {len(held)} samples: {list(held[:5])}" if held else ""
            raise RelayLost(f"{where} does not answer{what}: {error}", samples=held, step=step) from error
        except R3Error as error:
            raise error.within(where) from error

    def _try(self, number: int, call: Callable[[Peer], _Answer]) -> _Answer | None:
        """The same where there is nothing that could be done about an error."""
        try:
            return self._ask(number, call)
        except R3Error as error:
            log.warning("%s", error)
            return None


def _check_numbered(told: Sequence[Mapping[str, Any]]) -> None:
    for number, its in enumerate(told):
        expected = {"relay": number, "relays": len(told), **{key: told[0][key] for key in ("spec", "layout")}}
        wrong = "; ".join(
            f"{key} is {its[key]}, expected {value}" for key, value in expected.items() if its[key] != value
        )
        if wrong:
            raise ConfigError(
                f"relay {number} of {len(told)}: {wrong}. config.relay numbers the relays from 0 on, config.relays counts them, "
                "and all have one spec and one layout"
            )
