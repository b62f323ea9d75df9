"""Two processes: rows from a relay to a receiver over NCCL, several steps; over gloo on a CPU.

Each has a GPU of its own where there are two. One GPU is enough: NCCL refuses two ranks of one host on it, and takes processes
with two NCCL_HOSTID for two hosts (`getHostHash` of its src/misc/utils.cc), between which rows go through sockets. That shows order,
matching and bytes of the way between two nodes; its speed says nothing.
"""

from __future__ import annotations

import os
import time

import torch

from tests.gpu.checks.actor import receiver_of, relay_in, steps
from tests.gpu.facts import Facts

SOCKETS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def check(device: str, facts: Facts) -> None:
    transport, where, other = "gloo", torch.device("cpu"), list[str]()
    if device == "cuda":
        gpus = torch.cuda.device_count()
        transport, where = "nccl", torch.device("cuda", gpus - 1)
        facts.note("GPUs", gpus)
        if gpus == 1:
            other = ["the GPU of another host"]
            os.environ.update(SOCKETS, NCCL_HOSTID="relay")  # the relay's process is made with it
    with relay_in("python", transport, *other) as (owner, control):
        if other:
            os.environ["NCCL_HOSTID"] = "trainer"
        if device == "cuda":
            torch.cuda.set_device(where)
        receiver, begin = receiver_of(control, transport, where), time.monotonic()
        receiver.join()
        facts.note("join, communicator included, s", time.monotonic() - begin)
        steps(owner, receiver, facts)
    if device == "cpu":
        facts.left_out.append("NCCL: gloo carried the rows")
