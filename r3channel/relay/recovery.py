"""What a relay that was killed left on disk: its samples, and the steps that it had sealed and not delivered.

A ticket file lies beside the segments from `seal` until every rank has acknowledged: xxh3 of the rest (8 bytes), then the
ticket's canonical JSON. Files outlive a process, not a machine: nothing is flushed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import xxhash

from r3channel.errors import RoutingError, SampleTwice, StepError, StoreBusy, StoreFull
from r3channel.plan.assignment import Assignment
from r3channel.plan.ticket import Ticket
from r3channel.relay.segment import CLAIM, FILE_SUFFIX, LIVE, RELEASED, TORN, Found, read_records
from r3channel.relay.store import FOLDER_PREFIX, LOCK_FILE
from r3channel.routing import Ids

_TICKET_SUFFIX = ".ticket"


@dataclass(frozen=True, slots=True)
class SavedSample:
    """A frame and its tokens as they were kept. The frame's own hash is still to be checked."""

    sample_id: str
    frame: memoryview
    tokens: Ids
    """int32."""


@dataclass
class Remains:
    """All that one relay left."""

    folder: Path
    samples: dict[str, SavedSample] = field(default_factory=dict)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    """What could not be read, by name."""
    unclaimed: int = 0
    """Frames that came directly and whose reply never did: nobody knows their samples."""


def write_ticket(folder: Path, ticket: Ticket) -> None:
    """Whole or not at all. Raises `StoreFull` on a full disk."""
    path, data = _ticket_path(folder, ticket.step), ticket.to_bytes()
    scratch = path.with_suffix(".new")
    try:
        scratch.write_bytes(xxhash.xxh3_64_digest(data) + data)
        scratch.rename(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise StoreFull(f"step {ticket.step}: no room for its ticket in {folder}: {error}") from error


def remove_ticket(folder: Path, step: int) -> None:
    _ticket_path(folder, step).unlink(missing_ok=True)


def _ticket_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:012d}{_TICKET_SUFFIX}"


@contextmanager
def dead_relays(root: Path, *, but: Path) -> Iterator[list[Remains]]:
    """What the relays left whose folders lie in `root` and whose processes have ended, the oldest first.

    They are locked meanwhile. Raises `StoreBusy` when a relay that lives, or another recovery, holds all of them.
    """
    folders = [path for path in root.glob(f"{FOLDER_PREFIX}*") if path != but]
    folders = [path for path in folders if (path / LOCK_FILE).exists()]
    locks = {path: _lock(path) for path in sorted(folders, key=lambda path: path.stat().st_mtime)}
    try:
        free = [path for path, lock in locks.items() if lock is not None]
        if folders and not free:
            raise StoreBusy(f"{[str(path) for path in folders]} belong to relays that live; end those first")
        yield [read_remains(path) for path in free]
    finally:
        for lock in locks.values():
            if lock is not None:
                os.close(lock)


