"""The steps that this relay has sealed: what each took, which shards are placed, and who has acknowledged them.

    reserve ----> start ----> (shards are placed and sent) ----> acknowledge by every rank ----> gone, its frames freed
       |
       +--------> cancel: its samples wait for a step again, as if it had never been

A reserved step has its samples, the memory of its shards and its ticket file; nothing is placed before `start`. Guards its
steps by `changed`, which whoever works on a step waits for and notifies too. Knows no engine, no thread and no wire.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from r3channel.errors import StepError, StoreFull, TicketMismatch, UsageError
from r3channel.metrics import Metrics
from r3channel.plan.shards import ShardKey
from r3channel.plan.ticket import Ticket
from r3channel.relay.inbox import Held, Inbox
from r3channel.relay.memory import BufferPool
from r3channel.relay.recovery import remove_ticket, write_ticket
from r3channel.relay.step import SealedStep
from r3channel.relay.store import FrameStore


@dataclass
class StepLedger:
    """OPEN -> CLOSED. Any thread; every method is atomic. `unless` of those that wait: an end of the wait that is not in here."""

    relay: int
    """Which of the ticket's relays this is."""
    inbox: Inbox
    store: FrameStore
    memory: BufferPool
    metrics: Metrics
    changed: threading.Condition = field(default_factory=threading.Condition)
    steps: dict[int, SealedStep] = field(default_factory=dict)
    """Reserved or started, and not delivered."""
    closed: bool = False
    _reserved: dict[int, Sequence[Held]] = field(default_factory=dict)
    """Samples of the steps between `reserve` and `start`: what `cancel` gives back."""
    _newest_started: int = -1
    _reserving: threading.Lock = field(default_factory=threading.Lock)
    """One at a time, without `changed`: memory beyond its ceiling is allocated on a disk, and trainers go on meanwhile."""

    # -- in --------------------------------------------------------------------------------------------------------

    def reserve(self, ticket: Ticket, *, shard_bytes: int) -> None:
        """Take memory and this relay's samples into the step. All or nothing.

        `shard_bytes` is the ceiling of the shards of all steps that are not delivered. Raises `StoreFull` beyond it, `StepError`
        for a step that is not newer, `SampleUnknown`, and `SampleChanged` for a sample that is not as the ticket describes it.
        """
        parts = ticket.parts.of_relay(self.relay)  # an unusable assignment fails here
        with self._reserving, ExitStack() as undo:
            nbytes = sum(part.nbytes for part in parts)
            with self.changed:
                self._check_room(ticket.step, nbytes, shard_bytes)
            sealed = SealedStep(ticket, {}, nbytes, sealed_s=time.monotonic(), relay=self.relay)
            undo.callback(sealed.memory.clear)  # the error's traceback would keep it from the pool
            for part in parts:
                sealed.memory[part.key] = self.memory.take(part.nbytes)
            undo.callback(remove_ticket, self.store.folder, ticket.step)
            write_ticket(self.store.folder, ticket)
            self._commit(sealed)
            undo.pop_all()

    def _check_room(self, step: int, nbytes: int, shard_bytes: int) -> None:
        self._check_open()
        if step <= self.newest:
            raise StepError(f"step {step} is not newer than step {self.newest}; was it sealed twice?")
        held = sum(sealed.nbytes for sealed in self.steps.values())
        if held + nbytes > shard_bytes:
            raise StoreFull(
                f"step {step}: its shards need {nbytes} bytes, {held} are held for steps {sorted(self.steps)} that are not "
                f"delivered, and shard_bytes allows {shard_bytes}. Join the previous send before sealing"
            )

    def _commit(self, sealed: SealedStep) -> None:
        ticket = sealed.ticket
        own = [ticket.sample(name) for name in ticket.parts.samples_of(self.relay)]
        with self.changed:
            self._check_open()
            taken = self.inbox.take(own, step=ticket.step)
            sealed.keys_by_sample.update((held.sample.sample_id, held.key) for held in taken)
            self._reserved[ticket.step] = taken
            self.steps[ticket.step] = sealed

    def start(self, step: int) -> None:
        """From now on the step is the background's; it cannot be cancelled any more."""
        with self.changed:
            if self._reserved.pop(step, None) is None:
                raise UsageError(f"step {step} is started, but was not reserved")
            self._newest_started = max(step, self._newest_started)

    def cancel(self, step: int) -> None:
        """Give the samples of a reserved step back; another step is ignored. One that is being reserved is waited for: who
        cancels may have given up waiting for that, too."""
        with self._reserving, self.changed:
            samples = self._reserved.pop(step, None)
            if samples is None:
                return
            del self.steps[step]
            remove_ticket(self.store.folder, step)
            self.inbox.give_back(samples)
            self.changed.notify_all()

    # -- under way -------------------------------------------------------------------------------------------------

    def wait_placed(self, step: int, key: ShardKey, *, wait_s: float, unless: Callable[[], object]) -> bool:
        """Is the shard placed, now or within `wait_s`? Raises `TicketMismatch` for a rank that has nothing to get of the step."""
        with self.changed:
            sealed = self._sealed(step, key)
            self.changed.wait_for(lambda: self.closed or key in sealed.buffers or unless(), timeout=wait_s)
            return key in sealed.buffers

    def undelivered(self, *, wait_s: float, unless: Callable[[], object]) -> dict[int, tuple[ShardKey, ...]]:
        """Step -> ranks that have not acknowledged it, after `wait_s`; early, and empty, when all have."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or not self.steps or unless(), timeout=wait_s)
            return self.missing

    @property
    def missing(self) -> dict[int, tuple[ShardKey, ...]]:
        """Step -> ranks that have not acknowledged it."""
        with self.changed:
            return {step: sealed.missing for step, sealed in self.steps.items()}

    @property
    def newest(self) -> int:
        """The newest step that was sealed; -1 before the first."""
        with self.changed:
            return max(self._newest_started, *self._reserved, -1)

    def oldest_s(self) -> float:
        """Seconds since the oldest step that is under way was sealed; 0 without one."""
        with self.changed:
            times_s = [sealed.sealed_s for sealed in self.steps.values()]
        return time.monotonic() - min(times_s) if times_s else 0.0

    def status(self) -> dict[int, dict[str, Any]]:
        """By step: its state, the ranks that have not acknowledged it, and where its samples are."""
        with self.changed:
            return {
                step: {
                    "state": sealed.state,
                    "missing": list(sealed.missing),
                    "samples": len(sealed.keys_by_sample),
                    "ranks": sealed.ranks(),
                }
                for step, sealed in self.steps.items()
            }

    # -- out -------------------------------------------------------------------------------------------------------

    def acknowledge(self, step: int, key: ShardKey) -> bool:
        """A rank holds its shard; the last one frees the step. False: it was known. Raises `TicketMismatch` for a shard that was
        never placed."""
        with self.changed:
            sealed = self.steps.get(step)
            if sealed is None or key in sealed.acknowledged:
                return False
            if key not in sealed.buffers:
                raise TicketMismatch(
                    f"(dp, pp, cp) {key} acknowledges step {step}, whose placed shards are {sorted(sealed.buffers)}"
                )
            sealed.acknowledged.add(key)
            del sealed.buffers[key]
            if not sealed.missing:
                self._deliver(sealed)
            self.changed.notify_all()
            return True

    def _deliver(self, sealed: SealedStep) -> None:
        """The ticket goes before the frames: a recovery between the two finds samples too many, and none too few."""
        del self.steps[sealed.ticket.step]
        self.inbox.forget(sealed.keys_by_sample)
        remove_ticket(self.store.folder, sealed.ticket.step)
        for key in sealed.keys_by_sample.values():
            self.store.release(key)
        self.metrics.inc("r3channel_samples_total", len(sealed.keys_by_sample), outcome="delivered")

    def close(self) -> dict[int, tuple[ShardKey, ...]]:
        """Take no step any more and end every wait. Returns what was not delivered, as `missing`; its memory is let go."""
        with self.changed:
            self.closed, missing = True, self.missing
            self.steps.clear()
            self._reserved.clear()
            self.changed.notify_all()
        return missing

    def _check_open(self) -> None:
        if self.closed:
            raise UsageError("this relay is closed")

    def _sealed(self, step: int, key: ShardKey) -> SealedStep:
        sealed = self.steps.get(step)
        if sealed is None or key in sealed.acknowledged or key not in sealed.keys:
            state = (
                "another layout's"
                if sealed and key not in sealed.keys
                else "already acknowledged or never sealed"
            )
            raise TicketMismatch(
                f"(dp, pp, cp) {key} asks for step {step}: {state}. Steps under way are {sorted(self.steps)}, the newest "
                f"sealed is {self.newest}; a shard leaves the relay when its rank has acknowledged it"
            )
        return sealed
