"""The rows of a sealed step for each receiver, from where they lie in the store, and the digests that they must have.

Nothing is copied before it is sent. This module knows no connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from r3channel.errors import FrameCorrupt
from r3channel.plan.row_order import Ints
from r3channel.plan.shards import Shard, ShardKey
from r3channel.plan.stream import Sent, Stream, overlaps, step_streams
from r3channel.plan.ticket import Ticket
from r3channel.plan.token_tensors import cut_tensor, received_tensors
from r3channel.relay.send_buffers import Bytes
from r3channel.relay.verify import HeldTensors, VerifiedRows
from r3channel.wire.digest import range_digests
from r3channel.wire.routing import Ids

Turns = Sequence[VerifiedRows]
HeldOfSample = Mapping[str, Sequence[HeldTensors]]
"""Sample -> its turns' tensors."""
_JOINED_BYTES = 256 << 10
"""Bytes of turns that are digested in one call: joined they fit a second-level cache. Larger turns are not copied."""


@dataclass(frozen=True, slots=True)
class RowStream:
    """The rows of one receiver, followed by the digests that they must have."""

    stream: Stream
    turns: Sequence[Ids]
    """The rows of each turn as they lie in the store, [rows, all MoE layers, K]."""
    places: tuple[Ints, Ints, Ints]
    """Columns turn, first row in the turn, end: the rows that travel, in order. All stages of a CP rank share them."""
    digests: bytes
    bucket_bytes: int
    tensors: Callable[[], list[bytes]] = list
    """Cuts the receiver's part of each tensor that follows the rows (`plan.token_tensors`). Raises FrameCorrupt."""

    def pieces(self) -> Iterator[Ids]:
        """Yield the rows in order, piece by piece.

        Yields:
            Rows [rows, all MoE layers, K], a view of the store.
        """
        for turn, first, end in zip(*(column.tolist() for column in self.places), strict=True):
            yield self.turns[turn][first:end]

    def travels_whole(self) -> bool:
        """Return whether rows travel with all their layers, as they lie."""
        return len(self.stream.columns) == self.stream.shard.spec.num_moe_layers

    def fill(self, buffers: Sequence[Bytes]) -> Iterator[tuple[int, int]]:
        """Gather the receiver's rows into buffers, one buffer after the other.

        A buffer holds whole rows only. The buffers are used in turn.

        Args:
            buffers: Buffers of one size.

        Yields:
            The index of the filled buffer, and the bytes in it.
        """
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
        """Yield the rows as they lie, in lists of limited size.

        Each list is sent within one deadline.

        Args:
            nbytes: Bytes of one list at most.
        """
        batch, size = list[memoryview](), 0
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


