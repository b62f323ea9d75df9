"""The relay: takes verified rows in, seals steps, and sends each receiver its own rows in the background.

    relay = Relay(spec, layout, config)
    relay.serve(token_file=...)                    # only for engines that deliver directly
    relay.add(sample_id, reply, tokens)            # as replies arrive; any thread
    ticket = relay.seal(step, assignment)          # returns before a byte is sent
    relay.join_previous(timeout_s=...)             # the next rollout, before it seals again

One process runs the relay beside (or as part of) the rollout manager. A receiver calls `hello` to learn where to connect. The
relay keeps a step's rows until every receiver has acknowledged them. `Relay` has the public calls and owns four parts: `Intake`
(bytes -> table), `Samples` (the table), `Steps` (table -> tickets, acknowledgements) and `RowServer` (tickets -> receivers).
README.md beside this file describes the locks, DESIGN.md the way of a request.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.model.spec import RoutingSpec
from r3channel.observe.metrics import Metrics
from r3channel.observe.stage_clock import StageClock
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.shards import ShardKey
from r3channel.plan.ticket import Ticket
from r3channel.recordings.recorder import Recorder
from r3channel.relay.intake import Intake, Tokens
from r3channel.relay.journal import Recovery, take_over
from r3channel.relay.row_server import RowServer
from r3channel.relay.sample_table import Turn
from r3channel.relay.samples import NAMED, Samples
from r3channel.relay.sealed_steps import Steps
from r3channel.relay.verify import VerifiedRows
from r3channel.transport.auth import obtain_token
from r3channel.transport.network import local_address
from r3channel.typed import Json, check_types
from r3channel.wire.digest import warm
from r3channel.wire.source import InHand

if TYPE_CHECKING:
    from r3channel.relay.ingest_server import IngestServer

log = logging.getLogger(__name__)

_MOST_BODY_BYTES = 1 << 30
"""Largest parcel in bytes. Engines close a parcel at 8 MiB and one frame."""


class Relay:
    """The rollout manager's side of the channel: frames in, exact shards out.

    States: OPEN -> CLOSED. Any thread may call the public methods. An error of a background thread is raised by the next call.
    """

    def __init__(
        self, spec: RoutingSpec, layout: TrainerLayout, config: ChannelConfig | None = None, *,
        clock: StageClock | None = None, metrics: Metrics | None = None, recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        config = errors.expect(config or ChannelConfig(), ChannelConfig)
        config = replace(config, interface=local_address(config.interface, others=False))
        # Compile here and not in a background thread: a fork would inherit numba's lock, and a process that ends while LLVM
        # works is aborted.
        warm(errors.expect(spec, RoutingSpec))
        self.spec, self.layout, self.config = spec, errors.expect(layout, TrainerLayout), config
        if recorder is not None:
            recorder.open(spec, layout)
        self.clock = clock or StageClock("relay")
        self.clock.keep(config.trace, "relay")
        self.metrics = metrics or Metrics.of("relay", config, clock=self.clock)
        self.run = uuid.uuid4().hex[:12]
        self._door: IngestServer | None = None
        with ExitStack() as undo:  # a constructor that fails leaves no folder, port or thread behind
            undo.callback(self.metrics.close)
            self.samples = Samples(spec, config, clock=self.clock, metrics=self.metrics, recorder=recorder)
            undo.callback(self.samples.close)
            self.intake = Intake(self.samples)
            self.steps = Steps(self.samples, layout, run=self.run)
            undo.callback(self.steps.close)
            self.row_server = RowServer(self.steps)
            undo.pop_all()
        self._watch()

    @classmethod
    def recover(
        cls, spec: RoutingSpec, layout: TrainerLayout, config: ChannelConfig, **options: Any
    ) -> tuple[Relay, Recovery]:
        """Make a relay that takes over what killed relays left in `config.journal`.

        Every row is verified as if it came from an engine. The dead relays' journal folders are deleted then.

        Seal the recovered steps again: call `seal` with each old number and its old ticket's assignment (`Recovery.steps`), or
        `resume` to seal all under their old tickets. Receivers that had acknowledged a step are not waited for again. Such a
        receiver may not know that its acknowledgement arrived: it can fetch its rows again until the next step is sealed.

        Args:
            spec: As of the constructor.
            layout: As of the constructor.
            config: As of the constructor, with `journal` set.
            **options: The constructor's other options.

        Returns:
            The new relay, and what it took over.

        Raises:
            UsageError: `config.journal` is not set, or the only stores there belong to relays that live.
        """
        if not config.journal:
            raise errors.UsageError(
                "config.journal is not set: without it a relay's rows end with its process, and nothing is left to recover"
            )
        relay = cls(spec, layout, config, **options)
        try:
            own = relay.samples.journal
            assert own is not None
            found, relay.steps.acked_before = take_over(own, relay.intake.restore)
            return relay, found
        except BaseException:
            relay.close()
            raise

    # -- engines ---------------------------------------------------------------------------------------------------

    def serve(self, *, token_file: str | Path | None = None) -> str:
        """Open the ingest for directly delivered frames and return its address.

        Engines get the address as R3CHANNEL_RELAY_URL. The ingest binds `config.interface` only.

        Args:
            token_file: The token's file, `config.token_file` by default. The file is created, mode 0600, when it does not exist.
                Engines read the same file.

        Raises:
            UsageError: The ingest is open already, or no token file is named.
        """
        self.samples.check_open()
        if self._door is not None:
            raise errors.UsageError(f"the ingest is open already, at {self._door.url}")
        path = Path(token_file or self.config.token_file or "")
        if not path.name:
            raise errors.UsageError("direct delivery needs a token_file, or R3CHANNEL_TOKEN_FILE")
        from r3channel.relay.ingest_server import IngestServer  # needs the extra `direct`

        self._door = IngestServer(
            self.intake, token=obtain_token(path), host=self.config.interface, port=self.config.ingest_port,
            max_body_bytes=min(self.config.store_bytes, _MOST_BODY_BYTES),
        )  # fmt: skip
        return self._door.url

    def expect_engines(self, engines: Iterable[str], *, timeout_s: float) -> None:
        """Require a hello from each of these engines.

        Until the deadline `add` waits for an engine's hello; after it, `add` raises `PluginNotApplied`.

        Args:
            engines: The names or addresses by which `add` names the engines.
            timeout_s: Seconds from now within which each engine must say hello.
        """
        self.samples.engines.expect(engines, timeout_s=timeout_s)

    def check_engine(self, reply: Mapping[str, Any], *, engine: str, tokens: int) -> None:
        """Check an engine by its reply to a tiny request.

        Call it before the first rollout; the best request is `wire.hello.probe_body()`. SGLang only logs a plug-in that fails.
        Without this check, the first step would find the data missing.

        Args:
            reply: The engine's decoded reply.
            engine: The engine's name or address.
            tokens: Number of tokens of the whole sequence, prompt and response.

        Raises:
            PluginNotApplied: The engine does not send usable frames, or its hello is refused.
        """
        self.intake.probe(reply, engine=engine, tokens=tokens)

    # -- replies ---------------------------------------------------------------------------------------------------

    @check_types
    def add(
        self, sample_id: str, reply: Mapping[str, Any] | list[Any], tokens: Tokens, *, engine: str = "?",
        append: bool = False, cut: bool = False,
    ) -> VerifiedRows | None:  # fmt: skip
        """Verify and keep the routing of one sample.

        Args:
            sample_id: The sample's name, which errors use.
            reply: The engine's decoded JSON, of any route.
            tokens: The whole sequence, prompt and response.
            engine: The engine that answered.
            append: The reply is a later turn (or the rest of an interrupted request) of a sample that is here, made with
                `routed_experts_start_len = rows_held`. `tokens` is the whole sequence again. Gaps, overlaps and changed tokens
                are refused, and the rows that are held stay.
            cut: `tokens` may end before what was generated, as where a limit or a stop string was applied afterwards. All rows
                are verified, and the rows of the remaining tokens are kept. Not with token tensors.

        Returns:
            The verified rows. None when the reply holds a frame reference: the frame comes directly, `seal` waits for it, and
            names it if it is lost. None, too, for a reply without routing where `on_missing` is `live`.

        Raises:
            RoutingError: A typed error that names sample and engine. Nothing is kept. The caller decides what happens to a bad
                sample.
        """
        return self.intake.take_parsed(Turn(sample_id, engine, append, cut), reply, tokens)

    @check_types
    def add_body(
        self, sample_id: str, body: bytes, tokens: Tokens | Callable[[Any], Tokens], *, engine: str = "?",
        append: bool = False, cut: bool = False,
    ) -> Any:  # fmt: skip
        """Verify and keep one sample from the reply's body as it came.

        The frame is decoded where it lies in the body, without the interpreter's lock, and only the rest is parsed: this takes an
        eighth of the CPU of `json.loads` and `add`. The call may wait for room; from a coroutine, call it on a thread.

            body, tokens = await response.read(), lambda reply: prompt + reply["output_ids"]
            reply = await asyncio.to_thread(relay.add_body, name, body, tokens, engine=url)

        Args:
            sample_id: As of `add`.
            body: The bytes of the reply, or of an event stream.
            tokens: The whole sequence, or a function that makes it from the parsed reply. The parsed reply of an event stream is
                its last event with a frame.
            engine: As of `add`.
            append: As of `add`.
            cut: As of `add`.

        Returns:
            The parsed reply, its routing field emptied.

        Raises:
            RoutingError: As of `add`.
            RoutingMissing: The body is no JSON object.
            UsageError: The body holds several samples.
        """
        return self.intake.take_body(Turn(sample_id, engine, append, cut), body, tokens)

    @check_types
    def add_bodies(
        self, sample_ids: Sequence[str], body: bytes, tokens: Callable[[str, Any], Tokens], *, engine: str = "?",
        append: bool = False, cut: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """Take in a reply's body that holds several samples.

        The request had several prompts, or `n` above 1. The body holds one reply for each sample, in the order of `sample_ids`.
        The bytes are read once. A sample that is refused costs no other one.

            names, prompts = ["a0", "a1"], {"a0": first, "a1": second}
            taken = relay.add_bodies(names, body, lambda name, reply: prompts[name] + reply["output_ids"], engine=url)

        Args:
            sample_ids: The samples' names.
            body: The bytes as they came: a JSON list of replies, or an OpenAI reply with a choice for each sample.
            tokens: Makes a sample's whole sequence from its name and its parsed reply.
            engine: The engine that answered.
            append: As of `add`, for each sample.
            cut: As of `add`, for each sample.

        Returns:
            By name the parsed reply, its routing field emptied, or the error (an `R3Error`) that the sample was refused with.

        Raises:
            RoutingMissing: The body is no JSON.
            UsageError: The body has more or fewer replies than there are names.
        """
        turns = [Turn(name, engine, append, cut) for name in sample_ids]
        return self.intake.take_bodies(turns, body, tokens, engine=engine)

    @check_types
    def add_frame(
        self, sample_id: str, data: bytes, tokens: Tokens, *, engine: str = "?", append: bool = False
    ) -> VerifiedRows | None:
        """Verify and keep a frame that is in hand, as `add` does.

        The frame may come from a recording, from another transport or from `pd_merge.merged_frame`.
        """
        return self.intake.take(Turn(sample_id, engine, append), InHand(data), tokens)

    @check_types
    def add_live(self, sample_id: str, tokens: Tokens, *, append: bool = False) -> None:
        """Leave a sample's rows to the live router, whatever `on_missing` says.

        Args:
            sample_id: The sample's name.
            tokens: The whole sequence, prompt and response.
            append: The sample is here; leave only the rows of its further tokens to the live router.
        """
        self.intake.take(Turn(sample_id, append=append), None, tokens)

    @check_types
    def cut(self, sample_id: str, tokens: Tokens, kept: int, *, step: int) -> None:
        """Keep only the rows of a sample's first tokens.

        Call it for a response that was cut after `add`. The call waits up to `frame_timeout_s` for directly delivered frames. The
        last turn that is kept gets new digests; its rows are first checked against the old ones, so that new digests cannot hide
        damage. After an error the sample is as it was.

        Args:
            sample_id: A sample that no step has taken.
            tokens: The whole sequence, as it was added.
            kept: How many of these tokens are left; two or more.
            step: The step that the sample is for, which errors name.

        Raises:
            SampleUnknown: The sample is not here, or is another step's.
            TurnMismatch: The rows were made for other tokens.
            RowCountMismatch: `kept` is below 2, or above the sample's tokens.
            FrameMissing: A frame did not come in time.
            FrameCorrupt: The rows are not those that came.
            UsageError: `token_tensors` are declared.
        """
        self.intake.cut(sample_id, tokens, kept, step=step)

    @check_types
    def rows_held(self, sample_id: str, tokens: Tokens | None = None) -> int:
        """Return how many rows of a sample are here or coming.

        The number is `routed_experts_start_len` of the sample's next turn.

        Args:
            sample_id: The sample's name.
            tokens: The tokens that the next turn begins with. If given, the result is 0 where that turn should not build on the
                held rows: they belong to other tokens, the sample is in a step, a frame of it was refused, or some rows are left
                to the live router.
        """

        return self.samples.rows_held(sample_id, tokens)

    @check_types
    def asks(self, sample_id: str) -> Json:
        """Return the fields to put into a sample's next request.

        The fields ask SGLang to return routing; for a later turn, to return only the rows that are not here.
        """

        held = self.rows_held(sample_id)
        return {"return_routed_experts": True} | ({"routed_experts_start_len": held} if held else {})

    @check_types
    def discard(self, sample_ids: Iterable[str]) -> int:
        """Drop samples that no assignment will name.

        Such samples were filtered, over-sampled, aborted or made for evaluation. Unknown ids and samples of a sealed step are
        ignored.

        Returns:
            How many samples were dropped.
        """

        return self.samples.drop(sample_ids, outcome="discarded")

    # -- steps -----------------------------------------------------------------------------------------------------

    @check_types
    def seal(self, step: int, assignment: Assignment) -> Ticket:
        """Take the assigned samples into a step and return its ticket.

        The call waits up to `frame_timeout_s` for directly delivered frames whose references came. It then hands the step to the
        background and returns before a byte is sent. An error carries all the samples that it is about; after an error, nothing
        is taken.

        Args:
            step: The step's number, higher than all before. A step that was abandoned may be sealed again.
            assignment: The samples of each rank and micro-batch.

        Raises:
            FrameMissing: Frames did not come in time; the error names them.
            SampleUnknown: An assigned sample was never added.
            StepError: The step is not newer than those before, or more rows are left to the live router than `max_live` allows.
            ConfigError: The layout cannot cut the assignment.
        """
        return self.steps.seal(step, assignment)

    def resume(self, found: Recovery) -> None:
        """Seal the steps of a recovery with the tickets that receivers have.

        A receiver that waits for rows connects again and gets them. Rows that do not match the ticket are refused like any
        others: before they are sent, and by receivers. Raises as `seal`.
        """
        self.steps.resume(found)

    @check_types
    def abandon(self, step: int) -> int:
        """Give up a sealed step and take its samples back.

        Receivers that ask for the step are told. Its samples wait for a step again, or for `discard`. The step may be sealed
        again under its number.

        Returns:
            How many samples came back; 0 for a step that is unknown or delivered.
        """
        return self.steps.abandon(step)

    def record(self, recorder: Recorder | None) -> None:
        """Record the steps that are prepared from now on.

        Token ids are recorded only of samples that come from now on.

        Args:
            recorder: The recorder that writes the steps; None ends the recording.

        Raises:
            RecordingInvalid: Another recording lies in the folder.
            ConfigError: Nothing can be written there.
        """
        self.samples.check_open()
        if recorder is not None:
            recorder.open(self.spec, self.layout)
        self.samples.recorder = recorder

    def find_undelivered(self, *, wait_s: float) -> dict[int, tuple[ShardKey, ...]]:
        """Return the receivers that have not acknowledged each sealed step.

        Args:
            wait_s: Seconds to wait for acknowledgements. The call returns early, and empty, when all have come.

        Returns:
            Step -> its missing receivers (dp, pp, cp). Steps that all receivers have acknowledged are left out.
        """
        steps = self.steps.find_undelivered(wait_s=wait_s)
        self.samples.check_open()
        return steps

    def join_previous(self, *, timeout_s: float | None = None) -> None:
        """Wait until every sealed step is delivered.

        Args:
            timeout_s: Seconds to wait, `config.step_timeout_s` by default.

        Raises:
            DeadlineExceeded: A step was not delivered in time. The error names the steps and carries the receivers that are
                missing.
        """
        limit = self.config.step_timeout_s if timeout_s is None else timeout_s
        with self.clock.span("wait_join"):
            steps = self.find_undelivered(wait_s=limit)
        if steps:
            entered = "Have those trainers entered the step? A send cannot finish before its receiver starts"
            raise errors.DeadlineExceeded(
                f"waited {limit:.1f} s for the send of step(s) {sorted(steps)}; not acknowledged by (dp, pp, cp) "
                f"{_as_lists(steps)}. {self.steps.failure() or entered}",
                ranks=[key for keys in steps.values() for key in keys],
                step=min(steps),
            )

    # -- the rest --------------------------------------------------------------------------------------------------

    def hello(self, *, dp: int, pp: int, cp: int = 0) -> Json:
        """Return where a receiver connects: host, port, token and run.

        Raises:
            TicketMismatch: The layout has no such receiver.
        """
        self.samples.check_open()
        return self.row_server.hello((dp, pp, cp))

    def list_page(self, process: str, target: str) -> None:
        """Add a process's /metrics to the /targets of this relay's page.

        Args:
            process: The process's name.
            target: Its page's host:port. An empty target takes the process off the list.
        """
        self.metrics.others[process] = target

    def status(self) -> Json:
        """Return where every sample of every step is."""
        samples = self.samples
        with samples.changed:
            found = {"run": self.run, **samples.status(), "steps": self.steps.status()}
        found |= {"engines": samples.engines.reports(), "receivers": self.row_server.status()}
        return found | {"store": {"frames": len(samples.store), "bytes": samples.store.live_bytes}}

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        errors.close_after(error, self.close)

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Stop the background and delete the store; may be called again.

        The log names samples that no step took.

        Args:
            timeout_s: Seconds to wait for each thread.

        Raises:
            StepError: Steps are undelivered, or threads still run. The error names the steps and their samples.
        """
        samples = self.samples
        with samples.changed:
            if samples.closed:
                return
            samples.closed = True
            waiting = [sample.name for sample in samples.table.samples.values() if sample.step is None]
        undelivered, unsent = self.steps.close()
        if self._door is not None:
            self._door.close(timeout_s=timeout_s)
        alive = self.row_server.close(timeout_s=timeout_s)
        self.steps.thread.join(timeout_s)
        alive += [self.steps.thread.name] if self.steps.thread.is_alive() else []
        samples.close()
        self.metrics.close()
        if waiting:
            log.warning("r3channel: %d samples that no step took: %s", len(waiting), waiting[:NAMED])
        if undelivered or alive:
            raise errors.StepError(
                f"closed with undelivered steps {_as_lists(undelivered)} (step: (dp, pp, cp) not acknowledged), "
                f"{len(unsent)} samples: {unsent[:NAMED]}; still running: {alive}",
                samples=unsent,
                ranks=[key for keys in undelivered.values() for key in keys],
            )

    def _watch(self) -> None:
        watch, samples, steps, rows = self.metrics.watch, self.samples, self.steps, self.row_server
        self.metrics.measure("r3channel_steps_total")
        self.metrics.set("r3channel_store_limit_bytes", self.config.store_bytes)
        watch("r3channel_samples_in_flight", lambda: len(samples.table.samples))
        watch("r3channel_frames_unclaimed", lambda: samples.table.unclaimed)
        watch("r3channel_expiry_in_seconds", samples.expiry_in_s)
        watch("r3channel_steps_in_flight", lambda: len(steps.find_undelivered(wait_s=0)))
        watch("r3channel_staging_peak_bytes", lambda: rows.peak_staging_bytes)
        watch("r3channel_engines_silent", lambda: samples.engines.counts()[1])
        watch("r3channel_engines_greeted", lambda: samples.engines.counts()[0])
        watch("r3channel_frames_in_store", lambda: len(samples.store))
        watch("r3channel_store_bytes", lambda: samples.store.live_bytes)
        watch("r3channel_oldest_in_flight_seconds", steps.oldest_s)
        watch("r3channel_background_thread_alive", lambda: float(samples.broken is None))
        # without a recorder this raises, which leaves the gauge out
        watch("r3channel_recording_lost_steps", lambda: samples.recorder.lost)  # pyright: ignore[reportOptionalMemberAccess]
        watch("r3channel_connection", lambda: max(rows.status()["lives"].values(), default=0))


def _as_lists(missing: Mapping[int, Sequence[ShardKey]]) -> dict[int, list[ShardKey]]:
    return {step: list(keys) for step, keys in missing.items()}
