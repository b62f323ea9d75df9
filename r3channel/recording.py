"""A step on disk: frames, ticket and tokens, to be replayed in a unit test without an engine, Ray or a relay.

    DIR/step-000003/ticket.json     the ticket's bytes
                    frames.bin      the samples' frames, one after another, in the ticket's order
                    frames.json     {"sizes": [bytes of each frame]}
                    tokens.npz      one int32 array per sample: t0, t1, ... in the ticket's order

Nothing here is unpickled; frames are verified again when they are read.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from r3channel.errors import FrameTruncated, SampleUnknown, TicketMismatch
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.place import fill_invalid, place_samples
from r3channel.plan.shards import ShardKey
from r3channel.plan.ticket import Ticket
from r3channel.routing import Ids
from r3channel.wire.frame import Frame, parse_frame


def step_folder(root: str | Path, step: int) -> Path:
    return Path(root) / f"step-{step:06d}"


@dataclass
class Recorder:
    """Keeps what a relay receives until its step is sealed, then writes it. Calls come from the relay, any thread."""

    root: Path
    _kept: dict[str, tuple[bytes, Ids]] = field(default_factory=dict)

    def keep(self, sample_id: str, frame: bytes, tokens: Sequence[int] | Ids) -> None:
        self._kept[sample_id] = (frame, np.asarray(tokens, dtype=np.int32))

    def forget(self, sample_id: str) -> None:
        self._kept.pop(sample_id, None)

    def write(self, ticket: Ticket) -> Path:
        """Write a sealed step and forget its samples; returns its folder."""
        folder = step_folder(self.root, ticket.step)
        scratch = folder.with_name(f".{folder.name}-{os.getpid()}")
        scratch.mkdir(parents=True)
        kept = [self._kept.pop(sample.sample_id) for sample in ticket.samples]
        (scratch / "frames.bin").write_bytes(b"".join(frame for frame, _ in kept))
        (scratch / "frames.json").write_text(json.dumps({"sizes": [len(frame) for frame, _ in kept]}))
        arrays: dict[str, Any] = {f"t{index}": tokens for index, (_, tokens) in enumerate(kept)}
        np.savez(scratch / "tokens.npz", **arrays)
        (scratch / "ticket.json").write_bytes(ticket.to_bytes())
        if folder.exists():
            shutil.rmtree(folder)
        scratch.rename(folder)  # a step's folder is there whole or not at all
        return folder


@dataclass(frozen=True)
class Recording:
    """One recorded step."""

    ticket: Ticket
    frames: dict[str, bytes]
    tokens: dict[str, Ids]
    """int32 [tokens] by sample id."""

    @classmethod
    def load(cls, folder: str | Path) -> Recording:
        """Read a step's folder; raises `TicketMismatch` or `FrameTruncated` for one that is damaged."""
        path = Path(folder)
        try:
            ticket = Ticket.from_bytes((path / "ticket.json").read_bytes())
            data = (path / "frames.bin").read_bytes()
        except OSError as error:
            raise FrameTruncated(f"{path}: expected the folder of one recorded step: {error}") from error
        try:
            sizes = [int(size) for size in json.loads((path / "frames.json").read_text())["sizes"]]
            with np.load(path / "tokens.npz", allow_pickle=False) as arrays:
                tokens = {s.sample_id: arrays[f"t{index}"] for index, s in enumerate(ticket.samples)}
        except (ValueError, KeyError, TypeError, OSError, zipfile.BadZipFile) as error:
            raise FrameTruncated(f"{path}: frames.json or tokens.npz is damaged: {error!r}") from error
        names = [sample.sample_id for sample in ticket.samples]
        if sum(sizes) != len(data) or len(sizes) != len(names):
            raise FrameTruncated(
                f"{path}: {len(sizes)} frames of {sum(sizes)} bytes announced, {len(data)} bytes for {len(names)} samples found"
            )
        ends = np.cumsum(sizes).tolist()
        frames = {name: data[end - size : end] for name, size, end in zip(names, sizes, ends, strict=True)}
        return cls(ticket, frames, tokens)

    def frame(self, sample_id: str) -> Frame:
        """A sample's frame, verified against the ticket. Raises `TicketMismatch` for another sample's bytes."""
        if sample_id not in self.frames:
            raise SampleUnknown(f"sample {sample_id} is not in the recording of step {self.ticket.step}")
        frame = parse_frame(
            self.frames[sample_id], spec=self.ticket.spec, sample_id=sample_id, engine="recording"
        )
        known = self.ticket.sample(sample_id)
        seen = (frame.payload_hash, frame.rows + 1, len(self.tokens[sample_id]))
        if seen != (known.frame_hash, known.tokens, known.tokens):
            raise TicketMismatch(
                f"sample {sample_id}: (frame hash, rows + 1, tokens) in the recording are {seen}, the ticket says "
                f"{(known.frame_hash, known.tokens, known.tokens)}. Were files of two recordings mixed?"
            )
        return frame

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
        """The uint8 shards of all pipeline stages and CP ranks of one DP rank, by (dp, pp, cp): what a relay would send."""
        return place_samples(self.ticket.plan, dp=dp, ids_of=self._ids)

    def _ids(self, sample_id: str) -> Ids:
        routing = self.frame(sample_id).routing(sample_id=sample_id)
        return fill_invalid(routing.expert_ids_TLK, routing.valid_T, self.ticket.spec)
