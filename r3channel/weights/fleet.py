"""The engines of one session: who belongs, and what the registry is told of them while updates begin, commit and fail."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import wait
from functools import partial

from r3channel.errors import ConfigError, RegistryRefused
from r3channel.weights.member import EngineState, Member, told
from r3channel.weights.progress import GRACE_S, background
from r3channel.weights.registry import EngineRecord, WeightRegistry
from r3channel.weights.sglang import EngineClient


class Fleet:
    """The engines of a session. One thread calls; `renew` may be called from any."""

    def __init__(self, clients: Sequence[EngineClient], registry: WeightRegistry) -> None:
        """Raises ConfigError for no engine, or for one given twice."""
        self.registry = registry
        self.members = _distinct([Member(client) for client in clients])
        self._held: dict[str, int] = {}
        self._leaving = threading.Lock()

    def member(self, url: str) -> Member:
        """The engine of this address. Raises ConfigError for one that is not in the session."""
        for member in self.members:
            if member.url == url.rstrip("/"):
                return member
        raise ConfigError(f"engine {url} is not one of {[member.url for member in self.members]}")

    @property
    def evicted(self) -> dict[str, str]:
        """Engines that updates go on without, and why."""
        return {member.url: member.evicted for member in self.members if member.evicted}

    def add(self, client: EngineClient) -> Member:
        member = Member(client)
        self.members = _distinct([*self.members, member])
        return member

    def drop(self, member: Member) -> None:
        """Leave this engine and forget it. ConfigError for the last one."""
        rest = _distinct([other for other in self.members if other is not member])
        member.leave()
        with self._leaving:
            self.registry.leave(member.url, member.boot_id)
            member.boot_id = ""
        self.members = rest

    def part_with_the_lost(self) -> tuple[str, ...]:
        """Forget engines whose lease ran out, and links of engines that joined again after a restart. Returns the former."""
        known = self._records()
        for member in self.members:
            if member.url in known and known[member.url].boot_id != member.boot_id:
                member.afresh()
        expired = [member for member in self.members if member.boot_id and member.url not in known]
        if len(expired) == len(self.members):
            raise RegistryRefused(f"no engine is left to update: leases ran out; {told(expired)}")
        for member in expired:
            self.drop(member)
        return tuple(member.url for member in expired)

    def admit(self, members: Iterable[Member]) -> None:
        """Admit engines that have told their boot id. Raises RegistryRefused, with both values where versions differ."""
        for member in members:
            self.registry.join(_record(member, member.boot_id), now_s=time.monotonic())

    def renew(self, timeout_s: float) -> None:
        """Ask each engine for its life: the same one renews its lease, another begins in quarantine. One that does not answer,
        has left meanwhile or has not joined yet stays as it is. Any thread."""
        for member, boot_id in self.boot_ids(timeout_s).items():
            with self._leaving:
                if member.boot_id:
                    self.registry.join(_record(member, boot_id), now_s=time.monotonic())

    def boot_ids(self, timeout_s: float) -> dict[Member, str]:
        """The life of each engine that answers within `timeout_s`. Any thread."""
        calls = {m: background(partial(m.client.boot_id, timeout_s=timeout_s)) for m in self.members}
        wait(calls.values(), timeout=timeout_s + GRACE_S)
        return {m: call.result() for m, call in calls.items() if call.done() and call.exception() is None}

    def cover(self, members: Sequence[Member], *, for_s: float) -> None:
        """Make the leases of these engines last as long as their update may."""
        now_s, known = time.monotonic(), self._records()
        for member in members:
            if member.boot_id and member.url in known:
                self.registry.renew(member.url, member.boot_id, now_s=now_s, for_s=for_s)
                self._held[member.url] = known[member.url].committed_version

    def open(self, members: Sequence[Member], *, for_s: float) -> None:
        """Note that these are paused: their leases cover it, and nothing is routed to them."""
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
        """Raises RegistryRefused when one of these has left or was restarted. Other engines may join or leave meanwhile."""
        for member in members:
            self.registry.renew(member.url, member.boot_id, now_s=time.monotonic())

    def ended(self, members: Iterable[Member], version: int | None = None) -> None:
        """Record for those that serve the version, or without one that which they had before `open`; the others stay in
        quarantine. Leases that covered the update end."""
        now_s = time.monotonic()
        for member in members:
            before = self._held.pop(member.url, None)
            held = before if version is None else version
            with contextlib.suppress(RegistryRefused):  # another life has joined meanwhile, in quarantine
                if member.state is EngineState.SERVING and held is not None and held >= 0:
                    self.registry.commit(member.url, member.boot_id, version=held, now_s=now_s)
                elif held is not None:
                    self.registry.quarantine(member.url, member.boot_id, now_s=now_s)

    def _records(self) -> dict[str, EngineRecord]:
        return {record.engine: record for record in self.registry.members(now_s=time.monotonic())}


def _record(member: Member, boot_id: str) -> EngineRecord:
    client = member.client
    return EngineRecord(
        engine=member.url, boot_id=boot_id, ranks=client.ranks, torch=client.torch, nccl=client.nccl
    )


def _distinct(members: list[Member]) -> list[Member]:
    urls = [member.url for member in members]
    if not members or len(set(urls)) != len(urls):
        raise ConfigError(f"engines {urls}: expected at least one, each once")
    return members