class StepRows:
    """The places of a sealed step's rows, by receiver.

    What many receivers share is worked out once, on whole arrays: a step of thousands of samples then holds the interpreter's
    lock for milliseconds.
    """

    def __init__(self, ticket: Ticket, turns: Sequence[Turns], tensors: HeldOfSample) -> None:
        """Compute what all receivers of the step share.

        Args:
            ticket: The step's ticket.
            turns: Each sample's turns with rows, ascending, in the ticket's order.
            tensors: The turns' tensors by sample.
        """
        self._ticket, self._tensors = ticket, tensors
        known = [(turn.ids_TLK, turn.first_row, turn.digests_L) for own in turns for turn in own]
        rows, first_A, digests = zip(*known, strict=True) if known else ((), (), ())
        self._rows: Sequence[Ids] = rows
        self._first_A = np.asarray(first_A, np.int64)
        self._before_A = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        self._turn_S = np.cumsum([0, *map(len, turns)])
        """The number of each sample's first turn. `_before_A`: rows of the turns before each turn. Both end with the total."""
        zeros_L = np.zeros(ticket.spec.num_moe_layers, np.uint64)
        sums_AL = np.cumsum(np.concatenate([zeros_L, *digests]).reshape(-1, len(zeros_L)), axis=0)
        self._engine_SL = sums_AL[self._turn_S[1:]] - sums_AL[self._turn_S[:-1]]
        """The engines' digests, [sample, MoE layer]: the sum of the digests of a sample's turns, modulo 2**64."""
        self._cuts = [self._cut(stream.sent) for stream in step_streams(ticket)]

    def _cut(self, sent: Sent) -> list[Ints]:
        """Return the columns of what travels to a CP rank.

        The columns are sample, turn, first row in the turn, end and position, in the order of travel. They have the samples of
        all DP ranks.
        """
        (sample, position, rows), first_A = sent, self._first_A
        counts = np.diff(self._turn_S), first_A, first_A + np.diff(self._before_A)
        piece, turn, begin, end = overlaps(sample, position, position + rows, *counts)
        return [sample[piece], turn, begin - first_A[turn], end - first_A[turn], begin]

    def receivers(self, dp: int) -> dict[ShardKey, RowStream]:
        """Return the row streams of all receivers of one DP rank.

        Raises:
            FrameCorrupt: Rows are not what they were when they came.
        """
        found = dict[ShardKey, RowStream]()
        ticket, layout, own = self._ticket, self._ticket.layout, self._samples(dp)
        samples, engine = ticket.sample_columns.part(own.start, own.stop), self._engine_SL[own].tobytes()
        parts = self.verify(dp) if layout.cp > 1 else [self._engine_SL[own]]
        for cp, (columns, part_SL) in enumerate(zip(self._cuts, parts, strict=True)):
            part = slice(*np.searchsorted(columns[0], (own.start, own.stop)).tolist())
            sample, turn, first, end, position = (column[part] for column in columns)
            sent = sample - own.start, position, end - first
            for pp in range(layout.pp):
                stream = Stream(ticket.plan.shard(dp=dp, pp=pp, cp=cp), samples, sent)
                digests = engine + part_SL[:, list(stream.columns)].tobytes()
                places, tensors = (turn, first, end), partial(self._cut_tensors, stream.shard)
                found[dp, pp, cp] = RowStream(
                    stream, self._rows, places, digests, ticket.bucket_bytes, tensors
                )
        return found

    def _cut_tensors(self, shard: Shard) -> list[bytes]:
        step, found = self._ticket.step, list[bytes]()
        held = {
            name: self._tensors.get(name, ()) for batch in shard.microbatches for name in batch.sample_ids
        }
        for tensor in received_tensors(self._ticket, shard):
            rows = {
                name: [turn.check_tensor(tensor, name, step=step) for turn in turns]
                for name, turns in held.items()
            }
            found.append(cut_tensor(shard, tensor, rows))
        return found

    def verify(self, dp: int) -> list[Ids]:
        """Compute the digests of one DP rank's rows as they lie here.

        Returns:
            For each CP rank, whatever its stage, the digests [sample, MoE layer] of its rows.

        Raises:
            FrameCorrupt: The digests do not add up to what the engines hashed.
        """
        own, ranks, (turn_P, line_P, edges_P2) = self._samples(dp), len(self._cuts), self._by_turn
        engine_SL = self._engine_SL[own]
        found_NL = np.zeros((ranks * len(engine_SL), engine_SL.shape[1]), np.uint64)
        for turns in self._batches(*self._turn_S[[own.start, own.stop]].tolist()):
            part = slice(*np.searchsorted(turn_P, (turns.start, turns.stop)).tolist())
            edges = edges_P2[part].ravel() - self._before_A[turns.start]
            if len(edges):  # every other range lies between two that travel, and is left out
                digests_PL = range_digests(self._rows[turns], self._first_A[turns], edges)[::2]
                np.add.at(found_NL, line_P[part] - own.start * ranks, digests_PL)
        found_SCL = found_NL.reshape(len(engine_SL), ranks, -1)
        self._attest(own, engine_SL != found_SCL.sum(axis=1))
        return list(found_SCL.transpose(1, 0, 2))

    @cached_property
    def _by_turn(self) -> tuple[Ints, Ints, Ints]:
        """Return all that travels, in the order of the turns.

        The columns are turn, sample * CP ranks + CP rank, and the edges [begin, end) among the rows of all turns.
        """
        sample, turn, first, end, _ = (np.concatenate(columns) for columns in zip(*self._cuts, strict=True))
        rank = np.repeat(np.arange(len(self._cuts)), [len(columns[0]) for columns in self._cuts])
        order, before = np.lexsort((first, turn)), self._before_A[turn]
        edges_P2 = np.stack((before + first, before + end), axis=1)
        return turn[order], (sample * len(self._cuts) + rank)[order], edges_P2[order]

    def _samples(self, dp: int) -> slice:
        begin = self._ticket.plan.microbatches.begin
        return slice(begin[dp], begin[dp + 1])

    def _batches(self, first: int, end: int) -> Iterator[slice]:
        """Yield the turns [first, end) in slices that may be joined."""
        before, most = self._before_A, _JOINED_BYTES // self._ticket.spec.bytes_per_token
        while first < end:
            until = int(np.searchsorted(before, int(before[first]) + most, side="right")) - 1
            yield slice(first, until := min(max(until, first + 1), end))
            first = until

    def _attest(self, own: slice, differs_SL: Ids) -> None:
        names, layers = self._ticket.assignment.sample_ids[own], self._ticket.spec.moe_layers
        wrong = {
            names[sample]: [layers[index] for index in np.flatnonzero(differs_SL[sample])]
            for sample in np.flatnonzero(differs_SL.any(axis=1))
        }
        if wrong:
            step, (name, found) = self._ticket.step, next(iter(wrong.items()))
            raise FrameCorrupt(
                f"step {step}: sample {name}, layers {found} ({len(wrong)} samples in all): the ids at rest in the relay are "
                "not those that the engine hashed; was memory or disk damaged? Abandon the step, discard the samples and "
                "generate them again",
                samples=wrong,
                step=step,
            )
