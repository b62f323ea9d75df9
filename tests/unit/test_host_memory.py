"""Host memory under its ceiling: whatever sizes come and go, the process has no more anonymous memory than the store allows.

The store works in a process of its own, so that what the kernel counts (RssAnon) is the store's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
CEILING = 64 * MIB
SIZES = (100_000, 1_050_000, 3 * MIB, 1_050_000)
"""Adopted as they are, rounded up, large, and one that was there before."""
MARGIN = 8 * MIB
"""What numpy and the allocator may add."""

CHILD = """
import ctypes, gc, json, re, sys
from pathlib import Path
import numpy as np
from r3channel.relay.storage.store import Store

ceiling, *sizes = map(int, sys.argv[1:])
store = Store(ceiling)


def anonymous():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free in the heap is not the store's
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def fill(size):
    blocks = []
    for number in range(ceiling // size // 2):
        blocks.append(store.allocate(size))
        np.frombuffer(blocks[-1].view, np.uint8)[:] = number % 251
        blocks.append(store.adopt(bytes([number % 251]) * size))
    seen = anonymous()
    whole = all((np.frombuffer(b.view, np.uint8) == at // 2 % 251).all() for at, b in enumerate(blocks))
    for block in blocks:
        block.free()
    return {"anonymous": seen, "after": anonymous(), "whole": bool(whole)}


store.allocate(1 << 20).free()
store.trim(idle_s=0)
before = anonymous()
found = [fill(size) for size in sizes]
store.trim(idle_s=0)
print(json.dumps({"before": before, "fills": found, "trimmed": anonymous()}))
store.close()
"""


def test_anonymous_memory_stays_under_the_ceiling_whatever_sizes_come_and_go() -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, (CEILING, *SIZES))],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    for fill in found["fills"]:
        assert fill["whole"]
        assert 0.8 * CEILING <= fill["anonymous"] - found["before"] <= CEILING + MARGIN, found
        assert fill["after"] - found["before"] <= CEILING + MARGIN, found
    assert found["trimmed"] - found["before"] <= MARGIN
