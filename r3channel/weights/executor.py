"""What an update asks of engines, by either way, and what a failure at any step of it leaves behind.

`Staged`: bytes go beside the parameters of serving engines; the commit is a change-over under a pause of milliseconds, so a
failure before it touches nothing and one in it is undone. The other way is `broadcast`. Knows members' states and the
registry; not where weights come from, or which version comes next.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from r3channel.errors import (
    DeadlineExceeded,
    EngineLeftBehind,
    EngineUnavailable,
    R3Error,
    TransportError,
    WeightsDiffer,
)
from r3channel.weights.fleet import Fleet
from r3channel.weights.member import EngineState, Member, told
from r3channel.weights.progress import CONTROL_S, GRACE_S, REPAIR_S, Run, background
from r3channel.weights.sglang import PauseMode
from r3channel.weights.stages import Stages, check_complete

T = TypeVar("T")
_Sums = list[tuple[dict[str, str], dict[str, str]]]
"""By rank: digests and checksums by parameter."""
OnEngineLoss = Literal["evict", "abort"]

_LOSSES = (EngineUnavailable, TransportError)  # which DeadlineExceeded is one of


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The same for all updates of a session; what they mean says `WeightSync`."""

    pause: PauseMode
    verify: bool
    on_engine_loss: OnEngineLoss
    engine_timeout_s: float
    name: str
    """Of the session; begins the names of its groups."""
    host: str
    backend: str
    numbers: itertools.count[int]
    """SGLang refuses a group name that it has seen."""
    check_names: bool
    """Whether what an engine has no place for, or is not given, fails an update."""


class Crew:
    """Some engines that are asked at the same time. One thread."""

    def __init__(
        self, members: Sequence[Member], fleet: Fleet, rules: Rules, run: Run, *, alone: bool = False
    ) -> None:
        """`alone`: of engines that are brought to a version which counts already, so that none of them is left out."""
        self.members = list(members)
        self._all, self._alone = list(members), alone
        self._fleet, self._rules, self._run = fleet, rules, run

    def each(
        self,
        call: Callable[[Member, float], T],
        *,
        within_s: float = math.inf,
        among: Sequence[Member] | None = None,
    ) -> dict[Member, T]:
        """Make a call to all engines, or to some, at once. One that is lost is left out; another failure is raised when all
        have answered, so that the states are exact."""
        left_s = min(self._run.deadline.left_s(), within_s)
        asked = self.members if among is None else among
        calls = {background(partial(call, member, left_s)): member for member in asked}
        wait(calls, timeout=left_s + GRACE_S)
        failed = {
            m: error for future, m in calls.items() if (error := _failure(future, m, left_s)) is not None
        }
        for member, error in failed.items():
            self.lose(member, error)
        return {member: future.result() for future, member in calls.items() if member not in failed}

    def lose(self, member: Member, error: BaseException) -> None:
        """Go on without it, or raise: where the rules say so, where it answered with a refusal, where it is the last."""
        last = len(self.members) == 1
        if self._alone or last or self._rules.on_engine_loss == "abort" or not isinstance(error, _LOSSES):
            raise error
        self.leave_out(member, f"{type(error).__name__}: {error}")

    def leave_out(self, member: Member, why: str) -> None:
        """Go on without it, until `update_one`."""
        self.members.remove(member)
        member.evicted = self._run.evicted[member.url] = why
        self._fleet.quarantine([member])
        background(member.unlink)

    def meet(self) -> None:
        """Let engines that have not joined in this life do so. Raises VersionsDiffer, RegistryRefused."""
        fresh = [member for member in self.members if not member.boot_id]
        met = self.each(Member.meet, within_s=CONTROL_S, among=fresh)
        self._fleet.admit(met)


