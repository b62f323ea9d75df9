"""Frames at rest: append-only segment files, mapped into memory, deleted when every frame in them is released.

The kernel decides what stays resident, so memory follows the page cache and not the batch. Each record begins with its
own header, so that a later process can find the frames of a crashed one by reading the files.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import tempfile
import threading
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from r3channel.errors import SampleTwice, SampleUnknown, StoreFull

_RECORD = struct.Struct("<4sHHQQ")  # magic, id bytes, zero, frame bytes, serial
_MAGIC, _RELEASED = b"R3R\x01", b"R3R\x00"
SEGMENT_BYTES = 64 << 20
"""One file; a larger frame gets a file of its own size."""


@dataclass
class _Segment:
    path: Path
    memory: mmap.mmap
    file: int
    """Open file: frames are written through it, because a first write into the mapping costs twice as much (page faults)."""
    used: int = 0
    live: int = 0
    """Records not yet released."""
    closed: bool = False
    """No record will be added."""


@dataclass(frozen=True, slots=True)
class _Record:
    segment: _Segment
    start: int
    stop: int
    header: int
    """Bytes of the record before `start`."""


@dataclass
class FrameStore:
    """Sample id -> frame bytes. Thread safe.

        put -> get* -> release          (a released id may be put again)

    A view from `get` stays valid until its id is released; nobody may hold it longer.
    """

    folder: Path
    ceiling_bytes: int
    _records: dict[str, _Record] = field(default_factory=dict)
    _segments: list[_Segment] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _serial: int = 0
    _temporary: tempfile.TemporaryDirectory[str] | None = None

    @classmethod
    def open(cls, folder: str, *, ceiling_bytes: int) -> FrameStore:
        """In `folder` (created), or in a fresh temporary folder when it is empty."""
        temporary = None if folder else tempfile.TemporaryDirectory(prefix="r3channel-store-")
        path = Path(temporary.name if temporary else folder)
        path.mkdir(parents=True, exist_ok=True)
        return cls(path, ceiling_bytes, _temporary=temporary)

    def put(self, sample_id: str, frame: bytes | memoryview) -> None:
        """Copy a frame in. Raises `SampleTwice`, or `StoreFull` at the ceiling; then nothing has changed."""
        key = sample_id.encode()
        size = _RECORD.size + len(key) + len(frame)
        with self._lock:
            if sample_id in self._records:
                raise SampleTwice(f"sample {sample_id} is already in the store; was a reply added twice?")
            segment = self._segment_for(size, sample_id)
            start = segment.used + _RECORD.size + len(key)
            self._serial += 1
            _RECORD.pack_into(segment.memory, segment.used, _MAGIC, len(key), 0, len(frame), self._serial)
            segment.memory[segment.used + _RECORD.size : start] = key
            _write(segment, frame, at=start)
            segment.used += size
            segment.live += 1
            self._records[sample_id] = _Record(segment, start, start + len(frame), _RECORD.size + len(key))

    def get(self, sample_id: str) -> memoryview:
        """The frame's bytes, without a copy."""
        with self._lock:
            record = self._records.get(sample_id)
        if record is None:
            raise SampleUnknown(f"sample {sample_id} is not in the store; never added, or already released")
        return memoryview(record.segment.memory)[record.start : record.stop]

    def release(self, sample_id: str) -> None:
        """Forget a frame; the last one of a full segment deletes the file. Unknown ids are ignored."""
        with self._lock:
            record = self._records.pop(sample_id, None)
            if record is not None:
                record.segment.live -= 1
                record.segment.memory[record.start - record.header : record.start - record.header + 4] = (
                    _RELEASED
                )
                self._collect(record.segment)

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._records

    @property
    def nbytes(self) -> int:
        """Size of all segment files."""
        return sum(len(segment.memory) for segment in self._segments)

    def close(self) -> None:
        """Delete every file; idempotent."""
        with self._lock:
            self._records.clear()
            for segment in list(self._segments):
                segment.live, segment.closed = 0, True
                self._collect(segment)
        if self._temporary is not None:
            self._temporary.cleanup()

    def _segment_for(self, size: int, sample_id: str) -> _Segment:
        if self._segments and not self._segments[-1].closed:
            last = self._segments[-1]
            if len(last.memory) - last.used >= size:
                return last
            last.closed = True
            self._collect(last)
        length = max(SEGMENT_BYTES, size)
        if self.nbytes + length > self.ceiling_bytes:
            raise StoreFull(
                f"sample {sample_id}: the store holds {len(self._records)} frames in {self.nbytes} bytes and may not exceed "
                f"{self.ceiling_bytes}. Seal and send steps, discard samples, or raise store_bytes"
            )
        return self._create(length)

    def _create(self, length: int) -> _Segment:
        path = self.folder / f"segment-{self._serial:012d}-{uuid.uuid4().hex}.r3s"
        with open(path, "x+b") as file:
            try:  # a sparse file on a full disk would end the process at the first write into the mapping
                os.posix_fallocate(file.fileno(), 0, length)
            except OSError as error:
                path.unlink()
                raise StoreFull(
                    f"no room for a segment of {length} bytes in {self.folder}: {error}"
                ) from error
            segment = _Segment(path, mmap.mmap(file.fileno(), length), os.dup(file.fileno()))
        self._segments.append(segment)
        return segment

    def _collect(self, segment: _Segment) -> None:
        if segment.closed and segment.live == 0:
            self._segments.remove(segment)
            segment.path.unlink(missing_ok=True)
            os.close(segment.file)
            with contextlib.suppress(BufferError):  # a view is still alive; the mapping goes with it
                segment.memory.close()


def _write(segment: _Segment, frame: bytes | memoryview, *, at: int) -> None:
    """The mapping of the same file shows the bytes at once."""
    rest = memoryview(frame).cast("B")
    while len(rest):
        written = os.pwrite(segment.file, rest, at)
        rest, at = rest[written:], at + written
