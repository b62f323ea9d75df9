"""A recording on disk, step by step: the manifest, and a segment for each step. Reads; writes nothing.

REC/manifest.json
    step-000003.r3s                       the step as it was sealed (`segment`)
    step-000003.logprobs-5.safetensors    of each trainer rank that computed them (`logprobs`)
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from r3channel.errors import R3Error, RecordingInvalid
from r3channel.plan.ticket import Ticket
from r3channel.recordings.logprobs import read_logprobs
from r3channel.recordings.manifest import Manifest
from r3channel.recordings.segment import Kind, Record, read
from r3channel.recordings.step import PASSES, Bytes, RecordedStep, SampleKey
from r3channel.wire.routing import Ids

_SEGMENT = re.compile(r"step-(\d+)\.r3s")


@dataclass(frozen=True)
class Segment:
    """The records of a step."""

    path: Path
    records: list[Record]
    torn_bytes: int

    @property
    def ended(self) -> bool:
        return bool(self.records) and self.records[-1].kind is Kind.END


@dataclass(frozen=True)
class Recording:
    """The steps of a folder. Each is read when it is asked for."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: str | Path) -> Recording:
        """Raises RecordingInvalid."""
        return cls(Path(folder), Manifest.read(Path(folder)))

    @cached_property
    def _paths(self) -> dict[int, Path]:
        """Step -> its segment."""
        named = ((_SEGMENT.fullmatch(path.name), path) for path in self.folder.glob("step-*.r3s"))
        return {int(match[1]): path for match, path in named if match}

    @property
    def steps(self) -> tuple[int, ...]:
        """Their numbers, ascending."""
        return tuple(sorted(self._paths))

    def nbytes(self, step: int) -> int:
        return self._paths[step].stat().st_size

    def segment(self, step: int) -> Segment:
        """Raises RecordingInvalid for a step that is not there."""
        if step not in self._paths:
            raise RecordingInvalid(
                f"{self.folder} has no step {step}; it has {list(self.steps)[:20]}. Does the ring of its recorder hold fewer?"
            )
        return Segment(self._paths[step], *read(self._paths[step]))

    def step(self, step: int) -> RecordedStep:
        """Every whole sample of a step; `cut` names the others. Raises RecordingInvalid, TicketMismatch and FrameError."""
        segment = self.segment(step)
        if not segment.records:
            raise RecordingInvalid(f"{segment.path} ends before its ticket does; nothing of it can be read")
        ticket = Ticket.from_bytes(bytes(segment.records[0].payload))
        self._check(segment, ticket, step)
        frames, tokens, tensors = self._gathered(segment, ticket)
        plain = {name: turns for (part, name), turns in frames.items() if part in PASSES[:2]}
        named = {sample.sample_id: plain.get(sample.sample_id, []) for sample in ticket.samples}
        router, spec = self.manifest.side == "router", self.manifest.spec
        options: dict[str, Any] = {"side": self.manifest.side, "tensors": tensors}
        options["logprobs"] = self._logprobs(ticket)
        recorded = RecordedStep(ticket, named, tokens, spec, passes=frames if router else {}, **options)
        if segment.ended and router:
            return recorded  # rows that no router used are for `check` to tell
        cut = tuple(s.sample_id for s in ticket.samples if not self._is_whole(recorded, s.sample_id))
        return replace(recorded, cut=cut)

    def _logprobs(self, ticket: Ticket) -> dict[str, Ids]:
        columns = read_logprobs(self.folder, ticket.step)
        if columns:
            sample, position = columns["sample"], columns["position"]
            rows = np.asarray([s.tokens - 1 for s in ticket.samples])
            inside = (sample >= 0) & (sample < len(rows)) & (position >= 0)
            if not inside.all() or (position >= rows[sample]).any():
                raise RecordingInvalid(
                    f"{self.folder}: log-probs of step {ticket.step} are of places that its ticket does not have: of another run?"
                )
        return columns

    def _check(self, segment: Segment, ticket: Ticket, step: int) -> None:
        if ticket.step != step:
            raise RecordingInvalid(f"{segment.path}: it holds step {ticket.step}; was the file renamed?")
        if self.manifest.side == "engine" and ticket.spec != self.manifest.spec:
            raise RecordingInvalid(
                f"{segment.path}: its ticket is of spec {ticket.spec}, the manifest of {self.manifest.spec}"
            )

    def _gathered(
        self, segment: Segment, ticket: Ticket
    ) -> tuple[dict[SampleKey, list[Bytes]], dict[str, Ids], dict[str, list[Bytes]]]:
        names = [sample.sample_id for sample in ticket.samples]
        frames, tokens = defaultdict[SampleKey, list[Bytes]](list), dict[str, Ids]()
        tensors = defaultdict[str, list[Bytes]](list)
        for index, record in enumerate(segment.records[1:], 2):
            if record.sample >= len(names) or record.part >= len(PASSES):
                raise RecordingInvalid(
                    f"{segment.path}: a record of sample {record.sample}, pass {record.part}; expected fewer than "
                    f"{len(names)} and {len(PASSES)}"
                )
            if record.kind is Kind.TICKET or (record.kind is Kind.END and index < len(segment.records)):
                raise RecordingInvalid(
                    f"{segment.path}: record {index} is a {record.kind.name}; expected one ticket at the start and one end: are "
                    "two segments in one file?"
                )
            if record.kind is Kind.TOKENS:
                name = names[record.sample]
                if record.payload.nbytes != 4 * ticket.sample(name).tokens:
                    raise RecordingInvalid(
                        f"{segment.path}: {record.payload.nbytes} bytes of token ids of sample {name}, expected 4 for each of "
                        f"its {ticket.sample(name).tokens} tokens"
                    )
                tokens[name] = np.frombuffer(record.payload, "<i4")
            elif record.kind is Kind.FRAME:
                frames[PASSES[record.part], names[record.sample]].append(record.payload)
            elif record.kind is Kind.TENSORS:
                tensors[names[record.sample]].append(record.payload)
        return dict(frames), tokens, dict(tensors)

    def _is_whole(self, step: RecordedStep, name: str) -> bool:
        """Whether each turn has its frames. Tokens come before; they are not known of samples from before the recording began."""
        sample = step.ticket.sample(name)
        there_T = np.zeros(sample.tokens - 1, bool)
        try:
            frames = step.parsed(name)
            turns = [len(step.tensor_rows(tensor, name)) for tensor in step.ticket.tensors]
        except R3Error:
            return False
        if turns and turns[0] < len(frames):
            return False
        for frame in frames:
            there_T[frame.first_row : frame.first_row + frame.rows] = True
        for start, end in sample.invalid:
            there_T[start:end] = True
        return bool(there_T.all())
