"""One weight update as a transaction over all engines. Knows order, states and deadlines; bytes and routes lie elsewhere.

    all tensors packed or staged and verified -> pause -> change over (or load) -> version -> resume

The version is set once, at the commit, so no reply ever carries a version that is only half loaded. With our half in the
engine (`staged`) nothing touches a parameter before every rank of every engine holds verified bytes, and a commit that one
engine refuses is undone at the others. Without it SGLang loads in place, and an engine that holds parts of an update stays
paused (quarantined) until it has whole weights: the committed version where a host copy is kept, else the next update.

The decision falls with the first engine that has taken the version. Before it, a failure aborts: the old version stays.
After it the update counts, and an engine that did not take it is left behind in quarantine.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch

from r3channel.bearer import read_token
from r3channel.errors import (
    CannotStage,
    ConfigError,
    DeadlineExceeded,
    EngineLeftBehind,
    R3Error,
    RegistryRefused,
    TrainerRankLost,
    UsageError,
    WeightUpdateFailed,
    WeightVersionRegressed,
)
from r3channel.metrics import Metrics
from r3channel.slot import PROCESS_SLOT
from r3channel.weights.convert import Shard
from r3channel.weights.exact import ExactStages, JointUpdate, TrainerRanks
from r3channel.weights.executor import (
    REPAIR_S,
    Broadcast,
    Crew,
    OnEngineLoss,
    Rules,
    Staged,
    Work,
    background,
    dissolve,
)
from r3channel.weights.geometry import Box
from r3channel.weights.manifest import Bucket, Manifest, TensorMeta
from r3channel.weights.member import EngineState, Member, told
from r3channel.weights.pack import OnNonfinite, Packer, Push
from r3channel.weights.progress import GRACE_S, LAST_WORD_S, Deadline, Run, Stream, UpdateReport
from r3channel.weights.registry import Enrolment, WeightRegistry, own_registry
from r3channel.weights.sglang import EngineClient, PauseMode
from r3channel.weights.store import Buffers, HeldWeights, checkpoint_tensors
from r3channel.weights.wires import WholeStages, Wire, group_device

DEFAULT_BUCKET_BYTES = 256 << 20
RESTORE_S = 30.0
Plan = Literal["broadcast", "exact"]
Staging = Literal["auto"] | bool
T = TypeVar("T")


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
        staged: Staging = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        host: str = "127.0.0.1",
        backend: str = "gloo",
        pause: PauseMode = "retract",
        verify: bool = False,
        keep_copy: bool = False,
        on_nonfinite: OnNonfinite = "error",
        on_engine_loss: OnEngineLoss = "evict",
        expected: Literal["engine"] | None = "engine",
        engine_timeout_s: float = 30.0,
        token_file: str = "",
        registry: WeightRegistry | None = None,
        plan: Plan = "broadcast",
        wire: Wire = "tcp",
        group: Any = None,
        metrics: Metrics | None = None,
        metrics_port: int = -1,
    ) -> None:
        """
        Args:
            engines: addresses, or clients where an engine has a key. Their ranks are asked of them.
            staged: receive in our half in the engine (R3CHANNEL_ENGINE=1 or R3CHANNEL_WEIGHTS=1), beside the parameters, and
                change over under a short pause. `auto`: where every engine has it and memory for one more copy; else, and with
                False, SGLang itself loads flattened buckets in place.
            bucket_bytes: cap of one bucket; two buffers of this size are held.
            host: this machine's address that the engines reach; we listen there and nowhere else.
            backend: of broadcasts.
            pause: what happens to running requests. `in_place` keeps the KV cache of the old weights and never flushes it.
            verify: also compute what the engine's own checksum of each parameter must be (`held`), and compare it before the
                commit of a broadcast (one rank, on the CPU). Staged bytes are always verified, on every rank.
            keep_copy: keep the committed weights packed in host memory (the model's bytes, twice during an update), for
                `update_one` and for giving a failed broadcast's engines the old version back.
            on_nonfinite: `error` refuses NaN and Inf by tensor before their bucket leaves; `allow` does not look.
            on_engine_loss: an engine that dies or falls silent during an update is left out by name (`evict`) until `update_one`
                brings it back, or fails the update (`abort`).
            expected: what every update must give: what the `engine` has parameters for; None does not look.
            engine_timeout_s: how long one engine may take for one bucket before it counts as lost.
            token_file: the run's token, where the engines were started with R3CHANNEL_TOKEN_FILE.
            registry: where the engines join and what they hold is recorded; None makes one without leases.
            plan: `broadcast`: one trainer rank has whole tensors. `exact`: all ranks of `group` make the same session and the
                same calls, each `update` is given `hf_shards`, and every rank sends its own part, staged.
            wire: how staged bytes reach an engine's ranks: over `tcp`, or put into `shared_memory` by trainers on its machine
                (colocated), so that none travels.
            group: a torch process group, `torch.distributed.group.WORLD` for all; with `exact` only.
            metrics: what updates count into, `TrainerChannel.metrics` where both are in one process.
            metrics_port: without `metrics`, a page of its own at this port of `host`; 0 takes a free one, -1 serves none.
        """
        if (plan == "exact") != (group is not None) or (plan == "exact" and staged is False):
            raise ConfigError(
                "plan='exact' goes with group=... and staged engines; plan='broadcast' with neither group"
            )
        clients = [EngineClient(engine) if isinstance(engine, str) else engine for engine in engines]
        self._members = _distinct([Member(client) for client in clients])
        name = f"r3channel-weights-{secrets.token_hex(4)}"
        self._enrolment = Enrolment(registry or own_registry(backend))
        self._rules = Rules(
            pause=pause,
            verify=verify,
            on_engine_loss=on_engine_loss,
            engine_timeout_s=engine_timeout_s,
            name=name,
            host=host,
            backend=backend,
            numbers=itertools.count(1),
            check_names=expected is not None,
        )
        self._staging: Staging = staged
        self._way = "" if staged else "broadcast: not wanted"
        run_token = read_token(token_file) if token_file else ""
        links = {"host": host, "session": name, "run_token": run_token, "staged": staged, "wire": wire}
        self._ranks = None if group is None else TrainerRanks(group)
        self._exact = self._ranks and ExactStages(self._ranks, bucket_bytes=bucket_bytes, **links)
        self._stages = self._exact or WholeStages(**links)
        self._copy = Buffers(keep=True) if keep_copy else None
        self._device = group_device(backend)
        self._on_nonfinite: OnNonfinite = on_nonfinite
        self._packer = Packer(
            bucket_bytes=bucket_bytes,
            on_nonfinite=on_nonfinite,
            named=expected is not None,
            checksums=verify,
        )
        self._kept: list[Shard] = []
        """This rank's part of the committed weights, with `exact` and `keep_copy`."""
        self._own_page = metrics is None
        self.metrics = metrics or Metrics("trainer")
        if metrics is None and metrics_port >= 0:
            self.metrics.serve(host, metrics_port)
        self.metrics.measure("r3channel_weight_updates_total")
        self.metrics.watch("r3channel_engines_routable", lambda: len(self.routable()))
        self._version: int | None = None
        self._checksums: Mapping[str, str] = {}
        """What an engine of one rank reports of the committed weights."""
        self._held: HeldWeights | None = None
        self._phase = "new"
        self._busy = threading.Lock()
        self._reading: Future[Any] | None = None

    @property
    def version(self) -> int | None:
        """The last version that was committed through this object."""
        return self._version

    @property
    def engine_states(self) -> dict[str, EngineState]:
        """What each engine holds and does, as far as this object knows."""
        return {member.url: member.state for member in self._members}

    @property
    def evicted(self) -> dict[str, str]:
        """Engines that updates go on without, and why."""
        return {member.url: member.evicted for member in self._members if member.evicted}

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
        """Who belongs, and with which version."""
        return self._enrolment.registry

    def routable(self) -> tuple[str, ...]:
        """The gate: engines that may get requests, as they hold the newest committed version. Any thread, no call.

        While a broadcast is under way its engines are not among them; engines that serve beside a staged copy are.
        """
        return self.registry.routable(now_s=time.monotonic())

    def renew(self, *, timeout_s: float) -> tuple[str, ...]:
        """Ask each engine whether it lives, and return `routable()`. Any thread; to be called more often than leases run.

        One that does not answer keeps its lease until it runs out. One that was restarted holds unknown weights: it is
        not routable until `update_one` or the next `update`.
        """
        self._enrolment.renew(self._boot_ids(timeout_s))
        return self.routable()

    def connect(self, *, timeout_s: float) -> None:
        """Let all engines join.

        Raises VersionsDiffer with both values, the engine's error, or DeadlineExceeded after `timeout_s`.
        """
        if self._phase != "new":
            raise UsageError(f"WeightSync.connect() on a session that is {self._phase}")
        run = Run(Deadline(timeout_s, "connect"))
        if self._exact is not None:
            self._exact.connect(run.deadline)
            self._rules = replace(self._rules, name=self._exact.session)
        if self._leads:
            Crew(self._members, self._enrolment, self._rules, run, alone=True).meet()
        self._phase = "ready"

    @property
    def _leads(self) -> bool:
        """Whether this rank speaks to engines."""
        return self._ranks is None or self._ranks.rank == 0

    def update(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]] | Iterable[Shard],
        *,
        version: int,
        timeout_s: float,
    ) -> UpdateReport:
        """Bring all engines to these weights under `version`, or raise with the old version still in place.

        The tensors are read once, in a thread, and packed while they come; none may change before this returns. Whatever
        happens, the iterator is exhausted (unless it raises itself), because other ranks may be in step with it. The first
        update fixes the manifest: later ones must give the same names, dtypes and shapes in the same order. It is packed whole
        before any engine is asked.

        Engines whose lease ran out, and those lost on the way, are left out and named in the report.

        Waits while a step's routing is being received in this process, and keeps it waiting (`slot.py`).

        Raises WeightUpdateFailed (naming bucket, tensor and engine, and the state of each engine), EngineLeftBehind
        (committed, but not by the engines named), TrainerRankLost (`exact`: says what engines hold),
        RegistryRefused (no engine is left), WeightVersionRegressed,
        SlotBusy, UsageError. Ends within `timeout_s`, after a failure within some 10 s more for cleaning up.
        """
        run = Run(Deadline(timeout_s, f"update to version {version}"))
        stream = Stream(_pair(one) for one in named_tensors)
        try:
            with (
                self._alone("update", f"the update to weight version {version}", timeout_s),
                self._counted(version),
            ):
                self._check_version(version)
                if self._exact is not None:
                    return self._update_exact([_shard(one) for one in named_tensors], version, run)
                return self._update(stream, version, run)
        finally:
            if self._exact is None and not stream.ended:
                self._drain(stream)
            if self._reading is not None:
                wait([self._reading], timeout=run.deadline.remaining_s)

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
        self._packer.buffers = self._copy
        manifest = self._packer.pack(Stream(checkpoint_tensors(folder)), _in_time(run), run)
        self._copy.commit(version, manifest, tuple(run.digests))
        self._version, self._checksums = version, self._packer.checksums

    def update_one(self, engine: str, *, timeout_s: float) -> UpdateReport:
        """Bring one engine, restarted, evicted or quarantined, to the committed version from the host copy (`keep_copy`).

        No other engine gets a call, allocates or pauses. Raises WeightUpdateFailed with that engine in quarantine, or
        UsageError without a copy.
        """
        deadline = Deadline(timeout_s, f"update of {engine}")
        with self._alone("update_one", f"the weight update of {engine}", timeout_s):
            if self._exact is not None:
                return self._update_exact(self._kept, self._version, Run(deadline), only=self._member(engine))
            return self._bring_up(self._member(engine), deadline)

    def add_engine(self, engine: EngineClient | str, *, timeout_s: float) -> UpdateReport | None:
        """Take one more engine in. With a host copy it gets the committed version now, else with the next update."""
        client = EngineClient(engine) if isinstance(engine, str) else engine
        deadline = Deadline(timeout_s, f"joining of {client.url}")
        with self._alone("add_engine", f"the joining of {client.url}", timeout_s):
            member = Member(client)
            self._members = _distinct([*self._members, member])
            try:
                if self._copy is not None and self._copy.version is not None:
                    return self._bring_up(member, deadline)
                Crew([member], self._enrolment, self._rules, Run(deadline), alone=True).meet()
                return None
            except BaseException:
                self._drop(member)
                raise

    def remove_engine(self, engine: str) -> None:
        """Leave this engine and forget it, dead or alive. It serves, or stays paused, as it was.

        ConfigError for the last one, and for one that is not there.
        """
        with self._alone("remove_engine", f"the leaving of {engine}", REPAIR_S):
            self._drop(self._member(engine))

    def close(self) -> None:
        """Leave all engines. Those that are not SERVING stay paused: they hold no weights worth serving."""
        if self._phase != "closed":
            self._phase = "closed"
            self._copy = None
            del self._packer  # frees the buffers
            wait([background(partial(_leave, member)) for member in self._members], timeout=2 * REPAIR_S)
            self._stages.close()
            if self._own_page:
                self.metrics.close()

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

    @contextlib.contextmanager
    def _counted(self, version: int) -> Iterator[None]:
        """One update of all engines, in the metrics."""
        result = "committed"
        try:
            with self.metrics.clock.span("weights"):
                yield
        except EngineLeftBehind:  # committed, but not by all
            raise
        except TrainerRankLost:
            result = "committed" if self._leads else "unknown"
            raise
        except BaseException:
            result = "failed"
            raise
        finally:
            self.metrics.inc("r3channel_weight_updates_total", result=result)
            if result == "committed":
                self.metrics.set("r3channel_weight_version", version)

    def _check_version(self, version: int) -> None:
        last = max(self.registry.current_version, -1 if self._version is None else self._version)
        if version < max(last, 0):
            raise WeightVersionRegressed(f"version {version} after {last}; versions only grow")

    # -- members -------------------------------------------------------------------------------------------------------

    def _member(self, url: str) -> Member:
        for member in self._members:
            if member.url == url.rstrip("/"):
                return member
        raise ConfigError(f"engine {url} is not one of {[member.url for member in self._members]}")

    def _drop(self, member: Member) -> None:
        rest = _distinct([other for other in self._members if other is not member])  # refuses to be empty
        _leave(member)
        self._enrolment.leave(member)
        self._members = rest

    def _boot_ids(self, timeout_s: float) -> dict[Member, str]:
        """The life of each engine that answers within `timeout_s`. Any thread."""
        calls = {m: background(partial(m.client.boot_id, timeout_s=timeout_s)) for m in self._members}
        wait(calls.values(), timeout=timeout_s + GRACE_S)
        return {m: call.result() for m, call in calls.items() if call.done() and call.exception() is None}

    def _part_with_the_lost(self) -> tuple[str, ...]:
        """Forget engines whose lease ran out, and what reached those that live another life. Names the former."""
        for member in self._enrolment.reborn(self._members):
            member.unlink()
            member.boot_id = ""
        expired = self._enrolment.expired(self._members)
        if len(expired) == len(self._members):
            raise RegistryRefused(f"no engine is left to update: leases ran out; {told(expired)}")
        for member in expired:
            self._drop(member)
        return tuple(member.url for member in expired)

    # -- the caller's tensors ------------------------------------------------------------------------------------------

    def _read(self, stream: Stream, push: Push, run: Run) -> Manifest:
        """Pack the caller's tensors in a thread, so that a stalled iterator keeps nobody waiting past the deadline."""
        reading = self._aside(lambda: self._packer.pack(stream, push, run))
        wait([reading], timeout=run.deadline.left_s())
        if (
            not stream.asking
        ):  # a call of ours is under way: it has the same deadline, and can name who is late
            wait([reading], timeout=LAST_WORD_S)
        if not reading.done():
            late = "the tensors did not come" if stream.asking else "the tensors were not packed and sent"
            why = ": is their iterator stuck?" if stream.asking else ""
            raise DeadlineExceeded(f"{late} within {run.deadline.elapsed_s:.1f} s{why}")
        return reading.result()

    def _drain(self, stream: Stream) -> None:
        """Read the iterator to its end, in a thread: the other trainer ranks are in step with it, whatever becomes of ours."""
        before = self._reading

        def drain() -> None:
            if before is not None:
                wait([before])
            stream.drain()

        self._aside(drain)

    def _aside(self, call: Callable[[], T]) -> Future[T]:
        """The caller's code in a thread, with the caller's setting of gradients, which each thread has its own of."""
        grad = torch.is_grad_enabled()

        def run() -> T:
            with torch.set_grad_enabled(grad):
                return call()

        self._reading = reading = background(run)
        return reading

    def _await_reading(self, deadline: Deadline) -> None:
        if self._reading is not None and not wait([self._reading], timeout=deadline.left_s()).done:
            raise UsageError(
                "the iterator of the update before is still being read: its other ranks have not come along"
            )

    # -- updates -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _undone(
        self, what: str, members: Sequence[Member], stream: Stream | None = None
    ) -> Iterator[list[Work]]:
        """A failure inside aborts the work that was put into the list, and says which state that left engines in."""
        begun: list[Work] = []
        try:
            yield begun
        except TrainerRankLost:  # after the commit
            raise
        except BaseException as error:
            if stream is not None:
                self._drain(stream)
            for work in begun:
                work.abort()
            self._enrolment.aborted(members)
            if stream is not None and begun:
                self._restore(members)
            if not isinstance(error, Exception):
                raise
            raise WeightUpdateFailed(f"{what}: {error} [engines now: {told(members)}]") from error

    def _taking_part(self, run: Run) -> list[Member]:
        if self._exact is None:  # whose other ranks know no leases
            run.expired = self._part_with_the_lost()
        members = [member for member in self._members if not member.evicted]
        if not members:
            raise RegistryRefused(f"no engine is left to update: {self.evicted}; update_one brings one back")
        self._enrolment.cover(members, for_s=run.deadline.left_s())
        return members

    def _stays(self, version: int) -> str:
        return f"weight version {version} was not committed, version {self._version} stays"

    def _update(self, stream: Stream, version: int, run: Run) -> UpdateReport:
        self._await_reading(run.deadline)
        members = self._taking_part(run)
        with self._undone(self._stays(version), members, stream) as begun:
            manifest, copy = self._packer.manifest, None
            if manifest is None:
                copy = self._copy or Buffers(keep=True)
                self._packer.buffers = copy
                manifest = self._read(stream, _in_time(run), run)
            work = self._work(begun, members, manifest, version, run)
            if copy is None:
                self._read(stream, work.push, run)
            else:
                ready = zip(manifest.buckets, copy.coming(), strict=True)
                _send(work, ready, run, count=len(manifest.buckets))
            work.close(self._packer.checksums)
            work.commit(version)
        self._record(version, manifest, run)
        work.resume(version)
        run.add("convert", stream.seconds)
        run.add("plan", run.seconds.pop("fill") - stream.seconds)
        return UpdateReport.of(version, manifest, run)

    def _update_exact(
        self, shards: Sequence[Shard], version: int | None, run: Run, *, only: Member | None = None
    ) -> UpdateReport:
        """All trainer ranks together; of all engines, or of one from what was kept."""
        assert self._exact is not None and self._ranks is not None
        if version is None or not shards:
            raise UsageError(
                "one engine is updated from kept shards: keep_copy=True, and a first update() of all"
            )
        members = [only.afresh()] if only else self._taking_part(run)
        run.way = "staged"
        work = self._staged(members, version, run, alone=only is not None)
        joint = JointUpdate(work, self._exact, self._ranks, run, version)
        with self._undone(self._stays(version), members) as begun:
            begun += [work] if joint.leads else []
            manifest = joint.run(shards, finite=self._on_nonfinite == "error")
        if only is None:
            self._version = version
            if self._copy is not None:
                self._kept = [Shard(s.meta, s.box, s.tensor.to(s.meta.dtype, copy=True)) for s in shards]
            self._hold(version, manifest, run)
        else:
            only.evicted = ""
        if joint.outcome is not None:
            raise joint.outcome
        return UpdateReport.of(version, manifest, run)

    def _bring_up(self, member: Member, deadline: Deadline) -> UpdateReport:
        """One engine to the committed version, from the copy."""
        copy = self._copy
        if copy is None or copy.version is None or copy.manifest is None:
            raise UsageError(
                "one engine is updated from the host copy: keep_copy=True, and a first update() of all or load_checkpoint()"
            )
        run, version, manifest, members = Run(deadline), copy.version, copy.manifest, [member.afresh()]
        with self._undone(f"engine {member.url} was not brought to version {version}", members) as begun:
            work = self._work(begun, members, manifest, version, run, alone=True)
            _send(work, copy.read(), run, count=len(manifest.buckets))
            work.close(self._checksums)
            work.commit(version)
            work.resume(version)
        member.evicted = ""
        return UpdateReport.of(version, manifest, run)

    def _staged(self, members: Sequence[Member], version: int, run: Run, *, alone: bool) -> Staged:
        return Staged(
            members, self._enrolment, self._rules, run, stages=self._stages, version=version, alone=alone
        )

    def _work(
        self,
        begun: list[Work],
        members: Sequence[Member],
        manifest: Manifest,
        version: int,
        run: Run,
        *,
        alone: bool = False,
    ) -> Work:
        """Opened, and put into `begun`: staged where that is wanted and can be, else a broadcast."""
        if not self._way:
            staged = self._staged(members, version, run, alone=alone)
            try:
                staged.open(manifest)
                run.way = "staged"
                begun.append(staged)
                return staged
            except CannotStage as error:
                if self._staging is True:
                    raise
                self._way = f"broadcast: {error}"
        work = Broadcast(
            members, self._enrolment, self._rules, run, stages=self._stages, version=version, alone=alone
        )
        run.way = self._way
        try:
            work.open(manifest)
        except BaseException:  # nothing has been loaded: there is nothing to restore
            work.abort()
            raise
        begun.append(work)
        return work

    def _restore(self, members: Sequence[Member]) -> None:
        """Give the old version back to engines that hold parts of a new one, each by itself. One that fails stays paused."""
        if self._copy is None or self._copy.version is None:
            return

        def one(member: Member) -> None:
            with contextlib.suppress(R3Error):  # the caller is told the states
                self._bring_up(member, Deadline(RESTORE_S, f"restoring {member.url}"))

        dirty = [member for member in members if member.state is EngineState.DIRTY and not member.evicted]
        wait([background(partial(one, member)) for member in dirty], timeout=RESTORE_S + GRACE_S)

    def _record(self, version: int, manifest: Manifest, run: Run) -> None:
        if self._packer.manifest is None:
            self._packer.manifest = manifest
            device = torch.device("cpu") if run.way == "staged" else self._device
            self._packer.buffers = self._copy or Buffers(keep=False, device=device)
        self._version, self._checksums = version, self._packer.checksums
        self._hold(version, manifest, run)
        if self._copy is not None:
            self._copy.commit(version, manifest, tuple(run.digests))

    def _hold(self, version: int, manifest: Manifest, run: Run) -> None:
        sums = run.checksums
        self._held = HeldWeights.of(manifest, version=version, engine=sums) if sums else None


