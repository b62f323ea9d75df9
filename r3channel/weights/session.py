"""Weight updates of a session's engines. `transaction` has the order of the steps; bytes and routes are in other modules.

With our half in the engine (`staged`) no parameter is touched before every rank of every engine holds verified bytes.
Without our half SGLang loads in place. An engine that holds parts of an update then stays paused until it has whole weights:
those of the next update, or the committed ones again (`republish`).

An update counts once the first engine has changed over. A failure before that aborts the update: the old version stays.
After that, an engine that does not serve the version is fenced: it stays paused, and the error names it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any

from r3channel import errors
from r3channel.observe.metrics import Metrics
from r3channel.transport.collective_lock import PROCESS_SLOT
from r3channel.weights.broadcast import Broadcast
from r3channel.weights.config import SyncConfig
from r3channel.weights.convert import Shard
from r3channel.weights.engine import EngineHandle, Engines, handle_of
from r3channel.weights.geometry import Box
from r3channel.weights.manifest import Bucket, Named, TensorMeta, read_again, read_first
from r3channel.weights.progress import CONTROL_S, REPAIR_S, Deadline, Run, UpdateReport, background
from r3channel.weights.ranks import TrainerRanks
from r3channel.weights.send_planner import Feed, Given, SendPlanner, UpdateSpec, from_peer
from r3channel.weights.staged_copy import JOINT
from r3channel.weights.store import HeldWeights
from r3channel.weights.transaction import EngineState
from r3channel.weights.update import Grouped, Staged, Update

Tensors = Iterable[Named] | Iterable[Shard]
log = logging.getLogger(__name__)
_NAMES = "weight_updates", "weight_pause_seconds", "weight_bytes", "engine_evictions"
_COUNTED = [f"r3channel_{name}_total" for name in _NAMES]


class WeightSync(contextlib.AbstractContextManager["WeightSync"]):
    """Publishes weights to engines. NEW -> READY (`connect`) -> CLOSED (`close`, any number of times).

    After a failed `update` the session is still READY: the next update joins the missing groups and sends everything again.

        with WeightSync.whole([url], bucket_bytes=64 << 20) as sync:
            sync.connect(timeout_s=60)
            report = sync.update(hf_weights(bridge, chunks), version=7, timeout_s=300)
            sync.republish(hf_weights(bridge, chunks), engines=[url], timeout_s=300)  # this engine restarted; no other is called

    If the tensors come from a collective iterator, ranks without a session exhaust their iterators at the same time. One thread
    at a time may call.
    """

    def __init__(self, config: SyncConfig, *, group: Any = None, exact: bool = False) -> None:
        """Build a session from a configuration; see `whole` and `sharded`.

        `whole` and `sharded` make the configuration from options.

        Args:
            config: What holds for all updates of the session.
            group: A torch process group of all trainer ranks; None for one trainer rank.
            exact: Whether updates give shards and are staged (`sharded`).

        Raises:
            ConfigError: `exact` with `staged=False`, a wire for shards without `exact`, no engine, or an engine given twice.
        """
        self._config, self._exact, wire = config, exact, config.wire
        if self._exact and config.staged is False:
            raise errors.ConfigError("shards are sent to staged engines only; staged=False stages none")
        if wire in JOINT and not self._exact:
            raise errors.ConfigError(f"wire={wire!r} is for `sharded`: `whole` takes backend={wire!r}")
        self._engines = Engines(config.engines, wire if wire in JOINT else config.backend)
        self._must_stage = config.staged is True or config.verify or self._exact
        self._way = "" if config.staged else "broadcast: not wanted"
        self._ranks = TrainerRanks(group)
        self._planner = SendPlanner(self._ranks, config)
        self._spec: UpdateSpec | None = None
        """What the last committed update gave."""
        self.metrics = config.metrics or Metrics("trainer")
        for name in _COUNTED:
            self.metrics.measure(name)
        # Without `self`: the metrics page would keep it, the group and gloo's threads until the process ends.
        engines = self._engines
        self.metrics.watch("r3channel_engines_routable", lambda: len(engines.routable(0)))
        self.version: int | None = None
        """The last version that was committed through this object."""
        self.held: HeldWeights | None = None
        """What the engines hold since the last commit: can be written to a file and compared with any engine (store.py)."""
        self._phase, self._busy = "new", threading.Lock()

    @classmethod
    def whole(cls, engines: Sequence[EngineHandle | str], *, group: Any = None, **options: Any) -> WeightSync:
        """Make a session whose trainer ranks give whole tensors.

        Each `update` is given (name, tensor). With a torch process group all its ranks make the same session and the same calls.
        Each rank gives whole tensors of its own (those of its pipeline stage: `hf_weights` with `source`), or none.

        Args:
            engines: Addresses or handles. Rank 0 knows the engines.
            group: A torch process group; None for one trainer rank.
            **options: Fields of `SyncConfig`.

        Returns:
            The session. Its reports count a rank's own tensors.
        """
        return cls(SyncConfig(engines=engines, **options), group=group)

    @classmethod
    def sharded(cls, engines: Sequence[EngineHandle | str], *, group: Any, **options: Any) -> WeightSync:
        """Make a session whose trainer ranks each send their shards.

        All ranks of `group` make the same session and the same calls. Each `update` is given `hf_shards`, and every rank sends
        its own part, staged. For the rest see `whole`.

        Args:
            engines: Addresses or handles.
            group: A torch process group; `torch.distributed.group.WORLD` for all ranks.
            **options: Fields of `SyncConfig`.
        """
        return cls(SyncConfig(engines=engines, **options), group=group, exact=True)

    @property
    def engine_states(self) -> dict[str, EngineState]:
        """Return each engine's state by URL, as far as known here."""
        return {member.url: member.now.state for member in self._engines.all}

    @property
    def evicted(self) -> dict[str, str]:
        """Return the engines that the last update left out, and why."""
        return {engine.url: engine.now.why for engine in self._engines.all if not engine.now.member}

    def routable(self, *, timeout_s: float = 0.0) -> tuple[str, ...]:
        """Return the engines that may get requests: the gate.

        These engines hold the newest committed version. Engines that take part in a broadcast under way are not among them;
        engines that serve beside a staged copy are. Any thread may call.

        Args:
            timeout_s: Seconds that each engine has for an answer. 0 makes no call.

        Returns:
            URLs. With a timeout, an engine that does not answer is not among them. An engine that was restarted is not among
                them either, until `update_one` or the next `update`.
        """
        return self._engines.routable(timeout_s)

    def connect(self, *, timeout_s: float) -> None:
        """Let all engines join the session.

        Args:
            timeout_s: Seconds for the whole call.

        Raises:
            RegistryRefused: An engine runs another version of torch or NCCL; names both versions.
            DeadlineExceeded: Not all engines have joined after `timeout_s`.
            R3Error: The engine's own error.
            UsageError: The session is not new.
        """
        if self._phase != "new":
            raise errors.UsageError(f"WeightSync.connect() on a session that is {self._phase}")
        deadline = Deadline(timeout_s, "connect")
        self._planner.connect(deadline)
        self._meet(self._engines.all, deadline)
        self._phase = "ready"

    def _meet(self, engines: Sequence[EngineHandle], deadline: Deadline) -> None:
        if self._ranks.leads:
            limit_s = min(deadline.left_s(), CONTROL_S)
            for call in [background(partial(self._engines.meet, engine, limit_s)) for engine in engines]:
                call.result()

    def update(self, named_tensors: Tensors, *, version: int, timeout_s: float) -> UpdateReport:
        """Publish these weights to all engines, or keep the old version.

        The tensors are read once, and sent while they come. The first update fixes the manifest: later updates must give the
        same names, dtypes and shapes in the same order. The manifest is packed whole before any engine is asked.

        Engines that are lost on the way are left out and named in the report; the next update tries each of them again.

        The call waits while a step's routing is being received in this process, and keeps the next routing waiting
        (`transport/collective_lock.py`).

        Args:
            named_tensors: (name, tensor) pairs, or shards. No tensor may change before the call returns. After a failure, too,
                the iterator is exhausted (unless the iterator itself raises), because other ranks may be in step with it.
            version: The version of these weights. Versions only grow.
            timeout_s: Seconds for the call. After a failure cleaning up takes some 10 s more. What the iterator itself takes is
                extra.

        Raises:
            WeightUpdateFailed: The old version is still in place. Names bucket, tensor and engine, and the state of each engine.
            EngineLeftBehind: The update is committed, but not by the engines named.
            TrainerRankLost: A trainer rank was lost (`sharded`); says what engines hold.
            DeadlineExceeded: No result within `timeout_s`.
            UsageError: A wrong call, or a version older than the last one.
        """
        run = Run(Deadline(timeout_s, f"update to version {version}"), version)
        with (
            self._drain(named_tensors) as given,
            self._exclusive("update", f"the update to weight version {version}", timeout_s),
            self._count(run),
        ):
            last = max(known or 0 for known in (self._engines.version, self.version))
            if version < last:
                raise errors.UsageError(f"version {version} after {last}; versions only grow")
            return self._bring(self._engines.all, run, lambda: self._describe_way(given, run))

    def republish(self, named_tensors: Tensors, *, engines: Sequence[str], timeout_s: float) -> UpdateReport:
        """Give the committed version again, to these engines alone.

        Use it for restarted, evicted or quarantined engines where no other engine holds the version for `update_one`. Every rank
        calls, as for `update`. No other engine gets a call or pauses. Staged bytes other than those of the commit are refused.

        Args:
            named_tensors: The weights that this rank gave in the committed update.
            engines: URLs of the engines.
            timeout_s: Seconds for the call, as in `update`.

        Raises:
            WeightUpdateFailed: The update failed; those engines are in quarantine.
            UsageError: No update was committed before, or `engines` is empty.
        """
        members = [self._engines.find(url) for url in engines]
        deadline = Deadline(timeout_s, f"republishing to {engines}")
        with self._drain(named_tensors) as given, self._exclusive("republish", "a weight update", timeout_s):
            if self.version is None or not members:
                raise errors.UsageError(f"republish() of version {self.version} to {engines}: nothing to do")
            run = Run(deadline, self.version, alone=True)
            return self._bring(members, run, lambda: self._describe_way(given, run))

    def update_one(self, engine: str, *, timeout_s: float) -> UpdateReport:
        """Update one engine to the committed version from another engine.

        The engine was restarted, evicted or quarantined. The weights come from another engine's memory (`staged`), which is read
        while that engine serves. No other engine gets a call or pauses.

        Args:
            engine: The URL of the engine.
            timeout_s: Seconds for the call.

        Raises:
            WeightUpdateFailed: The update failed; that engine is in quarantine.
            UsageError: No other engine holds the version.
        """
        deadline = Deadline(timeout_s, f"update of {engine}")
        with self._exclusive("update_one", f"the weight update of {engine}", timeout_s):
            return self._from_peer(self._engines.find(engine), deadline)

    def add_engine(self, engine: EngineHandle | str, *, timeout_s: float) -> UpdateReport | None:
        """Add one more engine to the session.

        The engine gets the committed version now, as by `update_one`. If no other engine holds that version for it, or it cannot
        stage (`staged="auto"`), it gets the next version together with the others.

        Args:
            engine: An address, or a handle.
            timeout_s: Seconds for the call.

        Returns:
            The report of the engine's update; None if the engine waits for the next version.

        Raises:
            ConfigError: The engine is in the session already.
            R3Error: The engine's own error; it is not added then.
        """
        member = handle_of(engine)
        deadline = Deadline(timeout_s, f"joining of {member.url}")
        with self._exclusive("add_engine", f"the joining of {member.url}", timeout_s):
            self._engines.add(member)
            try:
                try:
                    with contextlib.suppress(errors.UsageError):  # no other engine holds the version
                        return self._from_peer(member, deadline)
                except errors.WeightUpdateFailed as error:  # the next update may fall back for all
                    if self._must_stage or not isinstance(error.__cause__, errors.CannotStage):
                        raise
                self._ranks.begin()  # what failed there is over
                self._meet([member], deadline)
                # else ranks that meet no engine would take it in where rank 0 does not
                self._ranks.exchange("met", deadline)
                return None
            except BaseException:
                self._engines.drop(member)
                raise

    def remove_engine(self, engine: str) -> None:
        """Leave this engine and forget it, dead or alive.

        The engine goes on to serve, or stays paused, as it was.

        Args:
            engine: The URL of the engine.

        Raises:
            ConfigError: It is the last engine, or not one of the session.
        """
        with self._exclusive("remove_engine", f"the leaving of {engine}", REPAIR_S):
            self._engines.drop(self._engines.find(engine))

    def close(self) -> None:
        """Leave all engines.

        Engines that are not SERVING stay paused: they hold no weights worth serving.
        """
        if self._phase != "closed":
            self._phase = "closed"
            wait([background(member.leave) for member in self._engines.all], timeout=2 * REPAIR_S)
            self._planner.close()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        errors.close_after(error, self.close)

    @contextlib.contextmanager
    def _drain(self, named_tensors: Iterable[Any]) -> Iterator[Iterator[Any]]:
        checked = map(partial(_check, self._exact), named_tensors)
        try:
            yield checked
        except Exception:
            with contextlib.suppress(Exception):  # the first one is raised
                deque(checked, maxlen=0)  # other ranks may be in step with the iterator
            raise

    @contextlib.contextmanager
    def _exclusive(self, method: str, what: str, timeout_s: float) -> Iterator[None]:
        """Keep other threads, and a step's routing, out of the block."""
        if not self._busy.acquire(blocking=False):
            raise errors.UsageError(f"WeightSync.{method}() while another thread is inside this WeightSync")
        self._ranks.begin()
        try:
            with PROCESS_SLOT.use("weights", what, timeout_s=timeout_s):
                if self._phase != "ready":
                    raise errors.UsageError(f"WeightSync.{method}(): it is {self._phase}; connect() first")
                yield
        except BaseException as error:
            self._ranks.fail(error)
            self._planner.leave()
            raise
        finally:
            self._busy.release()

    @contextlib.contextmanager
    def _count(self, run: Run) -> Iterator[None]:
        result, before, report = "failed", self.evicted, run.report
        try:
            with self.metrics.clock.span("weights"):
                yield
            result = "committed"
        except (errors.EngineLeftBehind, errors.TrainerRankLost) as error:  # committed, but not by all
            behind = isinstance(error, errors.EngineLeftBehind)
            result = "committed" if behind or self._ranks.leads else "unknown"
            raise
        finally:
            self.metrics.inc("r3channel_weight_updates_total", result=result)
            moved, lost = report.sent_bytes or report.payload_bytes, report.evicted.keys() - before.keys()
            for name, value in zip(_COUNTED[1:], (report.paused_s, moved, len(lost)), strict=True):
                self.metrics.inc(name, value)
            for url in lost if self._ranks.leads else ():
                why = report.evicted[url]
                log.warning("weight version %s goes on without engine %s: %s", run.version, url, why)
            if result == "committed":
                self.metrics.set("r3channel_weight_version", run.version)

    # -- what is given -------------------------------------------------------------------------------------------------

    def _describe_way(self, what: Iterator[Any], run: Run) -> Given:
        """Return what an update gives, and how its values come."""
        if self._exact:
            shards = list[Shard](what)
            held = tuple((shard.meta, shard.box) for shard in shards)
            return UpdateSpec((held,), None), lambda push: push([shard.tensor for shard in shards])
        spec = self._spec
        if spec is None:
            with run.stage("plan"):
                manifest, copies = read_first(what, run, cap_bytes=self._config.bucket_bytes)
            if not copies and self._ranks.size == 1:
                raise errors.ManifestMismatch("the update gives no tensors at all")
            spec, what = UpdateSpec.whole(manifest), iter(copies)
        assert spec.manifest is not None  # tensors are whole here
        return spec, run.stage("plan")(partial(read_again, what, spec.manifest, run))

    # -- updates -------------------------------------------------------------------------------------------------------

    def _bring(self, members: list[EngineHandle], run: Run, give: Callable[[], Given | None]) -> UpdateReport:
        """Update engines to the run's version."""
        version, names = run.version, ", ".join(member.url for member in members)
        failed = f"weight version {version} was not committed, version {self.version} stays"
        try:
            if (giving := give()) is None:
                why = "no other engine took it staged; republish()"
                raise errors.UsageError(f"nothing holds version {self.version} for engine {names}: {why}")
            spec, feed = giving
            for member in members if run.alone else ():
                member.boot_id = ""  # what was known of it no longer counts
            work = self._deliver(members, run, spec, feed)
        except (errors.TrainerRankLost, errors.UsageError):  # after the commit, or before anything was done
            raise
        except Exception as error:
            self._ranks.fail(error)
            for url in error.engines if isinstance(error, errors.GiverChanged) else ():
                self._engines.find(url).forget()  # what it serves is not the version
            states = ", ".join(str(member.now) for member in members)
            if run.report.way != "staged" and not self._ranks.leads:
                states = "rank 0 knows"
            failed = f"engine {names} was not brought to version {version}" if run.alone else failed
            raise errors.WeightUpdateFailed(f"{failed}: {error} [engines now: {states}]") from error
        if not run.alone:
            self.version, self._spec = version, spec
            self.held = HeldWeights(version, run.checksums) if run.checksums else None
        buckets = spec.manifest.buckets if spec.manifest else (Bucket.of(self._planner.metas),)
        report = run.report
        report.tensors, report.buckets = sum(len(bucket.tensors) for bucket in buckets), len(buckets)
        report.payload_bytes = sum(bucket.payload_bytes for bucket in buckets)
        report.version, report.wall_s = version, run.deadline.elapsed_s
        work.check_all_follow()  # at last: what was sent is counted, also where an engine is left behind
        return report

    def _from_peer(self, member: EngineHandle, deadline: Deadline) -> UpdateReport:
        run = Run(deadline, -1 if self.version is None else self.version, alone=True)
        others = [other for other in self._engines.all if other is not member]
        return self._bring([member], run, partial(from_peer, others, self._planner, run))

    def _deliver(self, members: Sequence[EngineHandle], run: Run, spec: UpdateSpec, feed: Feed) -> Update:
        given = members, run, self._engines, self._planner
        run.report.way = self._way or "staged"
        if not self._way or spec.manifest is None:
            # One engine alone is brought over its links: the others need not pause.
            way = Grouped if self._config.wire in JOINT and not run.alone else Staged
            try:
                return way(*given).run(spec, feed)
            except errors.CannotStage as error:
                if spec.manifest is None or self._must_stage:
                    raise
                run.report.way = self._way = f"broadcast: {error}"
            self._ranks.begin()  # the broadcast is another update
        return Broadcast(*given).run(spec, feed)


def _check(exact: bool, one: Named | Shard) -> Named | Shard:
    if isinstance(one, Shard) and not exact:
        raise errors.UsageError("shards for a session of whole tensors; make it with WeightSync.sharded")
    if isinstance(one, Shard) or not exact:
        return one
    name, tensor = one  # whole: a shard, too
    return Shard(TensorMeta.of(name, tensor), Box.whole(tensor.shape), tensor)
