"""One weight update as a transaction over all engines. Knows order, states and deadlines; bytes and routes lie elsewhere.

    staged:     all bytes beside the parameters, verified -> pause -> change over, under the new version -> resume
    broadcast:  pause -> load bucket by bucket -> version -> resume

With our half in the engine (`staged`) nothing touches a parameter before every rank of every engine holds verified bytes, and
a change-over that one engine refuses is undone at the others. Without it SGLang loads in place, and an engine that holds parts
of an update stays paused (quarantined) until it has whole weights: those of the next update, or the committed ones again
(`republish`).

The update counts once all engines have changed over, or with the first that took a broadcast's version. Before, a failure
aborts: the old version stays. After it, an engine that does not serve the version is left behind in quarantine.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any, Literal

import torch

from r3channel.errors import (
    CannotStage,
    ConfigError,
    EngineLeftBehind,
    GiverChanged,
    R3Error,
    RegistryRefused,
    TrainerRankLost,
    UsageError,
    WeightUpdateFailed,
    close_after,
)
from r3channel.observe.metrics import Metrics
from r3channel.transport.auth import read_token
from r3channel.transport.collective_lock import PROCESS_SLOT
from r3channel.weights.broadcast import Broadcast
from r3channel.weights.convert import Shard
from r3channel.weights.executor import Crew, Feed, OnEngineLoss, Rules
from r3channel.weights.fleet import Fleet
from r3channel.weights.geometry import Box
from r3channel.weights.group import group_device
from r3channel.weights.joint import Staged
from r3channel.weights.manifest import Bucket, Manifest, TensorMeta
from r3channel.weights.member import EngineState, Member, told
from r3channel.weights.pack import OnNonfinite, Packer
from r3channel.weights.peer import from_peer
from r3channel.weights.progress import REPAIR_S, Deadline, Run, UpdateReport, background
from r3channel.weights.reader import read_again, read_first
from r3channel.weights.sglang import EngineClient, PauseMode
from r3channel.weights.stages import Given, Push, Stages, TrainerRanks
from r3channel.weights.store import HeldWeights
from r3channel.weights.wires import Wire

DEFAULT_BUCKET_BYTES = 256 << 20
_COUNTED = (
    *("r3channel_weight_updates_total", "r3channel_weight_pause_seconds_total"),
    *("r3channel_weight_bytes_total", "r3channel_engine_evictions_total"),
)
Plan = Literal["broadcast", "exact"]
Staging = Literal["auto"] | bool


class WeightSync(contextlib.AbstractContextManager["WeightSync"]):
    """Publishes weights to engines. NEW -> READY (`connect`) -> CLOSED (`close`, any number of times).

    An `update` that fails keeps the session READY: the next one joins what groups are missing and sends everything again.

        with WeightSync([url], bucket_bytes=64 << 20) as sync:
            sync.connect(timeout_s=60)
            report = sync.update(hf_weights(bridge, chunks), version=7, timeout_s=300)
            sync.republish(hf_weights(bridge, chunks), engines=[url], timeout_s=300)  # it restarted; the others notice nothing

    With whole tensors exactly one trainer rank owns a session; if the tensors come from a collective iterator, the other ranks
    exhaust theirs at the same time. One thread at a time calls.
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
        on_nonfinite: OnNonfinite = "error",
        on_engine_loss: OnEngineLoss = "evict",
        expected: Literal["engine"] | None = "engine",
        engine_timeout_s: float = 30.0,
        token_file: str = "",
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
            bucket_bytes: cap of one bucket: one leaves while the next is read. A broadcast holds two buffers of this size.
            host: this machine's address that the engines reach; we listen there and nowhere else.
            backend: of broadcasts.
            pause: what happens to running requests. `in_place` keeps the KV cache of the old weights and never flushes it.
            verify: also have each rank tell what the engine's own checksum of each parameter will be (`held`). No broadcast can.
                Staged bytes are verified in any case.
            on_nonfinite: `error` refuses NaN and Inf by tensor before their bucket or record leaves; `allow` does not look.
            on_engine_loss: an engine that dies or falls silent during an update is left out by name (`evict`) until `update_one`
                brings it back, or fails the update (`abort`).
            expected: what every update must give: what the `engine` has parameters for; None does not look.
            engine_timeout_s: how long one engine may take for one bucket of a broadcast, or one record (1 MiB) of staged bytes,
                before it counts as lost.
            token_file: the run's token, where the engines were started with R3CHANNEL_TOKEN_FILE.
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
        if verify and staged is False:
            raise ConfigError("verify=True tells what staged parameters will hold; staged=False stages none")
        if isinstance(engines, str):  # whose letters would be taken for engines
            raise ConfigError(f"engines is {engines!r}, one address; expected a list of them")
        clients = [EngineClient(engine) if isinstance(engine, str) else engine for engine in engines]
        self._fleet = Fleet(clients, backend)
        self._rules = Rules(
            pause=pause,
            verify=verify,
            look=on_nonfinite == "error",
            on_engine_loss=on_engine_loss,
            engine_timeout_s=engine_timeout_s,
            host=host,
            backend=backend,
            check_names=expected is not None,
        )
        self._must_stage = staged is True or verify or group is not None
        self._way = "" if staged else "broadcast: not wanted"
        if on_nonfinite not in ("error", "allow"):
            raise ConfigError(f"on_nonfinite {on_nonfinite!r}: expected error or allow")
        self._exact = group is not None
        self._ranks = TrainerRanks(group)
        self._stages = Stages(
            self._ranks,
            host=host,
            session=f"r3channel-weights-{secrets.token_hex(4)}",
            run_token=read_token(token_file) if token_file else "",
            staged=staged,
            wire=wire,
        )
        self._bucket_bytes = bucket_bytes
        self._packer = Packer(group_device(backend), look=self._rules.look)
        """Packs the buckets of broadcasts."""
        self._given: Given | None = None
        """What the last committed update gave."""
        self._own_page = metrics is None
        self.metrics = metrics or Metrics("trainer")
        if metrics is None and metrics_port >= 0:
            self.metrics.serve(host, metrics_port)
        for name in _COUNTED:
            self.metrics.measure(name)
        # Not by `self`, which the page would keep, and with it the group and gloo's threads, to the process's end.
        fleet = self._fleet
        self.metrics.watch("r3channel_engines_routable", lambda: len(fleet.routable(0)))
        self._version: int | None = None
        self._held: HeldWeights | None = None
        self._phase, self._busy = "new", threading.Lock()

    @property
    def version(self) -> int | None:
        """The last version that was committed through this object."""
        return self._version

    @property
    def engine_states(self) -> dict[str, EngineState]:
        """What each engine holds and does, as far as this object knows."""
        return {member.url: member.state for member in self._fleet.members}

    @property
    def evicted(self) -> dict[str, str]:
        """Engines that updates go on without, and why."""
        return self._fleet.evicted

    @property
    def held(self) -> HeldWeights | None:
        """What the engines hold since the last commit, to be written to a file and held against any engine (store.py)."""
        return self._held

    def routable(self, *, timeout_s: float = 0.0) -> tuple[str, ...]:
        """The gate: engines that may get requests, as they hold the newest committed version. Any thread.

        While a broadcast is under way its engines are not among them; engines that serve beside a staged copy are. With
        `timeout_s` each is asked, and one that does not answer is not among them, nor is one that was restarted, until
        `update_one` or the next `update`; without, no call is made.
        """
        return self._fleet.routable(timeout_s)

    def connect(self, *, timeout_s: float) -> None:
        """Let all engines join.

        Raises RegistryRefused with both versions, the engine's error, or DeadlineExceeded after `timeout_s`.
        """
        if self._phase != "new":
            raise UsageError(f"WeightSync.connect() on a session that is {self._phase}")
        run = Run(Deadline(timeout_s, "connect"))
        self._stages.connect(run.deadline)
        if self._ranks.leads:
            Crew(self._fleet.members, self._fleet, self._rules, run, alone=True).meet()
        self._phase = "ready"

    def update(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]] | Iterable[Shard],
        *,
        version: int,
        timeout_s: float,
    ) -> UpdateReport:
        """Bring all engines to these weights under `version`, or raise with the old version still in place.

        The tensors are read once, and sent while they come; none may change before this returns. After a failure, too, the
        iterator is exhausted (unless it raises itself), because other ranks may be in step with it. The first update fixes the
        manifest: later ones must give the same names, dtypes and shapes in the same order. It is packed whole before any
        engine is asked.

        Engines that are lost on the way are left out and named in the report.

        Waits while a step's routing is being received in this process, and keeps it waiting (`transport/collective_lock.py`).

        Raises WeightUpdateFailed (naming bucket, tensor and engine, and the state of each engine), EngineLeftBehind
        (committed, but not by the engines named), TrainerRankLost (`exact`: says what engines hold),
        RegistryRefused (no engine is left), DeadlineExceeded, UsageError (an older version, too).
        Ends within `timeout_s`, after a failure within some 10 s more for cleaning up, and what the iterator itself takes.
        """
        run = Run(Deadline(timeout_s, f"update to version {version}"))
        with (
            self._exhausted(named_tensors) as given,
            self._alone("update", f"the update to weight version {version}", timeout_s),
            self._counted(version, run.report),
        ):
            self._check_version(version)
            return self._update(given, version, run)

    def republish(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]] | Iterable[Shard],
        *,
        engines: Sequence[str],
        timeout_s: float,
    ) -> UpdateReport:
        """Give the committed version again, to these engines alone: restarted, evicted or quarantined ones, where no other holds
        it for `update_one`. Every rank calls, as for `update`, with the weights that it gave then.

        No other engine gets a call or pauses. Staged bytes other than those of the commit are refused. Raises
        WeightUpdateFailed with those engines in quarantine, or UsageError before the first committed update.
        """
        members = [self._fleet.member(url) for url in engines]
        run = Run(Deadline(timeout_s, f"republishing to {engines}"))
        with self._exhausted(named_tensors) as given, self._alone("republish", "a weight update", timeout_s):
            if self._version is None or not members:
                raise UsageError(f"republish() of version {self._version} to {engines}: nothing to do")
            report = self._bring_up(members, run, lambda: self._what(given, run))
            assert report is not None
            return report

    def update_one(self, engine: str, *, timeout_s: float) -> UpdateReport:
        """Bring one engine, restarted, evicted or quarantined, to the committed version.

        It comes from another engine's memory (`staged`), which is read while it serves. No other engine gets a call or pauses.
        Raises WeightUpdateFailed with that engine in quarantine, or UsageError where no other engine holds the version.
        """
        deadline = Deadline(timeout_s, f"update of {engine}")
        with self._alone("update_one", f"the weight update of {engine}", timeout_s):
            report = self._from_peer(self._fleet.member(engine), deadline)
            if report is None:
                raise UsageError(
                    f"nothing holds version {self._version} for engine {engine}: no other engine took it staged and serves it. "
                    "Give it again: republish()"
                )
            return report

    def add_engine(self, engine: EngineClient | str, *, timeout_s: float) -> UpdateReport | None:
        """Take one more engine in. It gets the committed version now, as by `update_one`, or the next one with the others: where
        nothing holds that version for it, or it cannot stage (`staged="auto"`)."""
        client = EngineClient(engine) if isinstance(engine, str) else engine
        deadline = Deadline(timeout_s, f"joining of {client.url}")
        with self._alone("add_engine", f"the joining of {client.url}", timeout_s):
            member = self._fleet.add(client)
            try:
                report = self._joined(member, deadline)
                if report is None and self._ranks.leads:
                    Crew([member], self._fleet, self._rules, Run(deadline), alone=True).meet()
                return report
            except BaseException:
                self._fleet.drop(member)
                raise

    def remove_engine(self, engine: str) -> None:
        """Leave this engine and forget it, dead or alive. It serves, or stays paused, as it was.

        ConfigError for the last one, and for one that is not there.
        """
        with self._alone("remove_engine", f"the leaving of {engine}", REPAIR_S):
            self._fleet.drop(self._fleet.member(engine))

    def close(self) -> None:
        """Leave all engines. Those that are not SERVING stay paused: they hold no weights worth serving."""
        if self._phase != "closed":
            self._phase = "closed"
            del self._packer  # frees the buffers
            wait([background(member.leave) for member in self._fleet.members], timeout=2 * REPAIR_S)
            self._stages.close()
            if self._own_page:
                self.metrics.close()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        close_after(error, self.close)

    @contextlib.contextmanager
    def _exhausted(self, named_tensors: Iterable[Any]) -> Iterator[Iterator[Any]]:
        """What the caller gives, read to its end also after a failure: other ranks may be in step with it."""
        given = map(_shard if self._exact else _pair, named_tensors)
        try:
            yield given
        except Exception:
            with contextlib.suppress(Exception):  # one is under way
                deque(given, maxlen=0)
            raise

    @contextlib.contextmanager
    def _alone(self, method: str, what: str, timeout_s: float) -> Iterator[None]:
        """Keep other threads out of this object, and this process from receiving a step's routing, inside the block."""
        with PROCESS_SLOT.use("weights", what, timeout_s=timeout_s):
            if self._phase != "ready":
                raise UsageError(f"WeightSync.{method}() on a session that is {self._phase}; connect() first")
            if not self._busy.acquire(blocking=False):
                raise UsageError(f"WeightSync.{method}() while another thread is inside this WeightSync")
            try:
                yield
            finally:
                self._busy.release()

    @contextlib.contextmanager
    def _counted(self, version: int, report: UpdateReport) -> Iterator[None]:
        """Count one update of all engines in the metrics."""
        result = "failed"
        try:
            with self.metrics.clock.span("weights"):
                yield
            result = "committed"
        except (EngineLeftBehind, TrainerRankLost) as error:  # committed, but not by all
            known = isinstance(error, EngineLeftBehind) or self._ranks.leads
            result = "committed" if known else "unknown"
            raise
        finally:
            self.metrics.inc("r3channel_weight_updates_total", result=result)
            moved = report.sent_bytes or report.payload_bytes
            for name, value in zip(_COUNTED[1:], (report.paused_s, moved, len(report.evicted)), strict=True):
                self.metrics.inc(name, value)
            if result == "committed":
                self.metrics.set("r3channel_weight_version", version)

    def _check_version(self, version: int) -> None:
        last = max(-1 if known is None else known for known in (self._fleet.version, self._version))
        if version < max(last, 0):
            raise UsageError(f"version {version} after {last}; versions only grow")

    # -- what is given -------------------------------------------------------------------------------------------------

    def _what(self, what: Iterator[Any], run: Run) -> tuple[Given, Feed]:
        """What an update gives, and how its values come. Whole tensors are copied where their names are not known sooner."""
        if self._exact:
            shards = list[Shard](what)
            tensors = [shard.tensor for shard in shards]
            held = tuple((shard.meta, shard.box) for shard in shards)
            return Given(held, (len(held),), None), lambda push: push(tensors)
        given = self._given
        if given is not None and given.manifest is not None:
            manifest = given.manifest

            def again(push: Push) -> None:
                with run.stage("plan"):
                    read_again(what, manifest, push, run)

            return given, again
        with run.stage("plan"):
            limits = {"cap_bytes": self._bucket_bytes, "look": self._rules.look}
            manifest, buckets = read_first(what, run, **limits)

        def feed(push: Push) -> None:
            deque(map(push, buckets), maxlen=0)

        return Given.whole(manifest), feed

    # -- updates -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _undone(self, what: str, members: Sequence[Member]) -> Iterator[list[Staged | Broadcast]]:
        """On a failure inside, abort the work that was put into the list, and tell the engines' states in the error."""
        begun: list[Staged | Broadcast] = []
        try:
            yield begun
        except TrainerRankLost:  # after the commit
            raise
        except BaseException as error:
            for work in begun:
                work.abort()
            if not isinstance(error, Exception):
                raise
            raise WeightUpdateFailed(f"{what}: {error} [engines now: {told(members)}]") from error

    def _taking_part(self) -> list[Member]:
        members = [member for member in self._fleet.members if not member.evicted]
        if not members:
            raise RegistryRefused(f"no engine is left to update: {self.evicted}; update_one brings one back")
        return members

    def _update(self, what: Iterator[Any], version: int, run: Run) -> UpdateReport:
        """Update all engines with what the caller gives."""
        members = self._taking_part()
        stays = f"weight version {version} was not committed, version {self._version} stays"
        with self._undone(stays, members) as begun:
            given, feed = self._what(what, run)
            outcome = self._deliver(begun, members, given, feed, version, run)
        self._version, self._given = version, given
        self._held = HeldWeights(version, run.checksums) if run.checksums else None
        if outcome is not None:
            raise outcome
        return run.ended(version, self._sent(given))

    def _joined(self, member: Member, deadline: Deadline) -> UpdateReport | None:
        """Bring up an engine that joins; None also if it cannot stage, because the next update may then fall back for all."""
        try:
            return self._from_peer(member, deadline)
        except WeightUpdateFailed as error:
            if self._must_stage or not isinstance(error.__cause__, CannotStage):
                raise
            return None

    def _bring_up(
        self, members: Sequence[Member], run: Run, source: Callable[[], tuple[Given, Feed] | None]
    ) -> UpdateReport | None:
        """Bring engines to the committed version; None where the source does not hold it."""
        version, names = self._version, ", ".join(member.url for member in members)
        with self._undone(f"engine {names} was not brought to version {version}", members) as begun:
            found = source()
            if version is None or found is None:
                return None
            given, feed = found
            try:
                for member in members:
                    member.boot_id = ""  # nothing that was known of it is
                outcome = self._deliver(begun, members, given, feed, version, run, alone=True)
            except GiverChanged:  # what it serves is not the version
                self._fleet.member(given.giver).holds = None
                raise
            if outcome is not None:
                raise outcome
        for member in members:
            member.evicted = ""
        return run.ended(version, self._sent(given))

    def _from_peer(self, member: Member, deadline: Deadline) -> UpdateReport | None:
        """Bring one engine to the committed version out of another one's memory; None where none holds it."""
        run, version = Run(deadline), self._version
        if version is None:
            return None
        others = [other for other in self._fleet.members if other is not member]
        read = partial(from_peer, others, self._stages, version, cap_bytes=self._bucket_bytes, run=run)
        return self._bring_up([member], run, read)

    def _deliver(
        self,
        begun: list[Staged | Broadcast],
        members: Sequence[Member],
        given: Given,
        feed: Feed,
        version: int,
        run: Run,
        *,
        alone: bool = False,
    ) -> R3Error | None:
        """Send staged if that is wanted and possible, else broadcast. Returns the error to raise although the update counts."""
        parts = members, self._fleet, self._rules, run
        work: Staged | Broadcast
        if not self._way or given.manifest is None:
            work = Staged(*parts, stages=self._stages, version=version, alone=alone)
            begun += [work] if self._ranks.leads else []
            run.report.way = "staged"
            try:
                work.open(given)
            except CannotStage as error:
                if given.manifest is None or self._must_stage:
                    raise
                self._way = f"broadcast: {error}"
                begun.clear()
            else:
                work.deliver(feed)
                return work.outcome
        run.report.way = self._way
        work = Broadcast(*parts, stages=self._stages, version=version, alone=alone, packer=self._packer)
        try:
            work.open(given)
        except BaseException:  # nothing has been loaded: there is nothing to restore
            work.abort()
            raise
        begun.append(work)
        work.deliver(feed)
        return work.outcome

    def _sent(self, given: Given) -> Manifest:
        """With `exact`: all tensors that trainers hold together."""
        return given.manifest or Manifest.of([Bucket.of(self._stages.metas)])


def _pair(one: tuple[str, torch.Tensor] | Shard) -> tuple[str, torch.Tensor]:
    if isinstance(one, Shard):
        raise UsageError("shards were given to plan='broadcast'; give hf_weights, or plan='exact'")
    return one


def _shard(one: tuple[str, torch.Tensor] | Shard) -> Shard:
    """With `exact` a whole tensor is a shard too."""
    if isinstance(one, Shard):
        return one
    name, tensor = one
    return Shard(TensorMeta.of(name, tensor), Box.whole(tensor.shape), tensor)
