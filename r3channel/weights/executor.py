"""The calls that an update makes to engines, staged (`joint`) or by `broadcast`, and what a failure at each call leaves.

Knows members' states; not where weights come from, or which version comes next.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
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
)
from r3channel.weights.fleet import Fleet
from r3channel.weights.member import EngineState, Member, told
from r3channel.weights.progress import CONTROL_S, GRACE_S, REPAIR_S, Run, background
from r3channel.weights.sglang import PauseMode
from r3channel.weights.stages import Push, Stages

T = TypeVar("T")
Feed = Callable[[Push], None]
"""Gives an update's values, bucket by bucket."""
OnEngineLoss = Literal["evict", "abort"]

_LOSSES = (EngineUnavailable, TransportError)  # which DeadlineExceeded is one of


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What holds for all updates of a session; `WeightSync` explains each."""

    pause: PauseMode
    verify: bool
    look: bool
    """Whether NaN and Inf are refused."""
    on_engine_loss: OnEngineLoss
    engine_timeout_s: float
    host: str
    backend: str
    check_names: bool
    """Whether an update fails when an engine has no place for a tensor, or gets none for a parameter."""


class Crew:
    """Engines that are asked at the same time. One thread."""

    def __init__(
        self, members: Sequence[Member], fleet: Fleet, rules: Rules, run: Run, *, alone: bool = False
    ) -> None:
        """`alone`: the version counts already, and no engine may be left out of it."""
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
        """Go on without this engine. Raise instead if the rules say so, if it refused, or if it is the last."""
        last = len(self.members) == 1
        if self._alone or last or self._rules.on_engine_loss == "abort" or not isinstance(error, _LOSSES):
            raise error
        self.leave_out(member, f"{type(error).__name__}: {error}")

    def leave_out(self, member: Member, why: str) -> None:
        """Go on without this engine, until `update_one`."""
        self.members.remove(member)
        member.evicted = self._run.report.evicted[member.url] = why
        member.holds = None
        background(member.unlink)

    def meet(self) -> None:
        """Let engines that have not joined in this life do so. Raises RegistryRefused."""
        fresh = [member for member in self.members if not member.boot_id]
        met = self.each(Member.meet, within_s=CONTROL_S, among=fresh)
        self._fleet.check_versions(met)


class Work(Crew):
    """One update of some engines. NEW -> `open` -> `deliver` (committed), or `abort` at any time. One thread."""

    def __init__(self, *crew: Any, stages: Stages, version: int, alone: bool = False) -> None:
        """`stages` says what goes over which link; for the rest see `Crew`."""
        super().__init__(*crew, alone=alone)
        self._stages, self._version = stages, version
        self.outcome: R3Error | None = None
        """The error to raise although the update counts: EngineLeftBehind or TrainerRankLost."""

    def pause(self) -> None:
        self._paused_s = time.monotonic()
        with self._run.stage("pause"):
            self.each(lambda member, left_s: member.pause(self._rules.pause, left_s), within_s=CONTROL_S)

    @property
    def flush(self) -> bool:
        """Whether the engines drop their KV cache with the new weights."""
        return self._rules.pause != "in_place"

    def resume(self) -> EngineLeftBehind | None:
        """Let those that have the version serve. Returns what names the others.

        They get time for it even if an engine that did not answer has used up the update's time.
        """
        took = [member for member in self.members if member.state is EngineState.COMMITTED]
        failure: BaseException | None = None
        with self._run.stage("resume"):
            calls = {background(partial(member.resume, CONTROL_S)): member for member in took}
            wait(calls, timeout=CONTROL_S + GRACE_S)
            for future, member in calls.items():
                failure = _failure(future, member, CONTROL_S) or failure
        self._run.report.paused_s = time.monotonic() - self._paused_s
        self._fleet.version = self._version
        left = [member for member in self.members if member.state is not EngineState.SERVING]
        if not left:
            return None
        return EngineLeftBehind(
            f"weight version {self._version} is committed, but {len(left)} of {len(self.members)} engines are left behind, "
            f"paused: {told(left)}; {failure or 'they did not take the version'}. Repair them one by one, or update all"
        )

    def roll_back(self) -> None:
        """Let every engine that no byte reached, or that committed, serve again; DIRTY ones stay paused."""
        calls = [background(partial(member.undo, REPAIR_S)) for member in self._all if not member.foreign]
        wait(calls, timeout=2 * REPAIR_S)


def _failure(future: Future[Any], member: Member, left_s: float) -> BaseException | None:
    if not future.done():
        return DeadlineExceeded(f"engine {member.url}: no answer within {left_s:.1f} s")
    return future.exception()
