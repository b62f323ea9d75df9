"""One limit for everything that a public call waits for, and the wait for several calls at once. Knows no engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from r3channel.errors import DeadlineExceeded, R3Error

GRACE_S = 0.3  # a call's own deadline comes first; this one guards against a stuck thread
_LAST_WORD_S = 0.3  # after the first failure of several calls: time for the one at fault to answer too


class Deadline:
    """Counts from its creation."""

    def __init__(self, timeout_s: float, what: str) -> None:
        self._begun_s = time.monotonic()
        self._timeout_s = timeout_s
        self._what = what

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun_s

    @property
    def remaining_s(self) -> float:
        """Seconds left; 0 when there are none."""
        return max(0.0, self._timeout_s - self.elapsed_s)

    def left_s(self) -> float:
        """Seconds left, more than 0; DeadlineExceeded when there are none."""
        left = self._timeout_s - self.elapsed_s
        if left <= 0:
            raise DeadlineExceeded(f"{self._what} did not end within {self._timeout_s:.1f} s")
        return left

    def at_least(self, seconds: float) -> Deadline:
        """This one, or where less is left one that ends in `seconds`: for what must not stay undone for want of time."""
        enough = self._timeout_s - self.elapsed_s >= seconds
        return self if enough else Deadline(seconds, self._what)


def wait_all(calls: Mapping[Future[Any], str], what: str, timeout_s: float) -> None:
    """Wait for all; raise the error of the first that failed, in the order given, as soon as one has.

    Calls of which one fails can leave the others waiting for it, so those are not waited for.
    """
    wait(calls, timeout=timeout_s + GRACE_S, return_when=FIRST_EXCEPTION)
    if any(call.done() and call.exception() for call in calls):
        wait(calls, timeout=_LAST_WORD_S)
    failed = [error for call in calls if call.done() and (error := call.exception())]
    if failed:
        kind = type(failed[0]) if isinstance(failed[0], R3Error) else R3Error
        raise kind(f"{what}: {failed[0]}") from failed[0]
    late = [name for call, name in calls.items() if not call.done()]
    if late:
        raise DeadlineExceeded(f"{what}: no answer from {', '.join(late)} within {timeout_s:.1f} s")