def _pair(one: tuple[str, torch.Tensor] | Shard) -> tuple[str, torch.Tensor]:
    if isinstance(one, Shard):
        raise UsageError(
            "shards were given to a session with plan='broadcast'; give hf_weights, or plan='exact'"
        )
    return one


def _shard(one: tuple[str, torch.Tensor] | Shard) -> Shard:
    """With `exact` a whole tensor is a shard too."""
    if isinstance(one, Shard):
        return one
    name, tensor = one
    return Shard(TensorMeta.of(name, tensor), Box.whole(tensor.shape), tensor)


def _send(work: Work, buckets: Iterable[tuple[Bucket, torch.Tensor]], run: Run, *, count: int) -> None:
    """From a host copy."""
    run.buckets.clear()
    for bucket, payload in buckets:
        work.push(bucket, payload, last=len(run.buckets) == count - 1)
        run.buckets.append(bucket)


def _in_time(run: Run) -> Push:
    """Takes buckets that stay where they were packed."""

    def push(bucket: Bucket, payload: torch.Tensor, /, *, last: bool) -> None:
        run.deadline.left_s()

    return push


def _leave(member: Member) -> None:
    """Our hold on it and its group end; nothing else changes there."""
    dissolve(member)
    member.unlink()


def _distinct(members: list[Member]) -> list[Member]:
    urls = [member.url for member in members]
    if not members or len(set(urls)) != len(urls):
        raise ConfigError(f"engines {urls}: expected at least one, each once")
    return members
