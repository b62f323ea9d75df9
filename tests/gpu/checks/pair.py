"""Two processes, a GPU each: rows from a relay to a receiver over NCCL, several steps. Over gloo on a CPU."""

from __future__ import annotations

import time

import torch

from tests.gpu.checks.actor import receiver_of, relay_in, steps
from tests.gpu.facts import Facts


def check(device: str, facts: Facts) -> None:
    transport, where = "gloo", torch.device("cpu")
    if device == "cuda":
        transport, where = "nccl", torch.device("cuda", 1)
        torch.cuda.set_device(where)
    with relay_in("python", transport) as (owner, control):
        receiver, begin = receiver_of(control, transport, where), time.monotonic()
        receiver.join()
        facts.note("join, communicator included, s", time.monotonic() - begin)
        steps(owner, receiver, facts)
    if device == "cpu":
        facts.left_out.append("NCCL: gloo carried the rows")
