"""What a piece of work takes of memory, measured in a process of its own: no thread and no test of this one counts.

    def receiving(rows):        # what comes before the yield warms up, and is not measured
        relay = opened()
        warm(relay)
        yield
        deliver(relay, frame_of(rows))

    assert growth_of(receiving, 300).peak < MIB

The kernel counts resident pages, so the bytes of the caller count with those of the code under test. tracemalloc would see
neither threads that run without the GIL nor the system's own allocations, and ends the process where both meet.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.children import printed

_NO_HUGE_PAGES = 41
"""prctl's PR_SET_THP_DISABLE: a page of 2 MiB would count whole where one byte of it is used."""


class Growth(NamedTuple):
    """Bytes above what was resident at the `yield`."""

    peak: int
    kept: int
    """Still there when the work was done; of its locals only where it ends in a second `yield`."""


def growth_of(case: Callable[..., Iterator[None]], *arguments: Any) -> Growth:
    """Run `case(*arguments)`, a generator of an importable module, in a process of its own; arguments travel as JSON."""
    told = printed("-m", "tests.support.memory", case.__module__, case.__name__, json.dumps(arguments))
    return Growth(*json.loads(told.splitlines()[-1]))


def resident(what: str) -> int:
    """`what` of /proc/self/status: VmRSS now, VmHWM at most since the peak was reset."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def main(module: str, name: str, arguments: str) -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(_NO_HUGE_PAGES, 1, 0, 0, 0)
    work = getattr(import_module(module), name)(*json.loads(arguments))
    next(work)
    gc.collect()
    libc.malloc_trim(0)  # free memory of the warming would hide what is taken from it
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = resident("VmRSS")
    next(work, None)
    peak = resident("VmHWM") - before
    gc.collect()
    libc.malloc_trim(0)
    print(json.dumps([peak, resident("VmRSS") - before]), flush=True)
    work.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
