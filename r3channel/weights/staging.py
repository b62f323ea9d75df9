"""What trainer and receiver say to each other over a link, and how a rank's staged copy is laid out. No engine, no model.

rank -> trainer   NEEDS, once: what it takes of the checkpoint
trainer -> rank   TABLE, once per plan: what it will send, in order; then per version DATA ..., END, VERIFY
rank -> trainer   END with an empty word or what is wrong; VERIFY with digests by parameter
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from r3channel.errors import TransportError, WeightsCorrupt
from r3channel.transport.link import Link
from r3channel.weights.dryrun import Part
from r3channel.weights.geometry import Box
from r3channel.weights.manifest import ALIGNMENT, TensorMeta

NEEDS, TABLE, DATA, END, VERIFY = range(1, 6)
HEAD = struct.Struct("<qIIQ")
"""Of DATA: version, first entry of the table, entries, xxh3 of the bytes that follow."""
ASK = struct.Struct("<q?")
"""Of VERIFY: version, and whether checksums as SGLang's own are wanted too."""
_MOST_BYTES = 256 << 20
"""Of a blob: needs of 100,000 tensors are 15 MB."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One piece that a trainer sends: a box within a part."""

    part: int
    box: Box


@dataclass(frozen=True, slots=True)
class StagedLayout:
    """Where each parameter lies in the staged copy."""

    params: tuple[TensorMeta, ...]
    offsets: tuple[int, ...]
    nbytes: int

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's memory, flat, in its dtype."""
        pairs = zip(self.params, self.offsets, strict=True)
        return [flat[at : at + meta.nbytes].view(meta.dtype) for meta, at in pairs]


def staged_layout(params: Sequence[TensorMeta]) -> StagedLayout:
    offsets, end = [], 0
    for meta in params:
        offsets.append(end)
        end += -(-meta.nbytes // ALIGNMENT) * ALIGNMENT
    return StagedLayout(tuple(params), tuple(offsets), end)


def session_token(run_token: str, nonce: str) -> bytes:
    """What both ends of a link prove to know: the run's secret, where there is one, and the session's own."""
    return hashlib.sha256(f"{run_token} {nonce}".encode()).digest()


def table_bytes(entries: Sequence[Entry]) -> np.ndarray:
    rows = [[e.part, len(e.box.start), *e.box.start, *e.box.stop] for e in entries]
    return np.array([value for row in rows for value in row], dtype=np.int64)


def read_table(blob: bytes, parts: Sequence[Part]) -> list[Entry]:
    """WeightsCorrupt for an entry that lies outside its part."""
    values = np.frombuffer(blob, dtype=np.int64).tolist()
    entries, at = [], 0
    while at < len(values):
        part, axes = values[at], values[at + 1]
        box = Box(tuple(values[at + 2 : at + 2 + axes]), tuple(values[at + 2 + axes : at + 2 + 2 * axes]))
        if not 0 <= part < len(parts) or len(box.stop) != len(parts[part].box.start):
            raise ValueError(f"entry {len(entries)} names part {part} of {len(parts)}")
        if box.numel and parts[part].box.intersect(box) != box:
            raise ValueError(f"entry {len(entries)}: {box} is outside {parts[part].box}")
        entries.append(Entry(part, box))
        at += 2 + 2 * axes
    return entries


def send_blob(link: Link, kind: int, value: Any, *, timeout_s: float | None) -> None:
    """Bytes, or plain values as JSON, of any length."""
    data = (
        value.tobytes()
        if isinstance(value, np.ndarray)
        else json.dumps(value, separators=(",", ":")).encode()
    )
    link.send_record(kind, len(data).to_bytes(8, "little"), timeout_s=timeout_s)
    link.send([data], timeout_s=timeout_s)


def receive_blob(link: Link, body: bytes, *, timeout_s: float | None = None) -> bytes:
    """The blob that a record's `body` announced."""
    length = int.from_bytes(body, "little")
    if length > _MOST_BYTES:
        raise TransportError(f"{length} bytes are announced, at most {_MOST_BYTES} are taken")
    data = bytearray(length)
    link.recv_into(memoryview(data), timeout_s=timeout_s)
    return bytes(data)


def expect_json(link: Link, kind: int, *, timeout_s: float) -> Any:
    """The next record, which must be a blob of this kind."""
    found, body = link.recv_record(timeout_s=timeout_s)
    if found != kind:
        raise WeightsCorrupt(f"{link.peer} sent record {found}, expected {kind}")
    return json.loads(receive_blob(link, body, timeout_s=timeout_s))
