"""The steps that are sealed and not delivered: what goes in, what receivers ask for, who has acknowledged. Knows no connection.

seal -> (prepared in the background) -> outgoing* -> acknowledge by every receiver -> gone, its rows freed
                                  \\-> abandon: its samples wait for a step again
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

from r3channel.errors import R3Error, StepError, TicketMismatch
from r3channel.plan.shards import ShardKey
from r3channel.plan.ticket import Ticket
from r3channel.relay.intake import Intake
from r3channel.relay.sample_table import Sample
from r3channel.relay.sealed import RowStream, SealedStep
from r3channel.relay.token_tensors import HeldMasks
from r3channel.relay.verify import VerifiedRows
from r3channel.wire.row_protocol import Seal

log = logging.getLogger(__name__)

_IDLE_S = 60.0
"""Memory that nobody used for so long goes back to the system."""


class Steps:
    """OPEN -> CLOSED. Any thread; its own prepares."""

    def __init__(self, intake: Intake, *, run: str, idle: Callable[[], None]) -> None:
        """`idle` is called once in a while when nothing is to be done."""
        self._intake, self._run, self._idle = intake, run, idle
        self._journal, self._changed, self._clock = intake._journal, intake._changed, intake.clock
        self._steps: dict[int, SealedStep] = {}
        self._seals: dict[int, int] = {}
        """Steps that are being sealed or were abandoned -> the number of their next seal."""
        self._sealing = set[int]()
        self.newest = -1
        self.acked_before: dict[int, set[ShardKey]] = {}
        """Who has already acknowledged each step that a relay before this one sealed and that is to be sealed again."""
        self.error: BaseException | None = None
        """What ended the thread; the next public call of the relay raises it."""
        self._closed = False
        self._queue: SimpleQueue[int | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._prepare_all, name="r3channel-prepare", daemon=True)
        self.thread.start()

    @contextmanager
    def sealing(self, step: int) -> Iterator[int]:
        """Reserve a step while it is sealed -> its seal's number. Raises StepError for one that is not newer than those before,
        unless it was abandoned, and for one that another thread is sealing."""
        with self._changed:
            if step in self._sealing or (step <= self.newest and step not in self._seals):
                raise StepError(
                    f"step {step} is not newer than step {self.newest}, or is being sealed; was it sealed twice?",
                    step=step,
                )
            self._sealing.add(step)
        try:
            yield self._seals.get(step, 0)
        finally:
            with self._changed:
                self._sealing.discard(step)

    def add(
        self, ticket: Ticket, rows: dict[str, list[VerifiedRows]], masks: Mapping[str, Sequence[HeldMasks]]
    ) -> None:
        """Receivers may ask for it from here on; it is prepared in the background."""
        sealed = SealedStep(ticket, rows, masks)
        sealed.had |= self.acked_before.pop(ticket.step, set())
        if self._journal is not None:
            self._journal.sealed(ticket.step, ticket.to_bytes())
        with self._changed:
            kept = [step for step, older in self._steps.items() if not (older.awaited or older.in_use)]
            gone = {step: self._take_out(step) for step in kept}  # who might have come again has gone on
            self._steps[ticket.step] = sealed
            self._seals.pop(ticket.step, None)
            self.newest = max(self.newest, ticket.step)
            self._changed.notify_all()
        for step, samples in gone.items():
            self._let_go(step, samples)
        self._queue.put(ticket.step)

    def abandon(self, step: int) -> int:
        """Give a sealed step up: receivers that ask for it are told, and its samples wait for a step again (or for `discard`).

        It may be sealed again, under its number and a new seal's. Returns how many samples came back; 0 for a step that is
        unknown or delivered.
        """
        with self._changed:
            sealed = self._steps.pop(step, None)
            if sealed is None:
                return 0
            self._seals[step] = sealed.ticket.seal + 1
            names = [
                name for name in sealed.ticket.assignment.sample_ids if name in self._intake.entries.samples
            ]
            self._intake.entries.give_back(self._intake.entries.samples[name] for name in names)
            self._changed.notify_all()
        if self._journal is not None:
            self._journal.done(step)
        return len(names)

    def undelivered(self, *, wait_s: float) -> dict[int, tuple[ShardKey, ...]]:
        """Step -> receivers that have not acknowledged it, after `wait_s`; early, and empty, when all have."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.error or not self._awaited(), timeout=wait_s)
            return self._missing()

    def _missing(self) -> dict[int, tuple[ShardKey, ...]]:
        return {step: sealed.missing for step, sealed in self._steps.items() if sealed.awaited}

    def _awaited(self) -> bool:
        return any(sealed.awaited for sealed in self._steps.values())

    # -- receivers -------------------------------------------------------------------------------------------------

    def settled(self, step: int, key: ShardKey, *, timeout_s: float) -> bool:
        """Whether `outgoing` answers at once, be it with an error; waits for it this long at most."""
        with self._changed:
            return self._changed.wait_for(lambda: self._settled(step, key), timeout=timeout_s)

    def outgoing(self, seal: Seal, key: ShardKey, *, timeout_s: float = 60.0) -> RowStream:
        """What a receiver gets, once it is prepared. Raises what the receiver is told."""
        run, step, _ = seal
        if run != self._run:
            raise TicketMismatch(
                f"ticket of run {run}, this relay is run {self._run}; did the relay restart?",
                step=step,
                ranks=[key],
            )
        with self._changed:
            self._changed.wait_for(lambda: self._settled(step, key), timeout=timeout_s)
            sealed = self._named(seal)
            if sealed is None or key not in sealed.keys:
                raise TicketMismatch(
                    f"(dp, pp, cp) {key} asks for step {step}: abandoned, delivered, never sealed, or of another layout. Steps "
                    f"under way are {sorted(self._steps)}, the newest sealed is {self.newest}",
                    step=step,
                    ranks=[key],
                )
            if sealed.error is not None:
                raise sealed.error
            if key not in sealed.outgoing:
                cause = (
                    f"the thread that prepares them ended: {self.error!r}" if self.error else "out of cores?"
                )
                raise StepError(
                    f"step {step}: the rows of (dp, pp, cp) {key} are not prepared; {cause}",
                    step=step,
                    ranks=[key],
                )
            return sealed.outgoing[key]

    def _settled(self, step: int, key: ShardKey) -> bool:
        sealed = self._steps.get(step)
        return (
            self._closed
            or sealed is None
            or sealed.error is not None
            or key in sealed.outgoing
            or bool(self.error)
        )

    def _named(self, seal: Seal) -> SealedStep | None:
        """With the condition held. None for another run's or another seal's: its receiver is late."""
        sealed = self._steps.get(seal[1])
        return sealed if sealed is not None and sealed.ticket.identity == seal else None

    def acknowledge(self, seal: Seal, key: ShardKey) -> None:
        """A receiver has its rows, verified; the last one frees the step. Repeating it does no harm, and what is said of another
        run's or an abandoned seal's rows frees nothing."""
        step = seal[1]
        with self._changed:
            sealed = self._named(seal)
            if sealed is None or key in sealed.acknowledged or key not in sealed.keys:
                return
            if self._journal is not None:
                self._journal.acked(step, key)
            sealed.acknowledge(key)
            gone = self._take_out(step) if sealed.done else []
            if not sealed.awaited:  # who joins the step waits for the last one alone
                self._changed.notify_all()
        self._let_go(step, gone)

    def _take_out(self, step: int) -> list[Sample]:
        """Removes the step's samples from the table. The caller holds the condition."""
        return self._intake.entries.remove(self._steps.pop(step).ticket.assignment.sample_ids)

    def _let_go(self, step: int, gone: list[Sample]) -> None:
        """What a delivered step held."""
        if gone:
            if self._journal is not None:
                self._journal.done(step)
            self._intake.let_go(gone, outcome="delivered")

    def verify_again(self, seal: Seal, key: ShardKey) -> None:
        """A receiver finds rows damaged: are they whole here? Raises FrameCorrupt with all of its samples that are not."""
        with self._changed:
            sealed = self._named(seal)
            out = sealed.outgoing.get(key) if sealed is not None else None
        if sealed is not None and out is not None:
            sealed.verify([sample.sample_id for sample in out.stream.samples])

    # -- background ------------------------------------------------------------------------------------------------

    def _prepare_all(self) -> None:
        try:
            while (step := self._next_step()) is not None:
                with self._changed:
                    sealed = self._steps.get(step)
                if sealed is not None:
                    self._prepare(sealed)
        except BaseException as error:
            with self._changed:
                self.error = error
                self._changed.notify_all()

    def _next_step(self) -> int | None:
        while True:
            try:
                return self._queue.get(timeout=_IDLE_S)
            except Empty:
                self._idle()

    def _prepare(self, sealed: SealedStep) -> None:
        """Whatever goes wrong is this step's error, which its receivers are told."""
        step, gone = sealed.ticket.step, list[Sample]()
        try:
            for dp in range(sealed.ticket.layout.dp):
                with self._clock.span("place", step=step):
                    outgoing = sealed.prepare(dp)
                with self._changed:
                    sealed.outgoing.update(outgoing)
                    self._changed.notify_all()
            recorder = self._intake.recorder
            if recorder is not None and self._steps.get(step) is sealed:  # and was not abandoned
                recorder.write(
                    sealed.ticket, sealed.rows
                )  # behind the last publication: no receiver waits for a disk
        except Exception as error:
            log.exception("r3channel: step %d", step)
            text = f"step {step}: cannot be sent or recorded: {error!r}"
            told = error if isinstance(error, R3Error) else StepError(text, step=step)
            self._intake.reject(told)
            with self._changed:
                sealed.error = told
        finally:
            with self._changed:
                sealed.in_use = False
                if sealed.done and self._steps.get(step) is sealed:
                    gone = self._take_out(step)
                self._changed.notify_all()
            self._let_go(step, gone)

    # -- the rest --------------------------------------------------------------------------------------------------

    def status(self) -> dict[int, Any]:
        """With the condition held."""
        return {
            step: {
                "state": sealed.state,
                "missing": list(sealed.missing),
                "acknowledged": sorted(sealed.acknowledged | sealed.had),
                "samples": len(sealed.ticket.samples),
            }
            for step, sealed in self._steps.items()
        }

    def oldest_s(self) -> float:
        """Seconds since the oldest step under way was sealed; 0 without one."""
        with self._changed:
            times_s = [sealed.sealed_s for sealed in self._steps.values() if sealed.awaited]
        return time.monotonic() - min(times_s) if times_s else 0.0

    def close(self) -> dict[int, tuple[ShardKey, ...]]:
        """End every wait and the thread; returns what was not delivered."""
        with self._changed:
            self._closed = True
            undelivered = self._missing()
            self._steps.clear()
            self._changed.notify_all()
        self._queue.put(None)
        return undelivered
