"""One engine of a session: its state, its links, and each call that an update makes to it.

The state that a call may cause is entered before the call, so that a lost answer leaves the more careful state. Knows one
engine only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

from r3channel.errors import CannotStage, EngineRefused, R3Error
from r3channel.weights.group import WeightGroup
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.progress import CONTROL_S, REPAIR_S, background
from r3channel.weights.sglang import FLUSH_REFUSED, FOUND_OPEN, UNTOUCHED, EngineClient, PauseMode
from r3channel.weights.wires import RankLink

_ASK_S = 1.0
_NO_PLUGIN = ("must run between", "init_weights_update_group")
"""What SGLang itself says to our order: that begin comes first, or, inside of it, that it knows no group of this name."""


class EngineState(Enum):
    """What an engine holds and does, as far as we know; entered before the call that may cause it."""

    SERVING = "serving the committed weights"
    PAUSED = "paused, weights untouched"
    OPEN = "paused, update begun, weights untouched"
    DIRTY = "paused, holding parts of an update"
    CHANGED = "paused, holding the new weights"
    COMMITTED = "paused, holding the new weights and version"


@dataclass(slots=True, eq=False)
class Member:
    """One engine and what it holds. One thread at a time makes calls to it."""

    client: EngineClient
    state: EngineState = EngineState.SERVING
    group: WeightGroup | None = None
    """The group of broadcasts."""
    ranks: list[RankLink] = field(default_factory=list)
    """The links of staged updates, by rank."""
    metas: tuple[TensorMeta, ...] = ()
    """The tensors that its ranks were told when they linked; what they need refers to these by index."""
    gives: int | None = None
    """The version that was committed over these links, and can be read back; rank 0 knows."""
    serves: str = ""
    """The version that it names in replies, known once it was linked."""
    holds: int | None = None
    """The version that it committed, as long as nothing says that it holds other weights."""
    boot_id: str = ""
    """The engine's life that was met; empty before, and where another one is known to have begun."""
    evicted: str = ""
    """Why updates go on without it, until `update_one` brings it back."""
    names: frozenset[str] = frozenset()
    """The tensor names that this life of the engine takes."""
    unheld: bool = False
    """Whether the engine has no plug-in of ours that keeps other sessions out."""
    foreign: bool = False
    """Whether another session, or one that died, opened the bracket that is open."""

    @property
    def url(self) -> str:
        return self.client.url

    def staged(self, metas: tuple[TensorMeta, ...]) -> bool:
        """Whether links to all of its ranks stand, for these tensors."""
        return self.metas == metas and bool(self.ranks) and all(rank.link.alive for rank in self.ranks)

    def enter(self, state: EngineState) -> None:
        """Change state; a DIRTY engine becomes clean only by a commit."""
        if self.state is not EngineState.DIRTY or state in (EngineState.COMMITTED, EngineState.CHANGED):
            self.state = state

    def meet(self, timeout_s: float) -> None:
        """Ask the engine whether it is there, for its ranks and for its boot id. What was known of another life is forgotten."""
        self.unlink()
        self.boot_id, self.holds = self.client.meet(timeout_s=timeout_s), None

    def unlink(self) -> None:
        """Forget the links and the group, without a call to the engine."""
        self.names, self.unheld = frozenset(), False
        for rank in self.ranks:
            rank.link.close()
        self.ranks, self.metas, self.gives = [], (), None
        if self.group is not None:
            self.group.close()
        self.group = None

    def leave(self) -> None:
        """End our hold on both sides, also when the engine is stuck in a broadcast; nothing else changes there.

        An engine that leaves closes its sockets, which ends our broadcast; dropping our end frees an engine that waits in one.
        """
        leaving = []
        if self.group is not None:
            leave = partial(self.client.destroy_group, self.group.name, timeout_s=REPAIR_S)
            leaving = [background(leave)]
            self.group.wait_quiet(1.0)
        self.unlink()
        wait(leaving, timeout=REPAIR_S)

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        self.enter(EngineState.PAUSED)
        self.client.pause(mode, timeout_s=timeout_s)

    def begin(self, timeout_s: float) -> None:
        """Open the bracket. If it is open already, another session holds it or one failed in it: these weights are unknown, so
        the engine counts as dirty, and only a whole update lets it serve again."""
        self.enter(EngineState.OPEN)
        self.foreign = False
        if not self.client.takes_orders:  # nor has it a begin
            return
        try:
            self.client.begin(timeout_s=timeout_s)
        except EngineRefused:
            self.foreign = True
            self.enter(EngineState.DIRTY)

    def take_over(self, timeout_s: float) -> None:
        """Close a bracket that was found open and open our own."""
        if self.foreign:
            with contextlib.suppress(EngineRefused):
                self.client.end(timeout_s=timeout_s)
            self.client.begin(timeout_s=timeout_s)
            self.foreign = False

    def open(self, order: Mapping[str, Any], timeout_s: float) -> None:
        """Have its ranks connect to us, under a short pause that keeps every request's cache. CannotStage without our half, and
        where bytes beside its parameters would leave something old. An update that is found begun was left by somebody who failed
        or died, or belongs to another session: then the engine is DIRTY (`begin`)."""
        if self.client.unstaged:
            raise CannotStage(f"engine {self.url} takes no staged bytes: {self.client.unstaged}")
        self.unlink()
        control_s = min(CONTROL_S, timeout_s)  # one that hangs is found here, not by the order
        self.serves = self.client.weight_version(timeout_s=control_s)
        self.pause("in_place", control_s)
        answer = ""
        try:
            answer = self.client.order(order, timeout_s=timeout_s)
        except EngineRefused as error:
            answer = str(error)
            if any(word in answer for word in _NO_PLUGIN):
                raise CannotStage(
                    f"engine {self.url} runs without our half; start it with R3CHANNEL_WEIGHTS=1"
                ) from error
            raise
        finally:
            answer = answer or self.client.order(
                {"op": "look"}, timeout_s=control_s
            )  # that order had no answer
            self._look_for_begun(answer)
            if not self.foreign:  # else it was paused, and stays so, by whom the bracket belongs to
                self.undo(control_s)

    def hold(self, order: Mapping[str, Any], timeout_s: float) -> bool:
        """Keep other sessions from this engine, and return whether our half could. Raises EngineRefused while another session
        holds it, and where an update would leave something old."""
        try:
            self._look_for_begun(self.client.order(order, timeout_s=timeout_s))
        except EngineRefused as error:
            self._look_for_begun(str(error))
            if any(word in str(error) for word in _NO_PLUGIN):
                return False
            raise
        return True

    def _look_for_begun(self, answer: str) -> None:
        self.foreign = FOUND_OPEN in answer
        if self.foreign:
            self.enter(EngineState.DIRTY)

    def change_over(
        self, order: Mapping[str, Any], version: int, flush_cache: bool, timeout_s: float
    ) -> None:
        """Let staged weights and parameters change places, under the new version."""
        before = self.state
        self.enter(EngineState.DIRTY)
        try:
            self._order(order, str(version), flush_cache, timeout_s)
        except EngineRefused as error:
            if UNTOUCHED in str(error):
                self.state = before
            raise
        self.state = EngineState.CHANGED

    def change_back(
        self, order: Mapping[str, Any], before: EngineState, flush_cache: bool, timeout_s: float
    ) -> None:
        """Undo a change-over, or raise EngineRefused. An engine that was DIRTY `before` is DIRTY again, its bracket open."""
        with contextlib.suppress(EngineRefused):  # a commit that ended half-way has left it open
            self.client.begin(timeout_s=timeout_s)
        self._order(order, self.serves, flush_cache, timeout_s)
        self.state = EngineState.DIRTY if before is EngineState.DIRTY else EngineState.OPEN

    def _order(self, order: Mapping[str, Any], version: str, flush_cache: bool, timeout_s: float) -> None:
        with self.flush_may_be_refused() as refused:
            self.client.order(order, flush_cache=flush_cache, weight_version=version, timeout_s=timeout_s)
        if refused:  # then SGLang has not told its front of the version
            self.client.set_version(version, timeout_s=timeout_s)

    def end(self, timeout_s: float) -> None:
        if self.client.takes_orders:
            self.client.end(timeout_s=timeout_s)

    def commit(self, version: int, timeout_s: float) -> None:
        self.client.set_version(version, timeout_s=timeout_s)
        self.take(version)

    def take(self, version: int) -> None:
        """Note that the engine holds this version and its name; close a bracket that was found open."""
        self.holds, self.serves, self.foreign = version, str(version), False
        self.enter(EngineState.COMMITTED)

    def resume(self, timeout_s: float) -> None:
        self.client.resume(timeout_s=timeout_s)
        self.enter(EngineState.SERVING)

    def undo(self, timeout_s: float) -> None:
        """Serve again if no byte of an update came, or all of them and the version; stay paused otherwise."""
        if self.state is EngineState.OPEN:
            with contextlib.suppress(EngineRefused):  # none is open: it never got our begin
                self.end(timeout_s)
            self.enter(EngineState.PAUSED)
        if self.state in (EngineState.PAUSED, EngineState.COMMITTED):
            self.resume(timeout_s)

    def version_now(self) -> str:
        """The version that the engine serves, asked just now, for an error."""
        try:
            return f"version {self.client.weight_version(timeout_s=_ASK_S)}"
        except R3Error as error:
            return f"unknown ({type(error).__name__})"

    @contextlib.contextmanager
    def flush_may_be_refused(self) -> Iterator[list[EngineRefused]]:
        """Let SGLang refuse to flush while requests wait for their grammar: the weights are in. Gives what it said."""
        refused: list[EngineRefused] = []
        try:
            yield refused
        except EngineRefused as error:
            if FLUSH_REFUSED not in str(error):
                raise
            refused.append(error)


def told(members: Sequence[Member]) -> str:
    """Each engine's state, for an error."""
    return ", ".join(f"{member.url}: {member.state.value}" for member in members)
