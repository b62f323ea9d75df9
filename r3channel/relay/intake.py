"""A reply or a frame on its way into the table, and out of it again: verified, kept, claimed, dropped. Knows no step or receiver.

The door's threads and the callers of `Relay.add` run this. Work is done before the table's lock is taken; events go in under it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from r3channel.config import ChannelConfig
from r3channel.errors import FrameMissing, R3Error, RoutingMissing, SampleTwice, StoreFull, UsageError
from r3channel.model.spec import RoutingSpec
from r3channel.observe.metrics import Metrics
from r3channel.observe.stage_clock import StageClock
from r3channel.recordings.recorder import Recorder
from r3channel.relay.engines import EngineRegistry
from r3channel.relay.journal import Journal, SavedSample
from r3channel.relay.memory import Store
from r3channel.relay.reply import frame_bytes_of, key_of, reference_in, split_reply
from r3channel.relay.sample_table import Reply, Sample, SampleTable, Turn
from r3channel.relay.token_tensors import HeldMasks, keep_masks
from r3channel.relay.verify import MOST_ROWS, FrameVerifier, VerifiedRows
from r3channel.wire.header import MAX_ROWS
from r3channel.wire.hello import Hello
from r3channel.wire.masks import split_masks
from r3channel.wire.parcel import FrameName, Source
from r3channel.wire.routing import Ids, as_tokens, hash_tokens

log = logging.getLogger(__name__)

_NAMED = 1000
"""Expired samples that `status` still names."""
Tokens = Sequence[int] | Ids


class Intake:
    """What takes rows in: the part of a relay that knows no step and no receiver. Any thread."""

    def __init__(
        self,
        spec: RoutingSpec,
        config: ChannelConfig,
        *,
        clock: StageClock,
        metrics: Metrics,
        recorder: Recorder | None,
    ) -> None:
        self.spec, self.config, self.clock, self.metrics = spec, config, clock, metrics
        self._closed = False
        self._changed = threading.Condition()
        """Guards the table and the steps, and is notified of every event."""
        self.entries, self.engines = SampleTable(), EngineRegistry(spec)
        self._store = Store(config.store_bytes)
        self._journal = Journal(config.journal) if config.journal else None
        self.verifier = FrameVerifier(
            spec, self._store, self._journal, clock=clock, invalid_rows=config.invalid_rows
        )
        self.recorder = recorder
        """May be given, exchanged and taken while the relay runs."""
        for name in ("r3channel_samples_total", "r3channel_rejected_total", "r3channel_rows_total"):
            metrics.measure(name)
        for leg in ("engine_frame", "engine_direct"):
            metrics.measure("r3channel_bytes_total", leg=leg)
        self._expired: list[str] = []
        self._bound: dict[int, Hello] = {}

    # -- engines' frames, from the door's threads ------------------------------------------------------------------

    def greet(self, hello: Hello) -> None:
        """An engine says what it is. Raises PluginNotApplied with the reason of a refusal."""
        self.engines.greet(hello)
        self._bound[hello.boot_id] = hello

    def knows(self, boot_id: int) -> bool:
        return self.engines.knows(boot_id)

    def deliver(self, boot_id: int, count: int, body: Source) -> None:
        """Take an opened parcel of `count` frames. Repeating it does no harm; what its engine made wrong is told to its reply.

        Raises FrameReferenceInvalid when it is no parcel, StoreFull when there is no room for all of it, FrameError for a frame
        that was damaged on the way (then send it again), and what `body` raises.
        """
        self.metrics.inc("r3channel_bytes_total", body.left, leg="engine_direct")
        self.expire()  # frames may come whose replies never do
        self.verifier.read(
            body,
            count,
            boot_id=boot_id,
            engine=self.engines.name_of(boot_id),
            most_rows=self._most_rows,
            wanted=self._wants,
            take=self.arrive,
        )

    def _wants(self, name: FrameName) -> bool:
        with self._changed:
            return self.entries.wants(name)

    def _most_rows(self, name: FrameName) -> int:
        """What its frame reference says, or the longest sequence of its engine."""
        with self._changed:
            owner = self.entries.owner(name)
        hello = self._bound.get(name[0])
        if owner is not None:
            return owner[1].end_row - owner[1].first_row
        return min(hello.context if hello else 0, MOST_ROWS) or MOST_ROWS  # a peer's number sizes no memory

    def arrive(self, name: FrameName, what: VerifiedRows | R3Error) -> None:
        """A frame came: its rows, or why it cannot be used."""
        with self._changed:
            owner = self.entries.owner(name)
            taken = self.entries.frame(name, what, now_s=time.monotonic())
            if taken and owner is not None:
                self._note(*owner)
            self._changed.notify_all()
        if isinstance(what, VerifiedRows) and not taken:
            self.free([what])
        if isinstance(what, R3Error):
            self.reject(what)

    # -- replies ---------------------------------------------------------------------------------------------------

    def add(
        self,
        sample_id: str,
        reply: Mapping[str, Any],
        tokens: Tokens,
        *,
        engine: str = "?",
        append: bool = False,
    ) -> VerifiedRows | None:
        """Verify and keep the routing of one sample.

        `reply` is the engine's decoded JSON, `tokens` the whole sequence (prompt and response). Raises a typed
        `RoutingError` naming sample and engine and keeps nothing; the caller decides what happens to a bad sample.
        None when the reply holds a frame reference: the frame comes directly, and `seal` waits for it and names it if it is lost.
        None, too, for a reply without routing where `on_missing` is `live`.

        `append`: a later turn (or the rest of an interrupted request) of a sample that is here, made with
        `routed_experts_start_len = rows_held`. `tokens` is the whole sequence again; gaps, overlaps and changed tokens
        are refused, and the rows that are held stay.
        """
        self._check_add(sample_id)
        with self._judged(sample_id, engine, new=not append):
            self.engines.check(engine)
            found = self._routing_in(reply, sample_id=sample_id, engine=engine)
            return self._add(sample_id, found, key_of(reply), tokens, engine=engine, append=append)

    def add_body(
        self,
        sample_id: str,
        body: bytes,
        tokens: Tokens | Callable[[Any], Tokens],
        *,
        engine: str = "?",
        append: bool = False,
    ) -> Any:
        """As `add`, for the reply's body as it came; returns the parsed reply, its routing field emptied.

        The frame is decoded where it lies in the body, without the interpreter's lock, and only the rest is parsed: an eighth of
        the CPU of `json.loads` and `add`. `tokens` may be a function of the parsed reply. Raises also `RoutingMissing` for a body
        that is no JSON object. It may wait for room: in a coroutine, on a thread.

            body, tokens = await response.read(), lambda reply: prompt + reply["output_ids"]
            reply = await asyncio.to_thread(relay.add_body, name, body, tokens, engine=url)
        """
        self._check_add(sample_id)
        with self._judged(sample_id, engine, new=not append):
            self.engines.check(engine)
            try:
                reply, data = split_reply(body)
            except ValueError as error:
                raise RoutingMissing(
                    f"sample {sample_id} from engine {engine}: {len(body)} bytes beginning with {body[:40]!r} are no JSON, "
                    f"expected a reply: {error}",
                    samples=[sample_id],
                ) from error
            data = data or self._routing_in(reply, sample_id=sample_id, engine=engine)
            whole = tokens(reply) if callable(tokens) else tokens
            self._add(sample_id, data, key_of(reply), whole, engine=engine, append=append)
            return reply

    def add_frame(
        self, sample_id: str, data: bytes, tokens: Tokens, *, engine: str = "?", append: bool = False
    ) -> VerifiedRows | None:
        """As `add`, for a frame that is already in hand (a recording, another transport, `pd_merge.merged_frame`)."""
        self._check_add(sample_id)
        with self._judged(sample_id, engine, new=not append):
            return self._add(sample_id, data, None, tokens, engine=engine, append=append)

    def restore(self, saved: SavedSample) -> int:
        """A sample as another relay left it -> its tokens. Raises as `add`; then nothing of it is kept."""
        number = 0
        self._became("received")
        try:
            for number, turn in enumerate(saved.turns):
                rows = self.verifier.keep(
                    turn.frame, sample_id=saved.sample_id, engine="recovered", max_rows=MAX_ROWS, room_s=0.0
                )
                reply = Reply(
                    sample_id=saved.sample_id,
                    engine="recovered",
                    key=turn.key,
                    tokens=rows.end_row + 1,
                    tokens_hash=turn.tokens_hash,
                    prefix_hash=turn.prefix_hash,
                )
                try:
                    with self._changed:
                        taken = self.entries.reply(reply, rows, append=number > 0, now_s=time.monotonic())
                        self._note(self.entries.samples[saved.sample_id], taken)
                except BaseException:
                    self.free([rows])
                    raise
        except R3Error:
            if not self.drop([saved.sample_id] if number else [], outcome="rejected"):
                self._became("rejected")
            raise
        return self.rows_held(saved.sample_id) + 1

    def rows_held(self, sample_id: str) -> int:
        """Rows of a sample that are here or on their way: `routed_experts_start_len` of its next turn."""
        with self._changed:
            return self.entries.rows_announced(sample_id)

    def asks(self, sample_id: str) -> dict[str, Any]:
        """Fields of a sample's next request: SGLang is to return routing, of a later turn only the rows that are not here."""
        held = self.rows_held(sample_id)
        return {"return_routed_experts": True} | ({"routed_experts_start_len": held} if held else {})

    def _routing_in(self, reply: Any, *, sample_id: str, engine: str) -> bytes:
        """Empty where there is none and the live router may choose."""
        try:
            return frame_bytes_of(reply, sample_id=sample_id, engine=engine)
        except RoutingMissing:
            if self.config.on_missing != "live":
                raise
            return b""

    def _add(
        self, sample_id: str, data: bytes, key: int | None, tokens: Tokens, *, engine: str, append: bool
    ) -> VerifiedRows | None:
        tokens_T = as_tokens(tokens)
        held = self.rows_held(sample_id) if append else 0
        where = f"sample {sample_id} from engine {engine}"
        masks, tail = None, b""
        if self.config.sampling_masks:
            data, tail = split_masks(data, where=where)
        reply = Reply(
            sample_id=sample_id,
            engine=engine,
            key=key,
            tokens=len(tokens_T),
            tokens_hash=hash_tokens(tokens_T),
            prefix_hash=hash_tokens(tokens_T[:-1]),
            held_hash=hash_tokens(tokens_T[:held]) if append else None,
            reference=reference_in(data),
        )
        rows, room_s = None, self.config.backpressure_timeout_s
        if data and reply.reference is None:
            self.expire()
            rows = self.verifier.keep(
                data, sample_id=sample_id, engine=engine, max_rows=len(tokens_T), room_s=room_s
            )
        try:
            if self.config.sampling_masks and data:
                masks = keep_masks(
                    tail,
                    self._store,
                    where=where,
                    key=rows.sample_key if rows else reply.reference and reply.reference.sample_key,
                    tokens=len(tokens_T),
                    held_rows=held,
                    room_s=room_s,
                )
                reply = replace(reply, masks=masks)
            with self._changed:
                turn = self.entries.reply(reply, rows, append=append, now_s=time.monotonic(), live=not data)
                self._note(self.entries.samples[sample_id], turn)
                self._changed.notify_all()
        except BaseException:
            with self._changed:
                unclaimed = self.entries.refuse(reply.reference) if reply.reference else None
            self.free([kept for kept in (rows, unclaimed) if isinstance(kept, VerifiedRows)])
            if masks is not None:
                masks.block.free()
            raise
        if (recorder := self.recorder) is not None:
            recorder.keep(sample_id, tokens_T)
        self.metrics.inc("r3channel_rows_total", turn.end_row - turn.first_row)
        if rows is not None:
            self.metrics.inc("r3channel_bytes_total", len(data), leg="engine_frame")
        return rows

    def _note(self, sample: Sample, turn: Turn) -> None:
        """Whose frame it is, for what survives: written when both are here. The table has it, so what cannot be written is said
        in the log: after a kill that frame is nobody's."""
        if self._journal is None or not isinstance(turn.rows, VerifiedRows):
            return
        try:
            self._journal.note(
                turn.rows.ref,
                sample_id=sample.name,
                turn=sample.turns.index(turn),
                tokens_hash=sample.tokens_hash,
                prefix_hash=sample.prefix_hash,
                key=turn.key,
            )
        except StoreFull as error:
            log.warning("r3channel: sample %s would not survive a kill: %s", sample.name, error)

    def _check_add(self, sample_id: str) -> None:
        self._check_open()
        if not isinstance(sample_id, str):
            raise UsageError(f"sample id {sample_id!r} is a {type(sample_id).__name__}, expected a string")

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this relay is closed")

    def _close_storage(self) -> None:
        if self._journal is not None:
            self._journal.close()
        self._store.close()

    # -- waiting ---------------------------------------------------------------------------------------------------

    def await_frames(self, names: Sequence[str], *, step: int, timeout_s: float) -> None:
        """Until no frame of these samples is outstanding. Raises FrameMissing, or leaves them to the live router."""
        self.expire()
        deadline_s = time.monotonic() + timeout_s
        with self.clock.span("wait_generation", step=step), self._changed:
            late = self.entries.outstanding(names)
            while late and (left_s := deadline_s - time.monotonic()) > 0:
                if self.entries.still(late[-1:]):
                    self._changed.wait(left_s)  # an event looks at the last one alone, not at thousands
                else:
                    late.pop()
            late = self.entries.still(late)
            if late and self.config.on_missing == "live":
                self.entries.leave_live(late)
                late = []
        if late:
            raise self._missing(late, step=step, timeout_s=timeout_s)

    def _missing(self, late: Sequence[tuple[Sample, Turn]], *, step: int, timeout_s: float) -> FrameMissing:
        told = [_describe(sample, turn, self.engines) for sample, turn in late[:5]]
        more = f"; and {len(late) - 5} more" if len(late) > 5 else ""
        return FrameMissing(
            f"step {step}: waited {timeout_s:.1f} s for {len(late)} frames whose frame references came: {'; '.join(told)}{more}",
            samples=dict.fromkeys(sample.name for sample, _ in late),
            engines=dict.fromkeys(turn.engine for _, turn in late),
            step=step,
        )

    # -- away ------------------------------------------------------------------------------------------------------

    def discard(self, sample_ids: Iterable[str]) -> int:
        """Drop samples that no assignment will name (filtered, over-sampled, aborted, evaluation); unknown ids and samples of a
        sealed step are ignored."""
        return self.drop(sample_ids, outcome="discarded")

    def drop(self, sample_ids: Iterable[str], *, outcome: str) -> int:
        with self._changed:
            free = [name for name in sample_ids if not self.entries.unknown([name])]
            gone = self.entries.remove(free)
            self._changed.notify_all()
        self.let_go(gone, outcome=outcome)
        return len(gone)

    def let_go(self, samples: Sequence[Sample], *, outcome: str) -> None:
        """Free what samples held that are not in the table any more."""
        self.free([rows for sample in samples for rows in rows_of(sample)])
        for masks in (masks for sample in samples for masks in masks_of(sample)):
            masks.block.free()
        delivered = outcome == "delivered"
        if (recorder := self.recorder) is not None:
            for sample in samples:
                recorder.forget(sample.name)
        for sample in samples:
            self._became("rejected" if sample.error else "live" if sample.is_live and delivered else outcome)

    def free(self, rows: Sequence[VerifiedRows]) -> None:
        """What survives goes first: nothing may be found after a kill whose memory was given away."""
        if self._journal is not None:
            self._journal.gone([one.ref for one in rows])
        for one in rows:
            one.block.free()

    def expire(self) -> None:
        """Drop samples that no assignment named `expiry_s` after they came, and frames that no reply claimed within
        `unclaimed_timeout_s`; said once."""
        now_s, config = time.monotonic(), self.config
        with self._changed:
            samples, unclaimed = self.entries.expired(
                before_s=now_s - config.expiry_s, unclaimed_s=now_s - config.unclaimed_timeout_s
            )
            names = [sample.name for sample in samples]
            self._expired = (self._expired + names)[-_NAMED:]
        if samples or unclaimed:
            self.let_go(samples, outcome="expired")
            self.free([rows for rows in unclaimed.values() if isinstance(rows, VerifiedRows)])
            frames = [f"{self.engines.name_of(boot_id)}: {serial}" for boot_id, serial in unclaimed]
            log.warning(
                "r3channel: dropped: %d samples that no step took within %.0f s: %s; %d frames without a reply for %.0f s: %s",
                len(names), config.expiry_s, names, len(frames), config.unclaimed_timeout_s, frames[:_NAMED],
            )  # fmt: skip

    @contextmanager
    def _judged(self, sample_id: str, engine: str, *, new: bool) -> Iterator[None]:
        """A reply counts as received at once, so that whatever becomes of it the outcomes add up. `new`: of a sample, and not
        another turn of one that is in flight."""
        if new:
            self._became("received")
        try:
            with self.clock.span("ingest"):
                yield
        except R3Error as error:  # a frame's own errors know their names as text only
            error.samples, error.engines = error.samples or (sample_id,), error.engines or (engine,)
            self.reject(error)
            if new:
                self._became("duplicate" if isinstance(error, SampleTwice) else "rejected")
            raise
        except BaseException:  # of the caller's `tokens`, or memory that is not to be had
            if new:
                self._became("rejected")
            raise

    def reject(self, error: R3Error) -> None:
        """A reply, a frame or a step was refused."""
        self.metrics.inc("r3channel_rejected_total", reason=error.reason)

    def _became(self, outcome: str, samples: int = 1) -> None:
        self.metrics.inc("r3channel_samples_total", samples, outcome=outcome)

    def expiry_in_s(self) -> float:
        """Seconds until the oldest sample that no step has taken is dropped. LookupError where there is none."""
        with self._changed:
            waiting = (s.since_s for s in self.entries.samples.values() if s.step is None)
            oldest_s = next(waiting, None)
        if oldest_s is None:
            raise LookupError("no sample waits for a step")
        return oldest_s + self.config.expiry_s - time.monotonic()

    def samples_status(self) -> dict[str, Any]:
        """Where the samples are that no step has taken. With the condition held."""
        samples = [sample for sample in self.entries.samples.values() if sample.step is None]
        return {
            "pending": sorted(sample.name for sample in samples if not sample.awaited and not sample.error),
            "waiting": sorted(sample.name for sample in samples if sample.awaited and not sample.error),
            "failed": {sample.name: str(sample.error) for sample in samples if sample.error},
            "expired": list(self._expired),
            "unclaimed": {"frames": self.entries.unclaimed},
        }


def rows_of(sample: Sample) -> list[VerifiedRows]:
    """A sample's rows, turn by turn."""
    return [rows for rows in sample.held if isinstance(rows, VerifiedRows)]


def masks_of(sample: Sample) -> list[HeldMasks]:
    """A sample's sampling masks, turn by turn."""
    return [turn.masks for turn in sample.turns if turn.masks is not None]


def _describe(sample: Sample, turn: Turn, engines: EngineRegistry) -> str:
    """A frame that has not come, and what is known about its engine."""
    boot_id, serial = turn.name or (0, 0)
    where = f"sample {sample.name} from engine {turn.engine}, frame {serial}, rows {turn.first_row}..{turn.end_row}"
    if engines.knows(boot_id):
        return f"{where}: not delivered; the engine's log says why it gave up"
    refused = engines.reports().get(engines.name_of(boot_id), "it never said hello to this relay")
    return f"{where}: {refused}; are R3CHANNEL_RELAY_URL and R3CHANNEL_TOKEN_FILE this relay's?"
