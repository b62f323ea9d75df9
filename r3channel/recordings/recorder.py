"""Writes the steps that a relay seals: a segment for each, within limits. A full disk ends the recording only.

Tokens come with the replies and wait until their step is sealed. Rows go to disk from where they lie in the store.
`add_options` adds the flags of recording to a command. This module knows no connection.
"""

from __future__ import annotations

import logging
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from r3channel.errors import ConfigError
from r3channel.model.spec import RoutingSpec
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket
from r3channel.recordings.recording import Manifest
from r3channel.recordings.segment import Kind, Pieces, check_room, nbytes_of, pack
from r3channel.recordings.step import PASSES, Bytes, RecordedStep
from r3channel.wire.codec import stored_entries
from r3channel.wire.frame import frame_head
from r3channel.wire.routing import Ids, ProvenanceSpan

log = logging.getLogger(__name__)

_Payload = tuple[int, *tuple[bytes | memoryview, ...]]
"""The `part` of a frame's record, then the frame in pieces."""
_NO_TOKENS: Ids = np.empty(0, np.int32)
_NONE: Mapping[str, Sequence[Bytes]] = {}


def segment_name(step: int) -> str:
    return f"step-{step:06d}.r3s"


class TurnRows(Protocol):
    """Rows of one turn; `relay.verify.VerifiedRows` is one."""

    ids_TLK: Ids
    first_row: int
    sample_key: int
    digests_L: Ids
    provenance: tuple[ProvenanceSpan, ...]
    invalid: tuple[tuple[int, int], ...]


@dataclass
class Recorder:
    """Writes steps within limits. One relay calls it, from any of its threads.

    The order of calls is NEW -> open -> (keep* -> write)* -> stopped by a limit or a full disk.
    """

    root: str | Path
    """The recording's folder."""
    steps: int = 0
    """Most steps that are kept; 0: any number."""
    max_bytes: int = 0
    """Most bytes of all segments; 0: any number."""
    ring: bool = False
    """True: at a limit the oldest step is removed. False: the recording ends there."""
    tokens: bool = True
    """Write token ids, too."""
    lost: int = 0
    """Steps that could not be written: the disk was full, or one is larger than `max_bytes`."""
    stopped: str = ""
    """The reason why nothing more is written; empty while the recorder writes."""
    _kept: dict[str, Ids] = field(default_factory=dict)
    _written: dict[Path, int] = field(default_factory=dict)
    """Segments and their bytes, the oldest first."""

    def __post_init__(self) -> None:
        self.folder = Path(self.root)
        if min(self.steps, self.max_bytes) < 0 or (self.ring and not self.steps + self.max_bytes):
            raise ConfigError(
                f"recording: steps={self.steps}, bytes={self.max_bytes}, ring={self.ring}; expected limits of 0 or more, and a "
                "ring only with one"
            )

    def open(self, spec: RoutingSpec, layout: TrainerLayout) -> None:
        """Write the manifest, and find the segments that are there.

        Raises:
            RecordingInvalid: the folder holds a recording of another model or layout.
            ConfigError: the folder cannot be written.
        """
        try:
            Manifest(spec=spec, layout=layout, tokens=self.tokens).write(self.folder)
            segments = sorted(self.folder.glob("step-*.r3s"), key=lambda path: path.stat().st_mtime)
            self._written = {path: path.stat().st_size for path in segments}
        except OSError as error:
            raise ConfigError(
                f"recording: {self.folder} cannot be written: {error}; expected a folder that this relay may write"
            ) from error

    def keep(self, sample_id: str, tokens: Ids) -> None:
        if self.tokens and not self.stopped:
            self._kept[sample_id] = tokens

    def forget(self, sample_id: str) -> None:
        self._kept.pop(sample_id, None)

    def write(
        self, ticket: Ticket, turns: Sequence[Sequence[TurnRows]], tensors: Mapping[str, Sequence[Bytes]] = _NONE,
    ) -> None:  # fmt: skip
        """Append a sealed step; `forget` ends the wait of its samples' tokens.

        Args:
            ticket: the step's ticket.
            turns: rows of each sample's turns, samples in the ticket's order.
            tensors: sample id -> frames that its turns bring beside their rows.
        """
        tokens = [self._kept.get(name, _NO_TOKENS) for name in ticket.assignment.sample_ids]
        frames = ([(0, head_of(turn, ticket.spec), turn.ids_TLK.data) for turn in sample] for sample in turns)
        records = [] if self.stopped else [*_records(ticket, tokens, frames, tensors)]
        path = self.folder / segment_name(ticket.step)
        try:
            if self._is_room(path, nbytes_of(records)):
                self._written[path] = write_segment(path, records)
        except OSError as error:  # from the new segment, or from an old one that cannot be removed
            with suppress(OSError):  # in a folder that became read-only nothing can be removed either
                path.unlink(missing_ok=True)
            self._stop(f"cannot write {path.name}: {error}")
        self.lost += bool(self.stopped) and not self.stopped.startswith("limit")

    def _is_room(self, path: Path, nbytes: int) -> bool:
        """Return whether the step may be written; a ring makes room."""
        if self.stopped:
            return False
        self._remove(path)  # with the log-probs of an earlier run's step
        if self.max_bytes and nbytes > self.max_bytes and self.ring:
            self.lost += 1
            log.warning("r3channel: %s: %d bytes, over the limit of %d", path.name, nbytes, self.max_bytes)
            return False
        while self._is_full(nbytes):
            if not self.ring:
                self._stop(f"limit: {len(self._written)} steps, {sum(self._written.values())} bytes")
                return False
            self._remove(next(iter(self._written)))
        return True

    def _remove(self, path: Path) -> None:
        for file in (path, *self.folder.glob(f"{path.stem}.logprobs-*")):
            file.unlink(missing_ok=True)
        self._written.pop(path, None)

    def _is_full(self, nbytes: int) -> bool:
        many = 0 < self.steps <= len(self._written)
        large = 0 < self.max_bytes < sum(self._written.values()) + nbytes
        return bool(self._written or not self.ring) and (many or large)

    def _stop(self, why: str) -> None:
        self.stopped = why
        self._kept.clear()
        log.warning("r3channel: the recording ends, the channel goes on: %s", why)


