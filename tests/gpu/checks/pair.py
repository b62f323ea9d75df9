"""Two processes: rows from a relay to a receiver over NCCL, several steps; over gloo on a CPU.

Each has a GPU of its own where there are two. One GPU is enough: NCCL refuses two ranks of one host on it, and takes processes
with two NCCL_HOSTID for two hosts (`getHostHash` of its src/misc/utils.cc), between which rows go through sockets.
That shows order, matching and bytes of the way between two nodes; its speed says nothing.
"""

from __future__ import annotations

import os
import time

import torch

from tests.gpu.checks.actor import receiver_of, relay_in, steps
from tests.gpu.facts import Facts


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
    if not gpus:
        facts.left_out.append("NCCL: gloo carried the rows")
