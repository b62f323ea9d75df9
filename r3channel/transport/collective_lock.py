"""A lock on this process's part of the trainer's collectives: the routing of a step or a weight update holds it, never both.

Both run collectives and transfers that the framework does not know of, on the same GPUs; two at once can deadlock or stall
each other. A trainer loop keeps them apart by its order. The lock makes sure of it, also when an update runs on another thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from r3channel.errors import DeadlineExceeded, UsageError


@dataclass(frozen=True, slots=True)
class _Use:
    kind: str
    what: str
    thread: int = field(default_factory=threading.get_ident)
    since_s: float = field(default_factory=time.monotonic)


class Slot:
    """Uses of one kind may overlap, uses of different kinds wait for each other. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._uses: list[_Use] = []

    @contextmanager
    def use(self, kind: str, what: str, *, timeout_s: float) -> Iterator[None]:
        """Hold the slot for a use of one kind.

        Inside the block no use of another kind is under way.

        Args:
            kind: uses of one kind may overlap.
            what: names this use in others' errors.
            timeout_s: seconds to wait for uses of other kinds.

        Raises:
            DeadlineExceeded: the wait took longer; the text says who holds the slot and for how long.
            UsageError: this thread itself holds the slot for another kind. It is raised at once.
        """
        mine = _Use(kind, what)
        with self._changed:
            for use in self._other_uses(kind):
                if use.thread == mine.thread:
                    raise UsageError(f"{what} inside {use.what}: one would wait for the other for ever")
            if not self._changed.wait_for(lambda: not self._other_uses(kind), timeout=timeout_s):
                now = time.monotonic()
                others = ", ".join(
                    f"{use.what} (for {now - use.since_s:.1f} s)" for use in self._other_uses(kind)
                )
                raise DeadlineExceeded(
                    f"{what} waited {timeout_s:.1f} s for {others}. Does it wait for this one?"
                )
            self._uses.append(mine)
        try:
            yield
        finally:
            with self._changed:
                self._uses.remove(mine)
                self._changed.notify_all()

    def _other_uses(self, kind: str) -> list[_Use]:
        return [use for use in self._uses if use.kind != kind]


PROCESS_SLOT = Slot()
"""The slot that receivers and weight sessions of this process share."""
