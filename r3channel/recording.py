"""A step on disk: frames, ticket and tokens, to be replayed in a unit test without an engine, Ray or a relay.

    DIR/step-000003/ticket.bin      the ticket's bytes
                    frames.bin      the samples' frames, turn by turn, one after another, in the ticket's order
                    frames.json     {"sizes": [[bytes of each turn's frame] of each sample]}
                    tokens.npz      one int32 array per sample: t0, t1, ... in the ticket's order

Nothing here is unpickled; frames are verified again when they are read.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from r3channel.errors import FrameTruncated, SampleUnknown, TicketMismatch
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.place import place_samples, spread_ids
from r3channel.plan.shards import ShardKey
from r3channel.plan.ticket import Ticket
from r3channel.routing import Ids, ProvenanceSpan
from r3channel.tokens import hash_tokens
from r3channel.wire.digest import fold
from r3channel.wire.frame import encode_frame, parse_frame

log = logging.getLogger(__name__)

NO_TOKENS: Ids = np.empty(0, np.int32)


def step_folder(root: str | Path, step: int) -> Path:
    return Path(root) / f"step-{step:06d}"


class TurnRows(Protocol):
    """Rows of one turn, as `relay.rows.HeldRows` has them."""

    @property
    def ids_TLK(self) -> Ids: ...
    @property
    def first_row(self) -> int: ...
    @property
    def sample_key(self) -> int: ...
    @property
    def provenance(self) -> tuple[ProvenanceSpan, ...]: ...
    @property
    def invalid(self) -> tuple[tuple[int, int], ...]: ...


@dataclass
class Recorder:
    """Keeps the tokens of what a relay receives until its step is sealed, then writes both. Called by the relay, from any thread.

    What cannot be written (a full disk) is lost for the recording and for nobody else: said once in the log, counted in `lost`.
    """

    root: Path
    lost: int = 0
    """Steps that could not be written."""
    _kept: dict[str, Ids] = field(default_factory=dict)

    def keep(self, sample_id: str, tokens: Ids) -> None:
        self._kept[sample_id] = tokens

    def forget(self, sample_id: str) -> None:
        self._kept.pop(sample_id, None)

    def write(self, ticket: Ticket, rows: Mapping[str, Sequence[TurnRows]]) -> Path | None:
        """Write a sealed step and forget its tokens; returns its folder, None where it could not be written."""
        folder = step_folder(self.root, ticket.step)
        scratch = folder.with_name(f".{folder.name}-{os.getpid()}")
        tokens = [self._kept.pop(sample.sample_id, NO_TOKENS) for sample in ticket.samples]
        try:
            self._write(ticket, rows, tokens, scratch)
            if folder.exists():
                shutil.rmtree(folder)
            scratch.rename(folder)  # a step's folder is there whole or not at all
        except OSError as error:
            self.lost += 1
            log.warning("r3channel: step %d is not recorded: %s", ticket.step, error)
            shutil.rmtree(scratch, ignore_errors=True)
            return None
        return folder

    def _write(
        self,
        ticket: Ticket,
        rows: Mapping[str, Sequence[TurnRows]],
        tokens: Sequence[Ids],
        scratch: Path,
    ) -> None:
        scratch.mkdir(parents=True)
        turns = [[_frame_of(turn, ticket) for turn in rows.get(s.sample_id, ())] for s in ticket.samples]
        (scratch / "frames.bin").write_bytes(b"".join(frame for own in turns for frame in own))
        sizes = [[len(frame) for frame in own] for own in turns]
        (scratch / "frames.json").write_text(json.dumps({"sizes": sizes}))
        arrays: dict[str, Any] = {f"t{index}": own for index, own in enumerate(tokens)}
        np.savez(scratch / "tokens.npz", **arrays)
        (scratch / "ticket.bin").write_bytes(ticket.to_bytes())


def _frame_of(turn: TurnRows, ticket: Ticket) -> bytes:
    valid_T = np.ones(len(turn.ids_TLK), bool)
    for start, end in turn.invalid:
        valid_T[start - turn.first_row : end - turn.first_row] = False
    return encode_frame(
        ticket.spec,
        expert_ids_TLK=turn.ids_TLK,
        first_row=turn.first_row,
        valid_T=valid_T,
        provenance=turn.provenance,
        sample_key=turn.sample_key,
        codec="stored",
    )


@dataclass(frozen=True)
class Recording:
    """One recorded step."""

    ticket: Ticket
    frames: dict[str, list[bytes]]
    """Those of a sample's turns, by sample id."""
    tokens: dict[str, Ids]
    """int32 [tokens] by sample id."""

    @classmethod
    def load(cls, folder: str | Path) -> Recording:
        """Read a step's folder; raises `TicketMismatch` or `FrameTruncated` for one that is damaged."""
        path = Path(folder)
        try:
            ticket = Ticket.from_bytes((path / "ticket.bin").read_bytes())
            data = (path / "frames.bin").read_bytes()
        except OSError as error:
            raise FrameTruncated(f"{path}: expected the folder of one recorded step: {error}") from error
        try:
            listed = json.loads((path / "frames.json").read_text())["sizes"]
            sizes = [[int(size) for size in own] for own in listed]
            with np.load(path / "tokens.npz", allow_pickle=False) as arrays:
                tokens = {s.sample_id: arrays[f"t{index}"] for index, s in enumerate(ticket.samples)}
        except (ValueError, KeyError, TypeError, OSError, zipfile.BadZipFile) as error:
            raise FrameTruncated(f"{path}: frames.json or tokens.npz is damaged: {error!r}") from error
        total = sum(map(sum, sizes))
        if (
            total != len(data)
            or len(sizes) != len(ticket.samples)
            or any(min(own, default=0) < 0 for own in sizes)
        ):
            raise FrameTruncated(
                f"{path}: {len(sizes)} samples with {total} bytes of frames announced, {len(data)} bytes for "
                f"{len(ticket.samples)} samples found"
            )
        frames, at = {}, 0
        for sample, own in zip(ticket.samples, sizes, strict=True):
            ends = [at + sum(own[: number + 1]) for number in range(len(own))]
            frames[sample.sample_id] = [data[end - size : end] for size, end in zip(own, ends, strict=True)]
            at += sum(own)
        return cls(ticket, frames, tokens)

    def rows(self, sample_id: str) -> Ids:
        """[tokens - 1, L, K] of a sample, verified against the ticket; rows without routing hold pad ids.

        Raises `TicketMismatch` for another sample's bytes, and as `Frame.verify`.
        """
        if sample_id not in self.frames:
            raise SampleUnknown(f"sample {sample_id} is not in the recording of step {self.ticket.step}")
        spec, known = self.ticket.spec, self.ticket.sample(sample_id)
        rows_TLK = np.broadcast_to(
            spread_ids(spec, positions_T=np.arange(known.tokens - 1))[:, None],
            (known.tokens - 1, spec.num_moe_layers, spec.top_k),
        ).copy()
        digest_L = np.zeros(spec.num_moe_layers, np.uint64)
        for data in self.frames[sample_id]:
            frame = parse_frame(
                data, spec=spec, sample_id=sample_id, engine="recording", max_rows=known.tokens
            )
            own_TLK = rows_TLK[frame.first_row : frame.first_row + frame.rows]
            own_TLK[frame.valid_T] = frame.verify()[frame.valid_T]
            digest_L += frame.digests_L
        seen = (fold(digest_L) if self.frames[sample_id] else 0, hash_tokens(self.tokens[sample_id]))
        if seen != (known.digest, known.tokens_hash):
            raise TicketMismatch(
                f"sample {sample_id}: (digest, hash of the tokens) in the recording are {seen}, the ticket says "
                f"{(known.digest, known.tokens_hash)}. Were files of two recordings mixed?"
            )
        return rows_TLK

    def replan(self, layout: TrainerLayout, *, microbatch_size: int) -> Recording:
        """The same samples cut for another trainer: balanced over its DP ranks."""
        by_id = {sample.sample_id: sample for sample in self.ticket.samples}
        lengths = {name: sample.tokens for name, sample in by_id.items()}
        assignment = Assignment.balanced(lengths, dp=layout.dp, microbatch_size=microbatch_size)
        samples = tuple(by_id[name] for name in assignment.sample_ids)
        return replace(
            self, ticket=replace(self.ticket, layout=layout, assignment=assignment, samples=samples)
        )

    def shards(self, *, dp: int) -> dict[ShardKey, Ids]:
        """The uint8 shards of all pipeline stages and CP ranks of one DP rank, by (dp, pp, cp): what receivers end with."""
        return place_samples(self.ticket.plan, dp=dp, ids_of=self.rows)
