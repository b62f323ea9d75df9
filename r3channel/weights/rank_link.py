"""Links to our half in engines' ranks: their messages, the words of orders to it, and how pieces of weights cross them.

A trainer sends pieces in the order in which they lie in the rank's staged copy, so that the rank receives neighbours at once
(of a small Qwen3-MoE 47 runs in 10 records, instead of 1,193 copies) and both ends do little work in Python. Records are small
enough to be gathered, searched for NaN, hashed and sent while they are in a core's cache.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from r3channel.errors import GiverChanged, TransportError, WeightsCorrupt, WeightsError
from r3channel.transport.connection import Connection
from r3channel.weights.checksums import cross_sums, finite, hashed_bytes, host_bytes, tensor_digest
from r3channel.weights.geometry import Box, Needs, Part
from r3channel.weights.manifest import TensorMeta, nonfinite
from r3channel.weights.progress import Deadline

Digests = tuple[dict[str, str], dict[str, str]]
"""By parameter, of one rank: digests, and SGLang's own checksums if asked for."""

NEEDS, TABLE, DATA, END, VERIFY, PLACED, GIVE, BEGIN, LANDS, LEAVES = range(1, 11)
HEAD = struct.Struct("<qIIQ")
"""The head of DATA, PLACED and LANDS: the update's number, first entry of the table, entries, xxh3 of the bytes that follow."""
ASK = struct.Struct("<q?")
"""VERIFY's body: the update's number, and whether checksums as SGLang's own are wanted too."""
LIMIT = struct.Struct("<qid")
"""BEGIN's body: the update's number, records that this trainer sends in the joint group (-1: none does), seconds it has left."""
PARAM = struct.Struct("<qI")
"""GIVE's body: version, and which parameter."""
RECORD_BYTES = 1 << 20
"""A record's bytes at most. Among 256 KiB to 8 MiB it was the fastest (AMD EPYC, 1 MiB of second-level cache a core)."""
ORDERS_GROUP = "r3channel"
"""The `group_name` of orders to our half: `/update_weights_from_distributed` whose one name is an order in JSON."""
COMMIT_FORMAT = "r3channel-commit"
"""The `load_format` of an order to change over. It comes without begin and end around it: our half makes both."""
OPEN_FORMAT = "r3channel-open"
"""The `load_format` of an order that loads nothing and has no begin and end, which would process old weights again."""
FOUND_OPEN = "an update was begun and not ended: "
"""The beginning of an answer to an order that loads nothing, where a begin is without its end."""
UNTOUCHED = "nothing was touched: "
"""The beginning of the reason why all ranks refused a commit before a parameter changed; without it any may have changed."""
FLUSH_REFUSED = "cache was not flushed"
"""SGLang's words when requests wait for their grammar; the weights are in nevertheless."""
UNREADABLE = (ValueError, LookupError, TypeError, ArithmeticError, RecursionError, OSError, zlib.error)
"""Errors of reading a peer's message that does not hold what was expected."""
_BLOB = struct.Struct("<QQ")
"""The announcement of a blob, at a record's end: its number of bytes, and their xxh3."""
_MOST_BYTES = 256 << 20
"""A blob's bytes at most: the needs of 100,000 tensors are 15 MB."""


class Entry(NamedTuple):
    """One piece that a trainer sends, as the rank is told of it: a box within a part."""

    part: int
    box: Box


