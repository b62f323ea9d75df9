"""The deadline of a public call, calls in threads, and the report of an update. This module does not know engines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from r3channel.errors import DeadlineExceeded
from r3channel.transport.process_group import in_background

# Nested waits have the same deadline. The innermost must end first, because it knows who is late: outer ones wait longer.
GRACE_S = 0.3  # for one call in a thread, which may make several calls

CONTROL_S = 10.0
"""Seconds that an engine may take to answer that it is there."""

AGAIN_S = 2.0
"""The same for an engine that the last update left out: the others wait for it at each update."""


REPAIR_S = 5.0
"""Seconds for each clean-up call after a failure, beyond the update's own deadline."""

T = TypeVar("T")


def background(call: Callable[[], T]) -> Future[T]:
    """Start `call` in a thread of its own."""
    return in_background(call, name="weights-call")


class Deadline:
    """The end of a time limit, which counts from this object's creation."""

    def __init__(self, timeout_s: float, what: str) -> None:
        self._begun_s = time.monotonic()
        self._timeout_s = timeout_s
        self._what = what

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun_s

    def timeout_error(self) -> DeadlineExceeded | None:
        """Return the error that says that no time is left, else None."""
        if self.elapsed_s < self._timeout_s:
            return None
        return DeadlineExceeded(f"{self._what} did not end within {self._timeout_s:.1f} s")

    def left_s(self) -> float:
        """Return the seconds left, more than 0.

        Raises:
            DeadlineExceeded: No time is left.
        """
        if (over := self.timeout_error()) is not None:
            raise over
        return max(self._timeout_s - self.elapsed_s, 1e-6)

    def at_least(self, seconds: float) -> Deadline:
        """Return this deadline, or one `seconds` from now if that is later.

        It is for work that must not stay undone for want of time.
        """
        return self if self._timeout_s - self.elapsed_s >= seconds else Deadline(seconds, self._what)


@dataclass(slots=True, kw_only=True)
class UpdateReport:
    """What one committed update did."""

    version: int = -1
    tensors: int = 0
    buckets: int = 0
    payload_bytes: int = 0
    """Bytes of the model, counted once for all engines."""
    verified: int = 0
    """Parameters of the engine whose checksum every engine confirmed; 0 without verification."""
    sent_bytes: int = 0
    """Bytes that this trainer rank sent to all engines, in an exact update."""
    way: str = ""
    """`staged`, or `broadcast: why not staged`."""
    loaded: str = ""
    """Why the model's own loader placed the staged tensors, which cannot be undone; empty where we placed them."""
    evicted: dict[str, str] = field(default_factory=dict)
    """Engines that this update left out, and why. The next update tries them again, or `update_one` does."""
    rounded: Mapping[str, str] = field(default_factory=dict)
    """Tensors that engines keep in another dtype: name -> `float32 -> bfloat16`. Only staged updates know it."""
    skipped: tuple[str, ...] = ()
    """Tensors that no rank of any engine has a place for. Only staged updates know it."""
    wall_s: float = 0.0
    paused_s: float = 0.0
    """Seconds from the call that pauses engines to the last answer of engines that serve again; 0 if another rank pauses them."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by stage, which add up to `wall_s`: join pause convert plan pack digest wait_send verify commit resume; in a
    broadcast also end. `convert` is the caller's iterator."""


@dataclass(slots=True)
class Run:
    """One update under way."""

    deadline: Deadline
    version: int = -1
    alone: bool = False
    """Whether the version is committed already, and only these engines get it."""
    report: UpdateReport = field(default_factory=UpdateReport)
    checksums: Mapping[str, Sequence[Mapping[str, str]]] = field(default_factory=dict)
    """What the engines' own checksums will be: by number of ranks, then by rank."""
    _inner_s: float = 0.0

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure the block's time, less that of stages inside it."""
        begun_s, outer_s, self._inner_s = time.monotonic(), self._inner_s, 0.0
        try:
            yield
        finally:
            spent_s = time.monotonic() - begun_s
            seconds = self.report.seconds
            seconds[name] = seconds.get(name, 0.0) + spent_s - self._inner_s
            self._inner_s = outer_s + spent_s
