"""One weight update as a transaction over all engines. Knows order, states and deadlines; bytes and routes lie elsewhere.

    pause -> begin -> buckets -> end -> (verify) -> version -> resume

The version is set once, at the commit, so no reply ever carries a version that is only half loaded. SGLang writes weights
in place: an update that fails after its first bucket cannot be undone, only repeated. Until then the engine stays paused
and serves nothing. An engine that no bucket reached goes on serving what it had.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TypeVar

import torch

from r3channel.errors import (
    ConfigError,
    ManifestMismatch,
    UsageError,
    WeightUpdateFailed,
    WeightVersionRegressed,
)
from r3channel.slot import PROCESS_SLOT
from r3channel.weights.buckets import (
    Bucket,
    Filled,
    Manifest,
    StagingPair,
    TensorMeta,
    fill_buckets,
    pack,
    unit_of,
)
from r3channel.weights.fleet import REPAIR_S, Deadline, EngineState, Fleet, wait_all
from r3channel.weights.group import WeightGroup, in_background
from r3channel.weights.sglang import EngineClient, PauseMode, tensor_checksum

T = TypeVar("T")

DEFAULT_BUCKET_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What one committed update did."""

    version: int
    tensors: int
    buckets: int
    payload_bytes: int
    verified: int
    """Tensors whose checksum every engine confirmed; 0 without verification."""
    manifest_digest: int
    wall_s: float
    seconds: Mapping[str, float]
    """Caller's thread, adding up to the wall: join pause begin convert plan pack wait_send end verify commit resume.
    Beside it, in the sender's thread: wire (broadcast) and apply (from there to the slowest engine's answer)."""


