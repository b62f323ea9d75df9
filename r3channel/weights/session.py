"""One weight update as a transaction over all engines. Knows order, states and deadlines; bytes and routes lie elsewhere.

    pause -> begin -> buckets -> end -> (verify) -> version -> resume

The version is set once, at the commit, so no reply ever carries a version that is only half loaded. SGLang writes weights
in place: an update that fails after its first bucket cannot be undone by the engine. It stays paused (quarantined) until
it has got whole weights: the committed version again where a host copy is kept, else the next update. An engine that no
bucket reached goes on serving what it had.

The decision falls with the first engine that has taken the version. Before it, a failure aborts: the old version stays.
After it the update counts, and an engine that did not take it is left behind in quarantine.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType

import torch

from r3channel.errors import (
    ConfigError,
    EngineLeftBehind,
    ManifestMismatch,
    R3Error,
    UsageError,
    WeightUpdateFailed,
    WeightVersionRegressed,
)
from r3channel.slot import PROCESS_SLOT
from r3channel.weights.buckets import Bucket, Manifest, TensorMeta, fill_buckets
from r3channel.weights.deadline import Deadline
from r3channel.weights.digests import EngineChecksums
from r3channel.weights.expected import Expected
from r3channel.weights.fleet import Fleet, GroupOptions, Links
from r3channel.weights.group import group_device
from r3channel.weights.held import HeldWeights
from r3channel.weights.kept import HostCopy
from r3channel.weights.member import EngineState, Member, told
from r3channel.weights.packer import OnNonfinite, Packer
from r3channel.weights.progress import Run, Stream, UpdateReport
from r3channel.weights.sender import BucketSender
from r3channel.weights.sglang import EngineClient, PauseMode

DEFAULT_BUCKET_BYTES = 256 << 20
RESTORE_TIMEOUT_S = 60.0


class WeightSync:
    """Publishes weights to engines. NEW -> READY (`connect`) -> CLOSED (`close`, any number of times).

    An `update` that fails keeps the session READY: the next one joins what groups are missing and sends everything again.

        with WeightSync([url], bucket_bytes=64 << 20, keep_copy=True) as sync:
            sync.connect(timeout_s=60)
            report = sync.update(hf_weights(bridge, chunks), version=7, timeout_s=300)
            sync.update_one(url, timeout_s=60)      # that engine restarted; the others notice nothing

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
        keep_copy: bool = False,
        links: Links = "each",
        on_nonfinite: OnNonfinite = "error",
        expected: Mapping[str, tuple[int, ...]] | None = None,
        depth: int = 2,
    ) -> None:
        """
        Args:
            engines: addresses, or clients where an engine has several ranks or a key.
            bucket_bytes: cap of one bucket; two buffers of this size are held, on the device of `backend`.
            host: this machine's address that the engines reach; the groups' stores listen there and nowhere else.
            pause: what happens to running requests. `in_place` keeps the KV cache of the old weights and never flushes it.
            verify: before the commit, compare each engine's own checksum of each parameter with that of the bytes sent
                (fused parameters too). CPU engines of one rank only.
            keep_copy: keep the committed weights packed in host memory (the model's bytes, twice during an update), for
                `update_one` and for giving a failed update's engines the old version back.
            links: `each` engine has a group of its own, or engines that have none form a `shared` one (see fleet.py).
            on_nonfinite: `error` refuses NaN and Inf by tensor before their bucket leaves; `allow` does not look.
            expected: name -> shape that every update must give; `expected.checkpoint_shapes` reads them from a folder.
            depth: buckets in work; 1 packs the next only when the one before is loaded.
        """
        clients = [EngineClient(engine) if isinstance(engine, str) else engine for engine in engines]
        if verify and (backend != "gloo" or any(client.ranks != 1 for client in clients)):
            raise ConfigError(
                "verify compares whole tensors on the CPU: it needs gloo and engines of one rank"
            )
        name = f"r3channel-weights-{secrets.token_hex(4)}"
        options = GroupOptions(name=name, host=host, backend=backend, links=links)
        self._fleet = Fleet([Member(client) for client in clients], options)
        self._bucket_bytes, self._depth = bucket_bytes, depth
        self._verify = verify
        self._pause: PauseMode = pause
        self._expected = None if expected is None else Expected(expected)
        self._copy = HostCopy() if keep_copy else None
        self._packer = Packer(group_device(backend), self._copy, on_nonfinite)
        self._manifest: Manifest | None = None
        self._version: int | None = None
        self._held: HeldWeights | None = None
        self._phase = "new"
        self._busy = threading.Lock()

    @property
    def version(self) -> int | None:
        """The last version that was committed through this object."""
        return self._version

    @property
    def engine_states(self) -> dict[str, EngineState]:
        """What each engine holds and does, as far as this object knows."""
        return self._fleet.states

    @property
    def held(self) -> HeldWeights | None:
        """What the engines hold since the last commit, to be written to a file and held against any engine (held.py)."""
        return self._held

    def connect(self, *, timeout_s: float) -> None:
        """Form the groups with all engines. Raises the engine's error, or DeadlineExceeded after `timeout_s`."""
        if self._phase != "new":
            raise UsageError(f"WeightSync.connect() on a session that is {self._phase}")
        self._fleet.ensure_links(Deadline(timeout_s, "connect"))
        self._phase = "ready"

    def update(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, version: int, timeout_s: float
    ) -> UpdateReport:
        """Bring all engines to these weights under `version`, or raise with the old version still in place.

        The tensors are read once, packed while they come; none may change before this returns. Whatever happens, the
        iterator is exhausted (unless it raises itself), because other ranks may be in step with it. The first update
        fixes the manifest: later ones must give the same names, dtypes and shapes in the same order.

        Waits while a step's routing is being received in this process, and keeps it waiting (`slot.py`).

        Raises WeightUpdateFailed (naming bucket, tensor and engine, and the state of each engine), EngineLeftBehind
        (committed, but not by the engines named), WeightVersionRegressed, SlotBusy, UsageError. Ends within `timeout_s`, after a
        failure within some 15 s more for cleaning up and RESTORE_TIMEOUT_S for giving engines the old version back.
        """
        stream = Stream(named_tensors)
        try:
            deadline = Deadline(timeout_s, f"update to version {version}")
            slot = PROCESS_SLOT.use("weights", f"the update to weight version {version}", timeout_s=timeout_s)
            with slot, self._one_at_a_time("update"):
                self._check_version(version)
                return self._update(stream, version, Run(deadline))
        except Exception:
            stream.drain()
            raise

    def update_one(self, engine: str, *, timeout_s: float) -> UpdateReport:
        """Bring one engine, restarted or quarantined, to the committed version from the host copy (`keep_copy`).

        No other engine gets a call, allocates or pauses. Raises WeightUpdateFailed with that engine in quarantine, or
        UsageError without a copy.
        """
        with self._one_at_a_time("update_one"):
            member = self._fleet.member(engine)
            return self._bring_up(member, Deadline(timeout_s, f"update of {engine}"))

    def add_engine(self, engine: EngineClient | str, *, timeout_s: float) -> UpdateReport | None:
        """Take one more engine in. With a host copy it gets the committed version now, else with the next update."""
        client = EngineClient(engine) if isinstance(engine, str) else engine
        if self._verify and client.ranks != 1:
            raise ConfigError(f"engine {client.url}: verify needs engines of one rank")
        with self._one_at_a_time("add_engine"):
            member = Member(client)
            self._fleet = self._fleet.only([*self._fleet.members, member])
            deadline = Deadline(timeout_s, f"joining of {client.url}")
            try:
                if self._copy is not None and self._copy.version is not None:
                    return self._bring_up(member, deadline)
                self._fleet.only([member]).ensure_links(deadline)
                return None
            except BaseException:
                self._drop(member)
                raise

    def remove_engine(self, engine: str) -> None:
        """Leave this engine's group and forget it, dead or alive. It serves, or stays paused, as it was.

        ConfigError for the last one, and for one that is not there.
        """
        with self._one_at_a_time("remove_engine"):
            self._drop(self._fleet.member(engine))

    def close(self) -> None:
        """Leave the groups. Engines that are not SERVING stay paused: they hold no weights worth serving."""
        if self._phase != "closed":
            self._phase = "closed"
            self._copy = None
            self._packer = Packer(torch.device("cpu"), None, "error")  # frees the buffers
            self._fleet.leave()

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _one_at_a_time(self, what: str) -> Iterator[None]:
        if self._phase != "ready":
            raise UsageError(f"WeightSync.{what}() on a session that is {self._phase}; call connect() first")
        if not self._busy.acquire(blocking=False):
            raise UsageError(f"WeightSync.{what}() while another thread is inside this session")
        try:
            yield
        finally:
            self._busy.release()

    def _check_version(self, version: int) -> None:
        if version < 0 or (self._version is not None and version < self._version):
            raise WeightVersionRegressed(f"version {version} after {self._version}; versions only grow")

    def _drop(self, member: Member) -> None:
        rest = [other for other in self._fleet.members if other is not member]
        fleet = self._fleet.only(rest)  # refuses to be empty
        self._fleet.only([member]).unlink()
        self._fleet = fleet

    # -- the transaction -----------------------------------------------------------------------------------------------

    def _update(self, stream: Stream, version: int, run: Run) -> UpdateReport:
        fleet, deadline = self._fleet, run.deadline
        sender = BucketSender(fleet, run, flush=self._pause != "in_place", depth=self._depth)
        try:
            self._open(fleet, run)
            manifest, checksums = self._send_all(stream, sender, run)
            self._close_bracket(fleet, checksums, run)
            with run.stage("commit"), _decided_by_one(fleet):
                fleet.commit(version, deadline)
        except BaseException as error:
            self._abort(fleet, sender)
            if not isinstance(error, Exception):
                raise
            raise WeightUpdateFailed(
                f"weight version {version} was not committed, version {self._version} stays: {error} "
                f"[engines now: {told(fleet.members)}]"
            ) from error
        self._record(version, manifest, checksums, run)
        with run.stage("resume"):
            self._resume(fleet, version, deadline)
        run.add("convert", stream.seconds)
        run.add("plan", run.seconds.pop("fill") - stream.seconds)
        return self._report(version, manifest, run)

    def _bring_up(self, member: Member, deadline: Deadline) -> UpdateReport:
        """One engine to the committed version, from the copy."""
        if self._copy is None or self._copy.version is None or self._manifest is None:
            raise UsageError(
                "one engine is updated from the host copy: keep_copy=True, and a first update() of all"
            )
        run, version = Run(deadline), self._copy.version
        one = self._fleet.only([member])
        sender = BucketSender(one, run, flush=self._pause != "in_place", depth=self._depth)
        try:
            with run.stage("join"):
                one.unlink()
            self._open(one, run)
            self._send_copy(sender, run)
            self._close_bracket(one, {} if self._held is None else self._held.engine, run)
            with run.stage("commit"):
                one.commit(version, deadline)
            with run.stage("resume"):
                one.resume(deadline)
        except Exception as error:
            self._abort(one, sender, restore=False)
            raise WeightUpdateFailed(
                f"engine {member.url} was not brought to version {version}: {error} [engine now: {told(one.members)}]"
            ) from error
        return self._report(version, self._manifest, run)

    def _open(self, fleet: Fleet, run: Run) -> None:
        with run.stage("join"):
            fleet.ensure_links(run.deadline)
        with run.stage("pause"):
            fleet.pause(self._pause, run.deadline)
        with run.stage("begin"):
            fleet.begin(run.deadline)

    def _close_bracket(self, fleet: Fleet, checksums: Mapping[str, str], run: Run) -> None:
        with run.stage("end"):
            fleet.end(run.deadline)
        with run.stage("verify"):
            if self._verify:
                run.verified = fleet.verify(checksums, run.deadline)

    def _record(self, version: int, manifest: Manifest, checksums: Mapping[str, str], run: Run) -> None:
        self._version, self._manifest = version, manifest
        self._held = HeldWeights.of(manifest, version=version, engine=checksums) if self._verify else None
        if self._copy is not None:
            self._copy.commit(version, tuple(manifest.buckets), tuple(run.digests))

    def _resume(self, fleet: Fleet, version: int, deadline: Deadline) -> None:
        """Let those that have the version serve; the others are named."""
        took = [member for member in fleet.members if member.state is EngineState.COMMITTED]
        failure: R3Error | None = None
        try:
            fleet.only(took).resume(deadline)
        except R3Error as error:
            failure = error
        left = [member for member in fleet.members if member.state is not EngineState.SERVING]
        if left:
            raise EngineLeftBehind(
                f"weight version {version} is committed, but {len(left)} of {len(fleet.members)} engines are left behind, "
                f"paused: {told(left)}; {failure or 'they did not take the version'}. Repair them one by one, or update all"
            ) from failure

    def _abort(self, fleet: Fleet, sender: BucketSender, *, restore: bool = True) -> None:
        """Free everything that waits, then let the engines serve that still hold, or are given again, whole weights."""
        sender.settle()
        fleet.drop_broken()
        fleet.roll_back()
        if restore and self._copy is not None and self._copy.version is not None:
            for member in fleet.members:
                if member.state is EngineState.DIRTY:
                    with contextlib.suppress(
                        R3Error
                    ):  # it stays in quarantine, and the caller is told the states
                        self._bring_up(member, Deadline(RESTORE_TIMEOUT_S, f"restoring {member.url}"))

    def _report(self, version: int, manifest: Manifest, run: Run) -> UpdateReport:
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

    def _send_all(self, stream: Stream, sender: BucketSender, run: Run) -> tuple[Manifest, dict[str, str]]:
        """Pack bucket g + 1 while bucket g is on the wire or being loaded; return what was sent, all of it loaded."""
        checksums = EngineChecksums()
        filling = fill_buckets(self._named(stream, run), cap_bytes=self._bucket_bytes)
        while (filled := run.timed_next("fill", filling)) is not None:
            bucket = self._agreed(filled.bucket, len(run.buckets))
            payload = self._packer.pack(bucket, filled, run, checksums if self._verify else None)
            sender.push(bucket, payload, last=filled.last)
            run.buckets.append(bucket)
        sender.finish()
        with run.stage("plan"):
            return self._complete(run.buckets), checksums.result()

    def _named(self, stream: Stream, run: Run) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """The stream, each tensor held against what is expected."""
        if self._expected is not None:
            self._expected.begin()
        for meta, tensor in stream:
            if self._expected is not None:
                try:
                    self._expected.check(meta)
                except ManifestMismatch as error:
                    raise ManifestMismatch(f"bucket {len(run.buckets)}: {error}") from error
            yield meta, tensor

    def _send_copy(self, sender: BucketSender, run: Run) -> None:
        assert self._manifest is not None
        last = len(self._manifest.buckets) - 1
        for index, (bucket, payload) in enumerate(self._packer.committed()):
            sender.push(bucket, payload, last=index == last)
        sender.finish()

    def _complete(self, buckets: Sequence[Bucket]) -> Manifest:
        if not buckets:
            raise ManifestMismatch("the update gives no tensors at all")
        if self._expected is not None:
            self._expected.check_complete()
        if self._manifest is None:
            return Manifest.of(buckets)
        self._manifest.check_complete(len(buckets))
        return self._manifest

    def _agreed(self, bucket: Bucket, index: int) -> Bucket:
        return bucket if self._manifest is None else self._manifest.check(index, bucket)


@contextlib.contextmanager
def _decided_by_one(fleet: Fleet) -> Iterator[None]:
    """A failure inside the block is raised only if no engine has taken the version: it decides for all."""
    try:
        yield
    except Exception:
        if not any(member.state is EngineState.COMMITTED for member in fleet.members):
            raise
