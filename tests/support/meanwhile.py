"""What goes on beside a test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


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
