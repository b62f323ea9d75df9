"""Turns the table of samples into sealed steps: tickets, each receiver's rows, and acknowledgements.

Of the relay's parts `Steps` calls only `relay.samples.Samples` (here `HeldSamples`). The relay's public methods and `RowServer`
call `Steps`. It handles no frame bytes and no connections.

    sealed -> prepared (in the background: where each receiver's rows lie) -> acknowledged by every receiver -> gone, rows freed
                                       \\-> abandoned: its samples wait for a step again

Nothing is copied: a receiver's rows are sent from where they lie in the store, and stay until the last acknowledgement.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from queue import Empty, SimpleQueue

from r3channel.errors import R3Error, StepError, TicketMismatch, expect
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.shards import ShardKey, check_cut
from r3channel.plan.ticket import Samples, Ticket
from r3channel.relay.journal import Recovery
from r3channel.relay.row_stream import HeldOfSample, RowStream, StepRows, Turns
from r3channel.relay.sample_table import Sample, Turn
from r3channel.relay.samples import Samples as HeldSamples
from r3channel.typed import Json
from r3channel.wire.row_protocol import Seal

log = logging.getLogger(__name__)

_IDLE_S = 60.0
"""Seconds after which unused memory goes back to the system."""


@dataclass(eq=False)
class SealedStep:
    """A step from its seal to the last acknowledgement.

    Hold the relay's condition for everything but `prepare`. The background calls `prepare` without it, and takes it to publish
    each result whole.
    """

    ticket: Ticket
    turns: Sequence[Turns]
    """The turns with rows of each sample, ascending; samples as in the ticket."""
    tensors: HeldOfSample
    had: set[ShardKey] = field(default_factory=set[ShardKey])
    """Receivers that acknowledged to the relay before this one. They are not waited for; one that never learned of its
    acknowledgement comes again."""
    sealed_s: float = field(default_factory=time.monotonic)
    acknowledged: set[ShardKey] = field(default_factory=set[ShardKey])
    in_use: bool = True
    """True until the step is prepared and recorded: until then its rows are read, whoever has acknowledged."""
    outgoing: dict[ShardKey, RowStream] = field(default_factory=dict[ShardKey, RowStream])
    error: R3Error | None = None
    """The reason why the step cannot be delivered; receivers that ask are told."""
    _waiting: dict[int, threading.Event] = field(default_factory=dict[int, threading.Event])
    """DP rank -> the event that is set once its receivers can be answered. Only ranks with a waiting receiver have one."""

    def __post_init__(self) -> None:
        layout = self.ticket.layout
        self.keys = frozenset(product(range(layout.dp), range(layout.pp), range(layout.cp)))
        """The keys of all receivers."""
        self.missing = set(self.keys - self.had)
        """Receivers that have not acknowledged and are waited for."""

    @property
    def done(self) -> bool:
        """Return whether the step can be removed.

        No receiver can ask for it again, and nobody here reads its rows.
        """
        return len(self.acknowledged) == len(self.keys) and not self.in_use

    @property
    def state(self) -> str:
        if self.error is not None:
            return "FAILED"
        return "PREPARED" if len(self.outgoing) == len(self.keys) else "SEALED"

    def event(self, dp: int) -> threading.Event:
        """Return the event that wakes the receivers of a DP rank.

        The event is set once the receivers can be answered.
        """
        return self._waiting.setdefault(dp, threading.Event())

    def wake(self, *ranks: int) -> None:
        """Signal the events of these DP ranks, by default of all.

        Threads that wait for rows of these ranks look again.
        """
        for dp in ranks or tuple(self._waiting):
            if event := self._waiting.pop(dp, None):
                event.set()

    @cached_property
    def rows(self) -> StepRows:
        return StepRows(self.ticket, self.turns, self.tensors)

    def prepare(self, dp: int) -> dict[ShardKey, RowStream]:
        """Return the row stream of each receiver of one DP rank.

        Raises:
            FrameCorrupt: Rows are not what they were when they came.
        """
        return self.rows.receivers(dp)


class Steps:
    """The steps between their seal and the last acknowledgement.

    States: OPEN -> CLOSED. Any thread may call. A thread of its own prepares the steps.
    """

    def __init__(self, held: HeldSamples, layout: TrainerLayout, *, run: str) -> None:
        self._held, self.layout, self.run, self.config = held, layout, run, held.config
        self._journal, self._changed = held.journal, held.changed
        self.clock, self.metrics = held.clock, held.metrics
        self._steps: dict[int, SealedStep] = {}
        self._seals: dict[int, int] = {}
        """Abandoned steps that are not sealed again yet -> the number of their next seal."""
        self._sealing = set[int]()
        self.newest = -1
        self.acked_before: dict[int, set[ShardKey]] = {}
        """Step -> receivers that acknowledged it to the relay before this one. The steps here are still to be sealed again."""
        self._warned = False
        self._queue: SimpleQueue[int | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._prepare_all, name="r3channel-prepare", daemon=True)
        self.thread.start()

    def seal(self, step: int, assignment: Assignment, *, before: Ticket | None = None) -> Ticket:
        """Take samples into a step, as `Relay.seal` does, and return its ticket.

        Args:
            step: The step's number.
            assignment: The samples of each rank and micro-batch.
            before: The ticket of the relay that sealed the step first.
        """
        held, config, spec = self._held, self.config, self._held.spec
        held.check_open()
        # check before anything is waited for or taken
        check_cut(expect(assignment, Assignment), spec, self.layout)
        names, table = assignment.sample_ids, held.table
        with self._reserve(step) as seal:
            held.await_frames(names, step=step, timeout_s=config.frame_timeout_s)
            with self.clock.span("plan", step=step), ExitStack() as undo:
                with self._changed:
                    held.check_open()
                    samples = table.take(names, step=step)
                    undo.callback(table.give_back, samples)
                told = Samples.of_packed(names, [sample.packed or sample.pack() for sample in samples])
                ticket = before or Ticket(
                    self.run, int(step), spec, self.layout, assignment, told, config.bucket_bytes,
                    token_tensors=tuple(tensor.option for tensor in held.tensors), seal=seal,
                )  # fmt: skip
                ticket.check()
                self._check_live(step, samples)
                tensors = {sample.name: sample.tensors for sample in samples} if held.tensors else {}
                self.add(ticket, [sample.held for sample in samples], tensors)
                undo.pop_all()
        self.metrics.inc("r3channel_steps_total")
        self.metrics.set("r3channel_step", step)
        self._warn_of_ceiling(int(ticket.sample_columns.tokens.sum()) * spec.bytes_per_token)
        return ticket

    def resume(self, found: Recovery) -> None:
        """Seal the steps of a recovery again, as `Relay.resume` does."""
        for step, ticket in found.steps.items():
            with self._changed:
                # samples without a frame were left to the live router
                for name in self._held.table.unknown(ticket.assignment.sample_ids):
                    whole = ticket.sample(name)
                    turn = Turn(name, tokens=whole.tokens, tokens_hash=whole.tokens_hash, live=True)
                    self._held.table.reply(turn, now_s=time.monotonic())
            self.seal(step, ticket.assignment, before=ticket)

    def _check_live(self, step: int, samples: Sequence[Sample]) -> None:
        live = {each.name: each.live_rows for each in samples if not each.packed and each.live_rows}
        left, rows = sum(live.values()), sum(sample.last.end_row for sample in samples)
        text = f"step {step}: {left} of {rows} rows are left to the live router, of samples {[*live]}"
        if left > (share := self.config.max_live) * rows:
            text += f"; max_live allows a share of {share:g}. The log says why"
            raise StepError(text, samples=live, step=step)
        if live:
            log.warning("r3channel: %s", text)

    def _warn_of_ceiling(self, nbytes: int) -> None:
        ceiling = self.config.store_bytes  # in one-step-off training it holds the rows of two steps
        if 2 * nbytes > ceiling and not self._warned:
            self._warned = True
            log.warning(
                "r3channel: a step has %d bytes of rows and store_bytes is %d: while one step is delivered there is no room for "
                "the next, and replies will wait. Raise store_bytes to twice a step", nbytes, ceiling,
            )  # fmt: skip

    @contextmanager
    def _reserve(self, step: int) -> Generator[int]:
        """Hold a step while it is sealed; yield its seal's number."""
        with self._changed:
            # an old step that was abandoned is in `_seals`, and may be sealed again
            if step in self._sealing or (step <= self.newest and step not in self._seals):
                text = f"step {step} is not newer than step {self.newest}, or is being sealed; was it sealed twice?"
                raise StepError(text, step=step)
            self._sealing.add(step)
        try:
            yield self._seals.get(step, 0)
        finally:
            with self._changed:
                self._sealing.discard(step)

    def add(self, ticket: Ticket, turns: Sequence[Turns], tensors: HeldOfSample) -> None:
        """Add a sealed step: receivers may ask for it from here on.

        The background prepares it.
        """
        step = ticket.step
        sealed = SealedStep(ticket, turns, tensors, had=self.acked_before.get(step, set()))
        if self._journal is not None:
            self._journal.write_ticket(step, ticket.to_bytes())
        with self._changed:
            self._held.check_open()
            kept = [number for number, older in self._steps.items() if not (older.missing or older.in_use)]
            # these are kept only for a receiver that might connect again; now a newer step is sealed, so none will
            gone = {number: self._take_out(number) for number in kept}
            self._steps[step] = sealed
            self._seals.pop(step, None)
            self.acked_before.pop(step, None)
            self.newest = max(self.newest, step)
        for number, samples in gone.items():
            self._let_go(number, samples)
        self._queue.put(step)

    def abandon(self, step: int) -> int:
        """Give up a sealed step and take its samples back.

        Receivers that ask for the step are told. Its samples wait for a step again, or for `discard`. The step may be sealed
        again under its number, with a new seal's number.

        Returns:
            How many samples came back; 0 for a step that is unknown or delivered.
        """
        with self._changed:
            sealed = self._steps.pop(step, None)
            if sealed is None:
                return 0
            self._seals[step] = sealed.ticket.seal + 1
            samples = self._held.table.samples
            names = [name for name in sealed.ticket.assignment.sample_ids if name in samples]
            self._held.table.give_back([samples[name] for name in names], now_s=time.monotonic())
            sealed.wake()
            self._changed.notify_all()
        if self._journal is not None:
            self._journal.delete_step(step)
        return len(names)

    def find_undelivered(self, *, wait_s: float) -> dict[int, tuple[ShardKey, ...]]:
        """Return the receivers that have not acknowledged each step.

        Args:
            wait_s: Seconds to wait for acknowledgements. The call returns early, and empty, when all have come.

        Returns:
            Step -> its missing receivers (dp, pp, cp). Steps that all receivers have acknowledged are left out.
        """
        with self._changed:
            steps = self._steps.values()  # each event looks at the steps, not at all receivers
            ended = lambda: self._held.broken or not any(sealed.missing for sealed in steps)  # noqa: E731
            self._changed.wait_for(ended, timeout=wait_s)
            return self._missing()

    def failure(self) -> R3Error | None:
        """Return why a step under way cannot be delivered."""
        with self._changed:
            return next((each.error for each in self._steps.values() if each.error and each.missing), None)

    def _missing(self) -> dict[int, tuple[ShardKey, ...]]:
        return {step: tuple(sorted(each.missing)) for step, each in self._steps.items() if each.missing}

    # -- receivers -------------------------------------------------------------------------------------------------

    def outgoing(self, seal: Seal, key: ShardKey, *, timeout_s: float) -> RowStream | None:
        """Return a receiver's rows, or None if not prepared in time.

        Args:
            seal: The run, step and seal's number of the receiver's ticket.
            key: The receiver (dp, pp, cp).
            timeout_s: Seconds to wait for the rows to be prepared.

        Raises:
            R3Error: What the receiver is told.
        """
        with self._changed:
            found = self._ready(seal, key)
        if isinstance(found, threading.Event) and found.wait(timeout_s):
            with self._changed:
                found = self._ready(seal, key)
        return None if isinstance(found, threading.Event) else found

    def _ready(self, seal: Seal, key: ShardKey) -> RowStream | threading.Event:
        """Return a receiver's rows, or the event to wait for.

        The event is set when the receiver can be answered. The caller holds the condition.
        """
        (run, step, _), sealed, whose = seal, self._find_step(seal), f"(dp, pp, cp) {key}"
        if sealed is None and run != self.run:
            text = f"ticket of run {run}, this relay is run {self.run}; did the relay restart?"
            raise TicketMismatch(text, step=step, ranks=[key])
        if sealed is None or key not in sealed.keys:
            under_way = f"Steps under way are {sorted(self._steps)}, the newest sealed is {self.newest}"
            text = f"{whose} asks for step {step}: abandoned, delivered, never sealed, or of another layout. {under_way}"
            raise TicketMismatch(text, step=step, ranks=[key])
        if sealed.error is not None:
            raise sealed.error
        if key in sealed.outgoing:
            return sealed.outgoing[key]
        if (error := self._held.broken) is not None:
            text = f"step {step}: the rows of {whose} are not prepared; the thread that prepares them ended: {error!r}"
            raise StepError(text, step=step, ranks=[key])
        return sealed.event(key[0])

    def _find_step(self, seal: Seal) -> SealedStep | None:
        """Return the step, or None for another run's or another seal's.

        A receiver that names another run or seal is late. The caller holds the condition.
        """
        sealed = self._steps.get(seal[1])
        return sealed if sealed is not None and sealed.ticket.identity == seal else None

    def acknowledge(self, seal: Seal, key: ShardKey) -> None:
        """Note that a receiver has its rows, verified.

        The last receiver frees the step. A repeated acknowledgement does no harm. An acknowledgement of another run's or an
        abandoned seal's rows frees nothing.
        """
        step = seal[1]
        with self._changed:
            sealed = self._find_step(seal)
            if sealed is None or key in sealed.acknowledged or key not in sealed.keys:
                return
            if self._journal is not None:
                self._journal.write_acknowledgement(step, key)
            sealed.acknowledged.add(key)
            sealed.missing.discard(key)
            gone = self._take_out(step) if sealed.done else []
            if not sealed.missing:  # whoever waits for the step waits for its last receiver alone
                self._changed.notify_all()
        self._let_go(step, gone)

    def _take_out(self, step: int) -> list[Sample]:
        """Remove and return the step's samples. The caller holds the condition."""
        return self._held.table.remove(self._steps.pop(step).ticket.assignment.sample_ids)

    def _let_go(self, step: int, gone: list[Sample]) -> None:
        if gone:
            if self._journal is not None:
                self._journal.delete_step(step)
            self._held.let_go(gone, outcome="delivered")

    def verify_again(self, seal: Seal, key: ShardKey) -> None:
        """Check rows at rest that a receiver found damaged.

        Raises:
            FrameCorrupt: The relay's own copy is damaged. The error names all damaged samples of the receiver's DP rank.
        """
        with self._changed:
            sealed = self._find_step(seal)
        if sealed is not None and key in sealed.outgoing:
            sealed.rows.verify(key[0])

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
                self._held.broken = error
                self._wake_all()

    def _next_step(self) -> int | None:
        while True:
            try:
                return self._queue.get(timeout=_IDLE_S)
            except Empty:
                self._held.store.trim(idle_s=_IDLE_S)

    def _prepare(self, sealed: SealedStep) -> None:
        step, gone = sealed.ticket.step, list[Sample]()
        try:
            for dp in range(sealed.ticket.layout.dp):
                with self.clock.span("place", step=step):
                    outgoing = sealed.prepare(dp)
                with self._changed:
                    sealed.outgoing.update(outgoing)
                    sealed.wake(dp)
                    if self._steps.get(step) is not sealed:  # abandoned, or the relay is closed
                        return
            if (recorder := self._held.recorder) is not None:
                # record after the last rows are published, so that no receiver waits for a disk
                tensors = {name: [one.block.view for one in own] for name, own in sealed.tensors.items()}
                recorder.write(sealed.ticket, sealed.turns, tensors)
        except Exception as error:
            if self._steps.get(step) is not sealed:  # abandoned: its rows may have been written over
                return
            log.exception("r3channel: step %d", step)
            text = f"step {step}: cannot be sent or recorded: {error!r}"
            told = error if isinstance(error, R3Error) else StepError(text, step=step)
            self._held.reject(told)
            with self._changed:
                sealed.error = told
                sealed.wake()
        finally:
            with self._changed:
                sealed.in_use = False
                if sealed.done and self._steps.get(step) is sealed:
                    gone = self._take_out(step)
            self._let_go(step, gone)

    def _wake_all(self) -> None:
        """End every wait. The caller holds the condition."""
        for sealed in self._steps.values():
            sealed.wake()
        self._changed.notify_all()

    # -- the rest --------------------------------------------------------------------------------------------------

    def close(self) -> tuple[dict[int, tuple[ShardKey, ...]], list[str]]:
        """End every wait and the thread.

        Returns:
            The receivers that have not acknowledged, by step, and the names of their DP ranks' samples.
        """
        with self._changed:
            undelivered = self._missing()
            parts = [(self._steps[step].ticket.assignment.ranks, keys) for step, keys in undelivered.items()]
            self._wake_all()
            self._steps.clear()
        self._queue.put(None)
        ranks = [ranks[dp] for ranks, keys in parts for dp in sorted({key[0] for key in keys})]
        return undelivered, [name for rank in ranks for batch in rank for name in batch]

    def status(self) -> dict[int, Json]:
        """Return each step's state, receivers and samples.

        The caller holds the condition.
        """
        return {
            step: {
                "state": sealed.state,
                "missing": sorted(sealed.missing),
                "acknowledged": sorted(sealed.keys - sealed.missing),
                "samples": len(sealed.ticket.samples),
            }
            for step, sealed in self._steps.items()
        }

    def oldest_s(self) -> float:
        """Return seconds since the oldest step under way was sealed.

        The result is 0 without such a step.
        """
        with self._changed:
            times_s = [sealed.sealed_s for sealed in self._steps.values() if sealed.missing]
        return time.monotonic() - min(times_s) if times_s else 0.0
