"""Turns a frame's bytes into verified rows at rest, in one pass, and the bytes behind them into tensors.

Wherever the bytes come from (a reply's base64, a socket, a file), the few in front of the rows are judged first. Then the rows
are written to where they stay, once, and every id is checked while it is in a cache. This module knows no sample and no step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from xxhash import xxh3_64_intdigest

from r3channel.errors import ExpertIdInvalid, FrameCorrupt, FrameMagicMismatch, RowCountMismatch, RowsInvalid
from r3channel.model.spec import RoutingSpec
from r3channel.observe.stage_clock import StageClock
from r3channel.plan.capacity import beside_bytes
from r3channel.recordings.recorder import head_of
from r3channel.relay.journal import Journal
from r3channel.relay.memory import Block, Store
from r3channel.wire.digest import layer_digests
from r3channel.wire.frame import Frame, read_frame
from r3channel.wire.routing import Ids, ProvenanceSpan, RowKind
from r3channel.wire.source import Source
from r3channel.wire.tensor_frame import TensorRows, parse_tensors
from r3channel.wire.token_tensors import TokenTensor

DAMAGED = (FrameCorrupt, FrameMagicMismatch)
"""Errors of a frame that was damaged on its way. Any other error is the engine's own fault, and sending the frame again does not
mend it."""
MOST_ROWS = 1 << 20
"""Most rows of a direct frame whose reply has not come and whose engine does not say how long sequences may be."""
Ranges = tuple[tuple[int, int], ...]


@dataclass(slots=True, eq=False, kw_only=True)
class VerifiedRows:
    """Verified rows of one frame, and the memory that they lie in until `free`."""

    ids_TLK: Ids
    """[T, L, K] in the spec's id dtype, read-only."""
    first_row: int
    sample_key: int
    digests_L: Ids
    """uint64 per layer, as the engine made them. They were checked against `ids_TLK` when the frame came."""
    provenance: tuple[ProvenanceSpan, ...]
    invalid: Ranges
    """Ranges [start, end) of the sample's rows that hold no routing."""
    block: Block
    ref: int
    """The frame's number in the journal."""

    @property
    def end_row(self) -> int:
        return self.first_row + len(self.ids_TLK)

    def digests_before(self, end_row: int) -> Ids:
        """Return the digests that the rows before `end_row` have in memory now."""
        first, valid_T = self.first_row, np.ones(end_row - self.first_row, bool)
        for start, end in self.invalid:
            valid_T[start - first : end - first] = False
        return layer_digests(self.ids_TLK[: len(valid_T)], first_row=first, valid_T=valid_T)


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensors:
    """The tensors of one turn, valid until their `block` is freed."""

    rows: Mapping[str, TensorRows]
    """By the tensor's name."""
    block: Block
    _hash: int
    """xxh3_64 of the block when it came."""

    def check_tensor(self, tensor: TokenTensor, sample_id: str, *, step: int) -> TensorRows:
        """Return a tensor of this turn, checked against its hash.

        Args:
            tensor: The tensor.
            sample_id: The sample's name, for the error.
            step: The step's number, for the error.

        Raises:
            FrameCorrupt: Memory or disk was damaged since the tensors came.
        """
        if xxh3_64_intdigest(self.block.view) != self._hash:
            raise FrameCorrupt(
                f"step {step}: the {tensor.name} of sample {sample_id} at rest are not those that came; was memory or disk "
                "damaged? Abandon the step, discard the sample and generate it again",
                samples=[sample_id],
                step=step,
            )
        return self.rows[tensor.name]


