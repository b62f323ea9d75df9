"""One recorded step: its ticket, frames and tokens. A step can be verified, replayed and cut for other trainers.

This module knows no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from r3channel.errors import RecordingInvalid, SampleUnknown, TicketMismatch
from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.placement import place_samples, spread_ids
from r3channel.plan.shards import Shard, ShardKey
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.plan.token_tensors import cut_tensor, received_tensors
from r3channel.wire.digest import fold
from r3channel.wire.frame import Frame, parse_frame
from r3channel.wire.routing import Ids, ProvenanceSpan, hash_tokens
from r3channel.wire.tensor_frame import TensorRows, entries_of, parse_tensors, row_lengths
from r3channel.wire.token_tensors import TokenTensor

Bytes = bytes | memoryview
SampleKey = tuple[str, str]
"""(pass, sample)."""
PASSES = ("engine", "forward", "recompute", "logprob")
"""The pass of a frame, by the `part` of its record."""


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step. Frames are verified again whenever their rows are read; nothing is unpickled."""

    ticket: Ticket
    frames: Mapping[str, Sequence[Bytes]]
    """The frames of a sample's turns, by sample id."""
    tokens: Mapping[str, Ids]
    """int32 [tokens] by sample id; only of samples whose tokens were written."""
    spec: RoutingSpec
    """The routing shape of the ids. The routers' side has that of the trainer's model, which may have more layers or columns."""
    side: str = "engine"
    cut: tuple[str, ...] = ()
    """Samples that are not whole, because the recorder ended or a relay's segment is missing."""
    passes: Mapping[SampleKey, Sequence[Bytes]] = field(default_factory=dict)
    """(pass, sample) -> frames, on the routers' side; `frames` are those of `forward`."""
    tensors: Mapping[str, Sequence[Bytes]] = field(default_factory=dict)
    """Frames of the tensors that tokens bring beside expert ids, one for each turn, by sample id."""
    logprobs: Mapping[str, Ids] = field(default_factory=dict)
    """Columns in the form of `logprobs`; empty where none were written."""
    untested: tuple[str, ...] = ()
    """Sentences that say what this cut of the step leaves out or cannot show."""

    @property
    def number(self) -> int:
        return self.ticket.step

    @property
    def samples(self) -> tuple[TicketSample, ...]:
        """Return the whole samples in the ticket's order."""
        return tuple(sample for sample in self.ticket.samples if sample.sample_id not in set(self.cut))

    def parse(self, sample_id: str, *, of_pass: str = "forward") -> list[Frame]:
        """Return a sample's frames, verified except for their ids.

        Args:
            sample_id: a sample of the ticket.
            of_pass: the pass whose frames are read, one of `PASSES`.

        Raises:
            SampleUnknown: the recording does not have the sample.
            RecordingInvalid: the sample is in `cut`, or a frame has rows that the sample does not have.
            FrameError: a frame is damaged.
        """
        sample = self.ticket.sample(sample_id)
        if sample_id in self.cut:
            raise RecordingInvalid(
                f"sample {sample_id} of step {self.number} was cut off when the recording ended, or a relay's segment is not "
                f"here; {len(self.samples)} other samples are whole", samples=[sample_id], step=self.number,
            )  # fmt: skip
        frames = self.passes.get((of_pass, sample_id), self.frames.get(sample_id))
        if frames is None:
            raise SampleUnknown(f"sample {sample_id} is not in the recording of step {self.number}")
        options: dict[str, Any] = {"spec": self.spec, "sample_id": sample_id, "engine": "recording"}
        parsed = [parse_frame(data, **options) for data in frames]
        for frame in parsed:
            _check_inside(sample, frame.first_row, frame.rows)
        return parsed

    def rows(self, sample_id: str) -> Ids:
        """Return a sample's ids after checking every id.

        On the engines' side the rows are also checked against the ticket's digest.

        Returns:
            [tokens - 1, L, K]; rows without routing hold pad ids.

        Raises:
            TicketMismatch: the bytes are another sample's.
            R3Error: a frame is not valid; the errors are those of `parse` and `Frame.verify`.
        """
        frames = self.parse(sample_id)
        pads_TK = spread_ids(self.spec, positions_T=np.arange(self.ticket.sample(sample_id).tokens - 1))
        rows_TLK = np.repeat(pads_TK[:, None], self.spec.num_moe_layers, axis=1)
        digest_L = np.zeros(self.spec.num_moe_layers, np.uint64)
        for frame in frames:
            frame_TLK = rows_TLK[frame.first_row : frame.first_row + frame.rows]
            frame_TLK[frame.valid_T] = frame.verify()[frame.valid_T]
            digest_L += frame.digests_L
        if self.side == "engine":
            self._hold(sample_id, fold(digest_L) if frames else 0)
        return rows_TLK

    def ids(self, sample_id: str, *, of_pass: str = "forward") -> tuple[Ids, Ids]:
        """Return a sample's ids as they lie on disk, unchecked.

        Returns:
            ids [tokens - 1, L, K], and [tokens - 1] bool, True for rows that are there.
        """
        rows = self.ticket.sample(sample_id).tokens - 1
        ids_TLK = np.zeros((rows, self.spec.num_moe_layers, self.spec.top_k), self.spec.id_dtype)
        there_T = np.zeros(rows, bool)
        for frame in self.parse(sample_id, of_pass=of_pass):
            if frame.first_row == 0 and frame.rows == rows and frame.valid_T.all():
                return frame.ids(), frame.valid_T
            frame_rows = slice(frame.first_row, frame.first_row + frame.rows)
            ids_TLK[frame_rows], there_T[frame_rows] = frame.ids(), frame.valid_T
        return ids_TLK, there_T

    def tensor_rows(self, tensor: TokenTensor, sample_id: str) -> list[TensorRows]:
        """Return the rows of a tensor that each turn brings.

        Raises:
            FrameError: a frame is damaged.
            RecordingInvalid: a turn brings rows that the sample does not have.
            RoutingMissing: a turn does not bring the tensor.
        """
        tensors, where, begin = self.ticket.tensors, f"recording, sample {sample_id}", 0
        turns = [parse_tensors(data, tensors, where=where) for data in self.tensors.get(sample_id, ())]
        found = [rows for turn in turns for rows in turn if rows.tensor.name == tensor.name]
        for rows in found:
            _check_inside(self.ticket.sample(sample_id), rows.first_row, len(rows.lengths_T), begin=begin)
            begin = rows.end_row
        return found

    def tensor_whole(self, tensor: TokenTensor, sample_id: str) -> TensorRows:
        """Return a tensor's rows as if the sample had one turn.

        The turn begins at the sample's first token. A row that no turn brought is empty. The errors are those of `tensor_rows`.
        """
        turns, rows = self.tensor_rows(tensor, sample_id), self.ticket.sample(sample_id).tokens - 1
        return TensorRows(tensor, 0, row_lengths(turns, rows), entries_of(tensor, turns))

    def tensor_shard(self, shard: Shard) -> dict[str, Ids]:
        """Return the bytes of each tensor that this shard receives, by name.

        The result is the argument `tensors` of `RankShard.from_whole`.
        """
        names, arrays = [name for batch in shard.microbatches for name in batch.sample_ids], dict[str, Ids]()
        for tensor in received_tensors(self.ticket, shard):
            data = cut_tensor(shard, tensor, {name: self.tensor_rows(tensor, name) for name in names})
            arrays[tensor.name] = np.frombuffer(data, np.uint8)
        return arrays

    def _hold(self, sample_id: str, digest: int) -> None:
        sample = self.ticket.sample(sample_id)
        tokens = self.tokens.get(sample_id)
        tokens_hash = sample.tokens_hash if tokens is None else hash_tokens(tokens)
        if (digest, tokens_hash) != (sample.digest, sample.tokens_hash):
            raise TicketMismatch(
                f"sample {sample_id}: (digest, hash of the tokens) in the recording are {(digest, tokens_hash)}, the ticket says "
                f"{(sample.digest, sample.tokens_hash)}. Were files of two recordings mixed?"
            )

    def replan(self, layout: TrainerLayout, *, microbatch_size: int) -> RecordedStep:
        """Cut the whole samples for another trainer, balanced over its DP ranks.

        The result has no log-probs: they belong to the places that samples had before.
        """
        lengths = {sample.sample_id: sample.tokens for sample in self.samples}
        assignment = Assignment.balanced(lengths, dp=layout.dp, microbatch_size=microbatch_size)
        samples = tuple(map(self.ticket.sample, assignment.sample_ids))
        ticket = replace(self.ticket, layout=layout, assignment=assignment, samples=samples)
        return replace(self, ticket=ticket, cut=(), logprobs={})  # log-probs name samples by their old places

    def shards(self, *, dp: int) -> dict[ShardKey, Ids]:
        """Return one DP rank's uint8 shards, as its receivers end with them.

        Returns:
            (dp, pp, cp) -> shard, for all pipeline stages and CP ranks.
        """
        return place_samples(self.ticket.plan, dp=dp, ids_of=self.rows)


def _check_inside(sample: TicketSample, first_row: int, rows: int, *, begin: int = 0) -> None:
    # An earlier turn has the rows before `begin`; rows outside come from a record of another sample.
    if not begin <= first_row <= first_row + rows <= sample.tokens - 1:
        raise RecordingInvalid(
            f"sample {sample.sample_id}: rows {first_row}..{first_row + rows}, expected {begin}..{sample.tokens - 1} at most: is "
            "the record another sample's?", samples=[sample.sample_id],
        )  # fmt: skip


def spread(spans: Sequence[ProvenanceSpan], rows: int) -> tuple[Ids, Ids]:
    """Return (version, kind) of each row, -1 for rows without a span."""
    version, kind = np.full(rows, -1, np.int64), np.full(rows, -1, np.int64)
    for span in spans:
        version[span.start : span.end], kind[span.start : span.end] = span.weight_version, int(span.kind)
    return version, kind
