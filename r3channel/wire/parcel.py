"""Direct delivery: what a reply holds instead of its frame, the parcel of the frame, and how an engine sends parcels. No I/O.

    frame reference (40 B, 56 in base64)   magic, zero, first_row u32, rows u32, sample_key u64, boot_id u64, serial u64
    parcel                         magic, count u32, boot_id u64, then count x
                                   {serial u64, bytes u32, check u32, frame, zeros to a multiple of 16}
    check                          the low 32 bits of xxh3_64 of boot_id u64, serial u64, bytes u64

(boot_id, serial) names one frame of one life of an engine. Sending a frame twice does no harm, and the relay can say which frame
it has not got. Frames carry their own hashes; `check` covers the name, so that no frame is kept under another frame's name.

An engine sends parcels to a relay over HTTP:

    POST /v1/hello     a hello (`wire.hello`); the answer's text names a session
    POST /v1/frames    a parcel of frames, with `R3-Session` of the hello of their engine
    both               with `Authorization: Bearer TOKEN` and a Content-Length; chunked bodies are not read. `R3-Address` is the
                       engine's end of the connection: where the relay sees the same one, no proxy is between, and the
                       connection ends no later than the engine

A connection is kept for further requests unless the answer says `Connection: close`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import xxhash

from r3channel.errors import FrameReferenceInvalid
from r3channel.wire.source import Part, Source

REFERENCE_MAGIC = b"R3T\x01"
PARCEL_MAGIC = b"R3P\x02"
_REFERENCE = struct.Struct("<4s4xIIQQQ")
_PARCEL = struct.Struct("<4sIQ")
_ENTRY = struct.Struct("<QII")
_CHECKED = struct.Struct("<QQQ")
_ALIGNMENT = 16
"""Every frame in a parcel begins at a multiple of this: its ids are aligned from its own start (see `wire.header`)."""
REFERENCE_BYTES = _REFERENCE.size
FrameName = tuple[int, int]
"""(boot_id, serial)."""


class FrameReference(NamedTuple):
    """A stand-in for a frame of `rows` rows from `first_row` on; the frame itself is sent directly.

    >>> reference = FrameReference(sample_key=7, boot_id=1, serial=2, first_row=0, rows=30)
    >>> FrameReference.from_bytes(reference.to_bytes()) == reference, len(reference.to_bytes())
    (True, 40)
    """

    first_row: int
    rows: int
    sample_key: int
    boot_id: int
    """Random per life of an engine process."""
    serial: int

    @property
    def end_row(self) -> int:
        return self.first_row + self.rows

    @property
    def name(self) -> FrameName:
        return self.boot_id, self.serial

    def to_bytes(self) -> bytes:
        return _REFERENCE.pack(REFERENCE_MAGIC, *self)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> FrameReference:
        """Read a frame reference.

        Raises:
            FrameReferenceInvalid: `data` has another size, or does not begin with the magic of a reference.
        """
        if len(data) != REFERENCE_BYTES or bytes(data[:4]) != REFERENCE_MAGIC:
            raise FrameReferenceInvalid(
                f"{len(data)} bytes beginning with {bytes(data[:4])!r}, expected {REFERENCE_BYTES} with {REFERENCE_MAGIC!r}"
            )
        return cls(*_REFERENCE.unpack(data)[1:])


def pack_parcel(boot_id: int, frames: Sequence[tuple[int, bytes]]) -> list[bytes]:
    """Return the body that carries frames, in parts.

    The parts are to be sent one after another: no frame is copied.

    Args:
        boot_id: The life of the engine that made the frames.
        frames: (serial, frame) pairs.
    """
    parts = [_PARCEL.pack(PARCEL_MAGIC, len(frames), boot_id)]
    for serial, frame in frames:
        entry = _ENTRY.pack(serial, len(frame), _check(boot_id, serial, len(frame)))
        parts += [entry, frame, bytes(-len(frame) % _ALIGNMENT)]
    return parts


def open_parcel(source: Source) -> tuple[int, int]:
    """Read the beginning of a parcel.

    Args:
        source: The parcel.

    Returns:
        (boot_id, number of frames).

    Raises:
        FrameReferenceInvalid: `source` holds no parcel, or one that announces more than `MAX_PARCEL_FRAMES` frames.
    """
    size = source.left
    head = bytes(source.take(min(size, _PARCEL.size)))
    if size < _PARCEL.size or head[:4] != PARCEL_MAGIC:
        raise FrameReferenceInvalid(f"{size} bytes beginning with {head[:4]!r} are no parcel of frames")
    _, count, boot_id = _PARCEL.unpack(head)
    if count > MAX_PARCEL_FRAMES:
        raise FrameReferenceInvalid(f"a parcel announces {count} frames, at most {MAX_PARCEL_FRAMES} fit")
    return boot_id, count


def frames_in(source: Source, count: int, *, boot_id: int) -> Iterator[tuple[int, Part]]:
    """Yield the frames of a parcel that was opened, in order.

    A name or a length is used only once its check agrees, a length only where so many bytes are left. What the caller does not
    read of a frame is skipped. Errors of `source` pass through.

    Args:
        source: The parcel behind its beginning.
        count: The number of frames, as `open_parcel` returned it.
        boot_id: As `open_parcel` returned it.

    Yields:
        (serial, the frame's bytes).

    Raises:
        FrameReferenceInvalid: The parcel is damaged or incomplete, or bytes follow its last frame.
    """
    for index in range(count):
        if source.left < _ENTRY.size:
            raise FrameReferenceInvalid(f"a parcel ends before frame {index} of {count}")
        serial, size, check = _ENTRY.unpack(source.take(_ENTRY.size))
        if check != _check(boot_id, serial, size):
            raise FrameReferenceInvalid(
                f"entry {index} of a parcel is damaged: check {check:#x} does not fit frame {serial} of {size} bytes"
            )
        padding = -size % _ALIGNMENT
        if size + padding > source.left:
            raise FrameReferenceInvalid(
                f"frame {index} of a parcel announces {size} bytes, {source.left} are left"
            )
        frame = Part(source, size)
        yield serial, frame
        frame.left += padding
        frame.skip()
    if source.left:
        raise FrameReferenceInvalid(f"{source.left} bytes after the last frame of a parcel")


def _check(boot_id: int, serial: int, nbytes: int) -> int:
    return xxhash.xxh3_64_intdigest(_CHECKED.pack(boot_id, serial, nbytes)) & 0xFFFFFFFF


HELLO_PATH, FRAMES_PATH = "/v1/hello", "/v1/frames"
SESSION_HEADER, ADDRESS_HEADER = "R3-Session", "R3-Address"
"""Binds parcels to the hello of their engine, also where a proxy ends connections between the two."""
PARCEL_BYTES = 8 << 20
"""An engine closes a parcel at this size: large enough that a request costs little per frame, small enough to be sent at once.
Its last frame may exceed it."""
PARCEL_FRAMES = 256
"""Requests whose frames an engine puts into one parcel."""
MAX_PARCEL_FRAMES = 1024
"""A parcel that announces more frames is refused."""


class Status(IntEnum):
    """Every answer that the ingest gives, as an HTTP status."""

    TAKEN = 200
    """The hello is known; or every frame of the parcel is kept until a reply claims it or it expires."""
    NO_PARCEL = 400
    """What was sent is no HTTP, no hello, no parcel, or a parcel that cannot be used. One more try, encoded anew, may help."""
    NO_TOKEN = 401
    """The bearer token is missing or another one. The body was not read."""
    NO_SUCH_PATH = 404
    NO_SUCH_METHOD = 405
    TOO_SLOW = 408
    """The body stood still, or took too long in all. Send it again."""
    HELLO_FIRST = 409
    """The session is not this engine's: the relay was restarted, or the engine sent another hello, or its hello was refused."""
    NO_LENGTH = 411
    """Content-Length is missing. The body was not read."""
    TOO_LARGE = 413
    """No parcel of this size is ever taken. The body was not read."""
    HELLO_REFUSED = 422
    """The engine is not what the relay expects; the text says in which field."""
    FRAME_DAMAGED = 425
    """A frame of the parcel came damaged: send the parcel again. Its other frames were kept, and are known by their names."""
    FAILED = 500
    """A defect of the relay, in its log. Send the request again."""
    COME_AGAIN = 503
    """The relay has no room. What was not kept must be sent again; it may have been read or not."""
