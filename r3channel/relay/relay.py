"""The relay: verified frames in, a sealed step out, exact shards sent in the background.

    relay = Relay(spec, layout, config)
    relay.serve(token_file=...)                    # only for engines that deliver directly
    relay.add(sample_id, reply, tokens)            # as replies arrive; any thread
    ticket = relay.seal(step, assignment)          # returns before a byte is sent
    relay.join_previous(timeout_s=...)             # the next rollout, before it seals again

One process runs it beside (or as part of) the rollout manager; trainers reach `hello`, `ready` and `ack` over any
control channel (Ray actor calls in `relay.actor`). It keeps a step's bytes until every rank has acknowledged them.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from r3channel.config import ChannelConfig
from r3channel.distinct import kernels
from r3channel.errors import (
    BackgroundFailed,
    DeadlineExceeded,
    StepError,
    StoreFull,
    TicketMismatch,
    UsageError,
)
from r3channel.metrics import Metrics, StageClock
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.shards import ShardKey
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.recording import Recorder
from r3channel.relay.engines import EngineRegistry
from r3channel.relay.gate import Gate
from r3channel.relay.inbox import Held, Inbox
from r3channel.relay.ingest import Verified
from r3channel.relay.intake import Intake
from r3channel.relay.memory import BufferPool
from r3channel.relay.placer import Placer
from r3channel.relay.sender import DeliveryGroup
from r3channel.relay.staging import check_device
from r3channel.relay.step import SealedStep
from r3channel.relay.store import FrameStore
from r3channel.routing import Ids
from r3channel.spec import RoutingSpec
from r3channel.transport.base import Rendezvous, open_store
from r3channel.transport.object_store import Mailbox
from r3channel.wire.hello import Hello


@dataclass(frozen=True, slots=True)
class _Reserved:
    """A step between `reserve` and `start`: what `cancel` needs."""

    newest_before: int
    samples: Sequence[Held]


class Relay:
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
        self.spec, self.layout, self.config = spec, layout, config or ChannelConfig()
        if self.config.relays > 1 and recorder is not None:
            raise UsageError("a recording holds whole steps; with several relays none of them has one")
        if self.config.backend == "nccl":
            check_device(self.config.device)
        self.run = uuid.uuid4().hex[:12]
        self.clock = clock or StageClock("relay")
        self.metrics = metrics or Metrics("relay", clock=self.clock)
        self._store = FrameStore.open(self.config.store_dir, ceiling_bytes=self.config.store_bytes)
        self._inbox = Inbox(self._store)
        self.engines = EngineRegistry(spec)
        self._intake = Intake(
            spec,
            self.config,
            store=self._store,
            inbox=self._inbox,
            engines=self.engines,
            clock=self.clock,
            metrics=self.metrics,
            recorder=recorder,
        )
        self._gate = Gate(self.config, engines=self.engines, intake=self._intake)
        self._changed = threading.Condition()
        self._steps: dict[int, SealedStep] = {}
        self._newest_step = -1
        self._reserved: dict[int, _Reserved] = {}
        self._closed = False
        self._rendezvous_store = (
            open_store(self.config.interface) if self.config.backend in ("gloo", "nccl") else None
        )
        self._mailbox = Mailbox()
        self._groups = [self._group(dp) for dp in range(layout.dp)]
        self._memory = BufferPool(self.config.shard_memory_bytes, folder=self._store.folder)
        self._placer = Placer(
            store=self._store,
            memory=self._memory,
            changed=self._changed,
            steps=self._steps,
            clock=self.clock,
            threads=self.config.place_threads,
            recorder=recorder,
        )
        threading.Thread(target=kernels, name="r3channel-compile", daemon=True).start()
        self._watch()
        for group in self._groups:
            group.start()
        self._placer.start()

    # -- engines ---------------------------------------------------------------------------------------------------

    def serve(self, *, token_file: str | Path | None = None) -> str:
        """Open the ingest for directly delivered frames and return its address, for R3CHANNEL_RELAY_URL.

        The token's file (`config.token_file` by default) is created, mode 0600, when it does not exist; engines read the
        same one. Binds `config.interface` only.
        """
        self._check_open()
        return self._gate.serve(token_file)

    def expect_engines(self, engines: Iterable[str], *, timeout_s: float) -> None:
        """Replies of these engines are refused (`EngineSilent`) unless each has said hello within `timeout_s` from now."""
        self.engines.expect(engines, timeout_s=timeout_s)

    def check_engine(self, reply: Mapping[str, Any], *, engine: str, tokens: int) -> None:
        """Judge an engine by the reply to a tiny request before the first rollout, best to `wire.hello.probe_body()`.

        SGLang only logs a plug-in that fails; without this check the data would be found missing at the first step.
        """
        self._gate.check_reply(reply, engine=engine, tokens=tokens)

    @property
    def bound(self) -> list[Hello]:
        """The engines whose frames come to this relay's ingest."""
        return self._gate.bound

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
        """Verify and keep the routing of one sample.

        `reply` is the engine's decoded JSON, `tokens` the whole sequence (prompt and response). Raises a typed
        `RoutingError` naming sample and engine and keeps nothing; the caller decides what happens to a bad sample.
        None when the reply holds a receipt: the frame comes directly, and `seal` waits for it and names it if it is lost.

        `append`: a later turn (or the rest of an interrupted request) of a sample that is here, made with
        `routed_experts_start_len = rows held`. `tokens` is the whole sequence again; gaps, overlaps and changed tokens
        are refused, and the rows that are held stay.
        """
        self._check_open()
        self.engines.check(engine)
        self._intake.expire()
        return self._intake.add(sample_id, reply, tokens, engine=engine, adds_turn=append)

    def add_frame(
        self,
        sample_id: str,
        data: bytes,
        tokens: Sequence[int] | Ids,
        *,
        engine: str = "?",
        append: bool = False,
    ) -> Verified | None:
        """As `add`, for a frame that is already in hand (a recording, another transport, `splice.merge`)."""
        self._check_open()
        self._intake.expire()
        return self._intake.add_frame(sample_id, data, tokens, engine=engine, adds_turn=append)

    def rows_held(self, sample_id: str) -> int:
        """Rows of a sample that are here: `routed_experts_start_len` of its next turn."""
        held = self._inbox.held(sample_id)
        return held.sample.tokens - 1 if held is not None else 0

    def discard(self, sample_ids: Iterable[str]) -> int:
        """Drop samples that no assignment will name (filtered, over-sampled, aborted, evaluation); unknown ids are ignored."""
        return self._intake.drop(sample_ids, outcome="discarded")

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
        own = self.config.relay
        nbytes = sum(part.nbytes for part in ticket.parts.of_relay(own))  # an unusable assignment fails here
        names = ticket.parts.samples_of(own)
        with self._changed:
            self._check_room(ticket.step, nbytes)
            memory = {part.key: self._memory.take(part.nbytes) for part in ticket.parts.of_relay(own)}
            held = [found for name in names if (found := self._inbox.held(name)) is not None]
            keys = self._inbox.take(names, step=ticket.step)
            self._reserved[ticket.step] = _Reserved(self._newest_step, held)
            self._steps[ticket.step] = SealedStep(
                ticket, keys, nbytes, sealed_s=time.monotonic(), relay=own, memory=memory
            )
            self._newest_step = ticket.step

    def _check_room(self, step: int, nbytes: int) -> None:
        if step <= self._newest_step:
            raise StepError(f"step {step} is not newer than step {self._newest_step}; was it sealed twice?")
        held = sum(sealed.nbytes for sealed in self._steps.values())
        if held + nbytes > self.config.shard_bytes:
            raise StoreFull(
                f"step {step}: its shards need {nbytes} bytes, {held} are held for steps {sorted(self._steps)} that are not "
                f"delivered, and shard_bytes allows {self.config.shard_bytes}. Join the previous send before sealing"
            )

    def start(self, step: int) -> None:
        """Place and send a reserved step, in the background."""
        with self._changed:
            if self._reserved.pop(step, None) is None:
                raise UsageError(f"step {step} is started, but was not reserved")
        self._placer.place(step)

    def cancel(self, step: int) -> None:
        """Give the samples of a reserved step back; another step is ignored."""
        with self._changed:
            reserved = self._reserved.pop(step, None)
            if reserved is None:
                return
            del self._steps[step]
            if self._newest_step == step:
                self._newest_step = reserved.newest_before
            self._inbox.give_back(reserved.samples)
            self._changed.notify_all()

    def holds(self, sample_id: str) -> bool:
        """Is the sample here: its frame awaited, waiting for a step, or in a step that is not delivered?"""
        return self._intake.awaits(sample_id) or self._inbox.knows(sample_id)

    def undelivered(self, *, wait_s: float) -> dict[int, tuple[ShardKey, ...]]:
        """Step -> ranks that have not acknowledged it, after `wait_s`; early, and empty, when all have."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._background_error() or not self._steps, timeout=wait_s
            )
            steps = {step: sealed.missing for step, sealed in self._steps.items()}
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
                f"{ {step: list(missing) for step, missing in steps.items()} }. Have those trainers entered the step? A send "
                "cannot finish before its receiver starts"
            )

    def status(self) -> dict[str, Any]:
        """Where every sample of every step is."""
        with self._changed:
            return {
                "run": self.run,
                **self._intake.status(),
                "engines": self.engines.reports(),
                "steps": {
                    step: {
                        "state": sealed.state,
                        "missing": list(sealed.missing),
                        "samples": len(sealed.keys_by_sample),
                    }
                    for step, sealed in self._steps.items()
                },
                "groups": {group.dp: group.status() for group in self._groups},
                "store": {"frames": len(self._store), "bytes": self._store.nbytes},
            }

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Stop the background and delete the store. Raises `StepError` naming undelivered steps; idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            undelivered = {step: list(sealed.missing) for step, sealed in self._steps.items()}
            self._changed.notify_all()
        self._gate.close(timeout_s=timeout_s)
        threads = [self._placer.stop(), *(group.stop() for group in self._groups)]
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._store.close()
        self.metrics.close()
        if self._rendezvous_store is not None:
            self._rendezvous_store.close()
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
        layout = self.layout
        if not (0 <= dp < layout.dp and 0 <= pp < layout.pp and 0 <= cp < layout.cp):
            raise TicketMismatch(f"hello from dp {dp} pp {pp} cp {cp}; this relay serves layout {layout}")
        member = layout.member(pp=pp, cp=cp)
        rendezvous = self._groups[dp].hello(pp=member, boot_id=boot_id, after_epoch=after_epoch)
        return None if rendezvous is None else rendezvous.to_dict()

    def ready(self, *, run: str, step: int, dp: int, pp: int, cp: int = 0, epoch: int, wait_s: float) -> bool:
        """A TP0 is about to receive. Waits up to `wait_s` for its shard; False means ask again, True that the send starts."""
        self._check_open()
        self._check_run(run)
        with self._changed:
            sealed = self._sealed(step, (dp, pp, cp))
            self._changed.wait_for(
                lambda: (dp, pp, cp) in sealed.buffers or self._background_error() is not None, timeout=wait_s
            )
            placed = (dp, pp, cp) in sealed.buffers
        self._check_open()
        if placed:
            member = self.layout.member(pp=pp, cp=cp)
            return self._groups[dp].ready(pp=member, step=step, epoch=epoch, wait_s=wait_s)
        return False

    def ack(self, *, run: str, step: int, dp: int, pp: int, cp: int = 0) -> None:
        """A TP0 holds its verified shard; the last acknowledgement of a step frees it. Repeating it does no harm.

        Raises `TicketMismatch` for another run, another layout's rank, or a shard that was never placed.
        """
        self._check_run(run)
        key = (dp, pp, cp)
        with self._changed:
            sealed = self._steps.get(step)
            if sealed is None or key in sealed.acknowledged:
                return
            if key not in sealed.buffers:
                raise TicketMismatch(
                    f"(dp, pp, cp) {key} acknowledges step {step}, whose placed shards are {sorted(sealed.buffers)}"
                )
            sealed.acknowledged.add(key)
            del sealed.buffers[key]
            if not sealed.missing:
                del self._steps[step]
                self._delivered(sealed)
                self.metrics.inc("r3channel_samples_total", len(sealed.keys_by_sample), outcome="delivered")
            self._groups[dp].acknowledged()
            self._changed.notify_all()

    def _delivered(self, sealed: SealedStep) -> None:
        self._inbox.forget(sealed.keys_by_sample)
        for key in sealed.keys_by_sample.values():
            self._store.release(key)

    def mail(self, *, call: str, name: str, **arguments: Any) -> Any:
        """A call of a member to the mailbox of groups that use the object store."""
        return self._mailbox.mail(call=call, name=name, **arguments)

    @property
    def peak_staging_bytes(self) -> int:
        """The most that one group has had staged at once: two buckets, whatever the tokens. gloo sends from the shard itself
        and its groups send side by side; under NCCL they take turns, with as much again in pinned memory."""
        return max(group.peak_staging_bytes for group in self._groups)

    def _check_run(self, run: str) -> None:
        if run != self.run:
            raise TicketMismatch(f"ticket of run {run}, this relay is run {self.run}; did the relay restart?")

    def _sealed(self, step: int, key: ShardKey) -> SealedStep:
        sealed = self._steps.get(step)
        if sealed is None or key in sealed.acknowledged or key not in sealed.keys:
            state = (
                "another layout's"
                if sealed and key not in sealed.keys
                else "already acknowledged or never sealed"
            )
            raise TicketMismatch(
                f"(dp, pp, cp) {key} asks for step {step}: {state}. Steps under way are {sorted(self._steps)}, the newest "
                f"sealed is {self._newest_step}; a shard leaves the relay when its rank has acknowledged it"
            )
        return sealed

    # -- background ------------------------------------------------------------------------------------------------

    def _group(self, dp: int) -> DeliveryGroup:
        return DeliveryGroup(
            dp=dp,
            stages=self.layout.members,
            config=self.config,
            rendezvous=self._rendezvous,
            mailbox=self._mailbox,
            changed=self._changed,
            steps=self._steps,
            clock=self.clock,
            metrics=self.metrics,
        )

    def _rendezvous(self, *, backend: str, name: str, epoch: int, rank: int, world_size: int) -> Rendezvous:
        store = self._rendezvous_store
        host, port = (store.host, store.port) if store is not None else ("", 0)
        return Rendezvous(
            backend=backend,
            name=f"{self.run}/{name}/epoch{epoch}",
            epoch=epoch,
            rank=rank,
            world_size=world_size,
            host=host,
            port=port,
        )

    def _background_error(self) -> BaseException | None:
        runners = (self._placer, *self._groups)
        return next((runner.error for runner in runners if runner.error is not None), None)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this relay is closed")
        error = self._background_error()
        if error is not None:
            raise BackgroundFailed(f"a background thread of the relay died: {error!r}") from error

    def _watch(self) -> None:
        self.metrics.watch("r3channel_frames_in_store", lambda: len(self._store))
        self.metrics.watch("r3channel_store_bytes", lambda: self._store.nbytes)
        self.metrics.watch("r3channel_oldest_in_flight_seconds", self._oldest_s)
        self.metrics.watch(
            "r3channel_background_thread_alive", lambda: float(self._background_error() is None)
        )
        self.metrics.watch("r3channel_epoch", lambda: max(group.epoch for group in self._groups))

    def _oldest_s(self) -> float:
        sealed = [step.sealed_s for step in list(self._steps.values())]
        return time.monotonic() - min(sealed) if sealed else 0.0


def staged(ticket: Ticket, config: ChannelConfig) -> Ticket:
    """The ticket with the buckets that `config.staging` asks for."""
    if config.staging != "coalesced":
        return ticket
    return replace(ticket, bucket_bytes=max(shard.nbytes for shard in ticket.plan.shards))
