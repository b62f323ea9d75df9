"""What carries weights: a group that broadcasts to SGLang's own ranks, and links to our half in engines' ranks."""

from __future__ import annotations

import hashlib
import itertools
import json
import mmap
import os
import secrets
import struct
import threading
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import xxhash

from r3channel.errors import (
    CannotStage,
    ConfigError,
    ManifestMismatch,
    TransportError,
    UsageError,
    WeightsCorrupt,
    WeightsError,
)
from r3channel.transport.base import Rendezvous
from r3channel.transport.link import Link
from r3channel.transport.listener import Listener
from r3channel.transport.process_group import ProcessGroupTransport, RendezvousStore, device_of, in_background
from r3channel.weights.dryrun import Needs, Part
from r3channel.weights.geometry import Box
from r3channel.weights.manifest import ALIGNMENT, Manifest, TensorMeta
from r3channel.weights.progress import Deadline

Wire = Literal["tcp", "shared_memory"]
BACKENDS = ("gloo", "nccl")
_WILDCARDS = ("", "0.0.0.0", "::")


class WeightGroup:
    """Rank 0 of a group that broadcasts to SGLang's own ranks. LISTENING -> JOINED (`join`) -> CLOSED (`close`, often).

    >>> group = WeightGroup("doc-1", world_size=1)
    >>> group.join(timeout_s=20.0)
    >>> _ = group.broadcast(torch.zeros(4, dtype=torch.uint8), timeout_s=5.0)
    >>> group.close()

    One thread at a time calls `join` and `broadcast`; any thread may close.
    """

    def __init__(self, name: str, *, world_size: int, host: str = "127.0.0.1", backend: str = "gloo") -> None:
        """Listen on `host` (an address of this machine that the engines reach) at a port given by the system.

        ConfigError for a wildcard host: store and gloo have no authentication, so only the configured interface may see them.
        """
        if host in _WILDCARDS:
            raise ConfigError(f"weight group host {host!r} listens on every interface; name one address")
        self.name, self.host, self.world_size, self.backend = name, host, world_size, backend
        self._store = RendezvousStore(host)
        self.port = self._store.port
        self._sending = threading.Lock()
        self.wire: ProcessGroupTransport | None = None
        self._closed = False

    def join(self, *, timeout_s: float) -> None:
        """Wait until all members have joined. Raises DeadlineExceeded."""
        where = Rendezvous(
            backend=self.backend,
            name=self.name,
            epoch=0,
            rank=0,
            world_size=self.world_size,
            host=self.host,
            port=self.port,
        )
        self.wire = ProcessGroupTransport(where, timeout_s=timeout_s, foreign=True)
        if self._closed:  # meanwhile
            self.close()

    def broadcast(self, payload: torch.Tensor, *, timeout_s: float) -> float:
        """Send `payload` (uint8, contiguous) to every member; its memory may be reused on return. Returns the seconds.

        The members must expect exactly as many bytes: gloo aborts the process of a smaller receiver. After an error the
        group is dead on every side. Raises DeadlineExceeded after `timeout_s`, TransportError if a member is gone.
        """
        if self.wire is None:
            raise UsageError(f"weight group {self.name} is not joined, or is closed")
        begun_s = time.monotonic()
        with self._sending:
            self.wire.broadcast(0, payload, timeout_s=timeout_s)
        return time.monotonic() - begun_s

    def wait_quiet(self, timeout_s: float) -> bool:
        """Whether no broadcast is under way, after waiting up to `timeout_s` for that."""
        quiet = self._sending.acquire(timeout=timeout_s)
        if quiet:
            self._sending.release()
        return quiet

    def close(self) -> None:
        """Leave the group: members that wait in a broadcast fail at once. Never blocks on a broadcast under way."""
        self._closed = True
        wire, self.wire = self.wire, None
        self._store.close()
        if wire is None:
            return
        if self.backend == "gloo" and self.wait_quiet(0.0):
            wire.abort()
        else:  # gloo's group ends with the operation under way, by its deadline; NCCL's kernel waits on the device
            in_background(wire.abort, name="weights-bury")


def group_device(backend: str) -> torch.device:
    """Where a payload is best: the current CUDA device for NCCL. ConfigError for an unknown backend."""
    if backend not in BACKENDS:
        raise ConfigError(f"weight group backend {backend!r}: expected one of {BACKENDS}")
    return device_of(backend)


NEEDS, TABLE, DATA, END, VERIFY, PLACED = range(1, 7)
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


def shared_memory(nbytes: int) -> tuple[str, torch.Tensor]:
    """New memory that another process of this machine and user can map by its path."""
    path = f"/dev/shm/r3channel-weights-{secrets.token_hex(16)}"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(handle, max(nbytes, 1))
    return path, _mapped(handle, nbytes)


def shared_views(params: Sequence[TensorMeta], path: str) -> list[torch.Tensor]:
    """A rank's staged copy by parameter. The rank takes the path away once all trainers have it."""
    layout = staged_layout(params)
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    return layout.views(_mapped(handle, layout.nbytes))