class WeightSync:
    """Publishes weights to engines. NEW -> READY (`connect`) -> CLOSED (`close`, any number of times).

    An `update` that fails keeps the session READY: the next one joins a new group and sends everything again.

        with WeightSync([url], bucket_bytes=64 << 20) as sync:
            sync.connect(timeout_s=60)
            report = sync.update(hf_weights(bridge, chunks), version=7, timeout_s=300)

    Exactly one trainer rank owns a session. If the tensors come from a collective iterator, the other ranks exhaust theirs
    at the same time. One thread at a time calls.
    """

    def __init__(
        self,
        engines: Sequence[EngineClient | str],
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        host: str = "127.0.0.1",
        backend: str = "gloo",
        pause: PauseMode = "retract",
        verify: bool = False,
    ) -> None:
        """
        Args:
            engines: addresses, or clients where an engine has several ranks or a key.
            bucket_bytes: cap of one bucket; two buffers of this size are held, on the device of `backend`.
            host: this machine's address that the engines reach; the group's store listens there and nowhere else.
            pause: what happens to running requests. `in_place` keeps the KV cache of the old weights and never flushes it.
            verify: before the commit, compare each engine's own checksums with those of the bytes sent, for all tensors
                that the engine keeps under their own name (routers, norms, embeddings, ...). CPU engines of one rank only.
        """
        clients = [EngineClient(engine) if isinstance(engine, str) else engine for engine in engines]
        if verify and (backend != "gloo" or any(client.ranks != 1 for client in clients)):
            raise ConfigError(
                "verify compares whole tensors on the CPU: it needs gloo and engines of one rank"
            )
        self._fleet = Fleet(clients)
        self._bucket_bytes = bucket_bytes
        self._host, self._backend, self._verify = host, backend, verify
        self._pause: PauseMode = pause
        self._name = f"r3channel-weights-{secrets.token_hex(4)}"
        self._epoch = 0
        self._group: WeightGroup | None = None
        self._staging: StagingPair | None = None
        self._manifest: Manifest | None = None
        self._version: int | None = None
        self._phase = "new"
        self._busy = threading.Lock()

    @property
    def version(self) -> int | None:
        """The last version that every engine committed through this object."""
        return self._version

    @property
    def engine_states(self) -> dict[str, EngineState]:
        """What each engine holds and does, as far as this object knows."""
        return self._fleet.states

    def connect(self, *, timeout_s: float) -> None:
        """Form the group with all engines. Raises the engine's error, or DeadlineExceeded after `timeout_s`."""
        if self._phase != "new":
            raise UsageError(f"WeightSync.connect() on a session that is {self._phase}")
        self._ensure_group(Deadline(timeout_s, "connect"))
        self._phase = "ready"

    def update(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, version: int, timeout_s: float
    ) -> UpdateReport:
        """Bring all engines to these weights under `version`, or raise with the old version still in place.

        The tensors are read once, packed while they come; none may change before this returns. Whatever happens, the
        iterator is exhausted (unless it raises itself), because other ranks may be in step with it. The first update
        fixes the manifest: later ones must give the same names, dtypes and shapes in the same order.

        Waits while a step's routing is being received in this process, and keeps it waiting (`slot.py`).

        Raises WeightUpdateFailed (naming bucket, tensor and engine, and the state of each engine),
        WeightVersionRegressed, SlotBusy, UsageError. Ends within `timeout_s`, after a failure within some 15 s more for cleaning
        up.
        """
        stream = _Stream(named_tensors)
        try:
            deadline = Deadline(timeout_s, f"update to version {version}")
            slot = PROCESS_SLOT.use("weights", f"the update to weight version {version}", timeout_s=timeout_s)
            with self._one_at_a_time(), slot:
                self._check(version)
                return self._update(stream, version, deadline)
        except Exception:
            stream.drain()
            raise

    def close(self) -> None:
        """Leave the group. Engines that are not SERVING stay paused: they hold no weights worth serving."""
        if self._phase != "closed":
            self._phase = "closed"
            self._staging = None
            if self._group is not None:
                self._fleet.leave(self._group)
                self._group = None

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise UsageError("WeightSync.update() is already running in another thread")
        try:
            yield
        finally:
            self._busy.release()

    def _check(self, version: int) -> None:
        if self._phase != "ready":
            raise UsageError(f"WeightSync.update() on a session that is {self._phase}; call connect() first")
        if version < 0 or (self._version is not None and version < self._version):
            raise WeightVersionRegressed(f"version {version} after {self._version}; versions only grow")

    def _update(self, stream: _Stream, version: int, deadline: Deadline) -> UpdateReport:
        run = _Run(deadline)
        try:
            self._transact(stream, version, run)
        except BaseException as error:
            self._abort(run)
            if not isinstance(error, Exception):
                raise
            raise WeightUpdateFailed(
                f"weight version {version} was not committed: {error} [engines now: {self._fleet.told_states()}]"
            ) from error
        return self._report(version, run, stream)

    def _transact(self, stream: _Stream, version: int, run: _Run) -> None:
        fleet, deadline = self._fleet, run.deadline
        with run.stage("join"):
            self._ensure_group(deadline)
        with run.stage("pause"):
            fleet.pause(self._pause, deadline)
        with run.stage("begin"):
            fleet.begin(deadline)
        manifest = self._send_all(stream, run)
        with run.stage("end"):
            fleet.end(deadline)
        with run.stage("verify"):
            self._verify_all(run)
        with run.stage("commit"):
            fleet.commit(version, deadline)
        self._version, self._manifest = version, manifest
        with run.stage("resume"):
            fleet.resume(deadline)

    def _report(self, version: int, run: _Run, stream: _Stream) -> UpdateReport:
        manifest = self._manifest
        assert manifest is not None
        run.add("convert", stream.seconds)
        run.add("plan", run.seconds.pop("fill") - stream.seconds)
        return UpdateReport(
            version=version,
            tensors=manifest.tensor_count,
            buckets=len(manifest.buckets),
            payload_bytes=manifest.payload_bytes,
            verified=run.verified,
            manifest_digest=manifest.digest,
            wall_s=run.deadline.elapsed_s,
            seconds=run.seconds,
        )

    # -- sending -------------------------------------------------------------------------------------------------------

    def _send_all(self, stream: _Stream, run: _Run) -> Manifest:
        """Pack bucket g + 1 while bucket g is on the wire or being loaded; return what was sent, all of it loaded."""
        filling = fill_buckets(stream, cap_bytes=self._bucket_bytes)
        while (filled := run.timed_next("fill", filling)) is not None:
            bucket = self._agreed(filled.bucket, len(run.buckets))
            with run.stage("pack"):
                payload = pack(bucket, filled.items, self._buffers().take(bucket.payload_bytes))
                run.checksums |= _checksums(filled) if self._verify else {}
            with run.stage("wait_send"):
                run.join_sender()
                send = partial(self._send, len(run.buckets), bucket, payload, filled.last, run)
                run.sending = in_background(send, name="weights-send")
            run.buckets.append(bucket)
        with run.stage("wait_send"):
            run.join_sender()
        with run.stage("plan"):
            return self._complete(run.buckets)

    def _complete(self, buckets: Sequence[Bucket]) -> Manifest:
        if not buckets:
            raise ManifestMismatch("the update gives no tensors at all")
        if self._manifest is None:
            return Manifest.of(buckets)
        self._manifest.check_complete(len(buckets))
        return self._manifest

    def _agreed(self, bucket: Bucket, index: int) -> Bucket:
        return bucket if self._manifest is None else self._manifest.check(index, bucket)

    def _buffers(self) -> StagingPair:
        if self._staging is None:
            assert self._group is not None
            self._staging = StagingPair(self._group.device)
        return self._staging

    def _send(self, index: int, bucket: Bucket, payload: torch.Tensor, last: bool, run: _Run) -> None:
        """Announce the bucket to every engine, broadcast it beside, and wait until all have loaded it."""
        group, left_s, begun_s = self._group, run.deadline.left_s(), time.monotonic()
        assert group is not None
        flush = last and self._pause != "in_place"  # SGLang refuses to flush what paused requests still use
        loaded = self._fleet.announce(bucket, group, flush_cache=flush, timeout_s=left_s)
        wire = in_background(lambda: _timed_broadcast(group, payload, left_s), name="weights-send")
        wait_all({**loaded, wire: "the broadcast"}, f"bucket {index} ({bucket})", left_s)
        run.add("wire", wire.result())
        run.add("apply", max(time.monotonic() - begun_s - wire.result(), 0.0))

    def _verify_all(self, run: _Run) -> None:
        if self._verify:
            run.verified = self._fleet.verify(run.checksums, run.deadline)

    # -- group and failure ---------------------------------------------------------------------------------------------

    def _ensure_group(self, deadline: Deadline) -> None:
        if self._group is not None:
            return
        self._epoch += 1  # SGLang refuses a group name that it has seen
        group = WeightGroup(
            f"{self._name}-{self._epoch}",
            world_size=self._fleet.world_size,
            timeout_s=deadline.left_s(),
            host=self._host,
            backend=self._backend,
        )
        try:
            self._fleet.join(group, deadline)
        except BaseException:
            group.close()
            raise
        self._group = group

    def _abort(self, run: _Run) -> None:
        """Free everything that waits, then let the engines serve that still hold, or already hold, whole weights."""
        if run.sending is not None:
            wait([run.sending], timeout=REPAIR_S)  # a healthy bucket ends by itself; a stuck one is cut below
        group, self._group = self._group, None
        if group is not None:
            self._fleet.leave(group)
        self._fleet.roll_back()


