"""Wall and CPU seconds of named stages of one process, and CPU clocks of others. Knows no stage's meaning."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress


class Stages:
    """Seconds by name; a name that is timed twice adds up."""

    def __init__(self) -> None:
        self.wall_s: dict[str, float] = {}
        self.cpu_s: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """CPU is that of the whole process, all threads."""
        wall_s, cpu_s = time.monotonic(), time.process_time()
        yield
        self.wall_s[name] = self.wall_s.get(name, 0.0) + time.monotonic() - wall_s
        self.cpu_s[name] = self.cpu_s.get(name, 0.0) + time.process_time() - cpu_s

    def add(self, other: Stages, *, times: float) -> None:
        """Take over another's seconds, scaled."""
        for mine, theirs in ((self.wall_s, other.wall_s), (self.cpu_s, other.cpu_s)):
            for name, seconds in theirs.items():
                mine[name] = mine.get(name, 0.0) + times * seconds

    def to_dict(self) -> dict[str, dict[str, float]]:
        return {"wall_s": self.wall_s, "cpu_s": self.cpu_s}


def cpu_seconds_of(pids: Iterable[int]) -> float:
    """CPU seconds that living processes have used, ended threads included; a process that is gone counts nothing.

    Reads each process's own CPU clock (Linux: clock id ~pid << 3 | 2, see clock_getcpuclockid(3)), in nanoseconds.
    """
    total = 0.0
    for pid in pids:
        with suppress(OSError):
            total += time.clock_gettime((~pid << 3) | 2)
    return total
