"""The bytes of one recorded step: records, one after another. This module knows files, no steps and no relays.

    record    head (32 bytes, little endian), payload, zeros to a multiple of 16 bytes
    head      {magic "R3R\\x01", kind u8, part u8, 2 zero, sample u32, turn u32, payload bytes u64, xxh3_64 of these 24 bytes}

The file grows only at its end. However a writer ends, it leaves whole records and at most one torn record, which readers drop.
Payloads bring their own hashes. A size in the file is compared with the file's size before memory is taken for it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import numpy as np
import xxhash

from r3channel.errors import RecordingInvalid

_HEAD = Struct("<4sBB2xIIQ")
_MAGIC = b"R3R\x01"
"""The last byte is the format."""
HEAD_BYTES = _HEAD.size + 8
_ALIGNMENT = 16


class Kind(IntEnum):
    """What a record's payload is."""

    TICKET = 1
    """The first record: the step's ticket."""
    TOKENS = 2
    """int32 ids of a sample's whole sequence; `sample` is its place in the ticket."""
    FRAME = 3
    """Rows of a sample, as one frame; `turn` counts its turns."""
    END = 4
    """The last record, empty. It shows that the segment holds all that the relay had."""
    TENSORS = 5
    """Frames of the tensors that a turn's tokens bring beside expert ids, one after another in the ticket's order of tensors."""


Pieces = list[bytes | memoryview]
"""A record in pieces, which are written without a copy."""


class Record(NamedTuple):
    """One record. `part` is the pass that consumed a frame's ids, on the routers' side; 0 on the engines'."""

    kind: Kind
    payload: memoryview
    sample: int = 0
    turn: int = 0
    part: int = 0


class Segment(NamedTuple):
    """The records of one step, as far as they are whole."""

    records: list[Record]
    torn_bytes: int
    """Bytes of a torn record behind them."""
    path: Path

    @property
    def ended(self) -> bool:
        return bool(self.records) and self.records[-1].kind is Kind.END


def pack(kind: Kind, *payload: bytes | memoryview, sample: int = 0, turn: int = 0, part: int = 0) -> Pieces:
    size = sum(memoryview(piece).nbytes for piece in payload)
    head = _HEAD.pack(_MAGIC, kind, part, sample, turn, size)
    return [head + _hash(head), *payload, bytes(-size % _ALIGNMENT)]


def nbytes_of(records: Iterable[Pieces]) -> int:
    return sum(memoryview(piece).nbytes for pieces in records for piece in pieces)


def check_room(file: int, nbytes: int) -> None:
    """Raise OSError if the disk lacks room for so many bytes.

    The check comes before anything is written, because the relay's store may lie on the same disk.
    """
    disk = os.fstatvfs(file)
    if disk.f_blocks and disk.f_bavail * disk.f_frsize < nbytes:  # some file systems count no blocks
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read(path: Path) -> Segment:
    """Read a segment's whole records.

    Returns:
        The segment. Payloads are views of the mapped file, each at a multiple of 16.

    Raises:
        RecordingInvalid: the file is no segment, or a record was changed. Only the last record may be torn.
    """
    try:
        size = path.stat().st_size
        data = np.memmap(path, np.uint8, "r").data if size else memoryview(b"")
    except OSError as error:
        raise RecordingInvalid(f"{path}: expected a segment of a recording: {error}") from error
    records = list(_records(data, path))
    whole = sum(HEAD_BYTES + _padded_size(record.payload.nbytes) for record in records)
    return Segment(records, size - whole, path)


def _records(data: memoryview, path: Path) -> Iterator[Record]:
    at = 0
    while at + HEAD_BYTES <= len(data):
        head, head_hash = data[at : at + _HEAD.size], data[at + _HEAD.size : at + HEAD_BYTES]
        magic, kind, part, sample, turn, size = _HEAD.unpack(head)
        if magic[:3] == _MAGIC[:3] and magic != _MAGIC:
            raise RecordingInvalid(
                f"{path}: segment format {magic[3]}, expected {_MAGIC[3]}: written by another r3channel; read it with that one"
            )
        if bytes(head_hash) != _hash(head) or kind not in set(Kind):
            raise RecordingInvalid(
                f"{path}: byte {at}: expected the head of a record, its hash differs; damaged, or no segment? Record it again"
            )
        begin = at + HEAD_BYTES
        if begin + _padded_size(size) > len(data):
            return
        yield Record(Kind(kind), data[begin : begin + size], sample, turn, part)
        at = begin + _padded_size(size)


def _hash(head: bytes | memoryview) -> bytes:
    return xxhash.xxh3_64_intdigest(head).to_bytes(8, "little")


def _padded_size(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
