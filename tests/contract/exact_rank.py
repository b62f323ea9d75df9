"""Worker of test_weight_exact.py: one of two trainer ranks, each with half of the rows of every tensor."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from r3channel.errors import R3Error
from r3channel.weights.convert import Shard
from r3channel.weights.geometry import Box
from r3channel.weights.joint import JointUpdate
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.session import WeightSync
from r3channel.weights.sglang import EngineClient
from tests.dist.ranks import write_result

NAMES = [f"model.layers.{index}.mlp.gate.weight" for index in range(4)]


def weights(version: int) -> dict[str, torch.Tensor]:
    return {n: torch.arange(64.0).view(8, 8) + 100 * version + at for at, n in enumerate(NAMES)}


def shards(rank: int, version: int) -> list[Shard]:
    box = Box((4 * rank, 0), (4 * rank + 4, 8))
    return [
        Shard(TensorMeta.of(name, tensor), box, tensor[4 * rank : 4 * rank + 4])
        for name, tensor in weights(version).items()
    ]


def die_after_the_commit(job: dict[str, Any], version: int) -> None:
    """This rank ends once every engine serves the version: before it is told so, or before it tells."""

    def dying() -> Any:
        clients = [EngineClient(url) for url in job["engines"]]
        while any(client.weight_version(timeout_s=5) != str(version) for client in clients):
            time.sleep(0.01)
        write_result(job, {})
        os._exit(0)

    lead, commit = JointUpdate._lead, JointUpdate._commit
    if job["rank"]:
        JointUpdate._lead = lambda self, call: dying() if self._deciding else lead(self, call)
    else:
        JointUpdate._commit = lambda self: (commit(self), dying())[1]


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank = job["rank"]
    dist.init_process_group("gloo", init_method=job["init_method"], rank=rank, world_size=job["world_size"])
    result: dict[str, Any] = {}
    with WeightSync(
        job["engines"], plan="exact", group=dist.group.WORLD, verify=True, keep_copy=True
    ) as sync:
        sync.connect(timeout_s=60)
        report = sync.update(shards(rank, 1), version=1, timeout_s=60)
        result["sent"] = report.sent_bytes
        spoiled = shards(rank, 2)
        if rank:
            spoiled[0].tensor[0, 0] = float("nan")
        result["spoiled"] = failure(lambda: sync.update(spoiled, version=2, timeout_s=60))
        result["version"] = sync.version
        sync.update_one(job["engines"][0], timeout_s=60)
        if rank == job["dies"]:
            die_after_the_commit(job, 2)
        result["lost"] = failure(lambda: sync.update(shards(rank, 2), version=2, timeout_s=60))
        result |= {"after": sync.version, "held": sync.held.version if sync.held else None}
    write_result(job, result)


def failure(call: Callable[[], object]) -> list[str]:
    try:
        call()
    except R3Error as error:
        return [type(error).__name__, str(error)]
    return []


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
