"""From a claim whose frame is here to a sample in the inbox: whole at once, or a later turn behind the rows that are held."""

from __future__ import annotations

import numpy as np

from r3channel.errors import SampleUnknown, TokensChanged
from r3channel.metrics import Metrics, StageClock
from r3channel.plan.ticket import TicketSample
from r3channel.recording import Recorder
from r3channel.relay.awaited import Awaited
from r3channel.relay.inbox import Frames, Inbox
from r3channel.relay.ingest import check_fit, invalid_ranges
from r3channel.relay.splice import check_adjoins, join_frames
from r3channel.relay.store import FrameStore
from r3channel.spec import RoutingSpec
from r3channel.wire.frame import Frame, open_verified


class Keeper:
    """One claim at a time, in the order of the replies: the intake calls with its own condition held."""

    def __init__(
        self,
        spec: RoutingSpec,
        *,
        store: FrameStore,
        inbox: Inbox,
        clock: StageClock,
        metrics: Metrics,
        recorder: Recorder | None,
    ) -> None:
        self._spec, self._store, self._inbox = spec, store, inbox
        self._clock, self._metrics, self._recorder = clock, metrics, recorder

    def keep(self, claim: Awaited) -> None:
        """Put the claim's frame into the inbox. The frame of a later turn is copied, so its own place may be freed.

        Raises RowCountMismatch and PayloadCorrupt for a frame that is not of this claim, TokensChanged and SampleUnknown for a
        turn that does not continue what is held, StoreFull; then the inbox is as it was.
        """
        assert claim.arrived is not None
        frame, data = claim.arrived.frame, claim.arrived.data
        kept: Frames = claim.arrived.key or data
        turn_rows = frame.rows
        if claim.adds_turn:
            frame, kept = self._joined(claim, frame)
        else:
            _check_fit(claim, frame, held_rows=0)
        sample = TicketSample(
            claim.sample_id, len(claim.tokens), frame.payload_hash, frame.provenance, invalid_ranges(frame)
        )
        with self._clock.span("ingest"):
            keep = self._inbox.replace if claim.adds_turn else self._inbox.put
            if self._recorder is not None:  # first: a step may take the sample as soon as it is in the inbox
                self._inbox.check_free(claim.sample_id, unless_held=claim.adds_turn)
                whole = data if isinstance(kept, str) else kept
                self._recorder.keep(claim.sample_id, bytes(whole), claim.tokens)
            keep(sample, kept, claim.tokens)
        if not claim.adds_turn:
            self._metrics.inc("r3channel_samples_total", outcome="received")
        self._metrics.inc("r3channel_bytes_total", claim.arrived.frame.nbytes, leg="engine_frame")
        self._metrics.inc("r3channel_rows_total", turn_rows)

    def _joined(self, claim: Awaited, turn: Frame) -> tuple[Frame, bytes]:
        """The frame of the rows that are held with this turn's behind them."""
        held = self._inbox.held(claim.sample_id)
        if held is None:
            raise SampleUnknown(f"sample {claim.sample_id}: the turn before was rejected or taken by a step")
        where = claim.where
        held_rows = held.sample.tokens - 1
        check_adjoins(held_rows=held_rows, first_row=turn.first_row, where=where)
        _check_fit(claim, turn, held_rows=held_rows)
        if not np.array_equal(claim.tokens[:held_rows], held.tokens[:held_rows]):
            raise TokensChanged(
                f"{where}: the first {held_rows} tokens differ from those that the held rows were made for; expected the same. "
                "Was the conversation tokenized anew? Append token ids, not text"
            )
        before = open_verified(
            self._store.get(held.key),
            spec=self._spec,
            payload_hash=held.sample.frame_hash,
            sample_id=claim.sample_id,
        )
        return join_frames(before, turn, sample_id=claim.sample_id)


def _check_fit(claim: Awaited, frame: Frame, *, held_rows: int) -> None:
    check_fit(
        first_row=frame.first_row,
        rows=frame.rows,
        key=frame.sample_key,
        tokens=len(claim.tokens),
        expected_key=claim.key,
        held_rows=held_rows,
        where=claim.where,
    )
