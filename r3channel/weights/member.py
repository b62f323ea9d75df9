"""One engine of a session: what it holds and does, which group reaches it, and each call that an update makes to it.

A call enters the state that it may cause before it is made, so that a lost answer leaves the more careful one. Knows one
engine only; several at once are the fleet's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from r3channel.errors import EngineRefused, WeightsDiffer
from r3channel.weights.buckets import Bucket
from r3channel.weights.group import WeightGroup, in_background
from r3channel.weights.sglang import EngineClient, PauseMode

_SHOWN = 3


class EngineState(Enum):
    """What an engine holds and does, as far as we know; entered before the call that may cause it."""

    SERVING = "serving the committed weights"
    PAUSED = "paused, weights untouched"
    OPEN = "paused, update begun, weights untouched"
    DIRTY = "paused, holding parts of an update"
    COMMITTED = "paused, holding the new weights and version"


@dataclass(slots=True, eq=False)
class Link:
    """A group with the engines that it reaches: the trainer is rank 0, theirs follow in order."""

    group: WeightGroup
    members: tuple[Member, ...]
    calls: list[Future[Any]] = field(default_factory=list)
    """The bucket under way: its broadcast, and each member's loading."""

    def usable(self, *, timeout_s: float) -> bool:
        """Whether the last bucket went well everywhere, after waiting up to `timeout_s` for its end."""
        wait(self.calls, timeout=timeout_s, return_when=FIRST_EXCEPTION)
        return all(call.done() and call.exception() is None for call in self.calls)


@dataclass(slots=True, eq=False)
class Member:
    """One engine and what it holds. One thread at a time makes calls to it."""

    client: EngineClient
    state: EngineState = EngineState.SERVING
    link: Link | None = None
    boot_id: str = ""
    """Of the life that joined; empty before, and once it has left."""

    @property
    def url(self) -> str:
        return self.client.url

    def enter(self, state: EngineState) -> None:
        """Change state; a DIRTY engine becomes clean only by a commit."""
        if self.state is not EngineState.DIRTY or state is EngineState.COMMITTED:
            self.state = state

    def meet(self, timeout_s: float) -> None:
        """Find out that the engine is there, and which life of it."""
        self.boot_id = self.client.boot_id(timeout_s=timeout_s)

    def join(self, group: WeightGroup, first_rank: int, timeout_s: float) -> None:
        self.client.init_group(
            host=group.host,
            port=group.port,
            group_name=group.name,
            backend=group.backend,
            rank_offset=first_rank,
            world_size=group.world_size,
            timeout_s=timeout_s,
        )

    def leave(self, group_name: str, timeout_s: float) -> None:
        self.client.destroy_group(group_name, timeout_s=timeout_s)

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        self.enter(EngineState.PAUSED)
        self.client.pause(mode, timeout_s=timeout_s)

    def begin(self, timeout_s: float) -> None:
        """Open the bracket. One that is open already was left by somebody who failed or died: nothing is known of these
        weights, so the engine counts as dirty and only a whole update lets it serve again."""
        self.enter(EngineState.OPEN)
        try:
            self.client.begin(timeout_s=timeout_s)
        except EngineRefused:
            self.enter(EngineState.DIRTY)
            self.client.end(timeout_s=timeout_s)
            self.client.begin(timeout_s=timeout_s)

    def load(self, bucket: Bucket, flush_cache: bool, timeout_s: float) -> None:
        """Receive one broadcast of its link and load it."""
        assert self.link is not None
        self.enter(EngineState.DIRTY)
        name = self.link.group.name
        self.client.update_bucket(bucket, group_name=name, flush_cache=flush_cache, timeout_s=timeout_s)

    def end(self, timeout_s: float) -> None:
        self.client.end(timeout_s=timeout_s)

    def verify(self, checksums: Mapping[str, str], timeout_s: float) -> int:
        """Compare what was sent, under the engine's names, with the engine's own checksums; return how many are equal."""
        held = self.client.weight_checksums(timeout_s=timeout_s)
        wrong = [name for name in checksums if held.get(name) != checksums[name]]
        if wrong or not checksums:
            missing = [name for name in wrong if name not in held]
            raise WeightsDiffer(
                f"engine {self.url}: {len(wrong)} of {len(checksums)} tensors compared hold other bytes than were sent, first "
                f"{wrong[:_SHOWN]}; {len(missing)} of them it does not have at all. Does it keep another dtype, name or a "
                "packed form?"
            )
        return len(checksums)

    def commit(self, version: int, timeout_s: float) -> None:
        self.client.set_version(version, timeout_s=timeout_s)
        self.enter(EngineState.COMMITTED)

    def resume(self, timeout_s: float) -> None:
        self.client.resume(timeout_s=timeout_s)
        self.enter(EngineState.SERVING)

    def undo(self, timeout_s: float) -> None:
        """Serve again if no byte of an update came, or all of them and the version; stay paused otherwise."""
        if self.state is EngineState.OPEN:
            with contextlib.suppress(EngineRefused):  # none is open: it never got our begin
                self.client.end(timeout_s=timeout_s)
            self.enter(EngineState.PAUSED)
        if self.state in (EngineState.PAUSED, EngineState.COMMITTED):
            self.resume(timeout_s)


def told(members: list[Member]) -> str:
    """Each engine's state, for an error."""
    return ", ".join(f"{member.url}: {member.state.value}" for member in members)


def background(call: Any) -> Future[Any]:
    """`call` in a thread of its own."""
    return in_background(call, name="weights-call")
