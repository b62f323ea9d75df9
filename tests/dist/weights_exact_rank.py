"""Worker of test_weights_exact.py: one real Megatron rank that publishes its own shards to real engines."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from examples.embedded import megatron
from r3channel.errors import WeightUpdateFailed
from r3channel.plan.layout import TrainerLayout
from r3channel.weights.convert import hf_shards
from r3channel.weights.session import WeightSync
from tests.dist.ranks import write_result


def scale(chunks: list[torch.nn.Module], factor: float) -> None:
    """The same on every rank: a power of two, so that the expected bytes are known without a rounding."""
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.mul_(factor)


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    layout = TrainerLayout.parse(job["layout"])
    megatron.init_distributed(
        rank=job["rank"], world_size=job["world_size"], init_method=job["init_method"], layout=layout
    )
    model = megatron.build(job["model"], layout, dtype=job["dtype"])
    result: dict[str, Any] = {"reports": []}
    with WeightSync(
        job["engines"], plan="exact", group=dist.group.WORLD, verify=True, keep_copy=True, staged=True
    ) as sync:
        sync.connect(timeout_s=60)
        for version in (1, 2):
            scale(model.chunks, 2.0)
            report = sync.update(hf_shards(model.bridge, model.chunks), version=version, timeout_s=120)
            result["reports"].append([report.version, report.verified, report.sent_bytes, report.rounded])
        if job.get("spoil"):
            result["refused"] = spoiled(sync, model, job["rank"])
        report = sync.update_one(job["engines"][0], timeout_s=60)
        result["one"] = [report.version, report.verified]
        shards = hf_shards(model.bridge, model.chunks)
        result["held_bytes"] = sum(shard.tensor.nbytes for shard in shards)
        if sync.held is not None and job["rank"] == 0:
            sync.held.write(job["manifest"])
    megatron.close_distributed()
    write_result(job, result)


def spoiled(sync: WeightSync, model: Any, rank: int) -> str:
    """The last rank's shards hold a NaN: every rank raises, and no engine is touched."""
    shards = hf_shards(model.bridge, model.chunks)
    if rank == dist.get_world_size() - 1:
        shards[0].tensor.view(-1)[0] = float("nan")
    try:
        sync.update(shards, version=3, timeout_s=60)
    except WeightUpdateFailed as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
