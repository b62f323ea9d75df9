"""All engines of a session: each call goes to them in parallel, and what each one holds is known at any time.

Knows states and deadlines, not buckets' contents, versions' order or routes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from r3channel.errors import ConfigError, DeadlineExceeded, EngineRefused, R3Error, WeightsDiffer
from r3channel.weights.buckets import Bucket
from r3channel.weights.group import WeightGroup, in_background
from r3channel.weights.sglang import EngineClient, PauseMode

T = TypeVar("T")

REPAIR_S = 5.0  # for each clean-up call after a failure, beyond the update's own deadline
_LAST_WORD_S = 0.5  # after the first failure of several calls: time for the one at fault to answer too
_GRACE_S = 2.0  # a call's own deadline comes first; this one guards against a stuck thread


class EngineState(Enum):
    """What an engine holds and does, as far as we know; entered before the call that may cause it."""

    SERVING = "serving the committed weights"
    PAUSED = "paused, weights untouched"
    OPEN = "paused, update begun, weights untouched"
    DIRTY = "paused, holding parts of an update"
    COMMITTED = "paused, holding the new weights and version"


class Deadline:
    """One limit for everything that a public call waits for."""

    def __init__(self, timeout_s: float, what: str) -> None:
        self._begun_s = time.monotonic()
        self._timeout_s = timeout_s
        self._what = what

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun_s

    def left_s(self) -> float:
        """Seconds left, more than 0; DeadlineExceeded when there are none."""
        left = self._timeout_s - self.elapsed_s
        if left <= 0:
            raise DeadlineExceeded(f"{self._what} did not end within {self._timeout_s:.1f} s")
        return left


@dataclass(slots=True)
class Member:
    """One engine and what it holds."""

    client: EngineClient
    first_rank: int
    state: EngineState = EngineState.SERVING

    def enter(self, state: EngineState) -> None:
        """Change state; a DIRTY engine becomes clean only by a commit."""
        if self.state is not EngineState.DIRTY or state is EngineState.COMMITTED:
            self.state = state


class Fleet:
    """The engines of one session, in rank order. Called by one thread at a time.

    Every method but `roll_back` and `leave` raises the first failing engine's error after all engines have answered, so
    that the states are exact.
    """

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        if not clients or len({client.url for client in clients}) != len(clients):
            raise ConfigError(f"engines {[c.url for c in clients]}: expected at least one, each once")
        offsets = [1 + sum(client.ranks for client in clients[:i]) for i in range(len(clients))]
        self.members = [Member(client, offset) for client, offset in zip(clients, offsets, strict=True)]
        self.world_size = 1 + sum(client.ranks for client in clients)

    @property
    def states(self) -> dict[str, EngineState]:
        return {member.client.url: member.state for member in self.members}

    def told_states(self) -> str:
        return ", ".join(f"{url}: {state.value}" for url, state in self.states.items())

    def join(self, group: WeightGroup, deadline: Deadline) -> None:
        """Bring rank 0 and all engines into the group.

        Engines that are not there are found first: one missing member would hold the others until the deadline.
        """
        self._on_all(_check_present, deadline)
        left_s = deadline.left_s()
        calls = {
            self._ask(member, partial(_join, group, self.world_size), left_s): member.client.url
            for member in self.members
        }
        calls[in_background(lambda: group.join(timeout_s=left_s), name="weights-join")] = "rank 0"
        wait_all(calls, f"join of weight group {group.name}", left_s)

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        self._on_all(partial(_pause, mode), deadline)

    def begin(self, deadline: Deadline) -> None:
        """Open the bracket; one that an earlier failure left open is closed first."""
        self._on_all(_begin, deadline)

    def announce(
        self, bucket: Bucket, group: WeightGroup, *, flush_cache: bool, timeout_s: float
    ) -> dict[Future[None], str]:
        """Tell every engine to receive and load the bucket; the futures end when it is loaded. Marks all DIRTY."""
        call = partial(_announce, bucket, group.name, flush_cache)
        return {self._ask(member, call, timeout_s): member.client.url for member in self.members}

    def end(self, deadline: Deadline) -> None:
        self._on_all(_end, deadline)

    def verify(self, checksums: Mapping[str, str], deadline: Deadline) -> int:
        """Compare `checksums` with each engine's own, for every name that it has; return how many those are, at least 1.

        WeightsDiffer names the tensor. Engines may know different names; the least count is returned.
        """
        return min(self._on_all(partial(_verify, checksums), deadline))

    def commit(self, version: int, deadline: Deadline) -> None:
        self._on_all(partial(_commit, version), deadline)

    def resume(self, deadline: Deadline) -> None:
        self._on_all(_resume, deadline)

    def roll_back(self) -> None:
        """Let every engine that no byte reached, or that committed, serve again; DIRTY ones stay paused."""
        calls = [self._ask(member, _undo, REPAIR_S) for member in self.members]
        wait(calls, timeout=2 * REPAIR_S)

    def leave(self, group: WeightGroup) -> None:
        """Dissolve the group on all sides, also when some are stuck in a broadcast.

        An engine that leaves closes its sockets, which ends our broadcast; dropping our end then frees engines that
        wait in theirs. Ends within about REPAIR_S, twice that with an engine that is hung.
        """
        calls = [self._ask(member, partial(_leave, group.name), REPAIR_S) for member in self.members]
        group.wait_quiet(REPAIR_S)
        group.close()
        wait(calls, timeout=REPAIR_S)

    def _ask(self, member: Member, call: Callable[[Member, float], T], timeout_s: float) -> Future[T]:
        return in_background(lambda: call(member, timeout_s), name="weights-call")

    def _on_all(self, call: Callable[[Member, float], T], deadline: Deadline) -> list[T]:
        left_s = deadline.left_s()
        calls = {self._ask(member, call, left_s): member for member in self.members}
        wait(calls, timeout=left_s + _GRACE_S)
        for future, member in calls.items():
            if not future.done():
                raise DeadlineExceeded(
                    f"engine {member.client.url}: a call did not end within {left_s:.1f} s"
                )
        return [future.result() for future in calls]


def wait_all(calls: Mapping[Future[Any], str], what: str, timeout_s: float) -> None:
    """Wait for all; raise the error of the first that failed, in the order given, as soon as one has.

    Calls of which one fails can leave the others waiting for it, so those are not waited for.
    """
    wait(calls, timeout=timeout_s + _GRACE_S, return_when=FIRST_EXCEPTION)
    if any(call.done() and call.exception() for call in calls):
        wait(calls, timeout=_LAST_WORD_S)
    failed = [error for call in calls if call.done() and (error := call.exception())]
    if failed:
        kind = type(failed[0]) if isinstance(failed[0], R3Error) else R3Error
        raise kind(f"{what}: {failed[0]}") from failed[0]
    late = [name for call, name in calls.items() if not call.done()]
    if late:
        raise DeadlineExceeded(f"{what}: no answer from {', '.join(late)} within {timeout_s:.1f} s")


# -- one engine: each call enters a state first, so that a lost answer leaves the more careful one -----------------------


def _check_present(member: Member, timeout_s: float) -> None:
    member.client.weight_version(timeout_s=timeout_s)


def _join(group: WeightGroup, world_size: int, member: Member, timeout_s: float) -> None:
    member.client.init_group(
        host=group.host,
        port=group.port,
        group_name=group.name,
        backend=group.backend,
        rank_offset=member.first_rank,
        world_size=world_size,
        timeout_s=timeout_s,
    )


def _pause(mode: PauseMode, member: Member, timeout_s: float) -> None:
    member.enter(EngineState.PAUSED)
    member.client.pause(mode, timeout_s=timeout_s)


def _begin(member: Member, timeout_s: float) -> None:
    member.enter(EngineState.OPEN)
    try:
        member.client.begin(timeout_s=timeout_s)
    except EngineRefused:
        member.client.end(timeout_s=timeout_s)
        member.client.begin(timeout_s=timeout_s)


def _announce(bucket: Bucket, group_name: str, flush_cache: bool, member: Member, timeout_s: float) -> None:
    member.enter(EngineState.DIRTY)
    member.client.update_bucket(bucket, group_name=group_name, flush_cache=flush_cache, timeout_s=timeout_s)


def _end(member: Member, timeout_s: float) -> None:
    member.client.end(timeout_s=timeout_s)


def _verify(checksums: Mapping[str, str], member: Member, timeout_s: float) -> int:
    engine = member.client.weight_checksums(timeout_s=timeout_s)
    common = [name for name in checksums if name in engine]
    different = [name for name in common if engine[name] != checksums[name]]
    if different or not common:
        raise WeightsDiffer(
            f"engine {member.client.url}: {len(different)} of {len(common)} tensors compared hold other bytes than were "
            f"sent, first {different[:1]}; does it keep another dtype, name or a packed form?"
        )
    return len(common)


def _commit(version: int, member: Member, timeout_s: float) -> None:
    member.client.set_version(version, timeout_s=timeout_s)
    member.enter(EngineState.COMMITTED)


def _resume(member: Member, timeout_s: float) -> None:
    member.client.resume(timeout_s=timeout_s)
    member.enter(EngineState.SERVING)


def _undo(member: Member, timeout_s: float) -> None:
    if member.state is EngineState.OPEN:
        member.client.end(timeout_s=timeout_s)
        member.enter(EngineState.PAUSED)
    if member.state in (EngineState.PAUSED, EngineState.COMMITTED):
        _resume(member, timeout_s)


def _leave(group_name: str, member: Member, timeout_s: float) -> None:
    member.client.destroy_group(group_name, timeout_s=timeout_s)
