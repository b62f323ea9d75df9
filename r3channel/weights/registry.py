"""A key-value store inside the controller: which engines exist, what they hold, and which may serve.

A pure object: the time is a parameter, and every call is a plain call with plain values, so any control channel can carry
it (the relay's Ray actor, an HTTP route of the framework); no network of our own. Any thread calls.

    JOINED (lease renewed) -> LEFT (`leave`, or the lease expired); a restarted engine joins again under a new boot id

An engine is routable only while its committed version is the current one.

The relay has a list of engines too (`relay/engines.py`): who has said hello there. It knows no weights.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

from r3channel.errors import RegistryRefused, UsageError
from r3channel.transport.process_group import nccl_version, torch_version


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """What an engine says of itself when it joins. Plain values."""

    engine: str
    """Its address; the key."""
    boot_id: str
    """Names this life of the engine; a restart has another."""
    ranks: int
    committed_version: int = -1
    """-1: dummy or unknown weights."""
    torch: str = ""
    nccl: str = ""
    """Empty where there is none, as on CPU engines."""


class WeightRegistry:
    """Engines with leases, and the current version.

    >>> registry = WeightRegistry(torch="2.13.0", nccl="", lease_s=10.0)
    >>> record = EngineRecord(engine="http://a", boot_id="1", ranks=1, torch="2.13.0")
    >>> registry.join(record, now_s=0.0)
    >>> registry.commit("http://a", "1", version=3, now_s=1.0)
    >>> registry.routable(now_s=2.0)
    ('http://a',)
    >>> registry.routable(now_s=11.0)
    ()
    """

    def __init__(self, *, torch: str, nccl: str, lease_s: float) -> None:
        """Takes the trainer's versions of torch and NCCL, and how long a silent engine stays a member."""
        self._lock = threading.RLock()
        self._ours: Mapping[str, str] = {"torch": torch, "nccl": nccl}
        self._lease_s = lease_s
        self._leases: dict[str, tuple[EngineRecord, float]] = {}
        """Each engine's record, and the time at which its lease runs out."""
        self._version = -1

    @property
    def current_version(self) -> int:
        """The newest version that was committed anywhere; -1 before the first."""
        return self._version

    def join(self, record: EngineRecord, *, now_s: float) -> None:
        """Add an engine, or its next life; the same life again renews its lease. Raises RegistryRefused, with both values."""
        with self._lock:
            self._expire(now_s)
            self._check_versions(record)
            known = self._leases.get(record.engine)
            if known is not None and known[0].boot_id == record.boot_id:
                self.renew(record.engine, record.boot_id, now_s=now_s)
            else:
                self._leases[record.engine] = record, now_s + self._lease_s

    def renew(self, engine: str, boot_id: str, *, now_s: float, for_s: float = 0.0) -> None:
        """Renew the engine's lease for at least `for_s` more seconds.

        Raises RegistryRefused after an expiry or for an older life: join again.
        """
        with self._lock:
            record, until_s = self._lease(engine, boot_id, now_s)
            self._leases[engine] = record, max(until_s, now_s + max(self._lease_s, for_s))

    def leave(self, engine: str, boot_id: str) -> None:
        """Take an engine out. One that is not there, or another life, changes nothing."""
        with self._lock:
            lease = self._leases.get(engine)
            if lease is not None and lease[0].boot_id == boot_id:
                del self._leases[engine]

    def members(self, *, now_s: float) -> tuple[EngineRecord, ...]:
        """Engines that belong, by address."""
        with self._lock:
            self._expire(now_s)
            return tuple(self._leases[engine][0] for engine in sorted(self._leases))

    def commit(self, engine: str, boot_id: str, *, version: int, now_s: float) -> None:
        """This life of the engine holds `version` whole and verified; a lease of the usual length begins.

        Raises RegistryRefused for an engine that is no member or lives another life, and UsageError for a step back.
        """
        with self._lock:
            record, _ = self._lease(engine, boot_id, now_s)
            if version < record.committed_version:
                raise UsageError(
                    f"engine {engine}: version {version} after {record.committed_version}; versions only grow"
                )
            record = replace(record, committed_version=version)
            self._leases[engine] = record, now_s + self._lease_s
            self._version = max(self._version, version)

    def quarantine(self, engine: str, boot_id: str, *, now_s: float) -> None:
        """The engine may hold no whole weights: not routable until it commits again. Raises RegistryRefused as `commit`.

        Its lease is not renewed; one that was held longer ends within the usual length.
        """
        with self._lock:
            record, until_s = self._lease(engine, boot_id, now_s)
            record = replace(record, committed_version=-1)
            self._leases[engine] = record, min(until_s, now_s + self._lease_s)

    def routable(self, *, now_s: float) -> tuple[str, ...]:
        """Engines that may get requests: alive, with the current version."""
        with self._lock:
            if self._version < 0:
                return ()
            return tuple(r.engine for r in self.members(now_s=now_s) if r.committed_version == self._version)

    def _check_versions(self, record: EngineRecord) -> None:
        """NCCL hangs or fails between versions, and torch's wire formats follow its own."""
        for name, ours in self._ours.items():
            theirs = getattr(record, name)
            if theirs and ours and theirs != ours:
                raise RegistryRefused(
                    f"engine {record.engine} runs {name} {theirs}, the trainer {ours}; expected equal versions"
                )

    def _lease(self, engine: str, boot_id: str, now_s: float) -> tuple[EngineRecord, float]:
        self._expire(now_s)
        if engine not in self._leases:
            raise RegistryRefused(
                f"engine {engine} is not a member; did its lease expire? It must join first"
            )
        lease = self._leases[engine]
        if lease[0].boot_id != boot_id:
            raise RegistryRefused(
                f"engine {engine}: boot id {boot_id} acts, {lease[0].boot_id} has joined; is an old process alive?"
            )
        return lease

    def _expire(self, now_s: float) -> None:
        self._leases = {engine: lease for engine, lease in self._leases.items() if lease[1] > now_s}


def own_registry(backend: str) -> WeightRegistry:
    """A registry that a session makes for itself: this process's versions, and leases that never run out."""
    nccl = nccl_version() if backend == "nccl" else ""
    return WeightRegistry(torch=torch_version(), nccl=nccl, lease_s=float("inf"))