@dataclass(slots=True)
class _Run:
    """The state of one update."""

    deadline: Deadline
    seconds: dict[str, float] = field(default_factory=dict)
    buckets: list[Bucket] = field(default_factory=list)
    checksums: dict[str, str] = field(default_factory=dict)
    verified: int = 0
    sending: Future[None] | None = None

    def add(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begun_s = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - begun_s)

    def timed_next(self, name: str, items: Iterator[T]) -> T | None:
        with self.stage(name):
            return next(items, None)

    def join_sender(self) -> None:
        """Wait for the bucket under way, which has its own deadline, and raise its error."""
        if self.sending is not None:
            self.sending.result()
            self.sending = None


class _Stream:
    """The caller's tensors, read once, and the seconds spent waiting for them."""

    def __init__(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._iterator = iter(named_tensors)
        self._ended = False
        self.seconds = 0.0

    def __iter__(self) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        while (named := self._next()) is not None:
            name, tensor = named
            yield TensorMeta.of(name, tensor), tensor

    def _next(self) -> tuple[str, torch.Tensor] | None:
        begun_s = time.monotonic()
        self._ended = True  # unless it gives one: it may raise
        named = next(self._iterator, None)
        self._ended = named is None
        self.seconds += time.monotonic() - begun_s
        return named

    def drain(self) -> None:
        """Read to the end, keeping nothing; an error of the iterator is dropped, since one is already under way."""
        with contextlib.suppress(Exception):
            while not self._ended:
                self._next()


def _timed_broadcast(group: WeightGroup, payload: torch.Tensor, timeout_s: float) -> float:
    begun_s = time.monotonic()
    group.broadcast(payload, timeout_s=timeout_s)
    return time.monotonic() - begun_s


def _checksums(filled: Filled[torch.Tensor]) -> dict[str, str]:
    """Of the tensors that an engine can keep whole under the same name: no unit that it fuses, no expert that it stacks."""
    pairs = zip(filled.bucket.names, filled.items, strict=True)
    return {
        name: tensor_checksum(t) for name, t in pairs if unit_of(name)[1] == 1 and ".experts." not in name
    }
