"""The steps that are sealed and not delivered: what goes in, what receivers ask for, who has acknowledged. Knows no connection.

seal -> (prepared in the background) -> outgoing* -> acknowledge by every receiver -> gone, its rows freed
                                  \\-> abandon: its samples wait for a step again
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from r3channel.errors import R3Error, StepError, TicketMismatch
from r3channel.observe.stage_clock import StageClock
from r3channel.plan.shards import ShardKey
from r3channel.plan.ticket import Ticket
from r3channel.relay.intake import Intake
from r3channel.relay.journal import Journal
from r3channel.relay.sample_table import Sample
from r3channel.relay.sealed import RowStream, SealedStep
from r3channel.relay.token_tensors import HeldMasks
from r3channel.relay.verify import VerifiedRows

_IDLE_S = 60.0
"""Memory that nobody used for so long goes back to the system."""


class Steps:
    """OPEN -> CLOSED. Any thread; its own prepares."""

    def __init__(
        self,
        intake: Intake,
        *,
        run: str,
        journal: Journal | None,
        changed: threading.Condition,
        clock: StageClock,
        idle: Callable[[], None],
        timeout_s: float,
    ) -> None:
        """`changed` guards the steps as it does the table. `idle` is called once in a while when nothing is to be done;
        `timeout_s` bounds how long a receiver waits for its rows to be prepared."""
        self._intake, self._run = intake, run
        self._journal, self._changed = journal, changed
        self._clock, self._idle, self._timeout_s = clock, idle, timeout_s
        self._steps: dict[int, SealedStep] = {}
        self.newest = -1
        self.acked_before: dict[int, set[ShardKey]] = {}
        """Who has already acknowledged each step that a relay before this one sealed and that is to be sealed again."""
        self.error: BaseException | None = None
        """What ended the thread; the next public call of the relay raises it."""
        self._closed = False
        self._queue: SimpleQueue[int | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._prepare_all, name="r3channel-prepare", daemon=True)
        self.thread.start()

    def check_newer(self, step: int) -> None:
        """With the condition held. Raises StepError."""
        if step <= self.newest:
            raise StepError(
                f"step {step} is not newer than step {self.newest}; was it sealed twice?", step=step
            )

    def add(
        self,
        ticket: Ticket,
        rows: dict[str, list[VerifiedRows]],
        masks: Mapping[str, Sequence[HeldMasks]],
    ) -> None:
        """Receivers may ask for it from here on; it is prepared in the background."""
        sealed = SealedStep(ticket, rows, masks)
        sealed.had |= self.acked_before.pop(ticket.step, set())
        if self._journal is not None:
            self._journal.sealed(ticket.step, ticket.to_bytes())
        with self._changed:
            kept = [step for step, older in self._steps.items() if not older.missing]
            gone = {step: self._take_out(step) for step in kept}  # who might have come again has gone on
            self._steps[ticket.step] = sealed
            self.newest = max(self.newest, ticket.step)
            self._changed.notify_all()
        for step, samples in gone.items():
            self._let_go(step, samples)
        self._queue.put(ticket.step)

    def abandon(self, step: int) -> int:
        """Give a sealed step up: receivers that ask for it are told, and its samples wait for a step again (or for `discard`).

        Returns how many samples came back; 0 for a step that is unknown or delivered.
        """
        with self._changed:
            sealed = self._steps.pop(step, None)
            if sealed is None:
                return 0
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
            self._changed.wait_for(lambda: self._closed or self.error or not self._missing(), timeout=wait_s)
            return self._missing()

    def _missing(self) -> dict[int, tuple[ShardKey, ...]]:
        return {step: sealed.missing for step, sealed in self._steps.items() if sealed.missing}

    # -- receivers -------------------------------------------------------------------------------------------------

    def outgoing(self, step: int, key: ShardKey, run: str) -> RowStream:
        if run != self._run:
            raise TicketMismatch(
                f"ticket of run {run}, this relay is run {self._run}; did the relay restart?",
                step=step,
                ranks=[key],
            )
        with self._changed:
            self._changed.wait_for(lambda: self._settled(step, key), timeout=self._timeout_s)
            sealed = self._steps.get(step)
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

    def acknowledge(self, step: int, key: ShardKey) -> None:
        """A receiver has its rows, verified; the last one frees the step. Repeating it does no harm."""
        with self._changed:
            sealed = self._steps.get(step)
            if sealed is None or key in sealed.acknowledged:
                return
            if self._journal is not None:
                self._journal.acked(step, key)
            sealed.acknowledged.add(key)
            gone = self._take_out(step) if sealed.done else []
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

    def verify_again(self, step: int, key: ShardKey) -> None:
        """A receiver finds rows damaged: are they whole here? Raises FrameCorrupt with all of its samples that are not."""
        with self._changed:
            sealed = self._steps.get(step)
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
        for dp in range(sealed.ticket.layout.dp):
            try:
                with self._clock.span("place", step=sealed.ticket.step):
                    outgoing = sealed.prepare(dp)
            except R3Error as error:
                self._intake.reject(error)
                with self._changed:
                    sealed.error = error
                    self._changed.notify_all()
                return
            recorder = self._intake.recorder
            if recorder is not None and dp == sealed.ticket.layout.dp - 1:
                recorder.write(sealed.ticket, sealed.rows)  # once all have acknowledged, rows are gone
            with self._changed:
                sealed.outgoing.update(outgoing)
                self._changed.notify_all()

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
            times_s = [sealed.sealed_s for sealed in self._steps.values() if sealed.missing]
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
