"""A session's side of the registry: its engines join, their leases cover its updates, what they hold is recorded.

While an update is under way its engines are in quarantine there: a trainer that dies in the middle leaves a registry
that routes nothing to them. Knows members and the registry; no buckets, no groups, no HTTP.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from r3channel.errors import RegistryRefused
from r3channel.versions import nccl_version, torch_version
from r3channel.weights.manifest import Manifest
from r3channel.weights.member import EngineState, Member
from r3channel.weights.registry import EngineRecord, WeightRegistry


def own_registry(backend: str) -> WeightRegistry:
    """One that a session makes for itself: this process's versions, leases that never run out."""
    nccl = nccl_version() if backend == "nccl" else ""
    return WeightRegistry(torch=torch_version(), nccl=nccl, lease_s=float("inf"))


class Enrolment:
    """Some members in one registry. One thread, but for `renew`."""

    def __init__(self, registry: WeightRegistry) -> None:
        self.registry = registry
        self._held: dict[str, int] = {}
        self._leaving = threading.Lock()

    def admit(self, members: Iterable[Member]) -> None:
        """The handshake, once each has told its life. Raises VersionsDiffer with both values, RegistryRefused."""
        for member in members:
            self.registry.join(_record(member, member.boot_id), now_s=time.monotonic())

    def leave(self, member: Member) -> None:
        with self._leaving:
            self.registry.leave(member.url, member.boot_id, now_s=time.monotonic())
            member.boot_id = ""

    def renew(self, boot_ids: Mapping[Member, str]) -> None:
        """These engines have answered, with these lives: the same one renews its lease, another begins in quarantine. One
        that has left meanwhile, or has not joined yet, stays out."""
        for member, boot_id in boot_ids.items():
            with self._leaving:
                if member.boot_id:
                    self.registry.join(_record(member, boot_id), now_s=time.monotonic())

    def expired(self, members: Iterable[Member]) -> list[Member]:
        """Those that had joined and that the registry does not know any more."""
        known = self._records()
        return [member for member in members if member.boot_id and member.url not in known]

    def reborn(self, members: Iterable[Member]) -> list[Member]:
        """Those that have joined again in another life, whoever told: their old groups are gone."""
        known = self._records()
        return [m for m in members if m.url in known and known[m.url].boot_id != m.boot_id]

    def cover(self, members: Sequence[Member], *, for_s: float) -> None:
        """An update of these begins: leases last as long as it may."""
        now_s, known = time.monotonic(), self._records()
        for member in members:
            if member.boot_id and member.url in known:
                self.registry.renew(member.url, member.boot_id, now_s=now_s, for_s=for_s)
                self._held[member.url] = known[member.url].committed_version

    def open(self, members: Sequence[Member], *, for_s: float) -> None:
        """These are paused from now on: leases cover it, and nothing is routed to them."""
        now_s, known = time.monotonic(), self._records()
        for member in members:
            self.registry.quarantine(member.url, member.boot_id, now_s=now_s)
            self.registry.renew(member.url, member.boot_id, now_s=now_s, for_s=for_s)
            self._held.setdefault(member.url, known[member.url].committed_version)

    def quarantine(self, members: Iterable[Member]) -> None:
        """Nothing is routed to these until they hold the version again."""
        for member in members:
            self._held.pop(member.url, None)
            with contextlib.suppress(RegistryRefused):
                self.registry.quarantine(member.url, member.boot_id, now_s=time.monotonic())

    def check_lives(self, members: Iterable[Member]) -> None:
        """Raises RegistryRefused when one of these has left or lives another life; who else comes and goes is the same to it."""
        for member in members:
            self.registry.renew(member.url, member.boot_id, now_s=time.monotonic())

    def committed(self, members: Iterable[Member], version: int, manifest: Manifest) -> None:
        """Record the version for those that serve; the others stay in quarantine."""
        for member in members:
            self._held.pop(member.url, None)
            self._settle(member, version, manifest.id)

    def aborted(self, members: Iterable[Member]) -> None:
        """Record for those that serve the version that they had before `open`; the others stay in quarantine."""
        for member in members:
            if member.url in self._held:
                self._settle(member, self._held.pop(member.url), None)

    def _settle(self, member: Member, version: int, manifest_id: str | None) -> None:
        """The lease that covered the update ends either way."""
        registry, now_s = self.registry, time.monotonic()
        url, life = member.url, member.boot_id
        with contextlib.suppress(
            RegistryRefused
        ):  # another life has joined meanwhile: it begins in quarantine
            if member.state is EngineState.SERVING and version >= 0:
                registry.commit(url, life, version=version, now_s=now_s, manifest_id=manifest_id)
            else:
                registry.quarantine(url, life, now_s=now_s)

    def _records(self) -> dict[str, EngineRecord]:
        members = self.registry.members(now_s=time.monotonic())
        return {record.engine: record for record in members.engines}


def _record(member: Member, boot_id: str) -> EngineRecord:
    client = member.client
    return EngineRecord(
        engine=member.url,
        boot_id=boot_id,
        ranks=client.ranks,
        torch=client.torch,
        nccl=client.nccl,
    )
