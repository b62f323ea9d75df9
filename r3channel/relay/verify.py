"""From a frame's bytes to verified rows at rest, in one pass. Knows frames and the store; no sample and no step.

Rows that lie in the frame as they are stay where the door read it; those of a reply, and coded ones, are written once, into
the store, and stay decoded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from r3channel.errors import FrameCorrupt, FrameMagicMismatch, R3Error, RoutingError, RowsInvalid
from r3channel.model.spec import RoutingSpec
from r3channel.observe.stage_clock import StageClock
from r3channel.relay.journal import Journal
from r3channel.relay.memory import SMALL_BYTES, Block, Store
from r3channel.wire.digest import fold
from r3channel.wire.frame import Frame, parse_frame
from r3channel.wire.parcel import FrameName, Source, new_memory, read_frames
from r3channel.wire.routing import Ids, ProvenanceSpan, RowKind

DAMAGED = (FrameCorrupt, FrameMagicMismatch)
"""What becomes of a frame on its way; anything else is its engine's own fault, and sending it again mends nothing."""
MOST_ROWS = 1 << 20
"""Rows of a direct frame at most, while its reply has not come and its engine does not say how long sequences may be."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class VerifiedRows:
    """Verified rows of one frame, and the memory that they lie in until `free`."""

    ids_TLK: Ids
    """[T, L, K] in the spec's id dtype, read-only."""
    first_row: int
    sample_key: int
    digests_L: Ids
    """uint64, as the engine made them; checked against `ids_TLK` when these came."""
    provenance: tuple[ProvenanceSpan, ...]
    invalid: tuple[tuple[int, int], ...]
    """Ranges [start, end) of the sample's rows that hold no routing."""
    block: Block
    ref: int
    """Its number, for what survives."""
    fold: int
    """Identity of `digests_L`."""

    @property
    def end_row(self) -> int:
        return self.first_row + len(self.ids_TLK)

    @classmethod
    def of(cls, frame: Frame, ids_TLK: Ids, block: Block, *, ref: int) -> VerifiedRows:
        return cls(
            ids_TLK=ids_TLK,
            first_row=frame.first_row,
            sample_key=frame.sample_key,
            digests_L=frame.digests_L,
            provenance=frame.provenance,
            invalid=_invalid_ranges(frame),
            block=block,
            ref=ref,
            fold=fold(frame.digests_L),
        )


