"""How long tests wait at most: guards against what hangs, ten times what a quiet machine of two cores takes; and meanwhile.

A limit that users are promised, and a deadline that is to pass, stand in the test that is about them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

SOON_S = 30.0
"""A message, a thread, a step over loopback."""
UPDATE_S = 100.0
"""A session of weights that begins, or one update."""
PROGRAM_S = 200.0
"""A Python program with its imports."""
ENGINE_S = 300.0
"""A server that starts, or answers what is long."""
RUN_S = 600.0
"""Ranks of Megatron, a benchmark or a run of the demo, from nothing to its end."""
JOB_S = 1800.0
"""A job of slime, all checks of `make gpu`, a run of chaos."""


def until(
    condition: Callable[[], object], what: str = "", *, limit_s: float = SOON_S, log: Path | None = None
) -> None:
    """Wait for what another thread or process does; say what it was, and the end of its log, where it comes too late."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {limit_s:g} s: {what or condition}{end_of(log)}"
        time.sleep(0.002)


def busy() -> float:
    """Return how many times longer a machine with this load takes than a quiet one, for limits that users are promised."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def end_of(log: Path | None, *, size: int = 4000) -> str:
    """The last characters of a log, if there is one."""
    return f"\n{log.read_text(errors='replace')[-size:]}" if log and log.exists() else ""


def await_memory(gib: float, what: str) -> None:
    """Wait until so much memory is free: another worker's engines may still have it."""
    import psutil  # images with a GPU may lack it, and need no other wait

    free = f"{gib:g} GiB of memory for {what}"
    until(lambda: psutil.virtual_memory().available >= gib * 2**30, free, limit_s=RUN_S)


@contextmanager
def meanwhile(call: Callable[[], object], *, every_s: float = 0.0) -> Iterator[None]:
    """While the block runs, a thread calls this again and again; what it raises is raised after the block."""
    over = threading.Event()

    def calls() -> None:
        while not over.wait(every_s):
            call()

    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(calls)
        try:
            yield
        finally:
            over.set()
        calling.result()
