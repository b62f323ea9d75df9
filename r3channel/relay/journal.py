"""Keeps on disk what survives a killed relay: a file for each frame and for each sealed step. Only with `journal`.

    relay-<id>/lock           held while its process lives
               <ref>.frame    a whole frame, then a note that says whose it is: JSON, its length u32, its xxh3_64
               <step>.ticket  the ticket's bytes; <step>.acks: a line for each receiver that has acknowledged

A file that is there counts, a file that is gone does not: nothing is rewritten, and there is no index that could disagree. Files
outlive a process, not a machine: nothing is flushed. Frames and tickets carry their own hashes.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import logging
import os
import shutil
import struct
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from r3channel import errors
from r3channel.plan.shards import ShardKey
from r3channel.plan.ticket import Ticket
from r3channel.wire.header import HEADER_BYTES, announced_bytes, read_header
from r3channel.wire.source import InHand

log = logging.getLogger(__name__)

_TAIL = struct.Struct("<IQ")
_PREFIX, LOCK = "relay-", "lock"
_NUMBERS = "turn", "tokens_hash", "prefix_hash"
_FULL, _LOOK_S = (errno.ENOSPC, errno.EDQUOT), 0.2
"""Errors of a full disk, which a delivered step may mend, and seconds between two tries."""


class Journal:
    """The folder of one relay. States: OPEN -> CLOSED.

    Any thread may call: each call touches files of its own, and there is no lock.
    """

    def __init__(self, root: str) -> None:
        """Make a folder of its own in `root`, which is created.

        Raises:
            ConfigError: The folder cannot be written.
        """
        self.folder = Path(root) / f"{_PREFIX}{uuid.uuid4().hex[:12]}"
        try:
            self.folder.mkdir(parents=True)
        except OSError as error:
            raise errors.ConfigError(f"journal {root} cannot be written: {error}; give another") from error
        self._lock = os.open(self.folder / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def frame(
        self, ref: int, parts: Sequence[bytes | memoryview], *, timeout_s: float = 0.0, what: str = ""
    ) -> None:
        """Write a frame, part by part.

        Args:
            ref: The frame's number.
            parts: The frame's bytes, in order.
            timeout_s: Seconds during which the write is tried again while the disk is full.
            what: Whose frame it is, for the error.

        Raises:
            StoreFull: The frame could not be written; nothing of it is left.
        """
        path, deadline_s = self._frame(ref), time.monotonic() + timeout_s
        while True:
            try:
                with open(path, "xb") as file:
                    return file.writelines(parts)
            except OSError as error:
                path.unlink(missing_ok=True)
                if error.errno not in _FULL or time.monotonic() >= deadline_s:
                    said = f"{what}: no room for a frame of {sum(map(len, parts))} bytes: {error}"
                    raise errors.StoreFull(f"{said}; waited {timeout_s:.1f} s at most") from error
            time.sleep(_LOOK_S)

    def note(self, ref: int, **values: object) -> None:
        """Append a note to a frame's file that says whose it is.

        Raises:
            StoreFull: There is no room for the note.
        """
        body = json.dumps(values).encode()
        self._append(self._frame(ref), body + _TAIL.pack(len(body), xxhash.xxh3_64_intdigest(body)))

    def delete_frames(self, refs: Iterable[int]) -> None:
        """Delete the files of frames, the newest first.

        So the frames that a kill leaves of a sample are its first ones.
        """
        for ref in sorted(refs, reverse=True):
            self._frame(ref).unlink(missing_ok=True)

    def write_ticket(self, step: int, ticket: bytes) -> None:
        """Write a sealed step's ticket, whole or not at all.

        Raises:
            StoreFull: There is no room for the ticket.
        """
        path, scratch = self._step(step, "ticket"), self._step(step, "new")
        try:
            scratch.write_bytes(ticket)
            scratch.rename(path)
        except OSError as error:
            scratch.unlink(missing_ok=True)
            raise errors.StoreFull(
                f"step {step}: no room for its ticket in {self.folder}: {error}", step=step
            ) from error

    def write_acknowledgement(self, step: int, member: ShardKey) -> None:
        """Write that a receiver has acknowledged a step.

        A failed write is only logged: after a kill that receiver is waited for once more.
        """
        try:
            self._append(self._step(step, "acks"), f"{json.dumps(member)}\n".encode())
        except errors.StoreFull as error:
            log.warning("r3channel: %s", error)

    def delete_step(self, step: int) -> None:
        """Delete a step's files, before the files of its frames.

        A recovery between the two finds samples too many, and none too few.
        """
        for kind in ("ticket", "acks"):
            self._step(step, kind).unlink(missing_ok=True)

    def close(self) -> None:
        """Delete everything; may be called again."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _append(self, path: Path, data: bytes) -> None:
        try:
            with open(path, "ab") as file:
                file.write(data)
        except OSError as error:
            raise errors.StoreFull(f"no room for {len(data)} bytes at the end of {path}: {error}") from error

    def _frame(self, ref: int) -> Path:
        return self.folder / f"{ref:012d}.frame"

    def _step(self, step: int, kind: str) -> Path:
        return self.folder / f"{step:012d}.{kind}"


