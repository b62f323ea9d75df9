"""The calls that an update makes to engines, staged (`joint`) or by `broadcast`, and what a failure at each call leaves.

Knows engines' states; not where weights come from, or which version comes next.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from r3channel.errors import DeadlineExceeded, EngineLeftBehind, EngineUnavailable, R3Error, TransportError
from r3channel.weights.config import SyncConfig
from r3channel.weights.engine import EngineHandle, Engines, EngineState, describe_states
from r3channel.weights.progress import AGAIN_S, CONTROL_S, GRACE_S, REPAIR_S, Run, background
from r3channel.weights.stages import Push, Stages

T = TypeVar("T")
Feed = Callable[[Push], None]
"""Gives an update's values, bucket by bucket."""

_LOSSES = (EngineUnavailable, TransportError)  # which DeadlineExceeded is one of


class Crew:
    """Engines that are asked at the same time. One thread."""

    def __init__(
        self,
        members: Sequence[EngineHandle],
        engines: Engines,
        config: SyncConfig,
        run: Run,
        *,
        alone: bool = False,
    ) -> None:
        """`alone`: the version counts already, and no engine may be left out of it."""
        self.members = list(members)
        self._all, self._alone = list(members), alone
        self._engines, self._config, self._run = engines, config, run

    def each(
        self,
        call: Callable[[EngineHandle, float], T],
        *,
        within_s: float = math.inf,
        among: Sequence[EngineHandle] | None = None,
    ) -> dict[EngineHandle, T]:
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

    def lose(self, member: EngineHandle, error: BaseException) -> None:
        """Go on without this engine. Raise instead if it refused, or if it is the last."""
        if self._alone or len(self.members) == 1 or not isinstance(error, _LOSSES):
            raise error
        self.leave_out(member, f"{type(error).__name__}: {error}")

    def leave_out(self, member: EngineHandle, why: str) -> None:
        """Go on without this engine until it is met again: by `update_one`, or by the next update."""
        self.members.remove(member)
        member.evicted = self._run.report.evicted[member.url] = why
        member.boot_id, member.holds = "", None
        background(member.unlink)

    def meet(self) -> None:
        """Let engines that have not joined in this life do so, also those that were left out. Raises RegistryRefused."""
        for lost, within_s in ((True, AGAIN_S), (False, CONTROL_S)):
            fresh = [m for m in self.members if not m.boot_id and bool(m.evicted) is lost]
            self._engines.check_versions(self.each(EngineHandle.meet, within_s=within_s, among=fresh))


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
            within_s = self._config.engine_timeout_s
            self.each(lambda member, left_s: member.pause(self._config.pause, left_s), within_s=within_s)

    def commit(self, call: Callable[[EngineHandle, float], None]) -> EngineLeftBehind | None:
        """Let all engines take the version, and serve. The first that takes it decides for all: a failure is raised only if none
        has. Returns what names those that did not take it, or do not serve.

        They get time to resume even if an engine that did not answer has used up the update's time.
        """
        failure: BaseException | None = None
        limit_s = self._config.engine_timeout_s
        with self._run.stage("commit"):
            try:
                self.each(call, within_s=limit_s)
            except Exception as error:
                failure = error
                if not any(member.state is EngineState.NEW for member in self.members):
                    raise
        with self._run.stage("resume"):
            took = [member for member in self.members if member.state is EngineState.NEW]
            calls = {background(partial(member.resume, limit_s)): member for member in took}
            wait(calls, timeout=limit_s + GRACE_S)
            failure = next((f for c, m in calls.items() if (f := _failure(c, m, limit_s))), failure)
        self._run.report.paused_s = time.monotonic() - self._paused_s
        self._engines.version = self._version
        left = [member for member in self.members if member.state is not EngineState.SERVING]
        if not left:
            return None
        return EngineLeftBehind(
            f"weight version {self._version} is committed, but {len(left)} of {len(self.members)} engines are left behind, "
            f"paused: {describe_states(left)}; {failure}. Repair them one by one, or update all"
        )

    def roll_back(self) -> None:
        """Let every engine that no byte reached, or that committed, serve again; FENCED ones stay paused."""
        calls = [background(partial(member.undo, REPAIR_S)) for member in self._all if not member.foreign]
        wait(calls, timeout=2 * REPAIR_S)


def _failure(future: Future[Any], member: EngineHandle, left_s: float) -> BaseException | None:
    if not future.done():
        return DeadlineExceeded(f"engine {member.url}: no answer within {left_s:.1f} s")
    return future.exception()
