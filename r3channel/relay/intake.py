"""Takes replies and frames in: verifies and keeps them, and matches frames with replies.

`Intake` calls `Samples` and the verifier; the relay's public methods and the ingest's threads call `Intake`. It knows no step,
receiver or connection. Bytes are read and verified before the table's lock is taken; the table learns of them under the lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from r3channel import errors
from r3channel.relay import reply as replies
from r3channel.relay.journal import SavedTurn
from r3channel.relay.sample_table import Reply, Sample, Turn
from r3channel.relay.samples import Samples, Tokens
from r3channel.relay.verify import DAMAGED, MOST_ROWS, FrameVerifier, VerifiedRows, keep_tensors
from r3channel.wire.header import FRAME_MAGIC
from r3channel.wire.hello import Hello
from r3channel.wire.parcel import REFERENCE_BYTES, REFERENCE_MAGIC, FrameName, FrameReference, frames_in
from r3channel.wire.routing import Ids, as_tokens, hash_tokens, hashes_of
from r3channel.wire.source import InHand, Source

log = logging.getLogger(__name__)


class Intake:
    """The way of rows into the relay. Any thread may call."""

    def __init__(self, samples: Samples) -> None:
        self._samples, self._table, self._changed = samples, samples.table, samples.changed
        self._metrics, self._tensors = samples.metrics, samples.tensors
        self.clock, self.engines = samples.clock, samples.engines
        self.verifier = FrameVerifier(
            spec=samples.spec, store=samples.store, journal=samples.journal, clock=samples.clock,
            invalid_rows=samples.config.invalid_rows,
        )  # fmt: skip
        self._metrics.measure("r3channel_rows_total")
        for leg in ("engine_frame", "engine_direct"):
            self._metrics.measure("r3channel_bytes_total", leg=leg)
        for tensor in self._tensors:
            self._metrics.measure("r3channel_tensor_bytes_total", tensor=tensor.name)

    # -- engines' frames, from the ingest's threads ----------------------------------------------------------------

    def deliver(self, boot_id: int, count: int, body: Source) -> None:
        """Take an opened parcel of `count` frames.

        A repeated parcel does no harm. An error that the engine made is kept, and the frame's reply is refused with it. After the
        errors below the frames before are kept.

        Args:
            boot_id: The engine's process, as the parcel names it.
            count: How many frames the parcel has.
            body: The parcel's bytes behind its head. What it raises passes.

        Raises:
            FrameReferenceInvalid: The bytes are no parcel.
            StoreFull: There is no room for a frame.
            FrameError: A frame was damaged on the way. The others were taken. Send the parcel again.
        """
        self._metrics.inc("r3channel_bytes_total", body.left, leg="engine_direct")
        self._samples.expire()  # frames may come whose replies never do
        damaged: errors.R3Error | None = None
        for serial, frame in frames_in(body, count, boot_id=boot_id):
            with self._changed:
                most_rows = self._most_rows((boot_id, serial))
            if most_rows:
                damaged = self._land((boot_id, serial), frame, most_rows) or damaged
        if damaged is not None:
            raise damaged.prefix(f"a parcel of {count} frames")

    def _most_rows(self, name: FrameName) -> int:
        """Return how many rows a frame may have; 0: unwanted.

        A number that a peer sends with the frame never sizes memory. The caller holds the condition.
        """
        if not self._table.wants(name):
            return 0
        if (owner := self._table.owner(name)) is not None:
            return owner[1].end_row - owner[1].first_row
        return min(self.engines.context_of(name[0]), MOST_ROWS) or MOST_ROWS

    def _land(self, name: FrameName, frame: Source, most_rows: int) -> errors.R3Error | None:
        try:
            where = f"sample of frame {name[1]} from engine {self.engines.name_of(name[0])}"
            what = self.verifier.keep(frame, where=where, max_rows=most_rows)
        except errors.RoutingError as error:
            error.__cause__ = error.__context__ = None
            what = error.with_traceback(None)  # keep the error, not the memory that its traceback refers to
        self.arrive(name, what)
        return what if isinstance(what, DAMAGED) else None

    def arrive(self, name: FrameName, what: VerifiedRows | errors.R3Error) -> None:
        """Put a direct frame into the table: its rows, or its error."""
        with self._changed:
            owner = self._table.owner(name)
            taken = self._table.frame(name, what, now_s=time.monotonic())
            if taken and owner is not None:
                self._note(*owner)
            self._changed.notify_all()
        if isinstance(what, errors.R3Error):
            self._samples.reject(what)
        elif not taken:
            self._samples.free(what)

    # -- replies ---------------------------------------------------------------------------------------------------

    def take(self, reply: Reply, source: Source | None, tokens: Tokens) -> VerifiedRows | None:
        """Take in the bytes of a reply, as `Relay.add_frame` does.

        Args:
            reply: Whose reply it is, and how it is taken in.
            source: The reply's bytes; None leaves its rows to the live router.
            tokens: The whole sequence.

        Returns:
            The verified rows. None where no rows are here yet, or ever.
        """
        with self._received(reply):
            return self._take(reply, source, tokens)

    def take_parsed(
        self, reply: Reply, parsed: object, tokens: Tokens | Callable[[Any], Tokens], text: memoryview | None = None
    ) -> VerifiedRows | None:  # fmt: skip
        """Take in a parsed reply, as `Relay.add` does.

        Args:
            reply: Whose reply it is, and how it is taken in.
            parsed: The engine's reply.
            tokens: The whole sequence, or a function that makes it from the parsed reply.
            text: The frame's base64, where it was cut out of the reply. Else the frame is where SGLang puts it.
        """
        with self._received(reply):
            return self._take_parsed(reply, parsed, tokens, text)

    def take_body(self, reply: Reply, body: bytes, tokens: Tokens | Callable[[Any], Tokens]) -> Any:
        """Take in a reply's body, as `Relay.add_body` does."""
        with self._received(reply):
            one = replies.read_body(partial(replies.last_event, where=reply.where), body, where=reply.where)
            parsed, text = replies.read_body(replies.split_reply, one, where=reply.where)
            self._take_parsed(reply, parsed, tokens, text)
        return parsed

    def take_bodies(
        self, expected: Sequence[Reply], body: bytes, tokens: Callable[[str, Any], Tokens], *, engine: str
    ) -> dict[str, Any]:
        """Take in a body of several samples, as `Relay.add_bodies` does."""
        self.engines.check(engine)
        names = [reply.sample_id for reply in expected]
        split = replies.read_body(replies.split_replies, body, where=f"samples {names} from engine {engine}")
        if len(split) != len(set(names)):
            raise errors.UsageError(
                f"engine {engine}: {len(split)} replies for the samples {names!r}; expected one name for each"
            )
        taken = dict[str, Any]()
        for reply, (parsed, text) in zip(expected, split, strict=True):
            try:
                self.take_parsed(reply, parsed, partial(tokens, reply.sample_id), text)
                taken[reply.sample_id] = parsed
            except errors.R3Error as error:
                taken[reply.sample_id] = error
        return taken

    def cut(self, sample_id: str, tokens: Tokens, kept: int, *, step: int) -> None:
        """Keep the rows of a sample's first tokens, as `Relay.cut` does."""
        samples, tokens_T, where = self._samples, as_tokens(tokens), f"step {step}: sample {sample_id}"
        samples.check_open()
        if self._tensors:
            raise errors.UsageError(f"{where}: its rows cannot be cut where token_tensors are declared")
        samples.await_frames([sample_id], step=step, timeout_s=samples.config.frame_timeout_s)
        with self._changed:
            (sample,) = self._table.take([sample_id], step=step)  # so nobody else reads or frees its rows
        try:
            _check_cut(sample, tokens_T, kept, where=where)
            last = [turn for turn in sample.turns if turn.first_row < kept - 1][-1]
            rows = last.rows and self.verifier.cut(last.rows, kept - 1, where=where)
            self._metrics.inc("r3channel_cut_rows_total", sample.tokens - kept)
            with self._changed:
                gone = sample.cut(kept, hashes_of(tokens_T[:kept]), rows)
                self._note(sample, last)
        except errors.R3Error as error:
            error.samples = error.samples or (sample_id,)
            raise
        finally:
            with self._changed:
                self._table.give_back([sample])
        samples.free(*gone)
        if (recorder := samples.recorder) is not None:
            recorder.keep(sample_id, tokens_T[:kept])

    def restore(self, sample_id: str, turns: Sequence[SavedTurn]) -> int:
        """Take in a sample as another relay left it.

        Returns:
            How many tokens the sample has.

        Raises:
            R3Error: As of `take`; then nothing of the sample is kept.
        """
        number = 0
        self._samples.count("received")
        try:
            for number, turn in enumerate(turns):
                reply = Reply(
                    sample_id, "recovered", append=number > 0, key=turn.key, tokens=turn.tokens,
                    tokens_hash=turn.tokens_hash, prefix_hash=turn.prefix_hash,
                )  # fmt: skip
                self._enter(reply, turn.source(), room_s=0.0)
        except errors.R3Error:
            if not self._samples.drop([sample_id] if number else [], outcome="rejected"):
                self._samples.count("rejected")
            raise
        return self._samples.rows_held(sample_id) + 1

    def probe(self, reply: Mapping[str, Any], *, engine: str, tokens: int) -> None:
        """Check an engine by a probe's reply, as `Relay.check_engine` does."""
        where = f"sample probe from engine {engine}"
        try:
            hello, data = Hello.split(replies.frame_bytes_of(reply, where=where))
            if hello is not None:
                self.engines.greet(hello, engine=engine)
            if data[:3] != FRAME_MAGIC[:3]:
                raise errors.PluginNotApplied(
                    f"engine {engine} answers with {len(data)} bytes of stock routing, expected a frame. Is r3channel "
                    "installed in the engine's environment, and was R3CHANNEL_ENGINE=1 set when it started? The engine's "
                    "log names a hook that failed"
                )
            rows = self.verifier.keep(InHand(data), where=where, max_rows=tokens)
            self._samples.free(rows)
            if rows.end_row != tokens - 1:
                raise errors.RoutingError(
                    f"{where}: {rows.end_row} rows for {tokens} tokens, expected {tokens - 1}"
                )
        except errors.RoutingError as error:
            raise errors.PluginNotApplied(f"engine {engine} does not send usable frames: {error}") from error
        if hello is None:
            self.engines.vouch(engine)

    # -- one reply -------------------------------------------------------------------------------------------------

    @contextmanager
    def _received(self, reply: Reply) -> Generator[None]:
        """Count what becomes of a reply that is taken in meanwhile.

        All calls that add a reply use this. The reply counts as received at once, so that the outcomes add up whatever becomes
        of it.
        """
        self._samples.check_open()
        if not reply.append:  # a further turn belongs to a sample that was counted before
            self._samples.count("received")
            if self.clock.trace is not None:
                self.clock.trace.sample(reply.sample_id)
        try:
            with self.clock.span("ingest"):
                self.engines.check(reply.engine)
                yield
        except BaseException as error:  # also where the caller's `tokens` failed, or memory cannot be had
            if isinstance(error, errors.R3Error):  # many have these names in their text only
                error.samples, error.engines = (
                    error.samples or (reply.sample_id,),
                    error.engines or (reply.engine,),
                )
                self._samples.reject(error)
            if not reply.append:
                self._samples.count("duplicate" if isinstance(error, errors.SampleTwice) else "rejected")
            raise

    def _take_parsed(
        self, reply: Reply, parsed: object, tokens: Tokens | Callable[[Any], Tokens], text: memoryview | None
    ) -> VerifiedRows | None:
        try:
            source = replies.Base64Text(
                text or replies.routing_text(parsed, where=reply.where), where=reply.where
            )
        except errors.RoutingMissing:
            if self._samples.config.on_missing != "live":
                raise
            source = None
        reply.key = replies.key_of(parsed)
        return self._take(reply, source, tokens(parsed) if callable(tokens) else tokens)

    def _take(self, reply: Reply, source: Source | None, tokens: Tokens) -> VerifiedRows | None:
        tokens_T, nbytes = as_tokens(tokens), source.left if source else 0
        if len(tokens_T) < 2:
            raise errors.RowCountMismatch(
                f"{reply.where}: {len(tokens_T)} tokens, which have no row; expected two or more"
            )
        reply.live, reply.tokens = source is None, len(tokens_T)
        reply.tokens_hash, reply.prefix_hash = hashes_of(tokens_T)
        if reply.append:
            reply.held_rows = self._samples.rows_held(reply.sample_id)
            reply.held_hash = hash_tokens(tokens_T[: reply.held_rows])
        turn = self._enter(reply, source or InHand(b""), room_s=self._samples.config.backpressure_timeout_s)
        if (recorder := self._samples.recorder) is not None:
            recorder.keep(reply.sample_id, tokens_T)
        self._metrics.inc("r3channel_rows_total", turn.end_row - turn.first_row)
        for name, own in reply.tensors.rows.items() if reply.tensors else ():
            self._metrics.inc("r3channel_tensor_bytes_total", own.nbytes, tensor=name)
        if reply.rows is not None:
            self._metrics.inc("r3channel_bytes_total", nbytes, leg="engine_frame")
        return reply.rows

    def _enter(self, reply: Reply, source: Source, *, room_s: float) -> Turn:
        try:
            self._read(reply, source, room_s=room_s)
            with self._changed:
                turn = self._table.reply(reply, now_s=time.monotonic())
                self._note(self._table.samples[reply.sample_id], turn)
            return turn
        except BaseException:
            unclaimed = None
            if reply.reference is not None:  # the reply's direct frame is dropped, too
                with self._changed:
                    unclaimed = self._table.refuse(reply.reference)
            self._samples.free(reply.rows, unclaimed)
            if reply.tensors is not None:
                reply.tensors.block.free()
            raise

    def _read(self, reply: Reply, source: Source, *, room_s: float) -> None:
        """Keep a reply's frame or its reference, and the tensors behind it."""
        begun = source.take(min(nbytes := source.left, REFERENCE_BYTES))
        referred, key = bytes(begun[: len(REFERENCE_MAGIC)]) == REFERENCE_MAGIC, None
        if reply.cut and (self._tensors or referred):
            raise errors.UsageError(
                f"{reply.where}: cut=True, and rows come directly, or token_tensors are declared"
            )
        if referred:
            reply.reference = self._reference(begun, source)
            key = reply.reference.sample_key
        elif not reply.live:
            self._samples.expire()
            reply.rows = self.verifier.keep(
                source, where=reply.where, max_rows=MOST_ROWS if reply.cut else reply.tokens, room_s=room_s, begun=begun,
                more=bool(self._tensors),
            )  # fmt: skip
            key = reply.rows.sample_key
            begin = max(reply.held_rows, reply.rows.first_row)
            reply.cut = reply.cut and begin + 1 < reply.tokens <= reply.rows.end_row
            if reply.cut:
                end_row = reply.tokens - 1
                self._metrics.inc("r3channel_cut_rows_total", reply.rows.end_row - end_row)
                reply.rows = self.verifier.cut(reply.rows, end_row, where=reply.where, room_s=room_s)
        if self._tensors and nbytes:
            reply.tensors = keep_tensors(
                source, self._samples.store, self._tensors, where=reply.where, tokens=reply.tokens,
                held_rows=reply.held_rows, key=key, room_s=room_s,
            )  # fmt: skip

    def _reference(self, begun: memoryview, source: Source) -> FrameReference:
        if source.left and not self._tensors:
            raise errors.FrameReferenceInvalid(
                f"{len(begun) + source.left} bytes, expected {REFERENCE_BYTES}; do tensors lie behind the frame reference that "
                "token_tensors does not name?"
            )
        return FrameReference.from_bytes(begun)

    def _note(self, sample: Sample, turn: Turn) -> None:
        """Write to the journal whose frame this is, once both are here."""
        if self._samples.journal is None or turn.rows is None:
            return
        try:
            self._samples.journal.note(
                turn.rows.ref, sample_id=sample.name, turn=sample.turns.index(turn), key=turn.key,
                tokens_hash=sample.tokens_hash, prefix_hash=sample.prefix_hash,
            )  # fmt: skip
        except errors.StoreFull as error:
            # the table has the frame already; after a kill nobody knows whose it is
            log.warning("r3channel: sample %s would not survive a kill: %s", sample.name, error)


def _check_cut(sample: Sample, tokens_T: Ids, kept: int, *, where: str) -> None:
    if (len(tokens_T), hashes_of(tokens_T)[0]) != (sample.tokens, sample.tokens_hash):
        raise errors.TurnMismatch(
            f"{where}: {len(tokens_T)} tokens are not the {sample.tokens} that its rows were made for; expected the same"
        )
    if not 2 <= kept <= sample.tokens:
        raise errors.RowCountMismatch(
            f"{where}: {kept} of {sample.tokens} tokens are to be left; expected two at least"
        )
