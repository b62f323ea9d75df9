"""Sealed steps: what each takes from the table, what each receiver gets of it, and who has acknowledged it. Knows no connection.

    sealed -> prepared (in the background: where each receiver's rows lie) -> acknowledged by every receiver -> gone
                                       \\-> abandoned: its samples wait for a step again

Nothing is copied: a receiver's rows are sent from where they lie in the store, and stay until the last acknowledgement.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from r3channel.errors import FrameCorrupt, R3Error
from r3channel.plan.masks import brings_masks, cut_masks
from r3channel.plan.shards import ShardKey
from r3channel.plan.stream import Stream
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.relay.sample_table import Sample
from r3channel.relay.token_tensors import HeldMasks
from r3channel.relay.verify import VerifiedRows
from r3channel.wire.digest import fold, layer_digests
from r3channel.wire.routing import Ids

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class RowStream:
    """What one receiver gets: rows from where they lie, then the digests that they must have."""

    stream: Stream
    rows: dict[str, list[VerifiedRows]]
    """Sample -> its turns."""
    digests: bytes
    bucket_bytes: int
    masks: Mapping[str, Sequence[HeldMasks]] | None = None
    """Sample -> its turns' sampling masks; None where this receiver gets none."""

    def cut_masks(self, *, step: int) -> bytes:
        """Its part of the sampling masks. Raises FrameCorrupt."""
        masks = self.masks or {}
        names = (sample.sample_id for sample in self.stream.samples)
        found = {name: [held.whole(name, step=step) for held in masks.get(name, ())] for name in names}
        return cut_masks(self.stream.shard, found)

    def pieces(self) -> Iterator[Ids]:
        """The rows in order, each piece [rows, all MoE layers, K], a view of the store."""
        for sample, position, rows in self.stream.sends():
            end = position + rows
            for turn in self.rows[self.stream.samples[sample].sample_id]:
                first, last = max(position, turn.first_row), min(end, turn.end_row)
                if first < last:
                    yield turn.ids_TLK[first - turn.first_row : last - turn.first_row]

    def whole(self) -> bool:
        """Do rows travel with all their layers, as they lie?"""
        return len(self.stream.columns) == self.stream.shard.spec.num_moe_layers

    def fill(self, buffers: Sequence[_Bytes]) -> Iterator[tuple[int, int]]:
        """Gather the rows into buffers of one size, in turn; yields (which, bytes in it). Whole rows only."""
        stream, spec = self.stream, self.stream.shard.spec
        columns: Any = list(stream.columns)
        if columns and columns == list(range(columns[0], columns[-1] + 1)):
            columns = slice(columns[0], columns[-1] + 1)  # a copy without an index array
        room = len(buffers[0]) // stream.row_bytes if stream.row_bytes else 0
        shape = (room, len(stream.columns), spec.top_k)
        arrays = [buffer[: room * stream.row_bytes].view(spec.id_dtype).reshape(shape) for buffer in buffers]
        slot = at = 0
        for piece in self.pieces() if room else ():
            while len(piece):
                count = min(len(piece), room - at)
                arrays[slot][at : at + count] = piece[:count, columns]
                piece, at = piece[count:], at + count
                if at == room:
                    yield slot, at * stream.row_bytes
                    slot, at = (slot + 1) % len(buffers), 0
        if at:
            yield slot, at * stream.row_bytes

    def batches(self, nbytes: int) -> Iterator[list[memoryview]]:
        """The rows as they lie, in lists of at most so many bytes: each is sent within one deadline."""
        batch, size = [], 0
        for piece in self.pieces():
            rest = piece.reshape(-1).view(np.uint8).data
            while len(rest):
                part, rest = rest[: nbytes - size], rest[nbytes - size :]
                batch.append(part)
                size += len(part)
                if size == nbytes:
                    yield batch
                    batch, size = [], 0
        if batch:
            yield batch


