"""One file of the frame store and the records in it. Knows bytes; knows no ceiling, no sample's fate.

    file      {magic, zero u32, generation u64}, then records at multiples of 16 bytes
    record    64 bytes: {magic, state u8, kind u8, id bytes u16, tokens u32, zero u32, frame bytes u64, serial u64, refers to u64,
              generation u64, zero u64, xxh3 of all this (state as 0), id and tokens}, id, tokens int32, zeros, frame

A file is filled again when all its records are released; the new generation then hides what lies behind the new records. A
record's header is written before its frame and marked LIVE after it, so that whoever reads the file of a process that was killed
knows every record, and which one was being written. Frames carry their own hash.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from r3channel.errors import StoreFull
from r3channel.routing import Ids

_FILE = struct.Struct("<4sIQ")
_RECORD = struct.Struct("<4sBBHIIQQQQQQ")
_FILE_MAGIC, _RECORD_MAGIC = b"R3S\x02", b"R3R\x02"
_STATE_AT = 4
WRITING, LIVE, RELEASED = 1, 2, 3
TORN = 4
"""Never written: what `read_records` says of a record behind whose header the file ends."""
FRAME, CLAIM = 1, 2
"""A frame (of a named sample, or of none yet), or a record that gives the frame with serial `refers_to` a sample's name."""
_ALIGNMENT = 16
"""Of records and frames: ids are then checked and placed where they lie."""
FILE_SUFFIX = ".r3s"
NO_TOKENS: Ids = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What is written beside a frame."""

    kind: int = FRAME
    sample_id: str = ""
    tokens: Ids = field(default_factory=lambda: NO_TOKENS)
    """int32. The whole sequence of a sample, for its later turns."""
    serial: int
    refers_to: int = 0

    def body(self) -> bytes:
        return self.sample_id.encode() + self.tokens.astype("<i4", copy=False).tobytes()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record lies in its file."""

    at: int
    start: int
    """Of the frame."""
    stop: int


@dataclass(eq=False)
class Segment:
    """A file of fixed size, allocated on disk and mapped. Not thread safe, `write` and `mark` aside."""

    path: Path
    memory: mmap.mmap
    file: int
    """Open file: the first time frames are written through it, because a first write into the mapping costs twice as much (page
    faults). Later they are copied into the mapping, which costs half as much as a write (0.04 us per token against 0.08)."""
    fills: int = 0
    generation: int = 0
    used: int = 0
    live: int = 0
    """Records that are not released."""
    idle_since_s: float = field(default_factory=time.monotonic)

    @classmethod
    def create(cls, path: Path, size: int) -> Segment:
        """Raise `StoreFull` when the disk has no room; nothing is left then."""
        try:
            with open(
                path, "x+b"
            ) as file:  # a sparse file on a full disk would end the process at a write into the mapping
                os.posix_fallocate(file.fileno(), 0, size)
                segment = cls(path, mmap.mmap(file.fileno(), size), os.dup(file.fileno()))
        except OSError as error:
            path.unlink(missing_ok=True)
            raise StoreFull(f"no room for a segment of {size} bytes in {path.parent}: {error}") from error
        segment.restart()
        return segment

    def restart(self) -> None:
        """Forget every record and fill from the beginning."""
        self.fills += 1
        self.generation, self.live, self.used = secrets.randbits(64), 0, _ALIGNMENT
        self.idle_since_s = time.monotonic()
        _FILE.pack_into(self.memory, 0, _FILE_MAGIC, 0, self.generation)

    def room(self) -> int:
        return len(self.memory) - self.used

    def reserve(self, note: Note, frame_bytes: int) -> Place:
        """Write a record's header; the caller knows that there is room (`record_bytes`)."""
        body, at = note.body(), self.used
        fields = (
            note.kind, len(note.sample_id.encode()), len(note.tokens), 0, frame_bytes, note.serial, note.refers_to,
            self.generation, 0,
        )  # fmt: skip
        _RECORD.pack_into(self.memory, at, _RECORD_MAGIC, 0, *fields, 0)
        head = self.memory[at : at + _RECORD.size - 8]
        digest = xxhash.xxh3_64_intdigest(head + body)
        self.memory[at + _RECORD.size : at + _RECORD.size + len(body)] = body
        start = _aligned(at + _RECORD.size + len(body))
        _RECORD.pack_into(self.memory, at, _RECORD_MAGIC, WRITING, *fields, digest)
        self.used = _aligned(start + frame_bytes)
        self.live += 1
        return Place(at, start, start + frame_bytes)

    def write(self, place: Place, frame: bytes | memoryview) -> None:
        """Copy a frame to its place. The mapping of the same file shows the bytes at once."""
        if self.fills > 1:
            np.copyto(
                np.frombuffer(self.memory, np.uint8)[place.start : place.stop], np.frombuffer(frame, np.uint8)
            )
            return
        rest, at = memoryview(frame).cast("B"), place.start
        while len(rest):
            written = os.pwrite(self.file, rest, at)
            rest, at = rest[written:], at + written

    def mark(self, place: Place, state: int) -> None:
        self.memory[place.at + _STATE_AT] = state

    def delete(self) -> None:
        """Remove the file. A view that is still alive keeps the mapping."""
        self.path.unlink(missing_ok=True)
        os.close(self.file)
        with contextlib.suppress(BufferError):
            self.memory.close()


def record_bytes(note: Note, frame_bytes: int) -> int:
    """Bytes that a record takes at most."""
    return _aligned(_RECORD.size + len(note.body())) + _aligned(frame_bytes)


def file_bytes(record: int) -> int:
    """The least size of a file for one record."""
    return _ALIGNMENT + record


@dataclass(frozen=True, slots=True)
class Found:
    """A record in the file of a process that has ended."""

    state: int
    note: Note
    frame: memoryview


def read_records(path: Path) -> Iterator[Found]:
    """The records of a file in order, up to the first bytes that are none: nothing was written from there on.

    A last record behind whose header the file ends is `TORN`, its frame what is left. A header that is cut itself names nobody.
    Frames are views of the mapped file. Nothing is believed but what its hash covers.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _FILE.size:
            return
        view = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
    magic, _, generation = _FILE.unpack_from(view)
    at = _ALIGNMENT
    while magic == _FILE_MAGIC and at + _RECORD.size <= size:
        record, state, *rest = _RECORD.unpack_from(view, at)
        kind, id_bytes, tokens, _, frame_bytes, serial, refers_to, its_generation, _, digest = rest
        begin = at + _RECORD.size
        start = _aligned(begin + id_bytes + 4 * tokens)
        if record != _RECORD_MAGIC or its_generation != generation or start > size:
            return
        head = bytearray(view[at : begin - 8])
        head[_STATE_AT] = 0
        body = bytes(view[begin : begin + id_bytes + 4 * tokens])
        if xxhash.xxh3_64_intdigest(bytes(head) + body) != digest:
            return
        note = Note(
            kind=kind,
            sample_id=body[:id_bytes].decode(),
            tokens=np.frombuffer(body[id_bytes:], "<i4"),
            serial=serial,
            refers_to=refers_to,
        )
        if start + frame_bytes > size:
            yield Found(state if state == RELEASED else TORN, note, view[start:])
            return
        yield Found(state, note, view[start : start + frame_bytes])
        at = _aligned(start + frame_bytes)


def _aligned(value: int) -> int:
    return -(-value // _ALIGNMENT) * _ALIGNMENT
