"""Host memory under its ceilings: steps grow, anonymous memory of the process does not; the rest lies in files.

The store works in a process of its own, so that what the kernel counts (RssAnon) is the store's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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
from r3channel.relay.store import Store

folder, memory, *steps = sys.argv[1], *map(int, sys.argv[2:])
store = Store.open(folder, ceiling_bytes=512 << 20, memory_bytes=memory)


def anonymous():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free in the heap is not the store's
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def hold(nbytes):
    blocks = []
    for number in range(nbytes // (1 << 20) // 2):
        blocks.append(store.allocate(1 << 20))
        np.frombuffer(blocks[-1].view, np.uint8)[:] = number % 251
        blocks.append(store.adopt(bytes([number % 251]) * (1 << 20)))
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


def run(folder: str, *, memory: int) -> dict[str, Any]:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, folder, *map(str, (memory, *STEPS))],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


def test_anonymous_memory_stays_under_the_ceiling_while_steps_grow() -> None:
    found = run("", memory=MEMORY)
    for nbytes, step in zip(STEPS, found["steps"], strict=True):
        assert step["whole"] and step["held"] >= nbytes
        assert step["anonymous"] - found["before"] <= MEMORY + MARGIN, found
    assert found["trimmed"] - found["before"] <= MARGIN


def test_frames_that_outlive_the_process_take_no_anonymous_memory(tmp_path: Path) -> None:
    found = run(str(tmp_path), memory=MEMORY)
    assert all(step["whole"] and step["anonymous"] - found["before"] <= MARGIN for step in found["steps"]), (
        found
    )


def test_without_a_ceiling_below_them_the_kernel_counts_the_blocks_as_anonymous() -> None:
    found = run("", memory=512 * MIB)
    last = found["steps"][-1]
    assert last["anonymous"] - found["before"] >= 0.9 * STEPS[-1], "or the other tests measure nothing"
    assert last["after"] - found["before"] <= 2 * 64 * MIB + MARGIN, "holes are given back"
