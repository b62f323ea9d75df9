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
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType

import torch

from r3channel.errors import (
    ConfigError,
    R3Error,
    RegistryRefused,
    UsageError,
    WeightUpdateFailed,
    WeightVersionRegressed,
)
from r3channel.slot import PROCESS_SLOT
from r3channel.weights.buckets import Bucket, Manifest
from r3channel.weights.checkpoint import checkpoint_tensors
from r3channel.weights.contents import Contents
from r3channel.weights.deadline import Deadline
from r3channel.weights.enrolment import Enrolment, own_registry
from r3channel.weights.fleet import REPAIR_S, Fleet, GroupOptions, Links
from r3channel.weights.group import group_device
from r3channel.weights.held import HeldWeights
from r3channel.weights.kept import HostCopy
from r3channel.weights.member import EngineState, Member, told
from r3channel.weights.packer import OnNonfinite, Packer
from r3channel.weights.progress import Run, Stream, UpdateReport
from r3channel.weights.registry import WeightRegistry
from r3channel.weights.sglang import EngineClient, PauseMode
from r3channel.weights.transaction import Rules, Transaction

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
        registry: WeightRegistry | None = None,
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
            expected: name -> shape that every update must give; `checkpoint_shapes` reads them from a folder.
            depth: buckets in work; 1 packs the next only when the one before is loaded.
            registry: where the engines join and what they hold is recorded; None makes one without leases.
        """
        clients = [EngineClient(engine) if isinstance(engine, str) else engine for engine in engines]
        if verify and (backend != "gloo" or any(client.ranks != 1 for client in clients)):
            raise ConfigError(
                "verify compares whole tensors on the CPU: it needs gloo and engines of one rank"
            )
        name = f"r3channel-weights-{secrets.token_hex(4)}"
        options = GroupOptions(name=name, host=host, backend=backend, links=links)
        self._fleet = Fleet([Member(client) for client in clients], options)
        self._enrolment = Enrolment(registry or own_registry(backend))
        self._rules = Rules(pause=pause, verify=verify, depth=depth)
        self._copy = HostCopy() if keep_copy else None
        self._packer = Packer(group_device(backend), self._copy, on_nonfinite)
        self._contents = Contents(
            self._packer, bucket_bytes=bucket_bytes, expected=expected, checksums=verify
        )
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

    @property
    def digests(self) -> tuple[int, ...]:
        """xxh3 of each committed bucket, in order; () without a host copy."""
        return () if self._copy is None else self._copy.digests

    @property
    def registry(self) -> WeightRegistry:
        """Who belongs, in which epoch, with which version."""
        return self._enrolment.registry

    def routable(self) -> tuple[str, ...]:
        """The gate: engines that may get requests, as they hold the newest committed version. Any thread, no call.

        An engine that an update is under way to is not among them.
        """
        return self.registry.routable(now_s=time.monotonic())

    def renew(self, *, timeout_s: float) -> tuple[str, ...]:
        """Ask each engine whether it lives, and return `routable()`. Any thread; to be called more often than leases run.

        One that does not answer keeps its lease until it runs out. One that was restarted holds unknown weights: it is
        not routable until `update_one` or the next `update`.
        """
        self._enrolment.renew(self._fleet.boot_ids(timeout_s))
        return self.routable()

    def connect(self, *, timeout_s: float) -> None:
        """Let all engines join and form the groups.

        Raises VersionsDiffer with both values, the engine's error, or DeadlineExceeded after `timeout_s`.
        """
        if self._phase != "new":
            raise UsageError(f"WeightSync.connect() on a session that is {self._phase}")
        self._fleet.ensure_links(Deadline(timeout_s, "connect"), self._enrolment.admit)
        self._phase = "ready"

    def update(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        version: int,
        timeout_s: float,
        epoch: int | None = None,
    ) -> UpdateReport:
        """Bring all engines to these weights under `version`, or raise with the old version still in place.

        The tensors are read once, packed while they come; none may change before this returns. Whatever happens, the
        iterator is exhausted (unless it raises itself), because other ranks may be in step with it. The first update
        fixes the manifest: later ones must give the same names, dtypes and shapes in the same order.

        Engines whose lease ran out are left out and named in the report. `epoch`: of the registry, where the caller has
        acted on its members; another one is refused. So is a commit when members have changed since the update began.

        Waits while a step's routing is being received in this process, and keeps it waiting (`slot.py`).

        Raises WeightUpdateFailed (naming bucket, tensor and engine, and the state of each engine), EngineLeftBehind
        (committed, but not by the engines named), StaleEpoch, RegistryRefused (no engine is left), WeightVersionRegressed,
        SlotBusy, UsageError. Ends within `timeout_s`, after a
        failure within some 15 s more for cleaning up, and RESTORE_TIMEOUT_S for each engine that is given the old version
        back, those that answer first.
        """
        stream = Stream(named_tensors)
        try:
            deadline = Deadline(timeout_s, f"update to version {version}")
            with self._alone("update", f"the update to weight version {version}", timeout_s):
                self._check_version(version)
                if epoch is not None:
                    self.registry.check_epoch(epoch, now_s=time.monotonic())
                return self._update(stream, version, Run(deadline, expired=self._part_with_the_lost()))
        except Exception:
            stream.drain()
            raise

    def load_checkpoint(self, folder: str | os.PathLike[str], *, version: int, timeout_s: float) -> None:
        """Read a Hugging Face folder into the host copy as `version`, so that `update_one` and `add_engine` fill from it.

        No engine is asked, so it goes on beside engines that start (with dummy weights), also before `connect`. Memory:
        the copy, and two buckets. The first `update` still fixes order and dtypes of its own. UsageError without
        `keep_copy` or after an update; ConfigError, ManifestMismatch and NonFiniteWeights for a folder that does not fit.
        """
        if self._copy is None or self._phase == "closed" or self._version is not None:
            raise UsageError("load_checkpoint() needs keep_copy=True, and comes before the first update()")
        self._check_version(version)
        run = Run(Deadline(timeout_s, f"reading of {os.fspath(folder)}"))

        def in_time(_: Bucket, __: torch.Tensor, *, last: bool) -> None:
            run.deadline.left_s()

        manifest, checksums = self._contents.pack(Stream(checkpoint_tensors(folder)), in_time, run)
        self._record(version, manifest, checksums, run)

    def update_one(self, engine: str, *, timeout_s: float) -> UpdateReport:
        """Bring one engine, restarted or quarantined, to the committed version from the host copy (`keep_copy`).

        No other engine gets a call, allocates or pauses. Raises WeightUpdateFailed with that engine in quarantine, or
        UsageError without a copy.
        """
        deadline = Deadline(timeout_s, f"update of {engine}")
        with self._alone("update_one", f"the weight update of {engine}", timeout_s):
            return self._bring_up(self._fleet.member(engine), deadline)

    def add_engine(self, engine: EngineClient | str, *, timeout_s: float) -> UpdateReport | None:
        """Take one more engine in. With a host copy it gets the committed version now, else with the next update."""
        client = EngineClient(engine) if isinstance(engine, str) else engine
        if self._rules.verify and client.ranks != 1:
            raise ConfigError(f"engine {client.url}: verify needs engines of one rank")
        deadline = Deadline(timeout_s, f"joining of {client.url}")
        with self._alone("add_engine", f"the joining of {client.url}", timeout_s):
            member = Member(client)
            self._fleet = self._fleet.only([*self._fleet.members, member])
            try:
                if self._copy is not None and self._copy.version is not None:
                    return self._bring_up(member, deadline)
                self._fleet.only([member]).ensure_links(deadline, self._enrolment.admit)
                return None
            except BaseException:
                self._drop(member)
                raise

    def remove_engine(self, engine: str) -> None:
        """Leave this engine's group and forget it, dead or alive. It serves, or stays paused, as it was.

        ConfigError for the last one, and for one that is not there.
        """
        with self._alone("remove_engine", f"the leaving of {engine}", REPAIR_S):
            self._drop(self._fleet.member(engine))

    def close(self) -> None:
        """Leave the groups. Engines that are not SERVING stay paused: they hold no weights worth serving."""
        if self._phase != "closed":
            self._phase = "closed"
            self._copy = None
            del self._packer, self._contents  # frees the buffers
            self._fleet.leave()

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _alone(self, method: str, what: str, timeout_s: float) -> Iterator[None]:
        """Inside the block no other thread is in this object, and this process receives no step's routing."""
        with PROCESS_SLOT.use("weights", what, timeout_s=timeout_s):
            if self._phase != "ready":
                raise UsageError(
                    f"WeightSync.{method}() on a session that is {self._phase}; call connect() first"
                )
            if not self._busy.acquire(blocking=False):
                raise UsageError(f"WeightSync.{method}() while another thread is inside this WeightSync")
            try:
                yield
            finally:
                self._busy.release()

    def _check_version(self, version: int) -> None:
        last = max(self.registry.current_version, -1 if self._version is None else self._version)
        if version < max(last, 0):
            raise WeightVersionRegressed(f"version {version} after {last}; versions only grow")

    def _drop(self, member: Member) -> None:
        rest = [other for other in self._fleet.members if other is not member]
        fleet = self._fleet.only(rest)  # refuses to be empty
        self._fleet.only([member]).unlink()
        self._enrolment.leave(member)
        self._fleet = fleet

    def _part_with_the_lost(self) -> tuple[str, ...]:
        """Forget engines whose lease ran out; leave the groups of those that live another life. Names the former."""
        for member in self._enrolment.reborn(self._fleet.members):
            self._fleet.only([member]).unlink()
        expired = self._enrolment.expired(self._fleet.members)
        if len(expired) == len(self._fleet.members):
            raise RegistryRefused(f"no engine is left to update: leases ran out; {told(expired)}")
        for member in expired:
            self._drop(member)
        return tuple(member.url for member in expired)

    # -- updates -------------------------------------------------------------------------------------------------------

    def _update(self, stream: Stream, version: int, run: Run) -> UpdateReport:
        fleet = self._fleet
        work = Transaction(fleet, self._enrolment, self._rules, run)
        try:
            work.open()
            manifest, checksums = self._contents.pack(stream, work.push, run)
            work.close(checksums)
            work.commit(version)
        except BaseException as error:
            work.abort()
            self._restore(fleet)
            if not isinstance(error, Exception):
                raise
            raise WeightUpdateFailed(
                f"weight version {version} was not committed, version {self._version} stays: {error} "
                f"[engines now: {told(fleet.members)}]"
            ) from error
        self._contents.manifest = manifest
        self._record(version, manifest, checksums, run)
        work.resume(version, manifest)
        run.add("convert", stream.seconds)
        run.add("plan", run.seconds.pop("fill") - stream.seconds)
        return UpdateReport.of(version, manifest, run)

    def _bring_up(self, member: Member, deadline: Deadline) -> UpdateReport:
        """One engine to the committed version, from the copy."""
        if self._copy is None or self._copy.version is None or self._copy.manifest is None:
            raise UsageError(
                "one engine is updated from the host copy: keep_copy=True, and a first update() of all or load_checkpoint()"
            )
        run, version, manifest = Run(deadline), self._copy.version, self._copy.manifest
        one = self._fleet.only([member])
        work = Transaction(one, self._enrolment, self._rules, run, alone=True)
        try:
            with run.stage("join"):
                one.unlink()
            work.open()
            for bucket, payload in self._packer.committed():
                work.push(bucket, payload, last=bucket is manifest.buckets[-1])
            work.close({} if self._held is None else self._held.engine)
            work.commit(version)
            work.resume(version, manifest)
        except BaseException as error:
            work.abort()
            if not isinstance(error, Exception):
                raise
            raise WeightUpdateFailed(
                f"engine {member.url} was not brought to version {version}: {error} [engine now: {told(one.members)}]"
            ) from error
        return UpdateReport.of(version, manifest, run)

    def _restore(self, fleet: Fleet) -> None:
        """Give the old version back to engines that hold parts of a new one. One that fails stays in quarantine."""
        if self._copy is None or self._copy.version is None:
            return
        dirty = [member for member in fleet.members if member.state is EngineState.DIRTY]
        alive = fleet.only(dirty).boot_ids(REPAIR_S) if len(dirty) > 1 else {}
        for member in sorted(
            dirty, key=lambda member: member not in alive
        ):  # a hung one keeps no other waiting
            with contextlib.suppress(R3Error):  # the caller is told the states
                self._bring_up(member, Deadline(RESTORE_TIMEOUT_S, f"restoring {member.url}"))

    def _record(self, version: int, manifest: Manifest, checksums: Mapping[str, str], run: Run) -> None:
        self._version = version
        self._held = HeldWeights.of(manifest, version=version, engine=checksums) if checksums else None
        if self._copy is not None:
            self._copy.commit(version, manifest, tuple(run.digests))