class FrameVerifier:
    """Any thread."""

    def __init__(
        self,
        spec: RoutingSpec,
        store: Store,
        journal: Journal | None,
        *,
        clock: StageClock,
        invalid_rows: str,
    ) -> None:
        self._spec, self._store, self._journal = spec, store, journal
        self._clock, self._invalid_rows = clock, invalid_rows
        self._refs = itertools.count(1)

    def keep(self, data: bytes, *, sample_id: str, engine: str, max_rows: int, room_s: float) -> VerifiedRows:
        """Verify and keep a frame that is in hand. Raises a typed `RoutingError`, or `StoreFull` after `room_s`."""
        frame = self._parsed(data, sample_id, engine, max_rows)
        if (
            not frame.stored or len(data) >= SMALL_BYTES
        ):  # a view of many would keep the caller's bytes beside the block
            return self._decoded(frame, data, room_s=room_s)
        return self._finish(frame, data, None, self._store.adopt(data, timeout_s=room_s, what=frame.where))

    def read(
        self,
        body: Source,
        count: int,
        *,
        boot_id: int,
        engine: str,
        most_rows: Callable[[FrameName], int],
        wanted: Callable[[FrameName], bool],
        take: Callable[[FrameName, VerifiedRows | R3Error], None],
    ) -> None:
        """Read an opened parcel and hand on each frame that is `wanted`, or why it cannot be used.

        A frame that carries its rows is received into the store, at the place where it stays. One with more than `most_rows` is
        refused before it is decoded. Raises FrameReferenceInvalid and StoreFull; then nothing was taken, or it is known
        by its name when it comes again. Raises the error of a frame that was damaged on the way after the others were taken.
        """
        blocks: dict[int, Block] = {}

        def place(serial: int, size: int) -> memoryview:
            if serial in blocks or not wanted((boot_id, serial)):
                return new_memory(serial, size)
            blocks[serial] = self._store.allocate(size, what=f"frame {serial} from engine {engine}")
            return blocks[serial].view

        try:
            with self._clock.span("http"):
                frames = read_frames(body, count, boot_id=boot_id, place=place)
            damaged: R3Error | None = None
            for serial, data in frames:
                if wanted((boot_id, serial)):
                    most = most_rows((boot_id, serial))
                    what = self._land(serial, data, blocks.pop(serial, None), engine, most)
                    take((boot_id, serial), what)
                    damaged = damaged or (what if isinstance(what, DAMAGED) else None)
        finally:
            for block in blocks.values():
                block.free()
        if damaged is not None:
            raise damaged.within(f"a parcel of {count} frames")

    def _land(
        self, serial: int, data: memoryview, block: Block | None, engine: str, max_rows: int
    ) -> VerifiedRows | R3Error:
        try:
            frame = self._parsed(data, f"of frame {serial}", engine, max_rows)
            if block is None or not frame.stored:
                return self._decoded(frame, data)
            kept, block = block, None
            return self._finish(frame, data, None, kept)
        except RoutingError as error:
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)  # it is kept; what was refused is not
        finally:
            if block is not None:
                block.free()

    def _parsed(self, data: bytes | memoryview, sample_id: str, engine: str, max_rows: int) -> Frame:
        with self._clock.span("verify"):
            frame = parse_frame(data, spec=self._spec, sample_id=sample_id, engine=engine, max_rows=max_rows)
            self._check_policy(frame)
            return frame

    def _decoded(self, frame: Frame, data: bytes | memoryview, *, room_s: float = 0.0) -> VerifiedRows:
        """Rows that are coded, or many, are written once, into the store, and looked at there."""
        block = self._store.allocate(frame.raw_nbytes, timeout_s=room_s, what=frame.where)
        shape = (frame.rows, self._spec.num_moe_layers, self._spec.top_k)
        out_TLK = np.frombuffer(block.view, self._spec.id_dtype).reshape(shape)
        return self._finish(frame, data, out_TLK, block)

    def _finish(
        self, frame: Frame, data: bytes | memoryview, out_TLK: Ids | None, block: Block
    ) -> VerifiedRows:
        """Check every id, and write what must survive; whatever is raised, the block is free."""
        try:
            with self._clock.span("verify"):
                ids_TLK = frame.verify(out_TLK)
                ids_TLK.flags.writeable = False
            rows = VerifiedRows.of(frame, ids_TLK, block, ref=next(self._refs))
            if self._journal is not None:
                self._journal.frame(rows.ref, data)
        except BaseException:
            block.free()
            raise
        return rows

    def _check_policy(self, frame: Frame) -> None:
        """Policy `error`: a row without routing is refused by name."""
        missing = [span for span in frame.provenance if span.kind is RowKind.MISSING]
        if self._invalid_rows == "error" and (missing or not frame.valid_T.all()):
            first = int((~frame.valid_T).argmax()) if not frame.valid_T.all() else missing[0].start
            raise RowsInvalid(
                f"{frame.where}: {int((~frame.valid_T).sum())} of {frame.rows} rows hold no routing, the first is row {first}; "
                "expected all rows valid (policy: error)"
            )


def _invalid_ranges(frame: Frame) -> tuple[tuple[int, int], ...]:
    """Ranges of positions without routing, ascending."""
    if frame.valid_T.all():
        return ()
    edges = np.flatnonzero(np.diff(np.concatenate([[True], frame.valid_T, [True]]).astype(np.int8)))
    edges += frame.first_row
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
