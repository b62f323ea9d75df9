"""Host memory under its ceilings: steps grow, anonymous memory of the process does not; the rest lies in files.

The store works in a process of its own, so that what the kernel counts (RssAnon) is the store's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
MEMORY = 64 * MIB
STEPS = (8 * MIB, 96 * MIB, 320 * MIB)
MARGIN = 8 * MIB
"""What numpy and the allocator may add."""

CHILD = """
import ctypes, gc, json, re, sys
from pathlib import Path
import numpy as np
from r3channel.relay.storage.store import Store

memory, size, *steps = map(int, sys.argv[1:])
store = Store(512 << 20, memory)


def anonymous():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free in the heap is not the store's
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def hold(nbytes):
    blocks = []
    for number in range(nbytes // size // 2):
        blocks.append(store.allocate(size))
        np.frombuffer(blocks[-1].view, np.uint8)[:] = number % 251
        blocks.append(store.adopt(bytes([number % 251]) * size))
    seen, held = anonymous(), store.held_bytes
    whole = all((np.frombuffer(b.view, np.uint8) == at // 2 % 251).all() for at, b in enumerate(blocks))
    for block in blocks:
        block.free()
    return {"anonymous": seen, "held": held, "after": anonymous(), "whole": bool(whole)}


hold(4 << 20)
store.trim(idle_s=0)
before = anonymous()
found = [hold(nbytes) for nbytes in steps]
store.trim(idle_s=0)
print(json.dumps({"before": before, "steps": found, "trimmed": anonymous()}))
store.close()
"""


def run(*, memory: int, size: int, steps: tuple[int, ...] = STEPS) -> dict[str, Any]:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, (memory, size, *steps))],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


@pytest.mark.parametrize("size", [100_000, 1_050_000, 3 * MIB], ids=["adopted", "rounded up", "large"])
def test_anonymous_memory_stays_under_the_ceiling_while_steps_grow(size: int) -> None:
    steps = STEPS[:2] if size < MIB else STEPS  # thousands of files take a while
    found = run(memory=MEMORY, size=size, steps=steps)
    for nbytes, step in zip(steps, found["steps"], strict=True):
        assert step["whole"] and step["held"] >= nbytes - 2 * size
        assert step["anonymous"] - found["before"] <= MEMORY + MARGIN, found
        assert step["after"] - found["before"] <= MEMORY + MARGIN, found
    assert found["trimmed"] - found["before"] <= MARGIN


def test_without_a_ceiling_below_them_the_kernel_counts_the_blocks_as_anonymous() -> None:
    last = (found := run(memory=512 * MIB, size=MIB))["steps"][-1]
    assert last["anonymous"] - found["before"] >= 0.9 * STEPS[-1], "or the other test measures nothing"
    assert found["trimmed"] - found["before"] <= MARGIN
