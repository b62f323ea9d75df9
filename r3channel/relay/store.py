"""Frames at rest: segment files, allocated once, mapped into memory, and filled again when their frames are released.

The kernel decides what stays resident, so memory follows the page cache and not the batch; at steady state no fresh page is
touched. A store's folder is locked while its process lives; `relay.recovery` reads those of processes that ended.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from r3channel.errors import SampleTwice, SampleUnknown, StoreFull
from r3channel.relay.segment import (
    CLAIM,
    FILE_SUFFIX,
    LIVE,
    NO_TOKENS,
    RELEASED,
    Note,
    Place,
    Segment,
    file_bytes,
    record_bytes,
)
from r3channel.routing import Ids

SEGMENT_BYTES = 64 << 20
"""One file; a larger frame gets a file of its own size."""
LOCK_FILE = "lock"
FOLDER_PREFIX = "relay-"
IDLE_S = 60.0
"""Segments that nothing was put into for so long are given back to the disk."""


@dataclass(slots=True)
class _Record:
    segment: Segment
    place: Place
    serial: int
    claims: list[tuple[Segment, Place]] = field(default_factory=list)


@dataclass
class FrameStore:
    """Key -> frame bytes. Thread safe.

        put -> get* -> release          (a released key may be put again)

    A view from `get` stays valid until its key is released; nobody may hold it longer.
    """

    folder: Path
    ceiling_bytes: int
    _lock_file: int
    _records: dict[str, _Record] = field(default_factory=dict)
    _filling: Segment | None = None
    _full: list[Segment] = field(default_factory=list)
    _free: list[Segment] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _serial: int = 0
    _temporary: tempfile.TemporaryDirectory[str] | None = None

    @classmethod
    def open(cls, folder: str, *, ceiling_bytes: int) -> FrameStore:
        """In a fresh folder of its own in `folder` (created), or in the system's temporary folder when it is empty."""
        temporary = None if folder else tempfile.TemporaryDirectory(prefix="r3channel-store-")
        own = Path(temporary.name if temporary else folder) / f"{FOLDER_PREFIX}{uuid.uuid4().hex[:12]}"
        own.mkdir(parents=True)
        lock_file = os.open(own / LOCK_FILE, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return cls(own, ceiling_bytes, lock_file, _temporary=temporary)

    def put(
        self, key: str, frame: bytes | memoryview, *, sample_id: str = "", tokens: Ids = NO_TOKENS
    ) -> None:
        """Copy a frame in. Raises `SampleTwice`, or `StoreFull` at the ceiling or on a full disk; then nothing has changed.

        `sample_id` and `tokens` are kept beside it for a recovery; a frame without is recovered only if it is `claim`ed.
        """
        record = self._open(key, len(frame), sample_id=sample_id, tokens=tokens)
        record.segment.write(record.place, frame)
        record.segment.mark(record.place, LIVE)

    def reserve(self, key: str, nbytes: int) -> memoryview:
        """The place of a frame that is still to be written there, 16-byte aligned: `commit` or `release` it. Raises as `put`.

        A relay that is killed before `commit` leaves nothing of it.
        """
        record = self._open(key, nbytes, sample_id="", tokens=NO_TOKENS)
        return memoryview(record.segment.memory)[record.place.start : record.place.stop]

    def commit(self, key: str) -> None:
        """The frame is whole."""
        with self._changed:
            record = self._record(key)
            record.segment.mark(record.place, LIVE)

    def _open(self, key: str, nbytes: int, *, sample_id: str, tokens: Ids) -> _Record:
        with self._changed:
            if key in self._records:
                raise SampleTwice(f"sample {key} is already in the store; was a reply added twice?")
            self._serial += 1
            note = Note(sample_id=sample_id, tokens=tokens, serial=self._serial)
            segment, place = self._reserve(note, nbytes, key)
            record = self._records[key] = _Record(segment, place, note.serial)
            return record

    def claim(self, key: str, *, sample_id: str, tokens: Ids) -> None:
        """Say whose frame this is. Raises as `put`."""
        with self._changed:
            record = self._record(key)
            self._serial += 1
            note = Note(
                kind=CLAIM, sample_id=sample_id, tokens=tokens, serial=self._serial, refers_to=record.serial
            )
            segment, place = self._reserve(note, 0, sample_id)
            record.claims.append((segment, place))
        segment.mark(place, LIVE)

    def get(self, key: str) -> memoryview:
        """The frame's bytes, 16-byte aligned, without a copy."""
        with self._changed:
            record = self._record(key)
        return memoryview(record.segment.memory)[record.place.start : record.place.stop]

    def release(self, key: str) -> None:
        """Forget a frame; a segment whose last one it was is filled again. Unknown keys are ignored."""
        with self._changed:
            record = self._records.pop(key, None)
            if record is not None:
                for segment, place in ((record.segment, record.place), *record.claims):
                    segment.mark(place, RELEASED)
                    segment.live -= 1
                    self._reuse(segment)
                self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: object) -> bool:
        return key in self._records

    @property
    def nbytes(self) -> int:
        """Size of all segment files, those included that wait to be filled again."""
        with self._changed:
            return sum(len(segment.memory) for segment in self._segments)

    @property
    def live_bytes(self) -> int:
        """Of the frames themselves."""
        with self._changed:
            return sum(record.place.stop - record.place.start for record in self._records.values())

    def wait_room(self, nbytes: int, *, timeout_s: float = 0.0) -> bool:
        """Whether a frame of so many bytes can be put now, or within `timeout_s` when others are released."""
        with self._changed:
            return self._changed.wait_for(lambda: self._has_room(nbytes + 4096), timeout=timeout_s)

    def trim(self, *, idle_s: float = IDLE_S) -> None:
        """Delete the files of segments that have been empty for so long."""
        limit_s = time.monotonic() - idle_s
        with self._changed:
            for segment in [segment for segment in self._free if segment.idle_since_s <= limit_s]:
                self._free.remove(segment)
                segment.delete()

    def close(self) -> None:
        """Delete every file; idempotent."""
        with self._changed:
            self._records.clear()
            for segment in self._segments:
                segment.delete()
            self._full, self._free, self._filling = [], [], None
            if self._lock_file >= 0:
                os.close(self._lock_file)
                self._lock_file = -1
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._temporary is not None:
            self._temporary.cleanup()

    # -- with the condition held -----------------------------------------------------------------------------------

    @property
    def _segments(self) -> list[Segment]:
        return [*self._full, *self._free, *([self._filling] if self._filling else [])]

    def _record(self, key: str) -> _Record:
        record = self._records.get(key)
        if record is None:
            raise SampleUnknown(f"sample {key} is not in the store; never added, or already released")
        return record

    def _reserve(self, note: Note, frame_bytes: int, name: str) -> tuple[Segment, Place]:
        size = record_bytes(note, frame_bytes)
        segment = self._filling
        if segment is None or segment.room() < size:
            segment = self._next(file_bytes(size), name)
        return segment, segment.reserve(note, frame_bytes)

    def _next(self, least: int, name: str) -> Segment:
        """A segment to fill with room for `least` bytes; the one before is full."""
        segment = next((free for free in self._free if len(free.memory) >= least), None)
        if segment is not None:
            self._free.remove(segment)
            segment.restart()
        else:
            segment = self._create(max(SEGMENT_BYTES, least), name)
        if self._filling is not None:
            self._full.append(self._filling)
        self._filling = segment
        return segment

    def _create(self, length: int, name: str) -> Segment:
        while self._free and self._held() + length > self.ceiling_bytes:  # too small for this frame
            self._free.pop().delete()
        if self._held() + length > self.ceiling_bytes:
            raise StoreFull(
                f"sample {name}: the store holds {len(self._records)} frames in {self._held()} bytes and may not exceed "
                f"{self.ceiling_bytes}. Seal and send steps, discard samples, or raise store_bytes"
            )
        return Segment.create(self.folder / f"segment-{self._serial:012d}{FILE_SUFFIX}", length)

    def _held(self) -> int:
        return sum(len(segment.memory) for segment in self._segments)

    def _has_room(self, nbytes: int) -> bool:
        if self._filling is not None and self._filling.room() >= nbytes:
            return True
        if any(len(free.memory) >= nbytes for free in self._free):
            return True
        busy = self._held() - sum(len(free.memory) for free in self._free)
        return busy + max(SEGMENT_BYTES, nbytes) <= self.ceiling_bytes

    def _reuse(self, segment: Segment) -> None:
        if segment.live:
            return
        if segment is self._filling:
            segment.restart()
            return
        self._full.remove(segment)
        if len(segment.memory) > SEGMENT_BYTES:
            segment.delete()
            return
        segment.idle_since_s = time.monotonic()
        self._free.append(segment)
