"""A recording on disk, step by step: the manifest, and a segment for each step. This module reads; it writes no step.

REC/manifest.json                         spec and layout of all steps: written once, by the first writer
    step-000003.r3s                       the step as it was sealed (`segment`)
    step-000003.logprobs-5.safetensors    of each trainer rank that computed them (`logprobs`)

The manifest: {"format": "r3channel-recording", "version": 1, "side": "engine" | "router", "spec": {...}, "layout": {...},
 "tokens": true, "versions": {"r3channel": "0.1.0", "numpy": ..., "torch": ..., "sglang": ...}}
"""

from __future__ import annotations

import json
import os
import platform
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from r3channel.errors import R3Error, RecordingInvalid
from r3channel.model.spec import RoutingSpec
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket
from r3channel.recordings.logprobs import read_logprobs
from r3channel.recordings.segment import Kind, Record, Segment, read
from r3channel.recordings.step import PASSES, Bytes, RecordedStep, SampleKey
from r3channel.wire.routing import Ids

NAME = "manifest.json"
SIDES = ("engine", "router")
_FORMAT, _VERSION = "r3channel-recording", 1
_NAMED = ("r3channel", "numpy", "torch", "sglang", "megatron-core", "ray", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Spec and layout that every step of the recording shares."""

    spec: RoutingSpec
    layout: TrainerLayout
    side: str = "engine"
    """`engine`: the ids that the engines chose. `router`: the ids that the trainers' routers used."""
    tokens: bool = True
    """Whether token ids were written."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the packages installed where it was written."""

    def write(self, folder: Path) -> None:
        """Write the manifest, unless the folder has one.

        Raises:
            RecordingInvalid: the folder holds another recording: of another spec, layout, side, or choice of tokens.
            OSError: the folder cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        scratch = folder / f".{NAME}-{os.getpid()}-{id(self)}"
        values = {
            "format": _FORMAT, "version": _VERSION, "side": self.side, "spec": self.spec.to_dict(),
            "layout": self.layout.to_dict(), "tokens": self.tokens, "versions": dict(self.versions or installed_versions()),
        }  # fmt: skip
        try:
            scratch.write_text(json.dumps(values, indent=1) + "\n")
            with suppress(FileExistsError):
                os.link(scratch, folder / NAME)  # appears whole, and never replaces another relay's
        finally:
            scratch.unlink(missing_ok=True)
        there = Manifest.read(folder)
        for name in ("spec", "layout", "side", "tokens"):
            if getattr(there, name) != getattr(self, name):
                raise RecordingInvalid(
                    f"{folder} holds a recording of {name} {getattr(there, name)}, this one has {getattr(self, name)}; give "
                    "another folder"
                )

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a recording's folder.

        Raises:
            RecordingInvalid: the manifest is missing, damaged, or of another format.
        """
        path = folder / NAME
        try:
            values = json.loads(path.read_text())
            header = values["format"], values["version"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise RecordingInvalid(
                f"{folder}: expected a recording's folder, with its {NAME}: {error!r}. Is it the folder that --record was given?"
            ) from error
        if header != (_FORMAT, _VERSION):
            raise RecordingInvalid(
                f"{path}: format {header[0]!r}, version {header[1]!r}; expected {_FORMAT!r}, {_VERSION}: read it with the "
                "r3channel that wrote it"
            )
        try:
            return cls._of(values)
        except (R3Error, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise RecordingInvalid(f"{path} is damaged: {error!r}") from error

    @classmethod
    def _of(cls, values: Mapping[str, Any]) -> Manifest:
        if values["side"] not in SIDES:
            raise ValueError(f"side {values['side']!r}, expected one of {SIDES}")
        versions = {str(name): str(version) for name, version in values["versions"].items()}
        spec, layout = RoutingSpec.from_dict(values["spec"]), TrainerLayout.from_dict(values["layout"])
        fields = {"side": values["side"], "tokens": bool(values["tokens"]), "versions": versions}
        return cls(spec=spec, layout=layout, **fields)


def installed_versions() -> dict[str, str]:
    """Return name -> version of the packages that are installed here.

    Nothing is imported.
    """
    versions = {"python": platform.python_version()}
    for name in _NAMED:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


_Gathered = tuple[dict[SampleKey, list[Bytes]], dict[str, Ids], dict[str, list[Bytes]]]
"""Frames, tokens, and frames of the tensors that tokens bring beside expert ids."""


@dataclass(frozen=True)
class Recording:
    """The steps of a folder. A step is read each time that it is asked for."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: str | Path) -> Recording:
        """Open the recording in a folder.

        Raises:
            RecordingInvalid: the manifest cannot be read.
        """
        return cls(Path(folder), Manifest.read(Path(folder)))

    @cached_property
    def _paths(self) -> dict[int, Path]:
        paths = self.folder.glob("step-*.r3s")
        return {int(path.stem[5:]): path for path in paths if path.stem[5:].isdecimal()}

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the numbers of the steps, ascending."""
        return tuple(sorted(self._paths))

    def nbytes(self, step: int) -> int:
        return self._paths[step].stat().st_size

    def segment(self, step: int) -> Segment:
        """Read the records of one step.

        Raises:
            RecordingInvalid: the recording does not have the step, or its file is damaged.
        """
        if step not in self._paths:
            raise RecordingInvalid(
                f"{self.folder} has no step {step}; it has {list(self.steps)[:20]}. Does the ring of its recorder hold fewer?"
            )
        return read(self._paths[step])

    def step(self, step: int) -> RecordedStep:
        """Read one step; its `cut` names the samples that are not whole.

        Raises:
            RecordingInvalid: the recording does not have the step, or its records do not fit together.
            TicketMismatch: the ticket is not valid.
            FrameError: a frame is damaged.
        """
        segment = self.segment(step)
        if not segment.records:
            raise RecordingInvalid(f"{segment.path} ends before its ticket does; nothing of it can be read")
        ticket = Ticket.from_bytes(bytes(segment.records[0].payload))
        if ticket.step != step:
            raise RecordingInvalid(f"{segment.path}: it holds step {ticket.step}; was the file renamed?")
        if self.manifest.side == "engine" and ticket.spec != self.manifest.spec:
            what = f"its ticket is of spec {ticket.spec}, the manifest of {self.manifest.spec}"
            raise RecordingInvalid(f"{segment.path}: {what}")
        frames, tokens, tensors = self._gather(segment, ticket)
        plain = {name: turns for (part, name), turns in frames.items() if part in PASSES[:2]}
        named = {sample.sample_id: plain.get(sample.sample_id, []) for sample in ticket.samples}
        side, router = self.manifest.side, self.manifest.side == "router"
        recorded = RecordedStep(
            ticket, named, tokens, self.manifest.spec, side=side, passes=frames if router else {}, tensors=tensors,
            logprobs=self._logprobs(ticket),
        )  # fmt: skip
        if segment.ended and router:
            return recorded  # `check` reports rows that no router used
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

    def _gather(self, segment: Segment, ticket: Ticket) -> _Gathered:
        frames, tokens = defaultdict[SampleKey, list[Bytes]](list), dict[str, Ids]()
        tensors = defaultdict[str, list[Bytes]](list)
        for index, record in enumerate(segment.records[1:], 2):
            if problem := _problem(record, ticket, index, last=index == len(segment.records)):
                raise RecordingInvalid(f"{segment.path}: {problem}")
            name = ticket.samples[record.sample].sample_id
            if record.kind is Kind.TOKENS:
                tokens[name] = np.frombuffer(record.payload, "<i4")
            elif record.kind is Kind.FRAME:
                frames[PASSES[record.part], name].append(record.payload)
            elif record.kind is Kind.TENSORS:
                tensors[name].append(record.payload)
        return dict(frames), tokens, dict(tensors)

    def _is_whole(self, step: RecordedStep, name: str) -> bool:
        # Tokens are not checked. They are written first, and are not known for samples from before the recording began.
        sample = step.ticket.sample(name)
        there_T = np.zeros(sample.tokens - 1, bool)
        try:
            frames = step.parse(name)
            turns = [len(step.tensor_rows(tensor, name)) for tensor in step.ticket.tensors]
        except R3Error:
            return False
        if turns and turns[0] < len(frames):
            return False
        brought = [(frame.first_row, frame.first_row + frame.rows) for frame in frames]
        for start, end in [*brought, *sample.invalid]:
            there_T[start:end] = True
        return bool(there_T.all())


def _problem(record: Record, ticket: Ticket, index: int, *, last: bool) -> str:
    most = len(ticket.samples), len(PASSES)
    if record.sample >= most[0] or record.part >= most[1]:
        return f"a record of sample {record.sample}, pass {record.part}; expected fewer than {most[0]} and {most[1]}"
    if record.kind is Kind.TICKET or (record.kind is Kind.END and not last):
        what = f"record {index} is a {record.kind.name}; expected one ticket at the start and one end"
        return f"{what}: are two segments in one file?"
    sample, nbytes = ticket.samples[record.sample], record.payload.nbytes
    if record.kind is Kind.TOKENS and nbytes != 4 * sample.tokens:
        what = f"{nbytes} bytes of token ids of sample {sample.sample_id}"
        return f"{what}, expected 4 for each of its {sample.tokens} tokens"
    return ""