def write_segment(path: Path, records: Iterable[Pieces]) -> int:
    """Write all records and the end into a new file.

    Returns:
        The bytes of the file.

    Raises:
        OSError: the file cannot be written.
    """
    records = [*records, pack(Kind.END)]
    path.unlink(missing_ok=True)  # cutting the old file would kill a process that has it mapped
    with path.open("wb") as file:
        check_room(file.fileno(), nbytes := nbytes_of(records))
        file.writelines(chain.from_iterable(records))
    return nbytes


def write_step(folder: Path, step: RecordedStep) -> Path:
    """Write a whole step of either side at once.

    Raises:
        RecordingInvalid: the folder holds another recording.
        OSError: the folder or the segment cannot be written.
    """
    ticket, path = step.ticket, folder / segment_name(step.number)
    Manifest(spec=step.spec, layout=ticket.layout, side=step.side, tokens=bool(step.tokens)).write(folder)
    names = ticket.assignment.sample_ids
    tokens, frames = [step.tokens.get(n, _NO_TOKENS) for n in names], (_frames_of(step, n) for n in names)
    write_segment(path, _records(ticket, tokens, frames, step.tensors))
    return path


def _frames_of(step: RecordedStep, name: str) -> Iterator[_Payload]:
    for part, of_pass in enumerate(PASSES):
        frames = step.passes.get((of_pass, name), ()) if step.passes or part else step.frames[name]
        yield from ((part, frame) for frame in frames)


def _records(
    ticket: Ticket, tokens: Sequence[Ids], frames: Iterable[Iterable[_Payload]], tensors: Mapping[str, Sequence[Bytes]],
) -> Iterator[Pieces]:  # fmt: skip
    # Sample by sample, so that a torn segment has whole samples.
    yield pack(Kind.TICKET, ticket.to_bytes())
    samples = zip(ticket.assignment.sample_ids, tokens, frames, strict=True)
    for place, (name, token_T, payloads) in enumerate(samples):
        if len(token_T):
            yield pack(Kind.TOKENS, np.ascontiguousarray(token_T, "<i4").data, sample=place)
        turns = Counter[int]()
        for part, *payload in payloads:
            yield pack(Kind.FRAME, *payload, sample=place, turn=turns[part], part=part)
            turns[part] += 1
        for turn, data in enumerate(tensors.get(name, ())):
            yield pack(Kind.TENSORS, data, sample=place, turn=turn)


def head_of(turn: TurnRows, spec: RoutingSpec) -> bytes:
    """Return a turn's frame up to its ids, which are stored unchanged."""
    valid_T = np.ones(len(turn.ids_TLK), bool)
    for start, end in turn.invalid:
        valid_T[start - turn.first_row : end - turn.first_row] = False
    entries = stored_entries(len(turn.ids_TLK), row_bytes=spec.bytes_per_token)
    return frame_head(
        spec, entries, first_row=turn.first_row, valid_T=valid_T, provenance=turn.provenance,
        digests_L=turn.digests_L, sample_key=turn.sample_key,
    )  # fmt: skip


def add_options(parser: ArgumentParser | _ArgumentGroup, *, prefix: str = "") -> None:
    """Add `--record` and its limits to a parser, each name after `prefix`."""
    help_text = "keep every step's frames, ticket and tokens there, for offline replay"
    parser.add_argument(f"--{prefix}record", metavar="DIR", help=help_text)
    add_limits(parser, prefix=prefix)


def add_limits(parser: ArgumentParser | _ArgumentGroup, *, prefix: str = "") -> None:
    for what in ("steps", "bytes"):
        help_text = f"record so many {what} at most"
        parser.add_argument(f"--{prefix}record-{what}", metavar="N", type=int, default=0, help=help_text)
    help_text = "at a limit the oldest step goes, instead of the recording ending"
    parser.add_argument(f"--{prefix}record-ring", action="store_true", help=help_text)
    help_text = "leave token ids out of the recording"
    parser.add_argument(f"--{prefix}record-no-tokens", action="store_true", help=help_text)


def values_of(args: Namespace, *, prefix: str = "") -> dict[str, Any] | None:
    """Return `Recorder`'s arguments as plain values, for another process.

    Returns:
        name -> value, or None if nothing is to be recorded.
    """
    given = {name.removeprefix(prefix): value for name, value in vars(args).items()}
    if not given["record"]:
        return None
    return {
        "root": given["record"], "steps": given["record_steps"], "max_bytes": given["record_bytes"],
        "ring": given["record_ring"], "tokens": not given["record_no_tokens"],
    }  # fmt: skip


def recorder_of(args: Namespace, *, prefix: str = "") -> Recorder | None:
    """Make the recorder that the options ask for, or return None.

    Raises:
        ConfigError: the limits do not fit together.
    """
    values = values_of(args, prefix=prefix)
    return Recorder(**values) if values else None