@dataclass(eq=False, kw_only=True)
class FrameVerifier:
    """Reads frames, verifies them and keeps their rows. Any thread may call."""

    spec: RoutingSpec
    store: Store
    journal: Journal | None
    clock: StageClock
    invalid_rows: str
    """The policy for rows without routing."""
    _refs: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def keep(
        self, source: Source, *, where: str, max_rows: int, room_s: float = 0.0, begun: memoryview | bytes = b"",
        more: bool = False,
    ) -> VerifiedRows:  # fmt: skip
        """Read a frame, verify it and keep its rows.

        `wire.frame.read_frame` describes the arguments that are passed on to it. After an error nothing is kept; what the source
        raises passes.

        Args:
            source: The frame's bytes.
            where: Whose frame it is, for errors.
            max_rows: A frame with more rows is not decoded.
            room_s: Seconds to wait for room.
            begun: Bytes of the header that were read already.
            more: Other bytes may follow the frame.

        Returns:
            The rows, in memory until `free`.

        Raises:
            RoutingError: A typed error says what is wrong with the frame.
            StoreFull: There was no room within `room_s`.
        """
        with self.clock.span("verify"):
            frame = read_frame(source, spec=self.spec, where=where, max_rows=max_rows, begun=begun, more=more)
            edges = frame.invalid_edges
            nbytes = frame.rows * self.spec.bytes_per_token
            beside = beside_bytes(self.spec, spans=len(frame.provenance), ranges=len(edges) // 2)
            # The scratch memory comes first, so that whoever holds memory for rows never waits for more.
            coded = frame.scratch_bytes
            scratch = self.store.allocate(coded, timeout_s=room_s, what=where) if coded else None
            try:
                block = self.store.allocate(nbytes, beside=beside, timeout_s=room_s, what=where)
                try:
                    self._check_policy(frame)
                    rows = self._finish(frame, source, block, scratch)
                    if self.journal is not None:
                        parts = head_of(rows, self.spec), block.view
                        self.journal.frame(rows.ref, parts, timeout_s=room_s, what=where)
                    return rows
                except BaseException:
                    block.free()
                    raise
            finally:
                if scratch is not None:
                    scratch.free()

    def cut(self, rows: VerifiedRows, end_row: int, *, where: str, room_s: float = 0.0) -> VerifiedRows:
        """Return a sample's rows before `end_row`, in the same memory.

        They have digests of their own. A row does not depend on later tokens, so the cut rows are valid. The journal keeps only
        these.

        Args:
            rows: The rows; after an error they are as they were.
            end_row: The first row that is left out.
            where: Whose rows they are, for errors.
            room_s: Seconds to wait for room on the journal's disk.

        Raises:
            FrameCorrupt: The rows are not those that came. New digests would hide that.
            StoreFull: The journal had no room within `room_s`.
        """
        if not np.array_equal(rows.digests_before(rows.end_row), rows.digests_L):
            raise FrameCorrupt(f"{where}: rows at rest are not those that came; was memory damaged?")
        invalid = tuple((start, min(end, end_row)) for start, end in rows.invalid if start < end_row)
        spans = tuple(s._replace(end=min(s.end, end_row)) for s in rows.provenance if s.start < end_row)
        digests_L = rows.digests_before(end_row)
        ids_TLK = rows.ids_TLK[: end_row - rows.first_row]
        kept = replace(rows, ids_TLK=ids_TLK, provenance=spans, invalid=invalid, digests_L=digests_L)
        if self.journal is not None:
            # a frame of its own, so that a recovery after a kill finds these rows alone
            kept.ref = next(self._refs)
            parts = head_of(kept, self.spec), kept.ids_TLK.tobytes()
            self.journal.frame(kept.ref, parts, timeout_s=room_s, what=where)
            self.journal.delete_frames([rows.ref])
        return kept

    def _finish(self, frame: Frame, source: Source, block: Block, scratch: Block | None) -> VerifiedRows:
        shape = (frame.rows, self.spec.num_moe_layers, self.spec.top_k)
        ids_TLK = np.ndarray(shape, self.spec.id_dtype, block.view)
        try:
            frame.fill(source, ids_TLK, scratch and scratch.view)
        except ExpertIdInvalid:
            if self.invalid_rows == "error" or not frame.leave_out_unsound(ids_TLK):
                raise
        ids_TLK.flags.writeable = False
        return VerifiedRows(
            ids_TLK=ids_TLK, first_row=frame.first_row, sample_key=frame.sample_key, digests_L=frame.digests_L,
            provenance=frame.provenance, invalid=_invalid(frame), block=block, ref=next(self._refs),
        )  # fmt: skip

    def _check_policy(self, frame: Frame) -> None:
        missing = [(span.start, span.end) for span in frame.provenance if span.kind is RowKind.MISSING]
        named = _invalid(frame) or missing
        if named and self.invalid_rows == "error":
            raise RowsInvalid(
                f"{frame.where}: {sum(end - start for start, end in named)} of {frame.rows} rows hold no routing, the first is "
                f"row {named[0][0]}; expected all rows valid (policy: error)"
            )


def _invalid(frame: Frame) -> Ranges:
    edges = frame.invalid_edges
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def keep_tensors(
    source: Source, store: Store, tensors: Sequence[TokenTensor], *, where: str, key: int | None, tokens: int,
    held_rows: int, room_s: float,
) -> HeldTensors:  # fmt: skip
    """Keep the tensors that are left of a reply's bytes.

    After an error nothing is kept.

    Args:
        source: The bytes behind the frame or the frame reference.
        store: The store that gives the memory.
        tensors: The declared tensors.
        where: Whose reply it is, for errors.
        key: The request's key; None where it is not known.
        tokens: How many tokens the reply's sample has.
        held_rows: How many rows came before this reply.
        room_s: Seconds to wait for room.

    Raises:
        RowCountMismatch: The tensors' rows or key are not the reply's.
        StoreFull: There was no room in time.
        R3Error: What `parse_tensors` raises.
    """
    block = store.allocate(source.left, timeout_s=room_s, what=where)
    try:
        source.fill(block.view)
        found = parse_tensors(block.view, tensors, where=where)
        for rows in found:
            if rows.end_row != tokens - 1 or rows.first_row < held_rows or key not in (None, rows.sample_key):
                raise RowCountMismatch(
                    f"{where}: {rows.tensor.name} of rows {rows.first_row}..{rows.end_row}, request key {rows.sample_key:#x}; "
                    f"expected rows that begin at {held_rows} or later and end at {tokens - 1}, key {key}. Was the text cut "
                    "after generation, or were replies swapped?"
                )
    except BaseException:
        block.free()
        raise
    return HeldTensors({rows.tensor.name: rows for rows in found}, block, xxh3_64_intdigest(block.view))
