"""Host memory under its ceilings: steps grow, anonymous memory of the relay's process does not; the rest lies in files.

The relay runs in a process of its own, so that what the kernel counts (RssAnon) is the relay's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
MEMORY = 8 * MIB
STORE = 128 * MIB
STEPS = (3 * MIB, 12 * MIB, 48 * MIB)  # 4 ranks' samples of 192 kB
MARGIN = 12 * MIB
"""What numpy, the allocator and huge pages (2 MiB, in each of 8 buffers at worst) may add."""

CHILD = """
import ctypes, gc, json, re, sys, time
from pathlib import Path
import numpy as np
from r3channel.config import ChannelConfig
from r3channel.distinct import kernels
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.place import place_samples
from r3channel.relay.memory import BufferPool
from r3channel.relay.relay import Relay
from r3channel.routing import ProvenanceSpan, RowKind
from r3channel.spec import RoutingSpec
from r3channel.wire.frame import encode_frame

folder, memory, store, *steps = sys.argv[1], *map(int, sys.argv[2:])
spec = RoutingSpec(num_layers=48, moe_layers=tuple(range(48)), num_experts=128, top_k=8)
layout, tokens = TrainerLayout(dp=4), 512
span = ProvenanceSpan(start=0, end=tokens - 1, weight_version=0, kind=RowKind.DECODED)
config = ChannelConfig(
    backend="loopback", store_dir=folder, shard_memory_bytes=memory, store_bytes=store, place_threads=1
)


def ids_of(name):
    step, number = map(int, name.split("-"))
    first = np.arange(tokens - 1)[:, None, None] * 5 + np.arange(48)[:, None] * 3 + step * 7 + number
    return ((first + np.arange(8)) % 128).astype(np.uint8)


def anonymous():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free in the heap is not the relay's
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def deliver(relay, step, nbytes):
    names = [f"{step}-{number}" for number in range(nbytes // (tokens * spec.bytes_per_token) // 4 * 4)]
    for name in names:
        relay.add_frame(name, encode_frame(spec, expert_ids_TLK=ids_of(name), provenance=[span]), range(tokens))
    ticket = relay.seal(step, Assignment.round_robin(names, dp=4, microbatch_size=len(names) // 4))
    deadline_s = time.monotonic() + 30
    while relay.status()["steps"][step]["state"] != "PLACED" and time.monotonic() < deadline_s:
        time.sleep(0.01)
    status, seen, equal = relay.status(), anonymous(), True
    for dp in range(4):
        shard = relay._ledger.steps[step].buffers[dp, 0, 0]
        equal &= np.array_equal(shard, place_samples(ticket.plan, dp=dp, ids_of=ids_of)[dp, 0, 0])
        del shard
        relay.ack(run=ticket.run, step=step, dp=dp, pp=0)
    return {"anonymous": seen, "pool": status["shards"], "store": status["store"]["bytes"], "equal": bool(equal)}


kernels()
relay = Relay(spec, layout, config)
deliver(relay, 0, 1 << 20)
before = anonymous()
found = [deliver(relay, step, nbytes) for step, nbytes in enumerate(steps, 1)]
relay.close()
last = anonymous()
control = BufferPool(steps[-1]).take(steps[-1])
control[:] = 1
print(json.dumps({"before": before, "steps": found, "control": anonymous() - last}))
"""


def run(folder: Path, *, memory: int) -> dict[str, Any]:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), *map(str, (memory, STORE, *STEPS))],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


def test_anonymous_memory_stays_under_the_ceiling_while_steps_grow(tmp_path: Path) -> None:
    found = run(tmp_path, memory=MEMORY)
    for nbytes, step in zip(STEPS, found["steps"], strict=True):
        assert step["equal"]
        assert step["pool"]["memory"] <= MEMORY
        assert step["pool"]["use"] >= nbytes
        assert step["pool"]["file"] >= nbytes - MEMORY
        assert step["store"] <= STORE
        assert step["anonymous"] - found["before"] <= MEMORY + MARGIN, found
    assert found["control"] >= 0.9 * STEPS[-1], "the kernel's count sees what the pool holds in memory"
