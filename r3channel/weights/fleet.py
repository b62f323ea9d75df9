"""Several engines at once: each call goes to them in parallel, and groups are formed and left one by one.

By default each engine has a group of its own with the trainer (a *link*), so that one that joins, leaves, restarts or
dies touches no other: SGLang builds a group in its scheduler, which serves nothing meanwhile. With `links="shared"`
engines that have no link form one together: a bucket then leaves the trainer once instead of once per engine.

Knows states and deadlines, not buckets' contents, versions' order or routes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import torch

from r3channel.errors import ConfigError, DeadlineExceeded
from r3channel.weights.buckets import Bucket
from r3channel.weights.deadline import GRACE_S, Deadline, wait_all
from r3channel.weights.group import WeightGroup, in_background
from r3channel.weights.member import EngineState, Link, Member, background
from r3channel.weights.sglang import PauseMode

T = TypeVar("T")
Links = Literal["each", "shared"]

REPAIR_S = 5.0  # for each clean-up call after a failure, beyond the update's own deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """How groups are made."""

    name: str
    host: str
    backend: str
    links: Links = "each"


class Fleet:
    """Some engines, in order. `only` gives another fleet over some of the same members.

    Every method but `roll_back`, `drop_broken` and `leave` raises the first failing engine's error after all engines have
    answered, so that the states are exact. Called by one thread at a time.
    """

    def __init__(
        self, members: Sequence[Member], options: GroupOptions, epochs: itertools.count[int] | None = None
    ):
        urls = [member.url for member in members]
        if not members or len(set(urls)) != len(urls):
            raise ConfigError(f"engines {urls}: expected at least one, each once")
        self.members = list(members)
        self._options = options
        self._epochs = epochs or itertools.count(1)  # SGLang refuses a group name that it has seen

    def only(self, members: Sequence[Member]) -> Fleet:
        return Fleet(members, self._options, self._epochs)

    def member(self, url: str) -> Member:
        """ConfigError for an address that is none of ours."""
        for member in self.members:
            if member.url == url.rstrip("/"):
                return member
        raise ConfigError(f"engine {url} is not one of {[member.url for member in self.members]}")

    @property
    def states(self) -> dict[str, EngineState]:
        return {member.url: member.state for member in self.members}

    @property
    def links(self) -> list[Link]:
        """Every group that reaches one of these engines, once."""
        return list(dict.fromkeys(member.link for member in self.members if member.link is not None))

    def boot_ids(self, timeout_s: float) -> dict[Member, str]:
        """The life of each engine that answers within `timeout_s`. Any thread."""
        calls = {
            member: background(partial(member.client.boot_id, timeout_s=timeout_s)) for member in self.members
        }
        wait(calls.values(), timeout=timeout_s + GRACE_S)
        return {m: call.result() for m, call in calls.items() if call.done() and call.exception() is None}

    # -- groups ------------------------------------------------------------------------------------------------------

    def ensure_links(self, deadline: Deadline, admit: Callable[[Sequence[Member]], None]) -> None:
        """Form groups with the engines that have none, once `admit` has let them in.

        Those that are not there are found before, by a cheap question: one missing member would hold the others of a
        shared group until the deadline.
        """
        without = [member for member in self.members if member.link is None]
        if not without:
            return
        self.only(without)._on_all(Member.meet, deadline)
        admit(without)
        crews = [[member] for member in without] if self._options.links == "each" else [without]
        joining = {
            in_background(partial(self._link, crew, deadline), name="weights-link"): "a join"
            for crew in crews
        }
        left_s = deadline.left_s()
        wait(joining, timeout=left_s + 2 * GRACE_S)
        wait_all(joining, "joining the weight groups", GRACE_S)

    def _link(self, crew: Sequence[Member], deadline: Deadline) -> None:
        left_s = deadline.left_s()
        group = WeightGroup(
            f"{self._options.name}-{next(self._epochs)}",
            world_size=1 + sum(member.client.ranks for member in crew),
            timeout_s=left_s,
            host=self._options.host,
            backend=self._options.backend,
        )
        try:
            _join(group, crew, left_s)
        except BaseException:
            group.close()  # its store goes with it, so engines that still wait there fail at once
            raise
        link = Link(group, tuple(crew))
        for member in crew:
            member.link = link

    def drop_broken(self) -> None:
        """Leave the groups in which the last bucket failed or is stuck; the others stay as they are."""
        checks = {background(partial(link.usable, timeout_s=REPAIR_S)): link for link in self.links}
        wait(checks)
        broken = [link for check, link in checks.items() if not check.result()]
        wait([background(partial(_dissolve, link)) for link in broken])

    def leave(self) -> None:
        """Leave all groups of these engines. Ends within about REPAIR_S, twice that with an engine that is hung."""
        wait([background(partial(_dissolve, link)) for link in self.links])

    def unlink(self) -> None:
        """Leave the groups of these engines without a call to any other engine.

        A group that others share ends for them too, on our side alone: they form one again at the next update.
        """
        for link in self.links:
            if set(link.members) <= set(self.members):
                _dissolve(link)
            else:
                _forget(link)

    # -- the steps of an update ----------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        self._on_all(lambda member, left_s: member.pause(mode, left_s), deadline)

    def begin(self, deadline: Deadline) -> None:
        """Open the bracket; one that an earlier failure left open is closed first."""
        self._on_all(Member.begin, deadline)

    def send(
        self, bucket: Bucket, payload: torch.Tensor, *, flush_cache: bool, timeout_s: float
    ) -> list[Future[float]]:
        """Tell every engine to receive and load the bucket and broadcast it beside, group by group at the same time.

        Marks all DIRTY. Each link's `calls` end when the bucket is loaded; the futures returned hold each wire's seconds.
        """
        wires = []
        for link in self.links:
            loads = [
                background(partial(member.load, bucket, flush_cache, timeout_s)) for member in link.members
            ]
            wire = in_background(
                partial(link.group.broadcast, payload, timeout_s=timeout_s), name="weights-send"
            )
            link.calls = [*loads, wire]
            wires.append(wire)
        return wires

    def wait_loaded(self, what: str, timeout_s: float) -> None:
        """Until every engine has loaded the bucket under way. The first failure is raised at once, named `what`."""
        calls: dict[Future[object], str] = {}
        for link in self.links:
            for member, call in zip(link.members, link.calls, strict=False):
                calls[call] = member.url
        for link in self.links:
            calls[link.calls[-1]] = f"the broadcast to {', '.join(member.url for member in link.members)}"
        wait_all(calls, what, timeout_s)

    def end(self, deadline: Deadline) -> None:
        self._on_all(Member.end, deadline)

    def verify(self, checksums: Mapping[str, str], deadline: Deadline) -> int:
        """Compare `checksums` with each engine's own; return how many tensors that is. WeightsDiffer names the tensors."""
        return min(self._on_all(lambda member, left_s: member.verify(checksums, left_s), deadline))

    def commit(self, version: int, deadline: Deadline) -> None:
        """The first engine that takes the version decides for all: a failure is raised only if none has taken it."""
        try:
            self._on_all(lambda member, left_s: member.commit(version, left_s), deadline)
        except Exception:
            if not any(member.state is EngineState.COMMITTED for member in self.members):
                raise

    def resume(self, deadline: Deadline) -> None:
        self._on_all(Member.resume, deadline)

    def roll_back(self) -> None:
        """Let every engine that no byte reached, or that committed, serve again; DIRTY ones stay paused."""
        wait([background(partial(member.undo, REPAIR_S)) for member in self.members], timeout=2 * REPAIR_S)

    def _on_all(self, call: Callable[[Member, float], T], deadline: Deadline) -> list[T]:
        left_s = deadline.left_s()
        calls = {background(partial(call, member, left_s)): member for member in self.members}
        wait(calls, timeout=left_s + GRACE_S)
        for future, member in calls.items():
            if not future.done():
                raise DeadlineExceeded(f"engine {member.url}: a call did not end within {left_s:.1f} s")
        return [future.result() for future in calls]


def _join(group: WeightGroup, crew: Sequence[Member], left_s: float) -> None:
    """Rank 0 and the crew at the same time."""
    ranks = itertools.accumulate((member.client.ranks for member in crew), initial=1)
    calls = {
        background(partial(member.join, group, rank, left_s)): member.url
        for member, rank in zip(crew, ranks, strict=False)
    }
    calls[in_background(partial(group.join, timeout_s=left_s), name="weights-join")] = "rank 0"
    wait_all(
        calls, f"join of weight group {group.name} with {', '.join(member.url for member in crew)}", left_s
    )


def _forget(link: Link) -> None:
    for member in link.members:
        member.link = None
    link.group.close()


def _dissolve(link: Link) -> None:
    """On all sides, also when some are stuck in a broadcast.

    An engine that leaves closes its sockets, which ends our broadcast; dropping our end then frees engines that wait in
    theirs.
    """
    calls = [background(partial(member.leave, link.group.name, REPAIR_S)) for member in link.members]
    link.group.wait_quiet(REPAIR_S)
    _forget(link)
    wait(calls, timeout=REPAIR_S)