class Work(Crew, ABC):
    """What both ways share. NEW -> open -> ... -> resumed or aborted. One thread."""

    def __init__(
        self,
        members: Sequence[Member],
        fleet: Fleet,
        rules: Rules,
        run: Run,
        *,
        stages: Stages,
        version: int,
        alone: bool = False,
    ) -> None:
        """`stages` say what goes over which link."""
        super().__init__(members, fleet, rules, run, alone=alone)
        self._stages, self._version = stages, version

    @abstractmethod
    def abort(self) -> None:
        """After a failure: every engine that holds whole weights serves again."""

    def pause(self) -> None:
        with self._run.stage("pause"):
            self._fleet.open(self.members, for_s=self._run.deadline.left_s())
            self.each(lambda member, left_s: member.pause(self._rules.pause, left_s), within_s=CONTROL_S)
        with self._run.stage("begin"):
            self.each(Member.begin, within_s=CONTROL_S)

    @property
    def flush(self) -> bool:
        """Whether the engines drop their KV cache with the new weights."""
        return self._rules.pause != "in_place"

    def resume(self, version: int) -> None:
        """Let those that have the version serve, and record them. Raises EngineLeftBehind naming the others.

        They get time for it also when an engine that did not answer has used up the update's.
        """
        took = [member for member in self.members if member.state is EngineState.COMMITTED]
        failure: R3Error | None = None
        with self._run.stage("resume"):
            calls = {background(partial(member.resume, CONTROL_S)): member for member in took}
            wait(calls, timeout=CONTROL_S + GRACE_S)
            for future, member in calls.items():
                error = _failure(future, member, CONTROL_S)
                failure = error if isinstance(error, R3Error) else failure
        self._fleet.committed(self._all, version)
        left = [member for member in self.members if member.state is not EngineState.SERVING]
        if left:
            raise EngineLeftBehind(
                f"weight version {version} is committed, but {len(left)} of {len(self.members)} engines are left behind, "
                f"paused: {told(left)}; {failure or 'they did not take the version'}. Repair them one by one, or update all"
            ) from failure

    def roll_back(self) -> None:
        """Let every engine that no byte reached, or that committed, serve again; DIRTY ones stay paused."""
        calls = [background(partial(member.undo, REPAIR_S)) for member in self._all if not member.foreign]
        wait(calls, timeout=2 * REPAIR_S)
        self._fleet.aborted(self._all)


class Staged(Work):
    """Through our half in the engine: what rank 0 of the trainers does there. What is sent is the matter of `joint`."""

    def ask(self, without: Collection[str]) -> list[Member]:
        """Have engines connect that have no links, or are named as such; those that did."""
        self.meet()
        fresh = [m for m in self.members if not m.staged(self._stages.metas) or m.url in without]
        orders = {member: self._stages.order(member.url) for member in fresh}
        # A dry run may take all the time there is: engine_timeout_s is meant for a bucket, and it grows with the tensors.
        return list(self.each(lambda m, left_s: m.open(orders[m], left_s), among=fresh))

    def take(self, fresh: Sequence[Member]) -> None:
        """Accept their links. ManifestMismatch where parameters are not given."""
        if fresh:
            links = self._stages.accept({m.url: m.client.ranks for m in fresh}, self._run.deadline)
            for member in fresh:
                member.ranks, member.metas = links[member.url], self._stages.metas
        ranks = [rank for member in self.members for rank in member.ranks]
        metas, names = self._stages.metas, self._rules.check_names
        self._run.rounded, self._run.skipped = check_complete(ranks, metas, names=names)
        self._run.loaded = next((rank.whole for rank in ranks if rank.whole), "")

    def verify(self) -> None:
        """Every trainer has sent everything, and every rank has placed it. Engines of equal ranks must agree."""
        with self._run.stage("verify"):
            found = self.each(self._verified)
        first: dict[int, tuple[Member, _Sums]] = {}
        for member, sums in found.items():
            other, wanted = first.setdefault(len(sums), (member, sums))
            if sums != wanted:
                raise WeightsDiffer(
                    f"engines {other.url} and {member.url} staged other bytes than each other: trainer ranks that hold the same "
                    "parameter hold other values. Their replicas drift apart where gradients are not reduced between them, as "
                    "those of experts under TP > 1 with expert parallel sizes of 1 (Megatron's `allreduce` mark)"
                )
        self._run.verified = sum(len(digests) for digests, _ in next(iter(found.values())))
        if self._rules.verify and not self._run.loaded:
            self._run.checksums = {str(n): [own for _, own in sums] for n, (_, sums) in first.items()}

    def _verified(self, member: Member, left_s: float) -> _Sums:
        wanted = self._rules.verify
        return [rank.verify(self._version, checksums=wanted, timeout_s=left_s) for rank in member.ranks]

    def commit(self, version: int) -> None:
        """Pause, and change over everywhere, or undo everywhere."""
        self.pause()
        with self._run.stage("commit"):
            self._fleet.check_lives(self.members)
            order = {"op": "commit", "session": self._rules.name, "version": version}
            self.each(lambda m, left_s: m.change_over(order, version, self.flush, left_s), within_s=CONTROL_S)
        with self._run.stage("end"):
            self.each(Member.end, within_s=CONTROL_S)
        for member in self.members:
            member.take(version)

    def abort(self) -> None:
        """The old weights, bit for bit: they lie beside the new ones."""
        undo = {"op": "undo", "session": self._rules.name, "version": self._version}
        states = (EngineState.CHANGED, EngineState.DIRTY)
        changed = [m for m in self._all if m.state in states and m.staged(self._stages.metas)]
        calls = [background(partial(member.change_back, undo, self.flush, REPAIR_S)) for member in changed]
        wait(calls, timeout=2 * REPAIR_S)
        self.roll_back()


def _failure(future: Future[Any], member: Member, left_s: float) -> BaseException | None:
    if not future.done():
        return DeadlineExceeded(f"engine {member.url}: no answer within {left_s:.1f} s")
    return future.exception()