@dataclass(eq=False)
class SealedStep:
    """Guarded by the relay's condition, `prepare` aside: that is the background's, and what it makes is published whole."""

    ticket: Ticket
    rows: dict[str, list[VerifiedRows]]
    """Sample -> its turns with rows, ascending."""
    masks: Mapping[str, Sequence[HeldMasks]]
    """Sample -> its turns' sampling masks."""
    sealed_s: float = field(default_factory=time.monotonic)
    acknowledged: set[ShardKey] = field(default_factory=set)
    had: set[ShardKey] = field(default_factory=set)
    """Who acknowledged to the relay before this one: not waited for, but one that never learned of it comes again."""
    in_use: bool = True
    """Until it is prepared and recorded: its rows are read meanwhile, whoever has acknowledged."""
    outgoing: dict[ShardKey, RowStream] = field(default_factory=dict)
    error: R3Error | None = None
    """Why it cannot be delivered; receivers that ask are told."""

    @cached_property
    def keys(self) -> tuple[ShardKey, ...]:
        """All receivers."""
        layout = self.ticket.layout
        return tuple(
            (dp, pp, cp) for dp in range(layout.dp) for pp in range(layout.pp) for cp in range(layout.cp)
        )

    @cached_property
    def _missing(self) -> dict[ShardKey, None]:
        """Struck off one by one: nobody looks at a thousand receivers for each that acknowledges."""
        return {key: None for key in self.keys if key not in self.had}

    @property
    def missing(self) -> tuple[ShardKey, ...]:
        """Receivers that have not acknowledged, to be named."""
        return tuple(self._missing)

    @property
    def awaited(self) -> bool:
        """Whether some receiver has not acknowledged."""
        return bool(self._missing)

    @property
    def done(self) -> bool:
        """Nobody can ask for it again, and nobody here reads its rows."""
        return len(self.acknowledged) == len(self.keys) and not self.in_use

    def acknowledge(self, key: ShardKey) -> None:
        self.acknowledged.add(key)
        self._missing.pop(key, None)

    @property
    def state(self) -> str:
        if self.error is not None:
            return "FAILED"
        return "PREPARED" if all(key in self.outgoing for key in self.keys) else "SEALED"

    def prepare(self, dp: int) -> dict[ShardKey, RowStream]:
        """What the receivers of one DP rank get. Raises FrameCorrupt where rows are not what they were when they came."""
        keys = [key for key in self.keys if key[0] == dp]
        plan = self.ticket.plan
        streams = {key: Stream.of(self.ticket, plan.shard(dp=dp, pp=key[1], cp=key[2])) for key in keys}
        first = next(iter(streams.values()))
        engine_SL = np.stack([self._digests_of(sample.sample_id) for sample in first.samples])
        parts = {cp: engine_SL for _, _, cp in keys}
        if self.ticket.layout.cp > 1:
            parts = {cp: self._part(streams[key]) for key in keys for cp in [key[2]] if key[1] == keys[0][1]}
            self._attest(first, engine_SL, sum(parts.values(), np.zeros_like(engine_SL)))
        return {
            key: RowStream(
                stream,
                self.rows,
                engine_SL.tobytes() + self._own(stream, parts[key[2]]),
                self.ticket.bucket_bytes,
                self.masks if brings_masks(self.ticket, stream.shard) else None,
            )
            for key, stream in streams.items()
        }

    def verify(self, names: list[str]) -> None:
        """Look again at samples, some of which a receiver found damaged. Raises FrameCorrupt with those that are."""
        looked_at = list[tuple[str, Ids]]()
        for name in names:
            for turn in self.rows.get(name, ()):
                found_L = layer_digests(turn.ids_TLK, first_row=turn.first_row, valid_T=valid_rows(turn))
                looked_at.append((name, turn.digests_L != found_L))
        self._refuse(looked_at)

    def _digests_of(self, name: str) -> Ids:
        turns = self.rows.get(name, ())
        return sum((turn.digests_L for turn in turns), np.zeros(self.ticket.spec.num_moe_layers, np.uint64))

    def _part(self, stream: Stream) -> Ids:
        """[sample, MoE layer]: the digests of the rows that one CP rank gets, whatever its stage."""
        found_SL = np.zeros((len(stream.samples), self.ticket.spec.num_moe_layers), np.uint64)
        for sample, position, rows in stream.sends():
            end = position + rows
            for turn in self.rows[stream.samples[sample].sample_id]:
                first, last = max(position, turn.first_row), min(end, turn.end_row)
                if first < last:
                    ids_TLK = turn.ids_TLK[first - turn.first_row : last - turn.first_row]
                    found_SL[sample] += layer_digests(ids_TLK, first_row=first)
        return found_SL

    def _attest(self, stream: Stream, engine_SL: Ids, found_SL: Ids) -> None:
        """The parts of a sample must add up to what its engine saw: what was changed at rest is noticed here."""
        names = [sample.sample_id for sample in stream.samples]
        self._refuse(zip(names, engine_SL != found_SL, strict=True))

    def _refuse(self, looked_at: Iterable[tuple[str, Ids]]) -> None:
        """(sample, whether each layer differs): FrameCorrupt with all that do."""
        moe_layers = self.ticket.spec.moe_layers
        wrong = {
            name: [moe_layers[index] for index in np.flatnonzero(differs_L)]
            for name, differs_L in looked_at
            if differs_L.any()
        }
        if wrong:
            name, layers = next(iter(wrong.items()))
            raise FrameCorrupt(
                f"step {self.ticket.step}: sample {name}, layers {layers} ({len(wrong)} samples in all): the ids at rest in "
                "the relay are not those that the engine hashed; was memory or disk damaged? Abandon the step, discard "
                "the samples and generate them again",
                samples=wrong,
                step=self.ticket.step,
            )

    @staticmethod
    def _own(stream: Stream, part_SL: Ids) -> bytes:
        return np.ascontiguousarray(part_SL[:, list(stream.columns)]).tobytes()


def ticket_sample(sample: Sample) -> TicketSample:
    """As the ticket describes it. What nobody has is invalid."""
    known: list[Any] = [(turn, turn.rows) for turn in sample.turns]
    one = known[0][1]
    if len(known) == 1 and one is not None:  # as nearly all are
        return TicketSample(
            sample.name, sample.tokens, sample.tokens_hash, one.fold, one.provenance, one.invalid
        )
    tables = [rows.digests_L for _, rows in known if rows is not None]
    digest = fold(np.add.reduce(tables)) if tables else 0
    return TicketSample(
        sample.name,
        sample.tokens,
        sample.tokens_hash,
        digest,
        tuple(span for _, rows in known if rows is not None for span in rows.provenance),
        _joined(
            span
            for turn, rows in known
            for span in (((turn.first_row, turn.end_row),) if rows is None else rows.invalid)
        ),
    )


def _joined(spans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ascending ranges; those that touch are one.

    >>> _joined([(0, 2), (2, 5), (7, 8)])
    ((0, 5), (7, 8))
    """
    found: list[tuple[int, int]] = []
    for start, end in spans:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, end))
    return tuple(found)


def valid_rows(turn: VerifiedRows) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """[T] bool of a turn's rows."""
    valid_T = np.ones(len(turn.ids_TLK), bool)
    for start, end in turn.invalid:
        valid_T[start - turn.first_row : end - turn.first_row] = False
    return valid_T
