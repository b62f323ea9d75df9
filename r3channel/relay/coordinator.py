"""Several relays as one: the rollout manager's calls, and the seal. Knows which relay has which sample; holds no frames itself.

    relays = Coordinator(relay_0, [peer_1, peer_2])      # relay_0 is in this process
    relays.add(sample_id, reply, tokens)                 # the reply's receipt says which relay has the frame
    ticket = relays.seal(step, assignment)               # one ticket; every relay sends its part of each shard
    relays.join_previous(timeout_s=...)

Only small records cross between relays. Trainers join a group with every relay and merge what they send
(`trainer.merge`). A relay that is lost is named with its samples; a step that needs none of them goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from r3channel.errors import (
    DeadlineExceeded,
    InbandRefused,
    R3Error,
    RelayLost,
    StepError,
    UsageError,
)
from r3channel.plan.assignment import Assignment
from r3channel.plan.parts import COORDINATOR
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.relay.bindings import Bindings
from r3channel.relay.claims import Claim, Claims
from r3channel.relay.ingest import Verified, frame_bytes_of, receipt_in
from r3channel.relay.peer import LocalPeer, Peer
from r3channel.relay.relay import Relay, staged
from r3channel.relay.roster import Roster
from r3channel.routing import Ids

log = logging.getLogger(__name__)

_POLL_S = 1.0
"""One wait at a relay for its acknowledgements: short, so that a deadline is kept and a lost relay is noticed."""


class Coordinator:
    """OPEN -> CLOSED. The calls of `Relay` that a rollout manager uses, over several relays. Any thread, as there.

    Raises:
        ConfigError: the relays differ in spec or layout, or are not numbered 0, 1, 2, ...
    """

    def __init__(self, relay: Relay, peers: Sequence[Peer]) -> None:
        """`relay` is relay 0; `peers` are relays 1, 2, ... in order."""
        if not peers:
            raise UsageError("one relay needs no coordinator; call it itself")
        self._relay = relay
        self._roster = Roster([LocalPeer(relay), *peers])
        self._bindings = Bindings(self._roster.peers, relay.engines)
        self._claims = Claims(self._roster, self._bindings)
        self._steps: dict[int, dict[int, tuple[str, ...]]] = {}
        """Step -> relay -> its samples, until that relay has delivered them."""
        self._newest_step = -1
        self._lock = threading.Lock()

    # -- engines ---------------------------------------------------------------------------------------------------

    def expect_engines(self, engines: Iterable[str], *, timeout_s: float) -> None:
        """As `Relay.expect_engines`; each may say hello to any of the relays."""
        self._relay.expect_engines(engines, timeout_s=timeout_s)

    def check_engine(self, reply: Mapping[str, Any], *, engine: str, tokens: int) -> None:
        """As `Relay.check_engine`; also refuses (`InbandRefused`) an engine that does not deliver directly."""
        self._relay.check_engine(reply, engine=engine, tokens=tokens)
        self._check_direct(engine, "its hello says that frames come with its replies")

    def _check_direct(self, engine: str, what: str) -> None:
        if not self._relay.engines.delivers_directly(engine):
            raise InbandRefused(
                f"engine {engine}: {what}, expected receipts, because {len(self._roster)} relays share the work. Start it with "
                "R3CHANNEL_DELIVERY=direct and R3CHANNEL_RELAY_URL of the relay on its node, and name it here as in its hello"
            )

    # -- rollout side ----------------------------------------------------------------------------------------------

    def add(
        self,
        sample_id: str,
        reply: Mapping[str, Any],
        tokens: Sequence[int] | Ids,
        *,
        engine: str = "?",
        append: bool = False,
    ) -> Verified | None:
        """As `Relay.add`: the claim goes to the relay that the reply's receipt points to.

        A reply that holds its frame is refused (`InbandRefused`), unless its engine is known to deliver directly and its queue
        was full; then this process's relay keeps it. A later turn must come to the relay of the turns before
        (`TurnElsewhere`): keep a conversation on one node.
        """
        self._bindings.await_engine(engine)
        data = frame_bytes_of(reply, sample_id=sample_id, engine=engine)
        tokens_T = np.asarray(tokens, dtype=np.int64)
        receipt = receipt_in(data)
        if receipt is not None:
            request_id = reply["meta_info"].get("id")
            self._claims.add(Claim(sample_id, receipt, request_id, tokens_T, engine, append))
            return None
        self._check_direct(engine, f"its reply for sample {sample_id} holds the frame")
        with self._claims.turn(sample_id, COORDINATOR, tokens_T, first_row=None, append=append):
            return self._relay.add(sample_id, reply, tokens_T, engine=engine, append=append)

    def rows_held(self, sample_id: str) -> int:
        """As `Relay.rows_held`."""
        number = self._claims.relay_of(sample_id)
        return (
            0 if number is None else self._roster.at(number, lambda peer: peer.rows_held(sample_id=sample_id))
        )

    def discard(self, sample_ids: Iterable[str]) -> int:
        """As `Relay.discard`. What a lost relay holds is lost with it, and not counted."""
        by_relay, dropped = self._claims.forget(sample_ids)
        for number, names in by_relay.items():
            dropped += self._discard(number, names)
        return dropped

    def _discard(self, number: int, names: list[str]) -> int:
        try:
            return self._roster.at(number, lambda peer: peer.discard(sample_ids=names))
        except RelayLost:
            return 0

    # -- seal ------------------------------------------------------------------------------------------------------

    def seal(self, step: int, assignment: Assignment) -> Ticket:
        """As `Relay.seal`, over all relays: every relay that holds an assigned sample has its part of the step, or none has.

        Waits up to `frame_timeout_s`, at all relays at once. Errors name the relay; `RelayLost` names its samples too.
        """
        config, names = self._relay.config, assignment.sample_ids
        deadline_s = time.monotonic() + config.frame_timeout_s
        if step <= self._newest_step:
            raise StepError(f"step {step} is not newer than step {self._newest_step}; was it sealed twice?")
        self._claims.expire(config.expiry_s, but=self._under_way())
        self._claims.settle(names, step=step, timeout_s=config.frame_timeout_s)
        holders = self._claims.holders(names, step=step)
        samples = self._look(step, holders, timeout_s=max(0.0, deadline_s - time.monotonic()))
        with self._relay.clock.span("plan", step=step):
            ticket = staged(self._ticket(step, assignment, samples), config)
            self._hand_out(ticket)
        return ticket

    def _look(
        self, step: int, holders: Mapping[int, tuple[str, ...]], *, timeout_s: float
    ) -> dict[str, TicketSample]:
        answers = self._roster.at_all(
            holders, lambda peer, own: peer.look(step=step, sample_ids=own, timeout_s=timeout_s), step=step
        )
        return {
            sample.sample_id: replace(sample, relay=number)
            for number, values in answers.items()
            for sample in map(TicketSample.from_values, values)
        }

    def _ticket(self, step: int, assignment: Assignment, samples: Mapping[str, TicketSample]) -> Ticket:
        run, *peers = self._roster.runs
        return Ticket(
            run,
            step,
            self._relay.spec,
            self._relay.layout,
            assignment,
            tuple(samples[name] for name in assignment.sample_ids),
            self._relay.config.bucket_bytes,
            peers=tuple(peers),
        )

    def _hand_out(self, ticket: Ticket) -> None:
        """All relays or none: nothing is placed before every one of them has taken its samples into the step."""
        step, data, parts = ticket.step, ticket.to_bytes(), ticket.parts
        ranks = range(ticket.layout.dp)
        senders = {
            number: parts.samples_of(number)
            for number in range(len(self._roster))
            if any(parts.serves(number, dp) for dp in ranks)
        }
        try:
            self._roster.at_all(senders, lambda peer, _: peer.reserve(ticket=data), step=step)
        except R3Error:
            for number in senders:
                self._cancel(number, step)
            raise
        with self._lock:
            self._newest_step = step
            self._steps[step] = dict(senders)
        try:
            self._roster.at_all(senders, lambda peer, _: peer.start(step=step), step=step)
        except R3Error as error:  # as if it had died a moment later: trainers and `join_previous` name it
            log.warning("step %d is sealed, but %s", step, error)

    def _cancel(self, number: int, step: int) -> None:
        try:
            self._roster.at(number, lambda peer: peer.cancel(step=step))
        except RelayLost:
            log.warning("relay %d is lost, and its samples of step %d with it", number, step)
        except R3Error as error:  # the others are to be cancelled too
            log.warning("relay %d keeps its samples of step %d: %s", number, step, error)

    # -- delivery --------------------------------------------------------------------------------------------------

    def join_previous(self, *, timeout_s: float | None = None) -> None:
        """As `Relay.join_previous`. A lost relay raises `RelayLost` with its steps and samples, once: they are then given up."""
        limit = self._relay.config.step_timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + limit
        with self._relay.clock.span("wait_join"):
            while waiting := self._undelivered(min(_POLL_S, max(0.0, deadline_s - time.monotonic()))):
                if time.monotonic() >= deadline_s:
                    raise DeadlineExceeded(
                        f"waited {limit:.1f} s for the send of step(s) {sorted(self._steps)}; not acknowledged "
                        f"(relay: step: (dp, pp, cp)): {waiting}. Have those trainers entered the step? A send cannot finish "
                        "before its receiver starts"
                    )

    def _undelivered(self, wait_s: float) -> dict[int, dict[int, list[tuple[int, ...]]]]:
        """Relay -> step -> ranks that have not acknowledged, after `wait_s` at most; forgets what was delivered."""
        with self._lock:
            asked = sorted({number for relays in self._steps.values() for number in relays})
        waiting = {}
        for number in asked:
            try:
                steps = self._ask_undelivered(number, wait_s)
            except RelayLost as error:
                lost = {step: list(names) for step, names in self._forget(number).items()}
                raise RelayLost(f"{error}; samples of the steps that were under way there: {lost}") from error
            self._forget(number, but=steps)
            if steps:
                waiting[number], wait_s = steps, 0.0
        return waiting

    def _ask_undelivered(self, number: int, wait_s: float) -> dict[int, list[tuple[int, ...]]]:
        return self._roster.at(number, lambda peer: peer.undelivered(wait_s=wait_s))

    def _forget(self, number: int, *, but: Iterable[int] = ()) -> dict[int, tuple[str, ...]]:
        """Step -> samples that this relay has no more to do with."""
        still = set(but)
        with self._lock:
            gone = {
                step: relays.pop(number)
                for step, relays in self._steps.items()
                if number in relays and step not in still
            }
            self._steps = {step: relays for step, relays in self._steps.items() if relays}
        self._claims.forget([name for names in gone.values() for name in names])
        return gone

    def _under_way(self) -> set[str]:
        with self._lock:
            return {name for relays in self._steps.values() for names in relays.values() for name in names}

    # -- the rest --------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """{"relays": {number: `Relay.status()`, or {"lost": why}}, "waiting": samples of engines that no relay knows yet}."""
        return {
            "relays": {number: self._report(number) for number in range(len(self._roster))},
            "waiting": self._claims.waiting,
        }

    def _report(self, number: int) -> dict[str, Any]:
        try:
            return self._roster.at(number, lambda peer: peer.report())
        except RelayLost as error:
            return {"lost": str(error)}

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Close every relay that still answers, then raise the first error. Idempotent."""
        errors = [self._finish(number, timeout_s) for number in range(len(self._roster))]
        self._roster.close()
        for error in errors:
            if error is not None:
                raise error

    def _finish(self, number: int, timeout_s: float) -> R3Error | None:
        try:
            self._roster.at(number, lambda peer: peer.finish(timeout_s=timeout_s))
        except RelayLost:
            return None
        except R3Error as error:
            return error
        return None