def _lock(folder: Path) -> int | None:
    file = os.open(folder / LOCK_FILE, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file


def read_remains(folder: Path) -> Remains:
    """Read one relay's folder; nothing in it changes."""
    remains = Remains(folder)
    records = [record for path in sorted(folder.glob(f"*{FILE_SUFFIX}")) for record in read_records(path)]
    frames = {record.note.serial: record for record in records if record.note.kind != CLAIM}
    claimed = {record.note.refers_to for record in records if record.note.kind == CLAIM}
    for record in sorted(records, key=lambda record: record.note.serial):
        if record.state == RELEASED:
            continue
        source = frames.get(record.note.refers_to) if record.note.kind == CLAIM else record
        _keep(remains, record, source)
    remains.unclaimed = sum(
        record.state == LIVE and not record.note.sample_id and serial not in claimed
        for serial, record in frames.items()
    )
    for path in sorted(folder.glob(f"*{_TICKET_SUFFIX}")):
        _keep_ticket(remains, path)
    return remains


def _keep(remains: Remains, record: Found, source: Found | None) -> None:
    """The latest record of a sample is the one that counts: an appended turn's frame holds the rows before it."""
    name = record.note.sample_id
    if not name:
        return
    if source is not None and source.state == TORN:
        remains.damaged.append(f"sample {name}: its file ends after {len(source.frame)} bytes of its frame")
        return
    if record.state != LIVE or source is None or source.state != LIVE:
        remains.damaged.append(f"sample {name}: it was being written when the relay ended")
        return
    remains.samples[name] = SavedSample(name, source.frame, record.note.tokens)


def _keep_ticket(remains: Remains, path: Path) -> None:
    data = path.read_bytes()
    if xxhash.xxh3_64_digest(data[8:]) != data[:8]:
        remains.damaged.append(f"{path.name}: the ticket's hash does not match its {len(data)} bytes")
        return
    try:
        ticket = Ticket.from_bytes(data[8:])
    except StepError as error:
        remains.damaged.append(f"{path.name}: {error}")
        return
    remains.tickets[ticket.step] = ticket


@dataclass
class Recovery:
    """What a new relay took over."""

    pending: list[str] = field(default_factory=list)
    """Samples that wait for a step, those of `steps` included."""
    steps: dict[int, Assignment] = field(default_factory=dict)
    """Sealed and not delivered, with every sample here: to be sealed again, in this order."""
    shared: dict[int, dict[int, tuple[str, ...]]] = field(default_factory=dict)
    """Sealed over several relays and not delivered: step -> relay -> its samples, which it held and not the relay whose folder
    this is. No relay can seal such a step alone, and no coordinator knows its samples any more: recover all of its relays'
    folders together, from one `store_dir` and with `relays` 1 (then it is in `steps`), or generate the step again."""
    damaged: list[str] = field(default_factory=list)
    """What could not be taken over, by name."""
    unclaimed: int = 0
    """Directly delivered frames whose reply was never added."""


class Taker(Protocol):
    """The new relay, as far as a recovery needs it."""

    def add_frame(
        self, sample_id: str, data: bytes, tokens: Ids, *, engine: str = "?", append: bool = False
    ) -> object: ...


def take_over(relay: Taker, root: Path, *, but: Path) -> Recovery:
    """Give `relay` what dead relays left in `root`, its own folder `but` aside, and delete what was given."""
    recovery = Recovery()
    with dead_relays(root, but=but) as found:
        for remains in found:
            recovery.damaged += remains.damaged
            recovery.unclaimed += remains.unclaimed
            for sample in remains.samples.values():
                _hand_over(relay, sample, recovery)
        for remains in found:
            for ticket in remains.tickets.values():
                _sort_in(ticket, recovery)
        for remains in found:
            shutil.rmtree(remains.folder)
    return recovery


def _sort_in(ticket: Ticket, recovery: Recovery) -> None:
    """Once every sample is handed over: relays may have shared a folder."""
    here, step = set(recovery.pending), ticket.step
    of_relay = [ticket.parts.samples_of(relay) for relay in range(len(ticket.runs))]
    missing = {
        relay: gone
        for relay, names in enumerate(of_relay)
        if (gone := tuple(name for name in names if name not in here))
    }
    lost = sorted(name for gone in missing.values() for name in gone)
    elsewhere = all(gone == of_relay[relay] for relay, gone in missing.items())
    if not lost:
        recovery.steps[step] = ticket.assignment
    elif elsewhere and len(lost) < len(ticket.samples):
        recovery.shared[step] = missing
    else:
        recovery.damaged.append(f"step {step}: its samples {lost[:5]} are lost, {len(lost)} in all")


def _hand_over(relay: Taker, sample: SavedSample, recovery: Recovery) -> None:
    try:
        relay.add_frame(sample.sample_id, bytes(sample.frame), sample.tokens, engine="recovered")
    except RoutingError as error:
        recovery.damaged.append(str(error))
    except SampleTwice as error:
        recovery.damaged.append(f"{error} (left by two relays)")
    else:
        recovery.pending.append(sample.sample_id)
