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
from r3channel.relay.sample_table import Sample, Turn
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
        if (turn := self._table.owner(name)) is not None and not turn.cut:
            return turn.end_row - turn.first_row
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
            turn = self._table.owner(name)
            taken = self._table.frame(name, what, now_s=time.monotonic(), cut=self.verifier.cut)
            if taken and turn is not None:
                self._note(turn)
            self._changed.notify_all()
        if isinstance(what, errors.R3Error):
            self._samples.reject(what)
        elif not taken:
            self._samples.free(what)

    # -- replies ---------------------------------------------------------------------------------------------------

    def take(self, turn: Turn, source: Source | None, tokens: Tokens) -> VerifiedRows | None:
        """Take in the bytes of a reply, as `Relay.add_frame` does.

        Args:
            turn: Whose reply it is, and how it is taken in.
            source: The reply's bytes; None leaves its rows to the live router.
            tokens: The whole sequence.

        Returns:
            The verified rows. None where no rows are here yet, or ever.
        """
        with self._receive(turn):
            return self._take(turn, source, tokens)

    def take_parsed(
        self, turn: Turn, reply: object, tokens: Tokens | Callable[[Any], Tokens], text: memoryview | None = None
    ) -> VerifiedRows | None:  # fmt: skip
        """Take in a parsed reply, as `Relay.add` does.

        Args:
            turn: Whose reply it is, and how it is taken in.
            reply: The engine's reply, parsed.
            tokens: The whole sequence, or a function that makes it from the parsed reply.
            text: The frame's base64, where it was cut out of the reply. Else the frame is where SGLang puts it.
        """
        with self._receive(turn):
            return self._take_parsed(turn, reply, tokens, text)

    def take_body(self, turn: Turn, body: bytes, tokens: Tokens | Callable[[Any], Tokens]) -> Any:
        """Take in a reply's body, as `Relay.add_body` does."""
        with self._receive(turn):
            one = replies.read_body(partial(replies.last_event, where=turn.where), body, where=turn.where)
            reply, text = replies.read_body(replies.split_reply, one, where=turn.where)
            self._take_parsed(turn, reply, tokens, text)
        return reply

    def take_bodies(
        self, turns: Sequence[Turn], body: bytes, tokens: Callable[[str, Any], Tokens], *, engine: str
    ) -> dict[str, Any]:
        """Take in a body of several samples, as `Relay.add_bodies` does."""
        self.engines.check(engine)
        names = [turn.sample_id for turn in turns]
        split = replies.read_body(replies.split_replies, body, where=f"samples {names} from engine {engine}")
        if len(split) != len(set(names)):
            raise errors.UsageError(
                f"engine {engine}: {len(split)} replies for the samples {names!r}; expected one name for each"
            )
        taken = dict[str, Any]()
        for turn, (reply, text) in zip(turns, split, strict=True):
            try:
                self.take_parsed(turn, reply, partial(tokens, turn.sample_id), text)
                taken[turn.sample_id] = reply
            except errors.R3Error as error:
                taken[turn.sample_id] = error
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
            self._metrics.inc("r3channel_cut_rows_total", len(tokens_T) - kept)
            with self._changed:
                gone = sample.cut(kept, hashes_of(tokens_T[:kept]), rows)
                self._note(last)
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
            for number, saved in enumerate(turns):
                turn = Turn(
                    sample_id, "recovered", append=number > 0, key=saved.key, tokens=saved.tokens,
                    tokens_hash=saved.tokens_hash, prefix_hash=saved.prefix_hash,
                )  # fmt: skip
                self._enter(turn, saved.source(), room_s=0.0)
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
    def _receive(self, turn: Turn) -> Generator[None]:
        """Receive a reply: count it, and what becomes of it.

        All calls that add a reply use this. The reply counts as received at once, so that the outcomes add up whatever becomes
        of it.
        """
        self._samples.check_open()
        if not turn.append:  # a further turn belongs to a sample that was counted before
            self._samples.count("received")
            if self.clock.trace is not None:
                self.clock.trace.sample(turn.sample_id)
        try:
            with self.clock.span("ingest"):
                self.engines.check(turn.engine)
                yield
        except BaseException as error:  # also where the caller's `tokens` failed, or memory cannot be had
            if isinstance(error, errors.R3Error):  # many have these names in their text only
                error.samples = error.samples or (turn.sample_id,)
                error.engines = error.engines or (turn.engine,)
                self._samples.reject(error)
            if not turn.append:
                self._samples.count("duplicate" if isinstance(error, errors.SampleTwice) else "rejected")
            raise

    def _take_parsed(
        self, turn: Turn, reply: object, tokens: Tokens | Callable[[Any], Tokens], text: memoryview | None
    ) -> VerifiedRows | None:
        try:
            source = replies.Base64Text(
                text or replies.routing_text(reply, where=turn.where), where=turn.where
            )
        except errors.RoutingMissing:
            if self._samples.config.on_missing != "live":
                raise
            source = None
        turn.key = replies.key_of(reply)
        return self._take(turn, source, tokens(reply) if callable(tokens) else tokens)

    def _take(self, turn: Turn, source: Source | None, tokens: Tokens) -> VerifiedRows | None:
        tokens_T, nbytes = as_tokens(tokens), source.left if source else 0
        if len(tokens_T) < 2:
            raise errors.RowCountMismatch(
                f"{turn.where}: {len(tokens_T)} tokens, which have no row; expected two or more"
            )
        turn.live, turn.tokens = source is None, len(tokens_T)
        turn.tokens_hash, turn.prefix_hash = hashes_of(tokens_T)
        if turn.append:
            turn.first_row = self._samples.rows_held(turn.sample_id)
            turn.held_hash = hash_tokens(tokens_T[: turn.first_row])
        self._enter(turn, source or InHand(b""), room_s=self._samples.config.backpressure_timeout_s)
        if (recorder := self._samples.recorder) is not None:
            recorder.keep(turn.sample_id, tokens_T)
        self._metrics.inc("r3channel_rows_total", turn.end_row - turn.first_row)
        for name, own in turn.tensors.rows.items() if turn.tensors else ():
            self._metrics.inc("r3channel_tensor_bytes_total", own.nbytes, tensor=name)
        rows = None if turn.reference else turn.rows
        if rows is not None:
            self._metrics.inc("r3channel_bytes_total", nbytes, leg="engine_frame")
        return rows

    def _enter(self, turn: Turn, source: Source, *, room_s: float) -> None:
        try:
            self._read(turn, source, room_s=room_s)
            with self._changed:
                self._table.reply(turn, now_s=time.monotonic(), cut=self.verifier.cut)
                self._note(turn)
        except BaseException:
            gone = turn.rows
            if turn.reference is not None:  # the reply's direct frame is dropped, too
                with self._changed:
                    gone = self._table.refuse(turn.name)
            self._samples.free(gone)
            if turn.tensors is not None:
                turn.tensors.block.free()
            raise

    def _read(self, turn: Turn, source: Source, *, room_s: float) -> None:
        """Keep a reply's frame or its reference, and the tensors behind it."""
        begun = source.take(min(nbytes := source.left, REFERENCE_BYTES))
        referred, key = bytes(begun[: len(REFERENCE_MAGIC)]) == REFERENCE_MAGIC, None
        if turn.cut and self._tensors:
            raise errors.UsageError(f"{turn.where}: cut=True, and token_tensors are declared")
        what: VerifiedRows | FrameReference | None = None
        if referred:
            if source.left and not self._tensors:
                raise errors.FrameReferenceInvalid(
                    f"{len(begun) + source.left} bytes, expected {REFERENCE_BYTES}; do tensors lie behind the frame reference "
                    "that token_tensors does not name?"
                )
            what = turn.reference = FrameReference.from_bytes(begun)
        elif not turn.live:
            self._samples.expire()
            what = turn.rows = self.verifier.keep(
                source, where=turn.where, max_rows=MOST_ROWS if turn.cut else turn.tokens, room_s=room_s, begun=begun,
                more=bool(self._tensors),
            )  # fmt: skip
        if what is not None:
            key, begin = what.sample_key, max(turn.first_row, what.first_row)
            turn.cut = turn.cut and begin + 1 < turn.tokens <= what.end_row
            if turn.cut:
                self._metrics.inc("r3channel_cut_rows_total", what.end_row - turn.end_row)
                if turn.rows is not None:
                    turn.rows = self.verifier.cut(turn.rows, turn.end_row, where=turn.where, room_s=room_s)
        if self._tensors and nbytes:
            turn.tensors = keep_tensors(
                source, self._samples.store, self._tensors, where=turn.where, tokens=turn.tokens,
                held_rows=turn.first_row, key=key, room_s=room_s,
            )  # fmt: skip

    def _note(self, turn: Turn) -> None:
        """Write to the journal whose frame this is, once both are here."""
        if self._samples.journal is None or turn.rows is None:
            return
        number = self._table.samples[turn.sample_id].turns.index(turn)
        try:
            self._samples.journal.note(
                turn.rows.ref, sample_id=turn.sample_id, turn=number, key=turn.key, tokens_hash=turn.tokens_hash,
                prefix_hash=turn.prefix_hash,
            )  # fmt: skip
        except errors.StoreFull as error:
            # the table has the frame already; after a kill nobody knows whose it is
            log.warning("r3channel: sample %s would not survive a kill: %s", turn.sample_id, error)


def _check_cut(sample: Sample, tokens_T: Ids, kept: int, *, where: str) -> None:
    last = sample.last
    if (len(tokens_T), hashes_of(tokens_T)[0]) != (last.tokens, last.tokens_hash):
        raise errors.TurnMismatch(
            f"{where}: {len(tokens_T)} tokens are not the {last.tokens} that its rows were made for; expected the same"
        )
    if not 2 <= kept <= last.tokens:
        raise errors.RowCountMismatch(
            f"{where}: {kept} of {last.tokens} tokens are to be left; expected two at least"
        )
