"""Which engines exist, what they hold, and which of them may serve: a key-value store inside the controller.

A pure object: the time is a parameter, and every call is a plain call with plain values, so any control channel can carry
it (the relay's Ray actor, an HTTP route of the framework); no network of our own. Any thread calls.

    JOINED (lease renewed) -> LEFT (`leave`, or the lease expired); a restarted engine joins again under a new boot id

Each join, leave or expiry starts the next epoch. An update that was begun in an older epoch is refused, because it was
made for other members. An engine is routable only while its committed version is the current one.

The relay has a list of engines too (`relay/engines.py`): who has said hello there. It knows no weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from r3channel.errors import PlanInvalid, RegistryRefused, StaleEpoch, VersionsDiffer, WeightVersionRegressed
from r3channel.weights.shardmap import ShardMap

P = ParamSpec("P")
T = TypeVar("T")

CHECKED_VERSIONS = ("torch", "nccl")
"""Compared at the handshake: NCCL hangs or fails between versions, and torch's wire formats follow its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """What an engine says of itself when it joins. Plain values."""

    engine: str
    """Its address; the key."""
    boot_id: str
    """Of this life of the engine; a restart has another."""
    ranks: int
    layout: str = ""
    """Digest of its shard map; empty for an engine that gets whole tensors and cuts them itself."""
    manifest_id: str = ""
    """Of the last manifest that it was sent; empty for an engine that knows none."""
    committed_version: int = -1
    """-1: dummy or unknown weights."""
    torch: str = ""
    nccl: str = ""
    """Empty where there is none, as on CPU engines."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Membership:
    """One epoch: who belongs to it."""

    epoch: int
    engines: tuple[EngineRecord, ...]
    """By address."""


@dataclass(frozen=True, slots=True)
class _Lease:
    record: EngineRecord
    until_s: float


def _locked(
    method: Callable[Concatenate[WeightRegistry, P], T],
) -> Callable[Concatenate[WeightRegistry, P], T]:
    """One caller at a time inside the registry."""

    @wraps(method)
    def call(self: WeightRegistry, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            return method(self, *args, **kwargs)

    return call


class WeightRegistry:
    """Engines with leases and epochs, the shard maps of both sides, and the version that counts.

    >>> registry = WeightRegistry(torch="2.13.0", nccl="", lease_s=10.0)
    >>> record = EngineRecord(engine="http://a", boot_id="1", ranks=1, layout="x", torch="2.13.0")
    >>> epoch = registry.join(record, now_s=0.0)
    >>> registry.commit("http://a", "1", version=3, now_s=1.0)
    >>> registry.routable(now_s=2.0)
    ('http://a',)
    >>> registry.routable(now_s=11.0)
    ()
    """

    def __init__(self, *, torch: str, nccl: str, lease_s: float) -> None:
        """The trainer's versions, and how long an engine that stays silent belongs."""
        self._lock = threading.RLock()
        self._ours: Mapping[str, str] = {"torch": torch, "nccl": nccl}
        self._lease_s = lease_s
        self._leases: dict[str, _Lease] = {}
        self._maps: dict[str, ShardMap] = {}
        self._epoch = 0
        self._version = -1

    @property
    def current_version(self) -> int:
        """The newest version that was committed anywhere; -1 before the first."""
        return self._version

    @_locked
    def join(self, record: EngineRecord, *, now_s: float) -> int:
        """Add an engine, or its next life; returns the epoch that begins. The same record again only renews the lease.

        Raises VersionsDiffer, with both values, and RegistryRefused when another layout is known for the engines.
        """
        self._expire(now_s)
        self._check_versions(record)
        known = self._leases.get(record.engine)
        if known is not None and known.record.boot_id == record.boot_id:
            return self.renew(record.engine, record.boot_id, now_s=now_s)
        self._check_layout(record)
        self._leases[record.engine] = _Lease(record, now_s + self._lease_s)
        return self._next_epoch()

    @_locked
    def renew(self, engine: str, boot_id: str, *, now_s: float, for_s: float = 0.0) -> int:
        """The engine lives, and belongs for `for_s` more seconds at least; returns the epoch.

        Raises RegistryRefused after an expiry or for an older life: join again.
        """
        self._expire(now_s)
        lease = self._lease(engine, boot_id)
        until_s = max(lease.until_s, now_s + max(self._lease_s, for_s))
        self._leases[engine] = replace(lease, until_s=until_s)
        return self._epoch

    @_locked
    def leave(self, engine: str, boot_id: str, *, now_s: float) -> int:
        """Take an engine out; returns the epoch that begins. One that is not there, or another life, changes nothing."""
        self._expire(now_s)
        lease = self._leases.get(engine)
        if lease is None or lease.record.boot_id != boot_id:
            return self._epoch
        del self._leases[engine]
        return self._next_epoch()

    @_locked
    def members(self, *, now_s: float) -> Membership:
        """The epoch and its engines, with expired ones taken out."""
        self._expire(now_s)
        return Membership(self._epoch, tuple(self._leases[engine].record for engine in sorted(self._leases)))

    @_locked
    def check_epoch(self, epoch: int, *, now_s: float) -> None:
        """Raises StaleEpoch unless `epoch` is the current one."""
        self._expire(now_s)
        if epoch != self._epoch:
            raise StaleEpoch(
                f"epoch {epoch} was given, {self._epoch} is current: an engine joined, left or fell silent meanwhile; "
                "read the members and plan again"
            )

    @_locked
    def commit(
        self, engine: str, boot_id: str, *, version: int, now_s: float, manifest_id: str | None = None
    ) -> None:
        """This life of the engine holds `version` whole and verified; a lease of the usual length begins.

        Raises RegistryRefused for an engine that is no member or lives another life, and WeightVersionRegressed for a
        step back.
        """
        self._expire(now_s)
        lease = self._lease(engine, boot_id)
        if version < lease.record.committed_version:
            raise WeightVersionRegressed(
                f"engine {engine}: version {version} after {lease.record.committed_version}; versions only grow"
            )
        known = lease.record.manifest_id if manifest_id is None else manifest_id
        record = replace(lease.record, committed_version=version, manifest_id=known)
        self._leases[engine] = _Lease(record, now_s + self._lease_s)
        self._version = max(self._version, version)

    @_locked
    def quarantine(self, engine: str, boot_id: str, *, now_s: float) -> None:
        """The engine may hold no whole weights: not routable until it commits again. Raises RegistryRefused as `commit`.

        Its lease is not renewed; one that was held longer ends within the usual length.
        """
        self._expire(now_s)
        lease = self._lease(engine, boot_id)
        until_s = min(lease.until_s, now_s + self._lease_s)
        self._leases[engine] = _Lease(replace(lease.record, committed_version=-1), until_s)

    @_locked
    def routable(self, *, now_s: float) -> tuple[str, ...]:
        """Engines that may get requests: alive, with the current version."""
        if self._version < 0:
            return ()
        records = self.members(now_s=now_s).engines
        return tuple(record.engine for record in records if record.committed_version == self._version)

    @_locked
    def behind(self, *, now_s: float) -> tuple[str, ...]:
        """Engines that live and need a surgical update."""
        ready = set(self.routable(now_s=now_s))
        return tuple(r.engine for r in self.members(now_s=now_s).engines if r.engine not in ready)

    # -- shard maps ----------------------------------------------------------------------------------------------------

    @_locked
    def report_map(self, side: str, shards: ShardMap) -> None:
        """Keep the map of a side (`trainer` or `engine`); one instance reports for all. The same map again is fine.

        Raises RegistryRefused for another map than the one known (other instances would plan differently), and
        PlanInvalid when the engines' tensors are not among the trainer's, naming the first that differs.
        """
        known = self._maps.get(side)
        if known is not None and known.digest != shards.digest:
            raise RegistryRefused(
                f"{side} map {shards.digest} was reported, {known.digest} is known; do all instances run one layout?"
            )
        both = {**self._maps, side: shards}
        if len(both) == 2:
            check_maps(both["trainer"], both["engine"])
        self._maps[side] = shards

    @_locked
    def map_of(self, side: str) -> ShardMap:
        """The map of a side; RegistryRefused until it is reported."""
        if side not in self._maps:
            raise RegistryRefused(f"no shard map of the {side} side was reported yet")
        return self._maps[side]

    def _check_versions(self, record: EngineRecord) -> None:
        for name in CHECKED_VERSIONS:
            theirs, ours = getattr(record, name), self._ours[name]
            if theirs and ours and theirs != ours:
                raise VersionsDiffer(
                    f"engine {record.engine} runs {name} {theirs}, the trainer {ours}; expected equal versions"
                )

    def _check_layout(self, record: EngineRecord) -> None:
        known = self._maps.get("engine")
        if known is not None and record.layout and record.layout != known.digest:
            raise RegistryRefused(
                f"engine {record.engine} has layout {record.layout}, the engines' shard map is {known.digest}"
            )

    def _lease(self, engine: str, boot_id: str) -> _Lease:
        if engine not in self._leases:
            raise RegistryRefused(
                f"engine {engine} is not a member (epoch {self._epoch}); did its lease expire? It must join first"
            )
        lease = self._leases[engine]
        if lease.record.boot_id != boot_id:
            raise RegistryRefused(
                f"engine {engine}: boot id {boot_id} acts, {lease.record.boot_id} has joined; is an old process alive?"
            )
        return lease

    def _expire(self, now_s: float) -> None:
        late = [engine for engine, lease in self._leases.items() if lease.until_s <= now_s]
        for engine in late:
            del self._leases[engine]
        if late:
            self._next_epoch()

    def _next_epoch(self) -> int:
        self._epoch += 1
        return self._epoch


def check_maps(trainer: ShardMap, engine: ShardMap) -> None:
    """Every engine tensor is a trainer tensor of the same whole shape; PlanInvalid names the first that is not."""
    for meta in engine.metas:
        index = trainer.index_of.get(meta.name)
        if index is None:
            raise PlanInvalid(
                f"engine tensor {meta}: the trainer has none of this name; is a converter missing?"
            )
        if trainer.metas[index].shape != meta.shape:
            raise PlanInvalid(f"engine tensor {meta}: the trainer's is {trainer.metas[index]}")
