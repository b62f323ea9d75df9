"""The relay: verified rows in, a sealed step out, each receiver's own rows sent in the background.

    relay = Relay(spec, layout, config)
    relay.serve(token_file=...)                    # only for engines that deliver directly
    relay.add(sample_id, reply, tokens)            # as replies arrive; any thread
    ticket = relay.seal(step, assignment)          # returns before a byte is sent
    relay.join_previous(timeout_s=...)             # the next rollout, before it seals again

One process runs it beside (or as part of) the rollout manager; receivers learn by `hello` where they connect. It keeps a step's
rows until every receiver has acknowledged them. This file joins the parts; README.md beside it has the locks, DESIGN.md the way
of a request.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.model.spec import RoutingSpec
from r3channel.observe.metrics import Metrics
from r3channel.observe.stage_clock import StageClock
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.shards import ShardKey, check_cut
from r3channel.plan.ticket import Ticket
from r3channel.recordings.recorder import Recorder
from r3channel.relay.intake import NAMED, Intake, tensors_held
from r3channel.relay.journal import Recovery, take_over
from r3channel.relay.reply import frame_bytes_of
from r3channel.relay.row_server import RowServer
from r3channel.relay.sample_table import Reply, Sample
from r3channel.relay.sealed_steps import Steps, ticket_samples
from r3channel.transport.auth import obtain_token
from r3channel.transport.network import local_address
from r3channel.typed import typed
from r3channel.wire.header import FRAME_MAGIC
from r3channel.wire.hello import Hello
from r3channel.wire.source import InHand
from r3channel.wire.validate import warm

if TYPE_CHECKING:
    from r3channel.relay.ingest_server import IngestServer

log = logging.getLogger(__name__)

_MOST_BODY_BYTES = 1 << 30
"""Bytes of one parcel at most; engines close theirs at 8 MiB and one frame."""


class Relay(Intake):
    """OPEN -> CLOSED. Public methods are thread safe; an error of a background thread is raised by the next call."""

    def __init__(
        self, spec: RoutingSpec, layout: TrainerLayout, config: ChannelConfig | None = None, *,
        clock: StageClock | None = None, metrics: Metrics | None = None, recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        config = errors.expected(config or ChannelConfig(), ChannelConfig)
        config = replace(config, interface=local_address(config.interface, others=False))
        # In no thread: a fork would inherit numba's lock, and a process that ends while LLVM works is aborted.
        warm(errors.expected(spec, RoutingSpec))
        self.layout = errors.expected(layout, TrainerLayout)
        if recorder is not None:
            recorder.open(spec, layout)
        clock = clock or StageClock("relay")
        clock.keep(config.trace, "relay")
        metrics = metrics or Metrics.of("relay", config, clock=clock)
        self.run, self._warned = uuid.uuid4().hex[:12], False
        self._door: IngestServer | None = None
        with ExitStack() as undo:  # a constructor that fails leaves no folder, port or thread behind
            undo.callback(metrics.close)
            super().__init__(spec, config, clock=clock, metrics=metrics, recorder=recorder)
            undo.callback(self._close_storage)
            self.steps = Steps(self, run=self.run, idle=partial(self._store.trim, idle_s=60.0))
            undo.callback(self.steps.close)
            watched = {"clock": self.clock, "metrics": self.metrics}
            self._delivery = RowServer(layout, config, run=self.run, steps=self.steps, **watched)
            undo.pop_all()
        self._watch()

    @classmethod
    def recover(
        cls, spec: RoutingSpec, layout: TrainerLayout, config: ChannelConfig, **options: Any
    ) -> tuple[Relay, Recovery]:
        """A relay, made with the constructor's options, that holds what those before it left in `config.journal` when they were
        killed.

        Every row is verified as if it came from an engine. Sealed steps are to be sealed again, by the same number and with
        the assignment that the recovery names, or all at once by `resume`, with their tickets of before. Receivers that had
        acknowledged are not waited for again; one that never learned of it may come again until the next step is sealed. What
        was read is deleted. Raises `UsageError` where the only stores there belong to relays that live.
        """
        if not config.journal:
            raise errors.UsageError(
                "a relay without journal leaves nothing to recover: its memory went with it"
            )
        relay = cls(spec, layout, config, **options)
        try:
            own = relay._journal
            assert own is not None
            found, relay.steps.acked_before = take_over(
                Path(config.journal), but=own.folder, keep=relay.restore, keep_step=own.sealed_before
            )
            return relay, found
        except BaseException:
            relay.close()
            raise

    # -- engines ---------------------------------------------------------------------------------------------------

    def serve(self, *, token_file: str | Path | None = None) -> str:
        """Open the ingest for directly delivered frames and return its address, for R3CHANNEL_RELAY_URL.

        The token's file (`config.token_file` by default) is created, mode 0600, when it does not exist; engines read the
        same one. Binds `config.interface` only.
        """
        self._check_open()
        if self._door is not None:
            raise errors.UsageError(f"the ingest is open already, at {self._door.url}")
        path = Path(token_file or self.config.token_file or "")
        if not path.name:
            raise errors.UsageError("direct delivery needs a token_file, or R3CHANNEL_TOKEN_FILE")
        from r3channel.relay.ingest_server import IngestServer  # needs the extra `direct`

        self._door = IngestServer(
            self, token=obtain_token(path), host=self.config.interface, port=self.config.ingest_port,
            max_body_bytes=min(self.config.store_bytes, _MOST_BODY_BYTES),
        )  # fmt: skip
        self._hears, self._unreached = self._door.hears, self._door.unreached
        return self._door.url

    def expect_engines(self, engines: Iterable[str], *, timeout_s: float) -> None:
        """Replies of these engines are refused (`PluginNotApplied`) unless each has said hello within `timeout_s` from now."""
        self.engines.expect(engines, timeout_s=timeout_s)

    def check_engine(self, reply: Mapping[str, Any], *, engine: str, tokens: int) -> None:
        """Judge an engine by the reply to a tiny request before the first rollout, best to `wire.hello.probe_body()`.

        SGLang only logs a plug-in that fails; without this check the data would be found missing at the first step. Raises
        PluginNotApplied, also for a hello that is refused.
        """
        try:
            hello, data = Hello.split(frame_bytes_of(reply, sample_id="probe", engine=engine))
            if hello is not None:
                self.engines.greet(hello, engine=engine)
            if data[:3] != FRAME_MAGIC[:3]:
                raise errors.PluginNotApplied(
                    f"engine {engine} answers with {len(data)} bytes of stock routing, expected a frame. Is r3channel "
                    "installed in the engine's environment, and was R3CHANNEL_ENGINE=1 set when it started? The engine's "
                    "log names a hook that failed"
                )
            where = f"sample probe from engine {engine}"
            rows = self.verifier.keep(InHand(data), where=where, max_rows=tokens)
            self.free([rows])
            if rows.end_row != tokens - 1:
                raise errors.RoutingError(
                    f"{where}: {rows.end_row} rows for {tokens} tokens, expected {tokens - 1}"
                )
        except errors.RoutingError as error:
            raise errors.PluginNotApplied(f"engine {engine} does not send usable frames: {error}") from error
        if hello is None:
            self.engines.vouch(engine)

    # -- steps -----------------------------------------------------------------------------------------------------

    @typed
    def seal(self, step: int, assignment: Assignment) -> Ticket:
        """Take the assigned samples into a step, hand it to the background and return its ticket; no byte is sent before that.

        Waits up to `frame_timeout_s` for directly delivered frames whose references came. Raises `FrameMissing` naming those
        that did not, `SampleUnknown` for an assigned sample that was never added, `StepError` for a step that is not newer (one
        that was abandoned may be sealed again), `ConfigError` for an assignment that the layout cannot cut. The error carries
        all the samples that it is about; then nothing is taken.
        """
        return self._seal(step, assignment)

    def resume(self, found: Recovery) -> None:
        """Seal the steps of a recovery by the very tickets that their receivers have: who waits for rows connects again and gets
        them. Raises as `seal`. Rows that are not those of a ticket are refused as any: before they are sent, and by receivers."""
        for step, ticket in found.steps.items():
            with self._changed:
                # the live router's: they had no frame
                for name in self.entries.unknown(ticket.assignment.sample_ids):
                    whole = ticket.sample(name)
                    live = Reply(name, "recovered", None, whole.tokens, whole.tokens_hash, 0, live=True)
                    self.entries.reply(live, None, append=False, now_s=time.monotonic())
            self._seal(step, ticket.assignment, before=ticket)

    def _seal(self, step: int, assignment: Assignment, before: Ticket | None = None) -> Ticket:
        """`before`: the ticket of the relay that sealed it first."""
        self._check_open()
        # before anything waits or is taken
        check_cut(errors.expected(assignment, Assignment), self.spec, self.layout)
        names, entries = assignment.sample_ids, self.entries
        with self.steps.sealing(step) as seal:
            self.await_frames(names, step=step, timeout_s=self.config.frame_timeout_s)
            with self.clock.span("plan", step=step), ExitStack() as undo:
                with self._changed:
                    self._check_open()
                    samples = entries.take(names, step=step)
                    undo.callback(entries.give_back, samples)
                ticket = before or Ticket(
                    self.run, step, self.spec, self.layout, assignment, ticket_samples(names, samples),
                    self.config.bucket_bytes, token_tensors=tuple(tensor.option for tensor in self._tensors), seal=seal,
                )  # fmt: skip
                ticket.check()
                self._check_live(step, samples)
                tensors = {sample.name: tensors_held(sample) for sample in samples} if self._tensors else {}
                self.steps.add(ticket, [sample.held for sample in samples], tensors)
                undo.pop_all()
        self.metrics.inc("r3channel_steps_total")
        self.metrics.set("r3channel_step", step)
        self._warn_of_ceiling(int(ticket.sample_columns.tokens.sum()) * self.spec.bytes_per_token)
        return ticket

    def _check_live(self, step: int, samples: Sequence[Sample]) -> None:
        """Raises StepError where more than `max_live` of a step's rows are left to the live router; says which are."""
        live = {each.name: each.live_rows for each in samples if not each.packed and each.live_rows}
        left, rows = sum(live.values()), sum(sample.tokens - 1 for sample in samples)
        text = f"step {step}: {left} of {rows} rows are left to the live router, of samples {[*live]}"
        if left > (share := self.config.max_live) * rows:
            text += f"; max_live allows a share of {share:g}. The log says why"
            raise errors.StepError(text, samples=live, step=step)
        if live:
            log.warning("r3channel: %s", text)

    def _warn_of_ceiling(self, nbytes: int) -> None:
        """Once: one step off, the rows of two steps are here at a time."""
        if 2 * nbytes > self.config.store_bytes and not self._warned:
            self._warned = True
            log.warning(
                "r3channel: a step has %d bytes of rows and store_bytes is %d: while one step is delivered there is no room for "
                "the next, and replies will wait. Raise store_bytes to twice a step", nbytes, self.config.store_bytes,
            )  # fmt: skip

    @typed
    def abandon(self, step: int) -> int:
        """Give a sealed step up: receivers that ask for it are told, and its samples wait for a step again (or for `discard`).

        It may be sealed again under its number. Returns how many samples came back; 0 for a step that is unknown or delivered.
        """
        return self.steps.abandon(step)

    def record(self, recorder: Recorder | None) -> None:
        """Record the steps that are prepared from now on; None ends it. Token ids are those of samples that come from now on.

        Raises RecordingInvalid where another recording lies in the folder, ConfigError where nothing can be written.
        """
        self._check_open()
        if recorder is not None:
            recorder.open(self.spec, self.layout)
        self.recorder = recorder

    def undelivered(self, *, wait_s: float) -> dict[int, tuple[ShardKey, ...]]:
        """Step -> receivers that have not acknowledged it, after `wait_s`; early, and empty, when all have."""
        steps = self.steps.undelivered(wait_s=wait_s)
        self._check_open()
        return steps

    def join_previous(self, *, timeout_s: float | None = None) -> None:
        """Wait until every sealed step is delivered. The error names the steps and carries the receivers that are missing."""
        limit = self.config.step_timeout_s if timeout_s is None else timeout_s
        with self.clock.span("wait_join"):
            steps = self.undelivered(wait_s=limit)
        if steps:
            raise errors.DeadlineExceeded(
                f"waited {limit:.1f} s for the send of step(s) {sorted(steps)}; not acknowledged by (dp, pp, cp) "
                f"{_listed(steps)}. Have those trainers entered the step? A send cannot finish before its receiver starts",
                ranks=[key for keys in steps.values() for key in keys],
                step=min(steps),
            )

    # -- the rest --------------------------------------------------------------------------------------------------

    def hello(self, *, dp: int, pp: int, cp: int = 0) -> dict[str, Any]:
        """Where a receiver connects, {host, port, token, run}."""
        self._check_open()
        return self._delivery.hello((dp, pp, cp))

    def list_page(self, process: str, target: str) -> None:
        """List a process's /metrics, host:port, at the /targets of this relay's page; an empty one takes it off."""
        self.metrics.others[process] = target

    def status(self) -> dict[str, Any]:
        """Where every sample of every step is."""
        with self._changed:
            found = {"run": self.run, **self.samples_status(), "steps": self.steps.status()}
        found |= {"engines": self.engines.reports(), "receivers": self._delivery.status()}
        return found | {"store": {"frames": len(self._store), "bytes": self._store.live_bytes}}

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        errors.close_after(error, self.close)

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Stop the background and delete the store. Raises `StepError` naming undelivered steps and their samples; idempotent.
        Samples that no step took are named in the log."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            waiting = [sample.name for sample in self.entries.samples.values() if sample.step is None]
        undelivered, unsent = self.steps.close()
        if self._door is not None:
            self._door.close(timeout_s=timeout_s)
        alive = self._delivery.close(timeout_s=timeout_s)
        self.steps.thread.join(timeout_s)
        alive += [self.steps.thread.name] if self.steps.thread.is_alive() else []
        self._close_storage()
        self.metrics.close()
        if waiting:
            log.warning("r3channel: %d samples that no step took: %s", len(waiting), waiting[:NAMED])
        if undelivered or alive:
            raise errors.StepError(
                f"closed with undelivered steps {_listed(undelivered)} (step: (dp, pp, cp) not acknowledged), "
                f"{len(unsent)} samples: {unsent[:NAMED]}; still running: {alive}",
                samples=unsent,
                ranks=[key for keys in undelivered.values() for key in keys],
            )

    def _check_open(self) -> None:
        super()._check_open()
        if (error := self.steps.error) is not None:
            raise errors.BackgroundFailed(f"a background thread of the relay died: {error!r}") from error

    def _watch(self) -> None:
        watch, registry = self.metrics.watch, self.engines
        self.metrics.measure("r3channel_steps_total")
        self.metrics.set("r3channel_store_limit_bytes", self.config.store_bytes)
        watch("r3channel_samples_in_flight", lambda: len(self.entries.samples))
        watch("r3channel_frames_unclaimed", lambda: self.entries.unclaimed)
        watch("r3channel_expiry_in_seconds", self.expiry_in_s)
        watch("r3channel_steps_in_flight", lambda: len(self.steps.undelivered(wait_s=0)))
        watch("r3channel_staging_peak_bytes", lambda: self._delivery.peak_staging_bytes)
        watch("r3channel_engines_silent", lambda: registry.counts()[1])
        watch("r3channel_engines_greeted", lambda: registry.counts()[0])
        watch("r3channel_frames_in_store", lambda: len(self._store))
        watch("r3channel_store_bytes", lambda: self._store.live_bytes)
        watch("r3channel_oldest_in_flight_seconds", self.steps.oldest_s)
        watch("r3channel_background_thread_alive", lambda: float(self.steps.error is None))
        watch("r3channel_recording_lost_steps", self._lost_steps)
        watch("r3channel_connection", lambda: self._delivery.connection)

    def _lost_steps(self) -> float:
        """LookupError where nothing is recorded: then the gauge is absent."""
        if (recorder := self.recorder) is None:
            raise LookupError("nothing is recorded")
        return recorder.lost


def _listed(missing: Mapping[int, Sequence[ShardKey]]) -> dict[int, list[ShardKey]]:
    """As it is read in messages."""
    return {step: list(keys) for step, keys in missing.items()}
