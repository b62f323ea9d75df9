"""Two processes: rows from a relay to a receiver over NCCL, several steps; over gloo on a CPU.

Each has a GPU of its own where there are two. One GPU is enough: NCCL refuses two ranks of one host on it, and takes processes
with two NCCL_HOSTID for two hosts (`getHostHash` of its src/misc/utils.cc), between which rows go through sockets.
That shows order, matching and bytes of the way between two nodes; its speed says nothing.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from tests.gpu.checks.actor import receiver_of, relay_in, steps
from tests.gpu.checks.device import SPEC, Steps, replay
from tests.gpu.facts import Facts

UNASKED_S = 0.5
"""Rows are prepared in less, and would go now if nobody had to ask."""


def check(device: str, facts: Facts) -> None:
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    where = torch.device("cuda", gpus - 1) if gpus else torch.device("cpu")
    transport, other = "nccl" if gpus else "gloo", ["another GPU"] * (gpus == 1)
    if other:
        # The relay's process is made with it.
        os.environ.update(NCCL_HOSTID="relay", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    with relay_in("python", transport, *other) as (owner, control):
        # Not where each has a GPU: the two would go through sockets there, too.
        os.environ.update({"NCCL_HOSTID": "trainer"} if other else {})
        if gpus:
            torch.cuda.set_device(where)
        receiver, begin = receiver_of(control, transport, where), time.monotonic()
        receiver.join()
        facts.note("join, communicator included, s", time.monotonic() - begin)
        steps(owner, receiver, facts)
        large(owner, control, transport, where, facts)
    if not gpus:
        facts.left_out.append("NCCL: gloo carried the rows")


def large(owner: Any, control: Any, transport: str, where: torch.device, facts: Facts) -> None:
    """1 GB in the buckets that users have: right, and what it costs the receiving process. NCCL's sockets are a part of that."""
    mebibytes = 1 if facts.small else 1 << 10
    owner.enlarge(transport, mebibytes)
    receiver, sealed = receiver_of(control, transport, where, SPEC), Steps(mebibytes, shifts=(0,))
    receiver.join()
    for step in range(2):  # the first makes its memory
        ticket, before = owner.seal_large(step), owner.sends()
        time.sleep(UNASKED_S)
        early = owner.sends() - before
        begin, cpu_s = time.monotonic(), time.process_time()
        shard = receiver.receive(ticket)
        spent_s, cpu_s = time.monotonic() - begin, time.process_time() - cpu_s
        different = sealed.different(step, replay(shard, late=False))
        facts.expect(f"{mebibytes} MiB, step {step}: ids that differ", different, different == 0, "0")
        facts.note("CPU of the receiving process, s/GB", cpu_s / shard.shard.nbytes * 1e9)
        facts.note("its seconds a GB", spent_s / shard.shard.nbytes * 1e9)
        owner.join_previous()
        sends = early, owner.sends() - before
        facts.expect(
            f"step {step}: sends before READY, and in all", sends, sends[0] == 0 < sends[1], "0, and some"
        )
    receiver.close()
