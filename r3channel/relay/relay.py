"""The relay: verified frames in, a sealed step out, exact shards sent in the background.

    relay = Relay(spec, layout, config)
    relay.add(sample_id, reply, tokens)            # as replies arrive; any thread
    ticket = relay.seal(step, assignment)          # returns before a byte is sent
    relay.join_previous(timeout_s=...)             # the next rollout, before it seals again

One process runs it beside (or as part of) the rollout manager; trainers reach `hello`, `ready`, `ack` and `fail` over any
control channel (Ray actor calls in `relay.actor`). It keeps a step's bytes until every rank has acknowledged them.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from r3channel.config import ChannelConfig
from r3channel.errors import (
    BackgroundFailed,
    DeadlineExceeded,
    PluginNotApplied,
    R3Error,
    RoutingError,
    SampleTwice,
    SampleUnknown,
    StepError,
    TicketMismatch,
    UsageError,
)
from r3channel.metrics import Metrics, StageClock
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.shards import place_samples
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.recording import Recorder
from r3channel.relay.ingest import Verified, frame_bytes_of, verify_frame, verify_reply
from r3channel.relay.sender import DeliveryGroup
from r3channel.relay.step import SealedStep
from r3channel.relay.store import FrameStore
from r3channel.routing import Ids
from r3channel.spec import RoutingSpec
from r3channel.transport.base import Rendezvous
from r3channel.wire.frame import FRAME_MAGIC, parse_frame


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
        self.run = uuid.uuid4().hex[:12]
        self.clock = clock or StageClock("relay")
        self.metrics = metrics or Metrics("relay", clock=self.clock)
        self._recorder = recorder
        self._store = FrameStore.open(self.config.store_dir, ceiling_bytes=self.config.store_bytes)
        self._pending: dict[str, tuple[TicketSample, float]] = {}
        self._changed = threading.Condition()
        self._steps: dict[int, SealedStep] = {}
        self._newest_step = -1
        self._to_place: SimpleQueue[int | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._closed = False
        self._rendezvous_store: Any = None
        self._groups = [self._group(dp) for dp in range(layout.dp)]
        self._placer = threading.Thread(target=self._place_steps, name="r3channel-place", daemon=True)
        self._watch()
        for group in self._groups:
            group.start()
        self._placer.start()

    # -- rollout side ----------------------------------------------------------------------------------------------

    def check_engine(self, reply: Mapping[str, Any], *, engine: str, tokens: int) -> None:
        """Judge an engine by the reply to a tiny request before the first rollout.

        SGLang only logs a plug-in that fails; without this check the data would be found missing at the first step.
        """
        try:
            data = frame_bytes_of(reply, sample_id="probe", engine=engine)
            if data[:4] != FRAME_MAGIC:
                raise PluginNotApplied(
                    f"engine {engine} answers with {len(data)} bytes of stock routing, expected a frame. Is r3channel "
                    "installed in the engine's environment, and was R3CHANNEL_ENGINE=1 set when it started? The engine's "
                    "log names a hook that failed"
                )
            verify_frame(data, spec=self.spec, sample_id="probe", tokens=tokens, engine=engine)
        except RoutingError as error:
            raise PluginNotApplied(f"engine {engine} does not send usable frames: {error}") from error

    def add(
        self, sample_id: str, reply: Mapping[str, Any], tokens: Sequence[int], *, engine: str = "?"
    ) -> Verified:
        """Verify and keep the routing of one sample.

        `reply` is the engine's decoded JSON, `tokens` the whole sequence (prompt and response). Raises a typed
        `RoutingError` naming sample and engine and keeps nothing; the caller decides what happens to a bad sample.
        """
        return self._add(sample_id, tokens, lambda: verify_reply(
            reply, spec=self.spec, sample_id=sample_id, tokens=len(tokens), engine=engine
        ))  # fmt: skip

    def add_frame(self, sample_id: str, data: bytes, tokens: Sequence[int], *, engine: str = "?") -> Verified:
        """As `add`, for a frame that is already in hand (a recording, another transport)."""
        return self._add(sample_id, tokens, lambda: verify_frame(
            data, spec=self.spec, sample_id=sample_id, tokens=len(tokens), engine=engine
        ))  # fmt: skip

    def _add(self, sample_id: str, tokens: Sequence[int], verify: Any) -> Verified:
        self._check_open()
        self._expire()
        try:
            with self.clock.span("verify"):
                verified: Verified = verify()
            if sample_id in self._pending:
                raise SampleTwice(f"sample {sample_id} was added twice; was a request retried?")
            with self.clock.span("ingest"):
                self._store.put(sample_id, verified.data)
        except R3Error as error:
            self.metrics.inc("r3channel_samples_total", outcome="rejected")
            self.metrics.inc("r3channel_rejected_total", reason=error.reason)
            raise
        frame = verified.frame
        sample = TicketSample(sample_id, len(tokens), frame.payload_hash, frame.provenance)
        with self._changed:
            self._pending[sample_id] = (sample, time.monotonic())
        if self._recorder is not None:
            self._recorder.keep(sample_id, verified.data, tokens)
        self.metrics.inc("r3channel_samples_total", outcome="received")
        self.metrics.inc("r3channel_bytes_total", frame.nbytes, leg="engine_frame")
        self.metrics.inc("r3channel_rows_total", frame.rows)
        return verified

    def discard(self, sample_ids: Iterable[str]) -> int:
        """Drop samples that no assignment will name (filtered, over-sampled, aborted, evaluation); unknown ids are ignored."""
        return self._drop(list(sample_ids), outcome="discarded")

    def seal(self, step: int, assignment: Assignment) -> Ticket:
        """Plan the step, hand it to the background and return its ticket; no byte is sent before this returns.

        Raises `SampleUnknown` for an assigned sample that was never added, `StepError` for a step that is not newer.
        """
        self._check_open()
        self._expire()
        with self.clock.span("plan", step=step):
            ticket = self._plan(step, assignment)
            sealed = SealedStep(ticket, sealed_s=time.monotonic())
        with self._changed:
            for sample_id in assignment.sample_ids:
                del self._pending[sample_id]
            self._steps[step] = sealed
            self._newest_step = step
        if self._recorder is not None:
            self._recorder.write(ticket)
        self._to_place.put(step)
        return ticket

    def _plan(self, step: int, assignment: Assignment) -> Ticket:
        with self._changed:
            if step <= self._newest_step:
                raise StepError(
                    f"step {step} is not newer than step {self._newest_step}; was it sealed twice?"
                )
            known = {
                sample_id: self._pending[sample_id][0]
                for sample_id in assignment.sample_ids
                if sample_id in self._pending
            }
        missing = [sample_id for sample_id in assignment.sample_ids if sample_id not in known]
        if missing:
            raise SampleUnknown(
                f"step {step}: {len(missing)} of {len(assignment.sample_ids)} assigned samples are not here: {missing[:5]}. "
                "Rejected, discarded, expired, or sealed before?"
            )
        samples = tuple(known[sample_id] for sample_id in assignment.sample_ids)
        ticket = Ticket(self.run, step, self.spec, self.layout, assignment, samples, self.config.bucket_bytes)
        _ = ticket.plan  # an unusable assignment fails here, on the caller's thread
        return ticket

    def join_previous(self, *, timeout_s: float | None = None) -> None:
        """Wait until every sealed step is delivered. The error names the step and the ranks that have not acknowledged."""
        limit = self.config.step_timeout_s if timeout_s is None else timeout_s
        with self.clock.span("wait_join"), self._changed:
            done = self._changed.wait_for(lambda: self._background_error() or not self._steps, timeout=limit)
            steps = {step: sealed.missing for step, sealed in self._steps.items()}
        self._check_open()
        if not done:
            raise DeadlineExceeded(
                f"waited {limit:.1f} s for the send of step(s) {sorted(steps)}; not acknowledged by (dp, pp) "
                f"{ {step: list(missing) for step, missing in steps.items()} }. Have those trainers entered the step? A send "
                "cannot finish before its receiver starts"
            )

    def status(self) -> dict[str, Any]:
        """Where every sample of every step is."""
        with self._changed:
            return {
                "run": self.run,
                "pending": sorted(self._pending),
                "steps": {
                    step: {
                        "state": sealed.state,
                        "missing": list(sealed.missing),
                        "samples": len(sealed.ticket.samples),
                    }
                    for step, sealed in self._steps.items()
                },
                "groups": {group.dp: {"state": group.state, "epoch": group.epoch} for group in self._groups},
                "store": {"frames": len(self._store), "bytes": self._store.nbytes},
            }

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Stop the background and delete the store. Raises `StepError` naming undelivered steps; idempotent."""
        if self._closed:
            return
        with self._changed:
            undelivered = {step: list(sealed.missing) for step, sealed in self._steps.items()}
            self._closed = True
        self._to_place.put(None)
        self._placer.join(timeout_s)
        for group in self._groups:
            group.close(timeout_s=timeout_s)
        self._store.close()
        self.metrics.close()
        if undelivered:
            raise StepError(f"closed with undelivered steps: {undelivered} (step: (dp, pp) not acknowledged)")

    # -- trainer side, reached over the control channel --------------------------------------------------------------

    def hello(self, *, dp: int, pp: int, boot_id: str, after_epoch: int) -> dict[str, Any] | None:
        """A TP0 asks to join its group; None means that other members have not said hello yet: ask again."""
        self._check_open()
        if not (0 <= dp < self.layout.dp and 0 <= pp < self.layout.pp):
            raise TicketMismatch(f"hello from dp {dp} pp {pp}; this relay serves layout {self.layout}")
        rendezvous = self._groups[dp].hello(pp=pp, boot_id=boot_id, after_epoch=after_epoch)
        return None if rendezvous is None else rendezvous.to_dict()

    def ready(self, *, run: str, step: int, dp: int, pp: int, epoch: int, wait_s: float) -> bool:
        """A TP0 is about to receive. Waits up to `wait_s` for its shard; False means ask again, True that the send starts."""
        self._check_open()
        if run != self.run:
            raise TicketMismatch(f"ticket of run {run}, this relay is run {self.run}; did the relay restart?")
        with self._changed:
            if step not in self._steps:
                raise TicketMismatch(
                    f"dp {dp} pp {pp} asks for step {step}; steps under way are {sorted(self._steps)}, the newest sealed is "
                    f"{self._newest_step}. Sealed steps leave when every rank has acknowledged"
                )
            sealed = self._steps[step]
            self._changed.wait_for(
                lambda: (dp, pp) in sealed.buffers or self._background_error() is not None, timeout=wait_s
            )
            placed = (dp, pp) in sealed.buffers
        self._check_open()
        if placed:
            self._groups[dp].ready(pp=pp, step=step, epoch=epoch)
        return placed

    def ack(self, *, step: int, dp: int, pp: int) -> None:
        """A TP0 holds its verified shard; the last acknowledgement of a step frees it. Repeating it does no harm."""
        with self._changed:
            sealed = self._steps.get(step)
            if sealed is None:
                return
            sealed.acknowledged.add((dp, pp))
            sealed.buffers.pop((dp, pp), None)
            if not sealed.missing:
                del self._steps[step]
                self.metrics.inc("r3channel_samples_total", len(sealed.ticket.samples), outcome="delivered")
            self._changed.notify_all()

    # -- background ------------------------------------------------------------------------------------------------

    def _place_steps(self) -> None:
        try:
            while (step := self._to_place.get()) is not None:
                self._place(step)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _place(self, step: int) -> None:
        ticket = self._steps[step].ticket
        for dp in range(self.layout.dp):
            with self.clock.span("place", step=step):
                buffers = place_samples(ticket.plan, dp=dp, ids_of=self._decode)
            with self._changed:
                self._steps[step].buffers.update(buffers)
                self._changed.notify_all()
        for sample in ticket.samples:
            self._store.release(sample.sample_id)

    def _decode(self, sample_id: str) -> Ids:
        with self.clock.span("decode"):
            frame = parse_frame(
                self._store.get(sample_id), spec=self.spec, sample_id=sample_id, engine="store"
            )
            return frame.ids()  # may be a view of the store, which holds it until the step is placed

    def _group(self, dp: int) -> DeliveryGroup:
        return DeliveryGroup(
            dp=dp,
            stages=self.layout.pp,
            config=self.config,
            rendezvous=self._rendezvous,
            changed=self._changed,
            steps=self._steps,
            clock=self.clock,
            metrics=self.metrics,
        )

    def _rendezvous(self, name: str, epoch: int, rank: int) -> Rendezvous:
        host, port = "", 0
        if self.config.backend != "loopback":
            if self._rendezvous_store is None:
                from r3channel.transport.process_group import RendezvousStore

                self._rendezvous_store = RendezvousStore(self.config.interface)
            host, port = self._rendezvous_store.host, self._rendezvous_store.port
        return Rendezvous(
            backend=self.config.backend,
            name=f"{self.run}/{name}/epoch{epoch}",
            epoch=epoch,
            rank=rank,
            world_size=self.layout.pp + 1,
            host=host,
            port=port,
        )

    def _background_error(self) -> BaseException | None:
        return self._error or next((group.error for group in self._groups if group.error is not None), None)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this relay is closed")
        error = self._background_error()
        if error is not None:
            raise BackgroundFailed(f"a background thread of the relay died: {error!r}") from error

    def _expire(self) -> None:
        limit = time.monotonic() - self.config.expiry_s
        with self._changed:
            old = [sample_id for sample_id, (_, added_s) in self._pending.items() if added_s < limit]
        if old:
            self._drop(old, outcome="expired")

    def _drop(self, sample_ids: list[str], *, outcome: str) -> int:
        with self._changed:
            known = [sample_id for sample_id in sample_ids if self._pending.pop(sample_id, None) is not None]
        for sample_id in known:
            self._store.release(sample_id)
            if self._recorder is not None:
                self._recorder.forget(sample_id)
        self.metrics.inc("r3channel_samples_total", len(known), outcome=outcome)
        return len(known)

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