@dataclass(frozen=True, slots=True)
class SavedTurn:
    """A frame's file and what its note says.

    The frame's own hashes are not checked yet.
    """

    turn: int
    path: Path = field(compare=False)
    head: bytes
    """The frame's header. Its hashes stand for the whole frame where two frames are compared."""
    tokens: int
    tokens_hash: int
    prefix_hash: int
    key: int | None

    def source(self) -> InHand:
        """Return the frame's bytes, without the note."""
        return InHand(memoryview(self.path.read_bytes())[: announced_bytes(self.head)])


@dataclass(slots=True)
class SavedStep:
    ticket: bytes
    acked: set[ShardKey] = field(default_factory=set[ShardKey])


@dataclass(slots=True)
class Remains:
    """The contents of a folder that one relay left."""

    folder: Path
    samples: dict[str, list[SavedTurn]] = field(default_factory=dict[str, list[SavedTurn]])
    """The turns of each sample, in any order."""
    steps: dict[int, SavedStep] = field(default_factory=dict[int, SavedStep])
    unclaimed: int = 0
    """Frames that came directly and whose replies never did: nobody knows their samples."""
    damaged: list[str] = field(default_factory=list[str])
    """A line for each file that could not be read."""


def read_remains(folder: Path) -> Remains:
    """Read one relay's folder; nothing in it changes."""
    remains = Remains(folder)
    for path in sorted(folder.glob("*.frame")):
        try:
            _read_frame(path, remains)
        except (errors.FrameError, ValueError) as error:
            remains.damaged.append(f"{path.name}: {error}")
    for path in sorted(folder.glob("*.ticket")):
        acks = path.with_suffix(".acks")
        saved = SavedStep(path.read_bytes())
        for line in acks.read_bytes().splitlines() if acks.exists() else ():
            with suppress(ValueError, TypeError, RecursionError, OverflowError):  # cut by a kill
                dp, pp, cp = json.loads(line)
                saved.acked.add((int(dp), int(pp), int(cp)))
        remains.steps[int(path.stem)] = saved
    return remains


def _read_frame(path: Path, remains: Remains) -> None:
    with open(path, "rb") as file:
        head = file.read(HEADER_BYTES)  # the rows are read when the sample is handed over
        header = read_header(memoryview(head), nbytes=path.stat().st_size, where=path.name, more=True)
        file.seek(header.nbytes)
        note = file.read()
    if not note:
        remains.unclaimed += 1
        return
    size, digest = _TAIL.unpack(note[-_TAIL.size :]) if len(note) > _TAIL.size else (-1, 0)
    body = note[: -_TAIL.size]
    if size != len(body) or xxhash.xxh3_64_intdigest(body) != digest:
        raise ValueError("its note was being written when the relay ended")
    try:
        values = json.loads(body)
        if {type(values[number]) for number in _NUMBERS} != {int}:
            raise TypeError(f"{_NUMBERS} are no integers")
        turns = remains.samples.setdefault(str(values.pop("sample_id")), [])
        tokens = header.first_row + header.rows + 1
        turns.append(SavedTurn(path=path, head=head, tokens=tokens, **values))
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"its note is none: {error!r:.200}") from error


@contextmanager
def dead_relays(root: Path, *, but: Path) -> Generator[list[Remains]]:
    """Yield what relays left whose processes have ended.

    The folders are locked meanwhile.

    Args:
        root: The folder of all relays' folders.
        but: The folder in `root` to leave out.

    Yields:
        What each dead relay left, the oldest first.

    Raises:
        UsageError: A relay that lives, or another recovery, holds all of the folders.
    """
    locked = dict[Path, bool]()
    with ExitStack() as held:
        for path in root.glob(f"{_PREFIX}*"):
            with suppress(FileNotFoundError):  # a relay that closes meanwhile takes its folder with it
                if path != but:
                    locked[path] = _lock(path, held)
        free = [path for path, ours in locked.items() if ours]
        if locked and not free:
            raise errors.UsageError(f"{sorted(map(str, locked))} belong to relays that live; end those first")
        yield [read_remains(path) for path in sorted(free, key=lambda path: path.stat().st_mtime)]


