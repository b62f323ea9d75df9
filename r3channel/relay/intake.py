"""A reply or a frame on its way into the table, and out of it again: verified, kept, claimed, dropped. Knows no step or receiver.

The door's threads and the callers of `Relay.add` run this. Work is done before the table's lock is taken; events go in under it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.model.spec import RoutingSpec
from r3channel.observe.metrics import Metrics
from r3channel.observe.stage_clock import StageClock
from r3channel.recordings.recorder import Recorder, head_of
from r3channel.relay.engines import EngineRegistry
from r3channel.relay.journal import Journal, SavedTurn
from r3channel.relay.memory import Store
from r3channel.relay.reply import (
    Base64Text,
    NotBase64,
    key_of,
    last_event,
    no_base64,
    parsed,
    routing_text,
    samples_of,
    split_replies,
    split_reply,
)
from r3channel.relay.sample_table import Reply, Sample, SampleTable, Turn
from r3channel.relay.token_tensors import HeldTensors, keep_tensors
from r3channel.relay.verify import DAMAGED, MOST_ROWS, FrameVerifier, VerifiedRows
from r3channel.typed import typed
from r3channel.wire.header import MAX_ROWS
from r3channel.wire.parcel import REFERENCE_BYTES, REFERENCE_MAGIC, FrameName, FrameReference, frames_in
from r3channel.wire.routing import Ids, as_tokens, hash_tokens, hashes_of
from r3channel.wire.source import InHand, Source
from r3channel.wire.token_tensors import tensors_of

log = logging.getLogger(__name__)

_GONE_S, _LOOK_S = 3.0, 0.2
"""An engine whose connection has ended comes again within two seconds, if it lives; how often that is looked at."""
NAMED = 1000
"""Expired samples that `status` still names; samples of one message."""
_NOTHING = InHand(b"")
"""Routing of rows that are left to the live router."""
Tokens = Sequence[int] | Ids
_Taken = TypeVar("_Taken")


class Intake:
    """What takes rows in: the part of a relay that knows no step and no receiver. Any thread."""

    def __init__(
        self, spec: RoutingSpec, config: ChannelConfig, *, clock: StageClock, metrics: Metrics,
        recorder: Recorder | None,
    ) -> None:  # fmt: skip
        self.spec, self.config, self.clock, self.metrics = spec, config, clock, metrics
        self._closed = False
        self._changed = threading.Condition()
        """Guards the table and the steps, and is notified of every event."""
        self.entries, self.engines = SampleTable(), EngineRegistry(spec, pages=metrics.others)
        self._store = Store(config.store_bytes)
        self._tensors = tensors_of(config.token_tensors, spec)
        self._journal = Journal(config.journal) if config.journal else None
        self.verifier = FrameVerifier(
            spec=spec, store=self._store, journal=self._journal, clock=clock, invalid_rows=config.invalid_rows
        )
        self.recorder = recorder
        """May be given, exchanged and taken while the relay runs."""
        for name in ("r3channel_samples_total", "r3channel_rejected_total", "r3channel_rows_total"):
            metrics.measure(name)
        for leg in ("engine_frame", "engine_direct"):
            metrics.measure("r3channel_bytes_total", leg=leg)
        for tensor in self._tensors:
            metrics.measure("r3channel_tensor_bytes_total", tensor=tensor.name)
        self._expired: list[str] = []
        self._hears: Callable[[int], bool] = lambda _boot_id: True
        """Whether an engine's process lives, as far as is known: its frames may still come."""
        self._unreached: Callable[[int], str] = lambda _boot_id: ""
        """The door's address, where an engine's process has never come to it."""

    # -- engines' frames, from the door's threads ------------------------------------------------------------------

    def deliver(self, boot_id: int, count: int, body: Source) -> None:
        """Take an opened parcel of `count` frames. Repeating it does no harm; what its engine made wrong is told to its reply.

        Raises FrameReferenceInvalid when it is no parcel, StoreFull when there is no room for a frame, and what `body` raises;
        the frames before are kept then. Raises the FrameError of one that was damaged on the way after the others were taken:
        send the parcel again.
        """
        self.metrics.inc("r3channel_bytes_total", body.left, leg="engine_direct")
        self.expire()  # frames may come whose replies never do
        damaged: errors.R3Error | None = None
        for serial, frame in frames_in(body, count, boot_id=boot_id):
            with self._changed:
                most_rows = self._most_rows((boot_id, serial))
            if most_rows:
                damaged = self._land((boot_id, serial), frame, most_rows) or damaged
        if damaged is not None:
            raise damaged.within(f"a parcel of {count} frames")

    def _most_rows(self, name: FrameName) -> int:
        """With the condition held: 0 for a frame that nobody wants (any more); else what its frame reference says, or the longest
        sequence of its engine. A peer's number sizes no memory."""
        if not self.entries.wants(name):
            return 0
        if (owner := self.entries.owner(name)) is not None:
            return owner[1].end_row - owner[1].first_row
        return min(self.engines.context_of(name[0]), MOST_ROWS) or MOST_ROWS

    def _land(self, name: FrameName, frame: Source, most_rows: int) -> errors.R3Error | None:
        """Keep a frame, or why it cannot be used; returns what became of it on its way."""
        try:
            where = f"sample of frame {name[1]} from engine {self.engines.name_of(name[0])}"
            what = self.verifier.keep(frame, where=where, max_rows=most_rows)
        except errors.RoutingError as error:
            error.__cause__ = error.__context__ = None
            what = error.with_traceback(None)  # it is kept; what was refused is not
        self.arrive(name, what)
        return what if isinstance(what, DAMAGED) else None

    def arrive(self, name: FrameName, what: VerifiedRows | errors.R3Error) -> None:
        """A frame came: its rows, or why it cannot be used."""
        with self._changed:
            owner = self.entries.owner(name)
            taken = self.entries.frame(name, what, now_s=time.monotonic())
            if taken and owner is not None:
                self._note(*owner)
            self._changed.notify_all()
        if isinstance(what, VerifiedRows) and not taken:
            self.free([what])
        if isinstance(what, errors.R3Error):
            self.reject(what)

    # -- replies ---------------------------------------------------------------------------------------------------

    @typed
    def add(
        self, sample_id: str, reply: Mapping[str, Any] | list[Any], tokens: Tokens, *, engine: str = "?",
        append: bool = False, cut: bool = False,
    ) -> VerifiedRows | None:  # fmt: skip
        """Verify and keep the routing of one sample.

        `reply` is the engine's decoded JSON, of any route; `tokens` the whole sequence (prompt and response). Raises a typed
        `RoutingError` naming sample and engine and keeps nothing; the caller decides what happens to a bad sample.
        None when the reply holds a frame reference: the frame comes directly, and `seal` waits for it and names it if it is lost.
        None, too, for a reply without routing where `on_missing` is `live`.

        `append`: a later turn (or the rest of an interrupted request) of a sample that is here, made with
        `routed_experts_start_len = rows_held`. `tokens` is the whole sequence again; gaps, overlaps and changed tokens
        are refused, and the rows that are held stay.

        `cut`: `tokens` may end before what was generated, as where a limit or a stop string was applied afterwards. The rows are
        verified whole, and those of the tokens that are left are kept. Not with direct delivery or token tensors.
        """

        def take() -> VerifiedRows | None:
            self.engines.check(engine)
            source = self._routing_in(reply, sample_id, engine)
            return self._add(sample_id, source, key_of(reply), tokens, engine=engine, append=append, cut=cut)

        return self._judged(take, sample_id, engine, new=not append)

    @typed
    def add_body(
        self, sample_id: str, body: bytes, tokens: Tokens | Callable[[Any], Tokens], *, engine: str = "?",
        append: bool = False, cut: bool = False,
    ) -> Any:  # fmt: skip
        """As `add`, for the reply's body as it came; returns the parsed reply, its routing field emptied.

        The frame is decoded where it lies in the body, without the interpreter's lock, and only the rest is parsed: an eighth of
        the CPU of `json.loads` and `add`. `tokens` may be a function of the parsed reply: of an event stream the last event with
        a frame. Raises also `RoutingMissing` for a body that is no JSON object, and `UsageError` for one of several samples.
        It may wait for room: in a coroutine, on a thread.

            body, tokens = await response.read(), lambda reply: prompt + reply["output_ids"]
            reply = await asyncio.to_thread(relay.add_body, name, body, tokens, engine=url)
        """

        def take() -> Any:
            self.engines.check(engine)
            one = _read(partial(last_event, sample_id=sample_id, engine=engine), body, sample_id, engine)
            reply, text = _read(split_reply, one, sample_id, engine)
            again = partial(_read, parsed, one, sample_id, engine)
            how: dict[str, Any] = {"engine": engine, "append": append, "cut": cut}
            return self._add_split(sample_id, reply, text, again, tokens, **how)

        return self._judged(take, sample_id, engine, new=not append)

    @typed
    def add_bodies(
        self, sample_ids: Sequence[str], body: bytes, tokens: Callable[[str, Any], Tokens], *, engine: str = "?",
        append: bool = False, cut: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """Take in the body of a request with several prompts, or with n above 1: one sample for each reply, in their order.

        The bytes are gone through once. A sample that is refused costs no other one.

            names, prompts = ["a0", "a1"], {"a0": first, "a1": second}
            taken = relay.add_bodies(names, body, lambda name, reply: prompts[name] + reply["output_ids"], engine=url)

        Args:
            sample_ids: Their names.
            body: As it came: a JSON list of replies, or an OpenAI reply with a choice for each.
            tokens: Gives a sample's whole sequence by its name and its parsed reply.
            engine: Who answered.
            append: As of `add`, for each.
            cut: As of `add`.

        Returns:
            By name the parsed reply, its routing field emptied, or the error (an `R3Error`) that it was refused with.

        Raises:
            RoutingMissing: The body is no JSON.
            UsageError: It has more or fewer replies than there are names.
        """
        self.engines.check(engine)
        split = _read(split_replies, body, str(sample_ids), engine)
        if len(split) != len(set(sample_ids)):
            raise errors.UsageError(
                f"engine {engine}: {len(split)} replies for the samples {sample_ids!r}; expected one name for each"
            )
        taken = dict[str, Any]()
        for at, (name, (reply, text)) in enumerate(zip(sample_ids, split, strict=True)):
            whole = partial(tokens, name)
            again = partial(lambda at: samples_of(parsed(body))[at], at)
            how: dict[str, Any] = {"engine": engine, "append": append, "cut": cut}
            take = partial(self._add_split, name, reply, text, again, whole, **how)
            try:
                taken[name] = self._judged(take, name, engine, new=not append)
            except errors.R3Error as error:
                taken[name] = error
        return taken

    def _add_split(
        self, sample_id: str, reply: Any, text: memoryview | None, again: Callable[[], Any],
        tokens: Tokens | Callable[[Any], Tokens], **how: Any,
    ) -> Any:  # fmt: skip
        """`again` parses the whole reply, where the characters that were cut out are no base64."""
        found = text or self._routing_in(reply, sample_id, how["engine"])
        whole, key = tokens(reply) if callable(tokens) else tokens, key_of(reply)
        try:
            source = found if isinstance(found, Source) else Base64Text(found)
            self._add(sample_id, source, key, whole, **how)
        except NotBase64:  # or characters that JSON escapes
            source = self._routing_in(again(), sample_id, how["engine"])
            self._add(sample_id, source, key, whole, **how)
        return reply

    @typed
    def add_frame(
        self, sample_id: str, data: bytes, tokens: Tokens, *, engine: str = "?", append: bool = False
    ) -> VerifiedRows | None:
        """As `add`, for a frame that is already in hand (a recording, another transport, `pd_merge.merged_frame`)."""

        def take() -> VerifiedRows | None:
            return self._add(sample_id, InHand(data), None, tokens, engine=engine, append=append)

        return self._judged(take, sample_id, engine, new=not append)

    @typed
    def add_live(self, sample_id: str, tokens: Tokens, *, append: bool = False) -> None:
        """Leave a sample's rows to the live router, whatever `on_missing` says; with `append` those of its further tokens."""
        take = partial(self._add, sample_id, _NOTHING, None, tokens, engine="?", append=append)
        self._judged(take, sample_id, "?", new=not append)

    def restore(self, sample_id: str, turns: Sequence[SavedTurn]) -> int:
        """A sample as another relay left it -> its tokens. Raises as `add`; then nothing of it is kept."""
        number, where = 0, f"sample {sample_id} from engine recovered"
        self._became("received")
        try:
            for number, turn in enumerate(turns):
                rows = self.verifier.keep(turn.source(), where=where, max_rows=MAX_ROWS)
                hashes = turn.tokens_hash, turn.prefix_hash
                reply = Reply(sample_id, "recovered", turn.key, rows.end_row + 1, *hashes)
                try:
                    with self._changed:
                        taken = self.entries.reply(reply, rows, append=number > 0, now_s=time.monotonic())
                        self._note(self.entries.samples[sample_id], taken)
                except BaseException:
                    self.free([rows])
                    raise
        except errors.R3Error:
            if not self.drop([sample_id] if number else [], outcome="rejected"):
                self._became("rejected")
            raise
        return self.rows_held(sample_id) + 1

    @typed
    def rows_held(self, sample_id: str, tokens: Tokens | None = None) -> int:
        """Rows of a sample that are here or on their way: `routed_experts_start_len` of its next turn.

        `tokens`, which that turn begins with: 0 where a turn of them could not add to these rows, or better brings all: they are
        of other tokens, in a step, refused, or partly the live router's.
        """
        with self._changed:
            held, sample = self.entries.rows_announced(sample_id), self.entries.samples.get(sample_id)
            if tokens is None or sample is None:
                return held
            wanted, unsound = sample.prefix_hash, sample.step is not None or sample.error or sample.live_rows
        same = held <= len(tokens) and hash_tokens(as_tokens(tokens[:held])) == wanted
        return held if same and not unsound else 0

    @typed
    def asks(self, sample_id: str) -> dict[str, Any]:
        """Fields of a sample's next request: SGLang is to return routing, of a later turn only the rows that are not here."""
        held = self.rows_held(sample_id)
        return {"return_routed_experts": True} | ({"routed_experts_start_len": held} if held else {})

    def _routing_in(self, reply: Any, sample_id: str, engine: str) -> Source:
        """Nothing where there is none and the live router may choose."""
        try:
            return Base64Text(routing_text(reply, sample_id=sample_id, engine=engine))
        except errors.RoutingMissing:
            if self.config.on_missing != "live":
                raise
            return _NOTHING

    def _add(
        self, sample_id: str, source: Source, key: int | None, tokens: Tokens, *, engine: str, append: bool, cut: bool = False
    ) -> VerifiedRows | None:  # fmt: skip
        tokens_T = as_tokens(tokens)
        held, config = self.rows_held(sample_id) if append else 0, self.config
        reply = Reply(sample_id, engine, key, len(tokens_T), *hashes_of(tokens_T))
        if append:
            reply.held_hash = hash_tokens(tokens_T[:held])
        reply.live, nbytes, rows = source is _NOTHING, source.left, None
        try:
            begun = source.take(min(nbytes, REFERENCE_BYTES))
            if cut and (self._tensors or begun[: len(REFERENCE_MAGIC)] == REFERENCE_MAGIC):
                raise errors.UsageError(
                    f"{reply.where}: cut=True, and rows come directly, or token_tensors are declared"
                )
            if begun[: len(REFERENCE_MAGIC)] == REFERENCE_MAGIC:
                reply.reference = self._reference(begun, source)
            elif not reply.live:
                self.expire()
                rows = self.verifier.keep(
                    source, where=reply.where, max_rows=MOST_ROWS if cut else len(tokens_T),
                    room_s=config.backpressure_timeout_s, begun=begun, more=bool(self._tensors),
                )  # fmt: skip
                if cut and max(held, rows.first_row) + 1 < len(tokens_T) <= rows.end_row:
                    rows = self._cut(rows, len(tokens_T) - 1, where=reply.where)
            if self._tensors and nbytes:
                reply.tensors = keep_tensors(
                    source, self._store, self._tensors, where=reply.where, tokens=len(tokens_T), held_rows=held,
                    key=rows.sample_key if rows else reply.reference and reply.reference.sample_key,
                    room_s=config.backpressure_timeout_s,
                )  # fmt: skip
            with self._changed:
                turn = self.entries.reply(reply, rows, append=append, now_s=time.monotonic())
                if self._journal is not None:
                    self._note(self.entries.samples[sample_id], turn)
        except BaseException:
            self._undo(reply, rows)
            raise
        if (recorder := self.recorder) is not None:
            recorder.keep(sample_id, tokens_T)
        self.metrics.inc("r3channel_rows_total", turn.end_row - turn.first_row)
        for name, own in reply.tensors.rows.items() if reply.tensors else ():
            self.metrics.inc("r3channel_tensor_bytes_total", own.nbytes, tensor=name)
        if rows is not None:
            self.metrics.inc("r3channel_bytes_total", nbytes, leg="engine_frame")
        return rows

    def _cut(self, rows: VerifiedRows, end_row: int, *, where: str) -> VerifiedRows:
        """Keep the rows before `end_row` as a frame of their own, so that what survives a kill has these alone."""
        try:
            kept = rows.cut(end_row)
            data = head_of(kept, self.spec) + kept.ids_TLK.tobytes()
            room_s = self.config.backpressure_timeout_s
            return self.verifier.keep(InHand(data), where=where, max_rows=end_row + 1, room_s=room_s)
        finally:
            self.metrics.inc("r3channel_cut_rows_total", rows.end_row - end_row)
            self.free([rows])

    def _reference(self, begun: memoryview, source: Source) -> FrameReference:
        if source.left and not self._tensors:
            raise errors.FrameReferenceInvalid(
                f"{len(begun) + source.left} bytes, expected {REFERENCE_BYTES}; do tensors lie behind the frame reference that "
                "token_tensors does not name?"
            )
        return FrameReference.from_bytes(begun)

    def _undo(self, reply: Reply, rows: VerifiedRows | None) -> None:
        """Free what a reply that is refused has brought, its direct frame too."""
        unclaimed = None
        if reply.reference is not None:
            with self._changed:
                unclaimed = self.entries.refuse(reply.reference)
        self.free([kept for kept in (rows, unclaimed) if isinstance(kept, VerifiedRows)])
        if reply.tensors is not None:
            reply.tensors.block.free()

    def _note(self, sample: Sample, turn: Turn) -> None:
        """Whose frame it is, for what survives: written when both are here. The table has it, so what cannot be written is said
        in the log: after a kill that frame is nobody's."""
        if self._journal is None or not isinstance(turn.rows, VerifiedRows):
            return
        try:
            self._journal.note(
                turn.rows.ref, sample_id=sample.name, turn=sample.turns.index(turn), key=turn.key,
                tokens_hash=sample.tokens_hash, prefix_hash=sample.prefix_hash,
            )  # fmt: skip
        except errors.StoreFull as error:
            log.warning("r3channel: sample %s would not survive a kill: %s", sample.name, error)

    def _check_open(self) -> None:
        if self._closed:
            raise errors.UsageError("this relay is closed")

    def _close_storage(self) -> None:
        if self._journal is not None:
            self._journal.close()
        self._store.close()

    # -- waiting ---------------------------------------------------------------------------------------------------

    def await_frames(self, names: Sequence[str], *, step: int, timeout_s: float) -> None:
        """Until no frame of these samples is outstanding. Raises FrameMissing, or leaves them to the live router and says so.

        An engine that has gone is waited for `_GONE_S`, within which one that lives would have come again.
        """
        self.expire()
        with self.clock.span("wait_generation", step=step), self._changed:
            late = self.entries.outstanding(names)
            heard_s = dict.fromkeys(map(_boot_id, late), begun_s := time.monotonic())
            while late and (now_s := time.monotonic()) < begun_s + timeout_s:
                heard_s |= {boot_id: now_s for boot_id in heard_s if self._hears(boot_id)}
                # an event looks at the last one alone, not at thousands
                if not self.entries.still(*late[-1]) or now_s >= heard_s[_boot_id(late[-1])] + _GONE_S:
                    late.pop()
                else:
                    self._changed.wait(min(begun_s + timeout_s - now_s, _LOOK_S))
            late = self.entries.outstanding(names)
            if self.config.on_lost == "live":
                self.entries.leave_live(late)
        if late:
            missing = self._missing(late, step=step, waited_s=min(timeout_s, time.monotonic() - begun_s))
            if self.config.on_lost != "live":
                raise missing
            self.reject(missing)
            log.warning("r3channel: left to the live router: %s", missing)

    def _missing(
        self, late: Sequence[tuple[Sample, Turn]], *, step: int, waited_s: float
    ) -> errors.FrameMissing:
        told = [self._describe(*each) for each in late[:5]]
        text = "; ".join(told) + (f"; and {len(late) - 5} more" if len(late) > 5 else "")
        text += f". The store holds {self._store.live_bytes} of {self._store.ceiling_bytes} bytes"
        return errors.FrameMissing(
            f"step {step}: waited {waited_s:.1f} s for {len(late)} frames whose frame references came: {text}",
            samples=dict.fromkeys(sample.name for sample, _ in late),
            engines=dict.fromkeys(turn.engine for _, turn in late),
            step=step,
        )

    def _describe(self, sample: Sample, turn: Turn) -> str:
        """A frame that has not come, and what is known about its engine."""
        engines, (boot_id, serial) = self.engines, turn.name or (0, 0)
        engine = turn.engine if turn.engine != "?" else engines.name_of(boot_id)
        where = f"sample {sample.name} from engine {engine}, frame {serial}, rows {turn.first_row}..{turn.end_row}"
        if not self._hears(boot_id):
            return f"{where}: the engine died, or was started anew, before its frame came"
        if engines.knows(boot_id) and (url := self._unreached(boot_id)):
            return f"{where}: the engine has not reached {url}; does a firewall drop what it sends? Its log says what it got"
        if engines.knows(boot_id):
            return f"{where}: not delivered; is it alive? Its log says why it gave up"
        refused = engines.reports().get(engines.name_of(boot_id), "it never said hello to this relay")
        return f"{where}: {refused}; are R3CHANNEL_RELAY_URL and R3CHANNEL_TOKEN_FILE this relay's?"

    # -- away ------------------------------------------------------------------------------------------------------

    @typed
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
        for held in (held for sample in samples for held in tensors_held(sample)):
            held.block.free()
        delivered = outcome == "delivered"
        if (recorder := self.recorder) is not None:
            for sample in samples:
                recorder.forget(sample.name)
        for sample in samples:
            fate = "live" if sample.live_rows and delivered else outcome
            self._became("rejected" if sample.error else fate)

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
            self._expired = (self._expired + names)[-NAMED:]
        if samples or unclaimed:
            self.let_go(samples, outcome="expired")
            self.free([rows for rows in unclaimed.values() if isinstance(rows, VerifiedRows)])
            frames = [f"{self.engines.name_of(boot_id)}: {serial}" for boot_id, serial in unclaimed]
            log.warning(
                "r3channel: dropped: %d samples that no step took within %.0f s: %s; %d frames without a reply for %.0f s: %s",
                len(names), config.expiry_s, names, len(frames), config.unclaimed_timeout_s, frames[:NAMED],
            )  # fmt: skip

    def _judged(self, take: Callable[[], _Taken], sample_id: str, engine: str, *, new: bool) -> _Taken:
        """A reply counts as received at once, so that whatever becomes of it the outcomes add up. `new`: of a sample, and not
        another turn of one that is in flight."""
        self._check_open()
        if new:
            self._became("received")
            if self.clock.trace is not None:
                self.clock.trace.sample(sample_id)
        try:
            with self.clock.span("ingest"):
                return take()
        except BaseException as error:  # also where the caller's `tokens` failed, or memory is not to be had
            told = no_base64(error, sample_id, engine) if isinstance(error, NotBase64) else error
            if isinstance(told, errors.R3Error):  # a frame's own errors know their names as text only
                told.samples, told.engines = told.samples or (sample_id,), told.engines or (engine,)
                self.reject(told)
            if new:
                self._became("duplicate" if isinstance(told, errors.SampleTwice) else "rejected")
            if told is error:
                raise
            raise told from error

    def reject(self, error: errors.R3Error) -> None:
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


def _read(read: Callable[[bytes], Any], body: bytes, sample_id: str, engine: str) -> Any:
    try:
        return read(body)
    except ValueError as error:
        raise errors.RoutingMissing(
            f"sample {sample_id} from engine {engine}: {len(body)} bytes beginning with {body[:40]!r} are no JSON, "
            f"expected a reply: {error}",
            samples=[sample_id],
        ) from error


def rows_of(sample: Sample) -> list[VerifiedRows]:
    """A sample's rows, turn by turn."""
    return [rows for rows in sample.held if isinstance(rows, VerifiedRows)]


def tensors_held(sample: Sample) -> list[HeldTensors]:
    """A sample's tensors, turn by turn."""
    return [turn.tensors for turn in sample.turns if turn.tensors is not None]


def _boot_id(late: tuple[Sample, Turn]) -> int:
    return late[1].name[0] if late[1].name else 0
