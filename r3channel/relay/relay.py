"""The relay: verified frames in, a sealed step out, exact shards sent in the background.

    relay = Relay(spec, layout, config)
    relay.serve(token_file=...)                    # only for engines that deliver directly
    relay.add(sample_id, reply, tokens)            # as replies arrive; any thread
    ticket = relay.seal(step, assignment)          # returns before a byte is sent
    relay.join_previous(timeout_s=...)             # the next rollout, before it seals again

One process runs it beside (or as part of) the rollout manager; trainers reach `hello`, `ready` and `ack` over any
control channel (Ray actor calls in `relay.actor`). It keeps a step's bytes until every rank has acknowledged them.

A row's way through it, and who has it in hand:

    engines    `relay.front` judges them, verifies what they send,
    samples    and keeps it in its inbox until a step takes it
    steps      `relay.ledger` has what was sealed: its samples, the memory of its shards, its acknowledgements
    shards     `relay.placer`, a thread: frames of a started step -> the shard of each trainer process
    trainers   `relay.groups`, a thread for each DP rank: a placed shard -> the rank that says it is ready

This file joins them: it seals, answers trainers, says where everything is, and ends it.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from r3channel.config import ChannelConfig
from r3channel.distinct import kernels
from r3channel.errors import (
    BackgroundFailed,
    DeadlineExceeded,
    StepError,
    TicketMismatch,
    UsageError,
)
from r3channel.metrics import Metrics, StageClock
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.shards import ShardKey
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.recording import Recorder
from r3channel.relay.front import Front
from r3channel.relay.groups import Groups
from r3channel.relay.ledger import StepLedger
from r3channel.relay.memory import BufferPool
from r3channel.relay.placer import Placer
from r3channel.relay.recovery import Recovery, take_over
from r3channel.relay.staging import check_device
from r3channel.spec import RoutingSpec


class Relay(Front):
    """OPEN -> CLOSED. Public methods are thread safe; an error of a background thread is raised by the next call."""

    def __init__(
        self,
        spec: RoutingSpec,
        layout: TrainerLayout,
        config: ChannelConfig | None = None,
        *,
        clock: StageClock | None = None,
        metrics: Metrics | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        config = config or ChannelConfig()
        if config.relays > 1 and recorder is not None:
            raise UsageError("a recording holds whole steps; with several relays none of them has one")
        if config.backend == "nccl":
            check_device(config.device)
        super().__init__(spec, config, clock=clock, metrics=metrics, recorder=recorder)
        self.layout, self.run = layout, uuid.uuid4().hex[:12]
        self._memory = BufferPool(config.shard_memory_bytes, folder=self._store.folder)
        self._ledger = StepLedger(
            relay=config.relay,
            inbox=self._inbox,
            store=self._store,
            memory=self._memory,
            metrics=self.metrics,
        )
        self._groups = Groups(
            layout, config, run=self.run, ledger=self._ledger, clock=self.clock, metrics=self.metrics
        )
        self._placer = Placer(
            store=self._store,
            memory=self._memory,
            changed=self._ledger.changed,
            steps=self._ledger.steps,
            clock=self.clock,
            threads=config.place_threads,
            recorder=recorder,
        )
        threading.Thread(target=kernels, name="r3channel-compile", daemon=True).start()
        self._watch()
        self._groups.start()
        self._placer.start()

    @classmethod
    def recover(
        cls,
        spec: RoutingSpec,
        layout: TrainerLayout,
        config: ChannelConfig,
        *,
        clock: StageClock | None = None,
        metrics: Metrics | None = None,
        recorder: Recorder | None = None,
    ) -> tuple[Relay, Recovery]:
        """A relay that holds what those before it left in `config.store_dir` when they were killed.

        Every frame is verified as if it came from an engine. Sealed steps are to be sealed again, by the same number and with
        the assignment that the recovery names: their tickets of before belong to a run that has ended. What was read is deleted.
        Of a step that several relays shared, the recovery names the samples that the others held (`Recovery.shared`).
        Raises `StoreBusy` where the only stores there belong to relays that live.
        """
        if not config.store_dir:
            raise UsageError("a relay without store_dir leaves nothing to recover: its folder is temporary")
        relay = cls(spec, layout, config, clock=clock, metrics=metrics, recorder=recorder)
        try:
            return relay, take_over(relay, Path(config.store_dir), but=relay._store.folder)
        except BaseException:
            relay.close()
            raise

    # -- rollout side ----------------------------------------------------------------------------------------------

    def seal(self, step: int, assignment: Assignment) -> Ticket:
        """Plan the step, hand it to the background and return its ticket; no byte is sent before this returns.

        Waits up to `frame_timeout_s` for directly delivered frames whose receipts came. Raises `FrameMissing` naming those
        that did not, `SampleUnknown` for an assigned sample that was never added, `StepError` for a step that is not newer.
        """
        if self.config.relays > 1:
            raise UsageError(
                f"relay {self.config.relay} of {self.config.relays} is asked to seal alone; relay.coordinator.Coordinator does"
            )
        samples = self.look(assignment.sample_ids, step=step, timeout_s=self.config.frame_timeout_s)
        with self.clock.span("plan", step=step):
            ticket = Ticket(
                self.run, step, self.spec, self.layout, assignment, samples, self.config.bucket_bytes
            )
            ticket = staged(ticket, self.config)
            self.reserve(ticket)
        self.start(step)
        return ticket

    # -- the stages of `seal`, for the coordinator of several relays -----------------------------------------------

    def look(self, sample_ids: Sequence[str], *, step: int, timeout_s: float) -> tuple[TicketSample, ...]:
        """Wait for these samples' frames and describe them; they stay. Errors as of `seal`."""
        self._check_open()
        self._intake.expire()
        with self.clock.span("wait_generation", step=step):
            self._intake.wait(sample_ids, timeout_s=timeout_s, step=step)
        return self._inbox.look(sample_ids, step=step)

    def reserve(self, ticket: Ticket) -> None:
        """Take the ticket's samples that are this relay's into the step; nothing is placed before `start`. All or nothing."""
        self._check_open()
        self._ledger.reserve(ticket, shard_bytes=self.config.shard_bytes)

    def start(self, step: int) -> None:
        """Place and send a reserved step, in the background."""
        self._ledger.start(step)
        self._placer.place(step)

    def cancel(self, step: int) -> None:
        """Give the samples of a reserved step back; another step is ignored."""
        self._ledger.cancel(step)

    def undelivered(self, *, wait_s: float) -> dict[int, tuple[ShardKey, ...]]:
        """Step -> ranks that have not acknowledged it, after `wait_s`; early, and empty, when all have."""
        steps = self._ledger.undelivered(wait_s=wait_s, unless=self._background_error)
        self._check_open()
        return steps

    def join_previous(self, *, timeout_s: float | None = None) -> None:
        """Wait until every sealed step is delivered. The error names the step and the ranks that have not acknowledged."""
        limit = self.config.step_timeout_s if timeout_s is None else timeout_s
        with self.clock.span("wait_join"):
            steps = self.undelivered(wait_s=limit)
        if steps:
            raise DeadlineExceeded(
                f"waited {limit:.1f} s for the send of step(s) {sorted(steps)}; not acknowledged by (dp, pp, cp) "
                f"{_listed(steps)}. Have those trainers entered the step? A send "
                "cannot finish before its receiver starts"
            )

    def status(self) -> dict[str, Any]:
        """Where every sample of every step is."""
        with self._ledger.changed:
            return {
                "run": self.run,
                **self._intake.status(),
                "engines": self.engines.reports(),
                "steps": self._ledger.status(),
                "groups": self._groups.status(),
                "store": {"frames": len(self._store), "bytes": self._store.nbytes},
                "shards": self._memory.nbytes,
            }

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Stop the background and delete the store. Raises `StepError` naming undelivered steps; idempotent."""
        with self._ledger.changed:
            if self._ledger.closed:
                return
            undelivered = _listed(self._ledger.close())
        self._gate.close(timeout_s=timeout_s)
        self._adders.shutdown(wait=False, cancel_futures=True)
        threads = [self._placer.stop(), *self._groups.stop()]
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._store.close()
        self._memory.trim(idle_s=0.0)
        self.metrics.close()
        alive = [thread.name for thread in threads if thread.is_alive()]
        if undelivered or alive:
            raise StepError(
                f"closed with undelivered steps {undelivered} (step: (dp, pp, cp) not acknowledged); still running: {alive}"
            )

    # -- trainer side, reached over the control channel --------------------------------------------------------------

    def hello(
        self, *, dp: int, pp: int, cp: int = 0, boot_id: str, after_epoch: int
    ) -> dict[str, Any] | None:
        """A TP0 asks to join its group; None means that other members have not said hello yet: ask again."""
        self._check_open()
        rendezvous = self._groups.hello((dp, pp, cp), boot_id=boot_id, after_epoch=after_epoch)
        return None if rendezvous is None else rendezvous.to_dict()

    def ready(self, *, run: str, step: int, dp: int, pp: int, cp: int = 0, epoch: int, wait_s: float) -> bool:
        """A TP0 is about to receive. Waits up to `wait_s` for its shard; False means ask again, True that the send starts."""
        self._check_open()
        self._check_run(run)
        key = (dp, pp, cp)
        placed = self._ledger.wait_placed(step, key, wait_s=wait_s, unless=self._background_error)
        self._check_open()
        return placed and self._groups.ready(key, step=step, epoch=epoch, wait_s=wait_s)

    def ack(self, *, run: str, step: int, dp: int, pp: int, cp: int = 0) -> None:
        """A TP0 holds its verified shard; the last acknowledgement of a step frees it. Repeating it does no harm.

        Raises `TicketMismatch` for another run, another layout's rank, or a shard that was never placed.
        """
        self._check_run(run)
        key = (dp, pp, cp)
        with self._ledger.changed:
            if self._ledger.acknowledge(step, key):
                self._groups.acknowledged(key)

    def mail(self, *, call: str, name: str, **arguments: Any) -> Any:
        """A call of a member to the mailbox of groups that use the object store."""
        return self._groups.mailbox.mail(call=call, name=name, **arguments)

    @property
    def peak_staging_bytes(self) -> int:
        """The most that one group has had staged at once: two buckets, whatever the tokens. gloo sends from the shard itself
        and its groups send side by side; under NCCL they take turns, with as much again in pinned memory."""
        return self._groups.peak_staging_bytes

    def _check_run(self, run: str) -> None:
        if run != self.run:
            raise TicketMismatch(f"ticket of run {run}, this relay is run {self.run}; did the relay restart?")

    # -- background ------------------------------------------------------------------------------------------------

    def _background_error(self) -> BaseException | None:
        return self._placer.error or self._groups.error

    def _check_open(self) -> None:
        if self._ledger.closed:
            raise UsageError("this relay is closed")
        error = self._background_error()
        if error is not None:
            raise BackgroundFailed(f"a background thread of the relay died: {error!r}") from error

    def _in_the_way(self) -> str:
        missing = _listed(self._ledger.missing)
        return f"Steps under way and the (dp, pp, cp) that have not acknowledged: {missing}"

    def _watch(self) -> None:
        self.metrics.watch("r3channel_frames_in_store", lambda: len(self._store))
        self.metrics.watch("r3channel_store_bytes", lambda: self._store.nbytes)
        self.metrics.watch("r3channel_oldest_in_flight_seconds", self._ledger.oldest_s)
        self.metrics.watch(
            "r3channel_background_thread_alive", lambda: float(self._background_error() is None)
        )
        self.metrics.watch("r3channel_epoch", lambda: self._groups.epoch)


def staged(ticket: Ticket, config: ChannelConfig) -> Ticket:
    """The ticket with the buckets that `config.staging` asks for."""
    if config.staging != "coalesced":
        return ticket
    return replace(ticket, bucket_bytes=max(shard.nbytes for shard in ticket.plan.shards))


def _listed(missing: Mapping[int, Sequence[ShardKey]]) -> dict[int, list[ShardKey]]:
    """As it is read in messages."""
    return {step: list(keys) for step, keys in missing.items()}
