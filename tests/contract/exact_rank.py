"""One of two trainer ranks, each with half of the rows of every tensor."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from examples.float8_blocks import float8_blocks
from r3channel.errors import R3Error
from r3channel.weights.convert import Shard
from r3channel.weights.geometry import Box
from r3channel.weights.joint import Staged
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.session import WeightSync
from r3channel.weights.sglang import EngineClient
from tests.dist.ranks import write_result

NAMES = [f"model.layers.{index}.mlp.gate.weight" for index in range(4)]


def weights(version: int) -> dict[str, torch.Tensor]:
    return {n: torch.arange(64.0).view(8, 8) + 100 * version + at for at, n in enumerate(NAMES)}


FLOAT8 = "model.layers.0.mlp.down_proj.weight"


def plain() -> torch.Tensor:
    """What becomes float8."""
    return torch.randn(512, 200, generator=torch.Generator().manual_seed(3))


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

    lead, commit = Staged._lead, Staged._commit
    if job["rank"]:
        Staged._lead = lambda self, call: dying() if self._deciding else lead(self, call)
    else:
        Staged._commit = lambda self: (commit(self), dying())[1]


def run(job: dict[str, Any]) -> dict[str, Any]:
    gc.disable()  # a session without an error must not need it to end
    dist.init_process_group("gloo", init_method=job["init_method"], rank=job["rank"], world_size=2)
    result = float8(job) if "like" in job else plain_weights(job)
    if "like" not in job:
        gc.collect()  # a kept error's traceback holds the session
    dist.destroy_process_group()
    # A thread of gloo that comes for the interpreter while it ends would end the process.
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    assert not any("gloo" in name for name in names), names
    return result


def plain_weights(job: dict[str, Any]) -> dict[str, Any]:
    """Updates that succeed, that fail, and one in which a rank dies."""
    rank, result = job["rank"], dict[str, Any]()
    with WeightSync(job["engines"], plan="exact", group=dist.group.WORLD, verify=True) as sync:
        sync.connect(timeout_s=60)
        report = sync.update(shards(rank, 1), version=1, timeout_s=60)
        result["sent"] = report.sent_bytes
        spoiled = shards(rank, 2)
        if rank:
            spoiled[0].tensor[0, 0] = float("nan")
        result["spoiled"] = failure(lambda: sync.update(spoiled, version=2, timeout_s=60))
        short = shards(rank, 2)[rank:]  # nobody has the lower half of the first tensor
        result["short"] = [failure(lambda: sync.update(short, version=2, timeout_s=60)) for _ in range(2)]
        result["version"] = sync.version
        result["other"] = failure(
            lambda: sync.republish(shards(rank, 3), engines=job["engines"], timeout_s=60)
        )
        sync.republish(shards(rank, 1), engines=job["engines"][:1], timeout_s=60)
        if rank == job["dies"]:
            die_after_the_commit(job, 2)
        result["lost"] = failure(lambda: sync.update(shards(rank, 2), version=2, timeout_s=60))
        result |= {"after": sync.version, "held": sync.held.version if sync.held else None}
    return result


def float8(job: dict[str, Any]) -> dict[str, Any]:
    """An update of an engine of float8 weights, from this rank's rows; then the joining of a second one."""
    half = Box((256 * job["rank"], 0), (256 * job["rank"] + 256, 200))
    given = Shard(TensorMeta.of(FLOAT8, plain()), half, plain()[half.within(Box.whole((512, 200)))])
    with WeightSync(job["engines"], plan="exact", group=dist.group.WORLD) as sync:
        sync.connect(timeout_s=60)
        report = sync.update(float8_blocks([given], like=job["like"]), version=1, timeout_s=60)
        joined = sync.add_engine(job["joins"], timeout_s=60)
        facts = {"joined": joined and joined.version, "routable": list(sync.routable())}
        return {"tensors": report.tensors} | facts


def failure(call: Callable[[], object]) -> list[str]:
    try:
        call()
    except R3Error as error:
        return [type(error).__name__, str(error)]
    return []
