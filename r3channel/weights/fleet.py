"""The engines of one session: who belongs, in which versions of torch and NCCL, and who may serve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import wait
from functools import partial

from r3channel.errors import ConfigError, RegistryRefused
from r3channel.transport.process_group import nccl_version, torch_version
from r3channel.weights.member import EngineState, Member
from r3channel.weights.progress import GRACE_S, background
from r3channel.weights.sglang import EngineClient


class Fleet:
    """The engines of a session. One thread calls; `routable` may be called from any."""

    def __init__(self, clients: Sequence[EngineClient], backend: str) -> None:
        """Raises ConfigError for no engine, or for one given twice."""
        self.members = _distinct([Member(client) for client in clients])
        self.version: int | None = None
        """The newest version that any of them has committed."""
        self._ours = {"torch": torch_version(), "nccl": nccl_version() if backend == "nccl" else ""}

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
        self.members = rest

    def check_versions(self, members: Iterable[Member]) -> None:
        """RegistryRefused, with both values, for an engine of other versions: NCCL hangs or fails between them, and torch's wire
        formats follow its own. One that is not known is not compared."""
        for member in members:
            for name, ours in self._ours.items():
                theirs = getattr(member.client, name)
                if theirs and ours and theirs != ours:
                    raise RegistryRefused(
                        f"engine {member.url} runs {name} {theirs}, the trainer {ours}; expected equal versions"
                    )

    def routable(self, timeout_s: float) -> tuple[str, ...]:
        """Engines that serve the newest version, of those that answer within `timeout_s`; 0 asks none. One that was restarted
        has unknown weights, and is met anew by the next update. Any thread."""
        version = self.version
        able = [m for m in self.members if m.holds == version is not None and m.state is EngineState.SERVING]
        if timeout_s:
            calls = {m: background(partial(m.client.boot_id, timeout_s=timeout_s)) for m in able}
            wait(calls.values(), timeout=timeout_s + GRACE_S)
            lives = {m: c.result() for m, c in calls.items() if c.done() and c.exception() is None}
            for member in [m for m in lives if lives[m] != m.boot_id]:
                member.boot_id, member.holds = "", None
            able = [m for m in lives if m.holds == version and m in self.members]
        return tuple(sorted(member.url for member in able))


def _distinct(members: list[Member]) -> list[Member]:
    urls = [member.url for member in members]
    if not members or len(set(urls)) != len(urls):
        raise ConfigError(f"engines {urls}: expected at least one, each once")
    return members