def _mapped(handle: int, nbytes: int) -> torch.Tensor:
    try:
        return torch.from_numpy(np.frombuffer(mmap.mmap(handle, max(nbytes, 1)), dtype=np.uint8)[:nbytes])
    finally:
        os.close(handle)


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


@dataclass(slots=True, eq=False)
class RankLink:
    """One rank of an engine. One thread at a time."""

    engine: str
    rank: int
    link: Link
    needs: Needs
    whole: str
    """Why the rank stages whole tensors and lets the model's own loader place them; empty where parts are placed."""
    shared: list[torch.Tensor] = field(default_factory=list)
    """The rank's staged copy itself, by parameter, where both are on one machine: bytes are put there, none is sent."""
    entries: Sequence[Entry] = field(default_factory=tuple)

    def tell(self, entries: Sequence[Entry], *, timeout_s: float) -> None:
        """What will be sent from now on, in order."""
        self.entries = entries
        send_blob(self.link, TABLE, table_bytes(entries), timeout_s=timeout_s)

    def dtype(self, entry: Entry) -> torch.dtype:
        return self.needs.params[self.needs.parts[entry.part].param].dtype

    def send(self, version: int, first: int, pieces: Sequence[torch.Tensor], *, timeout_s: float) -> int:
        """The pieces of entries `first` ..., each of its entry's shape; returns the bytes. Cast to the rank's dtypes here."""
        flats = [
            piece.detach().to("cpu", self.dtype(entry)).contiguous().flatten().view(torch.uint8)
            for entry, piece in zip(self.entries[first : first + len(pieces)], pieces, strict=True)
        ]
        digest = xxhash.xxh3_64()
        for flat in flats:
            digest.update(flat.numpy().data)
        head = HEAD.pack(version, first, len(pieces), digest.intdigest())
        limit = time.monotonic() + timeout_s
        if self.shared:
            self._place(first, flats)
            self.link.send_record(PLACED, head, timeout_s=timeout_s)
        else:
            self.link.send_record(DATA, head, timeout_s=timeout_s)
            parts = [flat.numpy().data for flat in flats]
            self.link.send(parts, timeout_s=max(0.001, limit - time.monotonic()))
        return sum(map(len, flats))

    def _place(self, first: int, flats: Sequence[torch.Tensor]) -> None:
        targets, values = [], []
        for entry, flat in zip(self.entries[first : first + len(flats)], flats, strict=True):
            part = self.needs.parts[entry.part]
            targets.append(part.view(self.shared[part.param], entry.box))
            values.append(flat.view(self.dtype(entry)).view(entry.box.shape))
        torch._foreach_copy_(targets, values)  # pyright: ignore[reportPrivateImportUsage]

    def end(self, *, timeout_s: float) -> None:
        """Wait until the rank has placed everything; WeightsCorrupt with its reason if not."""
        self.link.send_record(END, timeout_s=timeout_s)
        kind, word = self.link.recv_record(timeout_s=timeout_s)
        if kind != END or word:
            raise WeightsCorrupt(f"engine {self.engine} rank {self.rank}: {word.decode(errors='replace')}")

    def verify(
        self, version: int, *, checksums: bool, timeout_s: float
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Digests, and checksums as SGLang's own if asked, by parameter, of what the rank would hold."""
        self.link.send_record(VERIFY, ASK.pack(version, checksums), timeout_s=timeout_s)
        told = expect_json(self.link, VERIFY, timeout_s=timeout_s)
        if "error" in told:
            raise WeightsError(f"engine {self.engine} rank {self.rank}: {told['error']}")
        return told["digests"], told["checksums"]


class Stages:
    """What goes over the links of a session to engines' ranks, which connect to this trainer. OPEN -> CLOSED. Threads may send to
    different ranks at once."""

    def __init__(
        self, *, host: str, session: str, run_token: str, staged: bool | str = True, wire: Wire = "tcp"
    ) -> None:
        """`staged`: `auto` lets a rank without memory for a staged copy refuse."""
        self.session, self.nonce = session, ""
        self._host, self._run_token = host, run_token
        self._how = {"staged": "auto" if staged == "auto" else "yes", "wire": wire}
        self._listener: Listener | None = None
        self.attempts: dict[str, int] = {}
        """By engine: the last order to connect. Links of one that was given up may still come."""
        self.metas: tuple[TensorMeta, ...] = ()
        """The tensors that engines are told of."""
        self.trainers: list[tuple[str, int]] = []
        """Where all listen; empty where this trainer is the only one."""

    def listen(self, nonce: str = "") -> tuple[str, int]:
        """Begin to listen, where nobody did; the address. `nonce`: the session's own secret, made by its first trainer."""
        if self._listener is None:
            self.nonce = nonce or secrets.token_hex(16)
            token = session_token(self._run_token, self.nonce)
            self._listener = Listener(self._host, token=token)
        return self._host, self._listener.port

    def order(self, engine: str, *, op: str = "open") -> dict[str, Any]:
        """The order that makes every rank of `engine` connect to all trainers, or be held by them."""
        trainers = self.trainers or [self.listen()]
        self.attempts[engine] = self.attempts.get(engine, 0) + 1
        return {
            "op": op,
            "session": self.session,
            "nonce": self.nonce,
            "engine": engine,
            "attempt": self.attempts[engine],
            "trainers": trainers,
            "tensors": [meta.row() for meta in self.metas],
            **self._how,
        }

    def accept(self, wanted: Mapping[str, int], deadline: Deadline) -> dict[str, list[RankLink]]:
        """The links of these engines (url -> ranks) that have opened. CannotStage, with why a rank cannot receive."""
        assert self._listener is not None
        found: dict[str, list[RankLink]] = {url: [] for url in wanted}
        refused = ""
        while any(len(found[url]) < ranks for url, ranks in wanted.items()):
            link = self._listener.accept(deadline.left_s())
            hello = json.loads(link.hello)
            if hello["engine"] not in found or hello["attempt"] != self.attempts[hello["engine"]]:
                link.close()  # of an attempt that was given up
                continue
            told = expect_json(link, NEEDS, timeout_s=deadline.left_s())
            refused = refused or told.get("error", "")
            needs = Needs.from_dict(told["needs"]) if "needs" in told else Needs((), (), ())
            shared = shared_views(needs.params, told["shared"]) if told.get("shared") else []
            found[hello["engine"]].append(
                RankLink(hello["engine"], hello["rank"], link, needs, told.get("whole", ""), shared)
            )
        if refused:
            raise CannotStage(refused)
        return {url: sorted(ranks, key=lambda rank: rank.rank) for url, ranks in found.items()}

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()


class WholeStages(Stages):
    """One trainer has whole tensors, bucket by bucket."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._ends: list[int] = []
        """Of each bucket: tensors up to its end."""
        self._firsts: dict[RankLink, list[int]] = {}

    def plan(self, manifest: Manifest) -> None:
        """What will be sent; equal to the last plan in all but the first call."""
        self.metas = tuple(meta for bucket in manifest.buckets for meta in bucket.tensors)
        self._ends = list(itertools.accumulate(len(bucket.tensors) for bucket in manifest.buckets))

    def accept(self, wanted: Mapping[str, int], deadline: Deadline) -> dict[str, list[RankLink]]:
        """Each has been told the pieces that will come."""
        found = super().accept(wanted, deadline)
        for rank in itertools.chain(*found.values()):
            self._tell(rank, timeout_s=deadline.left_s())
        return found

    def _tell(self, rank: RankLink, *, timeout_s: float) -> None:
        """Announce the pieces, bucket by bucket, each part whole and in the order of the tensors."""
        parts = rank.needs.parts
        rank.tell([Entry(index, part.box) for index, part in enumerate(parts)], timeout_s=timeout_s)
        tensors = [part.tensor for part in parts]
        self._firsts[rank] = [0, *(bisect_left(tensors, end) for end in self._ends)]

    def send(
        self, rank: RankLink, number: int, named: Mapping[str, torch.Tensor], version: int, left_s: float
    ) -> None:
        """The part of bucket `number` that the rank needs."""
        first, end = self._firsts[rank][number : number + 2]
        parts = rank.needs.parts[first:end]
        pieces = [_cut(named[self.metas[part.tensor].name], part) for part in parts]
        if pieces:
            rank.send(version, first, pieces, timeout_s=left_s)


def _cut(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    return tensor[part.box.within(Box.whole(tensor.shape))]


_SHOWN = 3


def check_complete(
    ranks: Sequence[RankLink], metas: Sequence[TensorMeta], *, names: bool
) -> tuple[dict[str, str], tuple[str, ...]]:
    """ManifestMismatch, naming what, unless these tensors fill every parameter of every rank.

    Returns what the engines keep in another dtype (tensor -> `float32 -> bfloat16`), and what has no place there.
    """
    rounded = _cast(ranks, metas)
    missing = sorted({name for rank in ranks for name in rank.needs.missing})
    used = {part.tensor for rank in ranks for part in rank.needs.parts}
    unknown = [meta.name for index, meta in enumerate(metas) if index not in used]
    if missing and names:
        raise ManifestMismatch(
            f"{len(missing)} parameters of the engine would keep their old values, first {missing[:_SHOWN]}; of the tensors "
            f"{len(unknown)} have no place there: {unknown[:_SHOWN]}. Is one misspelt, or the model given in part?"
        )
    return rounded, tuple(unknown)


def _cast(ranks: Sequence[RankLink], metas: Sequence[TensorMeta]) -> dict[str, str]:
    """Tensors that engines keep in another dtype. ManifestMismatch where that is float8: a cast alone lands under old scales."""
    found = {}
    for rank in ranks:
        for part in rank.needs.parts:
            own, kept = metas[part.tensor], rank.needs.params[part.param]
            if own.dtype == kept.dtype:
                continue
            if kept.dtype_name.startswith("float8"):
                raise ManifestMismatch(
                    f"engine {rank.engine} keeps {own.name} in {kept.dtype_name}, the trainer gives {own.dtype_name}: it is not "
                    "quantised on the way. Give float8 tensors with their scales (`float8_blocks`), or start the engine without "
                    "--quantization"
                )
            found[own.name] = f"{own.dtype_name} -> {kept.dtype_name}"
    return found
