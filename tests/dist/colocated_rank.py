"""Worker of test_reshard_colocated.py: one engine rank, whose trainer's shards are mapped, not received."""

from __future__ import annotations

import json
import sys
from typing import Any

from r3channel.transport.base import Rendezvous
from r3channel.transport.joining import join
from r3channel.weights.lending import borrow
from r3channel.weights.reshard import plan_reshard
from r3channel.weights.resharder import Resharder
from tests.dist.ranks import write_result
from tests.reshard_cases import equals_oracle, held, side

TENSORS = [
    *((f"layer{i}", "bfloat16", (96, 40)) for i in range(12)),
    ("fp8", "float8_e4m3fn", (31, 17)),
    ("scale", "float32", ()),
    ("empty", "bfloat16", (0, 4)),
]


def maps(world_size: int) -> tuple[Any, Any]:
    import torch

    tensors = [(name, getattr(torch, dtype), shape) for name, dtype, shape in TENSORS]
    ranks = range(world_size)
    return side(tensors, ranks, axis=0), side(tensors, ranks, axis=1)


def main(job: dict[str, Any]) -> None:
    source, target = maps(job["world_size"])
    rank = job["rank"]
    lent = borrow(job["cards"][rank])
    rendezvous = Rendezvous(backend="shm", name=job["name"], epoch=1, rank=rank, world_size=job["world_size"])
    transport = join(rendezvous, timeout_s=60)
    resharder = Resharder(plan_reshard(source, target, rank=rank), transport)
    resharder.agree(timeout_s=60)
    filled = held(target, rank, seed=None)
    report = resharder.run(lent.shards, filled, timeout_s=60)
    result = {
        "equal": equals_oracle(target, filled, seed=5),
        "copied": report.copied_bytes,
        "sent": report.sent_bytes,
    }
    lent.arena.buffer_N[0] = 100 + rank  # the trainer sees this in its own memory
    transport.close()
    write_result(job, result)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