def _lock(folder: Path, held: ExitStack) -> bool:
    """Return whether the folder is locked now, until `held` ends."""
    file = os.open(folder / LOCK, os.O_RDWR)
    held.callback(os.close, file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    os.stat(folder / LOCK)  # FileNotFoundError: its relay closed just now, and deleted the folder
    return True


@dataclass
class Recovery:
    """The samples and steps that a new relay took over."""

    pending: list[str] = field(default_factory=list[str])
    """Samples that wait for a step, those of `steps` included."""
    steps: dict[int, Ticket] = field(default_factory=dict[int, Ticket])
    """Steps that were sealed and not delivered, and whose samples are all here: to be sealed again, in this order."""
    damaged: list[str] = field(default_factory=list[str])
    """A line for each file, sample or step that was lost."""
    unclaimed: int = 0
    """Frames that came directly and whose replies never did: nobody knows their samples."""


def take_over(
    own: Journal, keep: Callable[[str, list[SavedTurn]], int]
) -> tuple[Recovery, dict[int, set[ShardKey]]]:
    """Take over what dead relays left beside a journal, and delete it.

    Steps that are to be sealed again are written to the journal before anything is deleted, so that a second kill forgets no
    acknowledgement. Their files stay until they are sealed again.

    Args:
        own: The journal of the relay that takes over.
        keep: Takes each sample's name and its turns, in order, and returns how many tokens it has.

    Returns:
        The recovery, and for each step the receivers that had acknowledged it.
    """
    recovery, acked = Recovery(), dict[int, set[ShardKey]]()
    with dead_relays(own.folder.parent, but=own.folder) as found:
        for remains in found:
            recovery.damaged += remains.damaged
            recovery.unclaimed += remains.unclaimed
        here: dict[str, int] = {}
        for name, turns in _join_turns(found, recovery):
            try:
                here[name] = keep(name, turns)
            except (errors.RoutingError, errors.SampleTwice) as error:
                recovery.damaged.append(str(error))
        recovery.pending = list(here)
        for remains in found:
            for step, saved in remains.steps.items():
                _sort_in(step, saved, here, recovery)
        for step, ticket in recovery.steps.items():
            acked[step] = {key for one in found if step in one.steps for key in one.steps[step].acked}
            for member in acked[step]:
                own.write_acknowledgement(step, member)
            own.write_ticket(step, ticket.to_bytes())
        for remains in found:
            # it is all here: a file system that keeps a folder (NFS does while its lock is open) must not end this relay, too
            shutil.rmtree(remains.folder, ignore_errors=True)
    return recovery, acked


def _join_turns(found: list[Remains], recovery: Recovery) -> Iterator[tuple[str, list[SavedTurn]]]:
    """Yield every sample with its turns, up to the first missing one."""
    samples: dict[str, dict[int, SavedTurn]] = {}
    for name, saved in (sample for remains in found for sample in remains.samples.items()):
        turns = samples.setdefault(name, {})
        if not turns:
            turns.update((turn.turn, turn) for turn in saved)
        elif any(turns.get(turn.turn) != turn for turn in saved):  # equal turns: a recovery was killed
            recovery.damaged.append(f"sample {name} was left by two relays; the older is taken")
    for name, turns in samples.items():
        whole = [turns[number] for number in itertools.takewhile(turns.__contains__, itertools.count())]
        if len(whole) < len(turns):
            recovery.damaged.append(f"sample {name}: turn {max(turns)} is here, turn {len(whole)} is not")
        if whole:
            yield name, whole


def _sort_in(step: int, saved: SavedStep, here: dict[str, int], recovery: Recovery) -> None:
    try:
        ticket = Ticket.from_bytes(saved.ticket)
    except errors.TicketMismatch as error:
        recovery.damaged.append(f"step {step}: {error}")
        return
    # samples without any row were left to the live router; one that has lost turns has fewer tokens
    known = [s for s in ticket.samples if s.invalid != ((0, s.tokens - 1),)]
    if names := [sample.sample_id for sample in known if here.get(sample.sample_id) != sample.tokens]:
        recovery.damaged.append(f"step {step}: its samples {names[:5]} are lost, {len(names)} in all")
    else:
        recovery.steps[step] = ticket