class Piece(NamedTuple):
    """One piece that a trainer sends, and what it is cut from."""

    part: int
    box: Box
    dtype: torch.dtype
    """The dtype that the rank keeps."""
    meta: TensorMeta
    """The whole tensor's name and shape, and the dtype that is sent."""
    shard: int
    """Index among what this trainer has for the bucket."""
    cut: tuple[slice, ...]
    """The piece's slices in the shard; () is all of it."""

    def of(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the piece's values, cast to the dtype sent, then the rank's.

        They lie on the shard's device, contiguous or not.

        Args:
            shards: what this trainer has for the bucket.
        """
        return shards[self.shard][self.cut].detach().to(self.meta.dtype).to(self.dtype)


class Run(NamedTuple):
    """Entries that lie side by side in a parameter."""

    entries: slice
    """Their indexes among the entries that were asked for."""
    view: torch.Tensor
    """A view of the staged copy: flat, or, for one entry with gaps, of the entry's shape."""


class Record(NamedTuple):
    """Pieces that travel together, in one dtype, by their place at the rank."""

    first: int
    pieces: Sequence[Piece]
    runs: Sequence[Run]
    """Where the pieces lie in memory that both map; () where bytes travel."""


def runs_of(entries: Sequence[Entry | Piece], needs: Needs, staged: Sequence[torch.Tensor]) -> list[Run]:
    """Return where entries lie in the staged copy.

    Args:
        entries: pieces by their place at the rank.
        needs: the rank's needs.
        staged: the staged copy, one flat tensor for each parameter.
    """
    runs, param, begun, end = list[Run](), -1, 0, 0
    for at, entry in enumerate(entries):
        part, first = needs.parts[entry.part], at
        flat, start = staged[part.param], part.start(entry.box)
        if part.gaps(entry.box):
            runs.append(Run(slice(at, at + 1), part.view(flat, entry.box)))
            param = -1
            continue
        if (param, end) == (part.param, start):
            first = runs.pop().entries.start
        else:
            param, begun = part.param, start
        end = start + entry.box.numel
        runs.append(Run(slice(first, at + 1), flat[begun:end]))
    return runs


def session_token(run_token: str, nonce: str) -> bytes:
    """Return the secret that both ends of a link prove to know.

    It is made of the run's token, where there is one, and the session's nonce.
    """
    return hashlib.sha256(f"{run_token} {nonce}".encode()).digest()


def table_bytes(entries: Iterable[Entry | Piece]) -> bytes:
    rows = [[e.part, len(e.box.start), *e.box.start, *e.box.stop] for e in entries]
    return np.array([value for row in rows for value in row], dtype=np.int64).tobytes()


def read_table(blob: bytes, parts: Sequence[Part]) -> list[Entry]:
    """Read the entries of a table that `table_bytes` wrote.

    Raises:
        ValueError: an entry names no part, lies outside its part, or is empty. The rank that reads it ends the link.
    """
    entries, values = list[Entry](), iter(np.frombuffer(blob, dtype=np.int64).tolist())
    for part in values:
        axes = next(values, -1)
        if not 0 <= part < len(parts) or axes != len(parts[part].box.start):
            raise ValueError(f"entry {len(entries)} names part {part} of {len(parts)}, with {axes} axes")
        box = Box(tuple(islice(values, axes)), tuple(islice(values, axes)))
        if not parts[part].box.holds(box) or not box.numel:
            raise ValueError(f"entry {len(entries)}: {box} is outside {parts[part].box}")
        entries.append(Entry(part, box))
    return entries


def send_blob(link: Connection, kind: int, value: Any, *, head: bytes = b"", timeout_s: float | None) -> None:
    """Send bytes or JSON of any length after a record.

    Args:
        link: the connection.
        kind: the record's kind.
        value: bytes, or plain values that are sent as JSON.
        head: the beginning of the record's body.
        timeout_s: limit of each of the two sends; None for no limit.
    """
    data = value if isinstance(value, bytes) else json.dumps(value, separators=(",", ":")).encode()
    link.send_record(kind, head + _BLOB.pack(len(data), xxhash.xxh3_64_intdigest(data)), timeout_s=timeout_s)
    link.send([data], timeout_s=timeout_s)


def receive_blob(link: Connection, body: bytes, *, timeout_s: float | None = None) -> bytes:
    """Receive the blob that a record's `body` announced.

    Raises:
        TransportError: the blob is too long or came damaged. The link is of no use any more.
    """
    length, digest = _BLOB.unpack(body.ljust(_BLOB.size, b"\xff")[: _BLOB.size])
    if length > _MOST_BYTES:
        raise TransportError(f"{length} bytes are announced, at most {_MOST_BYTES} are taken")
    data = bytearray(length)
    link.recv_into(memoryview(data), timeout_s=timeout_s)
    if xxhash.xxh3_64_intdigest(data) != digest:
        raise TransportError(f"{length} bytes from {link.peer} came damaged")
    return bytes(data)


def expect_json(link: Connection, kind: int, *names: str, timeout_s: float) -> dict[str, Any]:
    """Receive the next record, a JSON blob of this kind.

    Args:
        link: the connection.
        kind: the kind that the record must have.
        names: keys that the JSON object must have, unless it has `error`.
        timeout_s: limit of each receive.

    Raises:
        WeightsCorrupt: anything else came.
    """
    came, body = link.recv_record(timeout_s=timeout_s)
    if came == kind:
        with suppress(*UNREADABLE):
            value = json.loads(receive_blob(link, body, timeout_s=timeout_s))
            if isinstance(value, dict) and ("error" in value or value.keys() >= set(names)):
                return value
    raise WeightsCorrupt(f"{link.peer} sent record {came}, expected {kind} with a JSON object of {names}")


@dataclass(slots=True, eq=False)
class RankLink:
    """A trainer's link to one rank of an engine. One thread at a time."""

    engine: str
    rank: int
    link: Connection
    needs: Needs
    whole: str
    """Why the rank stages whole tensors and lets the model's own loader place them; empty where parts are placed."""
    compared: int
    """Parameters that the rank compares with what was given, once they hold it."""
    summed: bool = False
    """Whether the rank's digests are those of a GPU's sums."""
    shared: list[torch.Tensor] = field(default_factory=list)
    """The rank's staged copy itself, by parameter, where both are on one machine: bytes are put there, none is sent."""
    record_bytes: int = RECORD_BYTES
    """A record's bytes at most: more where each record waits for a GPU or for a turn in a group."""
    buckets: list[list[Record]] = field(default_factory=list)
    aimed: object = None
    """What the rank was told of: the trainers' boxes and buckets (`SendPlanner.aim`)."""

    def records(self, buckets: Sequence[Sequence[Piece]]) -> tuple[list[list[Record]], bytes]:
        """Return each bucket's records, and the table that describes them.

        Within a bucket the records are in the order of the rank's memory. The table is what the rank is told. Links of equal
        needs whose memory is not shared may be told the same.
        """
        table, made = list[Piece](), list[list[Record]]()
        for pieces in buckets:
            in_order = sorted(pieces, key=self._place)
            made.append(list(self._records(in_order, len(table))))
            table += in_order
        return made, table_bytes(table)

    def close(self) -> None:
        """Release the rank's memory, then end the link.

        The rank frees its copy when it sees the end.
        """
        self.shared, self.buckets, self.aimed = [], [], None
        self.link.close()

    def begin(self, update: int, records: int, *, timeout_s: float) -> None:
        """Send the rank word that an update begins.

        Args:
            update: the update's number.
            records: records that this trainer sends in the joint group; -1 if it sends none.
            timeout_s: seconds within which the update ends.
        """
        self.link.send_record(BEGIN, LIMIT.pack(update, records, timeout_s), timeout_s=timeout_s)

    def send(
        self, update: int, bucket: int, shards: Sequence[torch.Tensor], *, deadline: Deadline, record_timeout_s: float
    ) -> int:  # fmt: skip
        """Send one bucket's pieces of what this trainer holds.

        The values are cast to the rank's dtypes here.

        Args:
            update: the update's number.
            bucket: the bucket's number; before bucket 0 the update's begin is sent.
            shards: what this trainer has for the bucket.
            deadline: limits the whole call.
            record_timeout_s: limits each record.

        Returns:
            The number of bytes.

        Raises:
            NonFiniteWeights: a tensor, named in the text, holds NaN or Inf; its record has not left.
        """
        sent = 0
        if not bucket:
            self.begin(update, -1, timeout_s=deadline.left_s())
        nbytes = 0 if self.shared else self.record_bytes
        room = torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        for record in self.buckets[bucket]:
            timeout_s = min(deadline.left_s(), record_timeout_s)
            head, flats = self.seal(update, bucket, record, shards, room)
            self.link.send_record(PLACED if self.shared else DATA, head, timeout_s=timeout_s)
            if not self.shared:
                self.link.send([*map(host_bytes, flats)], timeout_s=timeout_s)
            sent += sum(flat.nbytes for flat in flats)
        return sent

    def seal(
        self, update: int, bucket: int, record: Record, shards: Sequence[torch.Tensor], room: torch.Tensor
    ) -> tuple[bytes, list[torch.Tensor]]:
        """Return a record's head and its values.

        Args:
            update: the update's number.
            bucket: the bucket's number, which errors name.
            record: which pieces.
            shards: what this trainer has for the bucket.
            room: uint8 memory for one record. Pieces are put together there, unless the rank's memory is shared or one piece
                needs none.

        Returns:
            The packed `HEAD`, and flat tensors. Where memory is shared, the values are already where the rank has them.

        Raises:
            NonFiniteWeights: a tensor holds NaN or Inf.
        """
        pieces = [piece.of(shards) for piece in record.pieces]
        if self.shared:
            flats = [_join(pieces[run.entries], run.view) for run in record.runs]
        elif len(pieces) == 1 and pieces[0].is_contiguous() and pieces[0].device == room.device:
            flats = [pieces[0].view(-1)]
        else:
            nbytes = sum(piece.nbytes for piece in pieces)
            flats = [_join(pieces, room[:nbytes].view(pieces[0].dtype))]
        if not all(map(finite, flats)):
            bad = next(piece for piece in record.pieces if not finite(piece.of(shards).cpu().flatten()))
            raise nonfinite(f"bucket {bucket}", bad.meta)
        digest = xxhash.xxh3_64()
        for flat in flats:
            digest.update(hashed_bytes(flat))
        return HEAD.pack(update, record.first, len(record.pieces), digest.intdigest()), flats

    def end(self, *, timeout_s: float) -> None:
        """Wait until the rank has placed everything.

        Raises:
            WeightsCorrupt: the rank has not; the text is its reason.
        """
        self.link.send_record(END, timeout_s=timeout_s)
        kind, word = self.link.recv_record(timeout_s=timeout_s)
        if kind != END or word:
            raise WeightsCorrupt(f"engine {self.engine} rank {self.rank}: {word.decode(errors='replace')}")

    def verify(self, update: int, *, checksums: bool, timeout_s: float) -> Digests:
        """Return digests of what the rank would hold, by parameter.

        Args:
            update: the update's number.
            checksums: whether checksums as SGLang's own are wanted too.
            timeout_s: limit of the request and of each receive.

        Raises:
            WeightsError: the rank answered with an error.
        """
        self.link.send_record(VERIFY, ASK.pack(update, checksums), timeout_s=timeout_s)
        reply = expect_json(self.link, VERIFY, "digests", "checksums", timeout_s=timeout_s)
        if "error" in reply:
            raise WeightsError(f"engine {self.engine} rank {self.rank}: {reply['error']}")
        return reply["digests"], reply["checksums"]

    def fetch(self, version: int, param: int, *, timeout_s: float) -> torch.Tensor:
        """Read a parameter of the committed version from the rank's memory.

        Args:
            version: the committed version.
            param: the parameter's number at the rank.
            timeout_s: limit of the request and of each receive.

        Returns:
            A flat tensor on the host.

        Raises:
            WeightsError: the rank cannot give it. The link is aborted, so that the next rank is asked.
            GiverChanged: the bytes are not those that were committed, or they came damaged. The link is aborted.
        """
        self.link.send_record(GIVE, PARAM.pack(version, param), timeout_s=timeout_s)
        reply = expect_json(self.link, GIVE, "digest", timeout_s=timeout_s)
        where, meta = f"engine {self.engine} rank {self.rank}", self.needs.params[param]
        if "error" in reply:
            self.link.abort(str(reply["error"]))
            raise WeightsError(f"{where}: {reply['error']}")
        flat = torch.empty(meta.nbytes // meta.dtype.itemsize, dtype=meta.dtype)
        self.link.recv_into(host_bytes(flat), timeout_s=timeout_s)
        if tensor_digest(cross_sums(flat) if self.summed else flat) != reply["digest"]:
            why = f"{meta.name} holds other bytes than were committed as version {version}, or they came damaged"
            self.link.abort(why)
            raise GiverChanged(f"{where}: {why}", engines=[self.engine])
        return flat

    def _place(self, piece: Piece) -> tuple[int, int]:
        part = self.needs.parts[piece.part]
        return part.param, part.start(piece.box)

    def _records(self, pieces: Sequence[Piece], first: int) -> Iterable[Record]:
        begins, nbytes = list[int](), 0
        for at, piece in enumerate(pieces):
            size = piece.box.numel * piece.dtype.itemsize
            if not at or piece.dtype != pieces[at - 1].dtype or nbytes + size > self.record_bytes:
                begins.append(at)
                nbytes = 0
            nbytes += size
        for begin, end in pairwise([*begins, len(pieces)]):
            runs = runs_of(pieces[begin:end], self.needs, self.shared) if self.shared else ()
            yield Record(first + begin, pieces[begin:end], runs)


def _join(pieces: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    if not out.is_contiguous():  # then one piece of its shape comes; what is returned has no gaps
        return out.copy_(pieces[0]).contiguous().view(-1)
    flat = [piece.reshape(-1).view(torch.uint8) for piece in pieces]  # torch joins no float8
    if flat[0].device == out.device:
        torch.cat(flat, out=out.view(torch.uint8))
    else:  # one copy between devices
        out.view(torch.uint8).copy_(torch.cat(flat))
    return out
