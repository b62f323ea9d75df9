"""One of several trainer ranks that give whole tensors of their own to all engines: each its pipeline stage's, the last none."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from r3channel.weights.groups import WeightGroup
from r3channel.weights.session import WeightSync
from tests.contract.exact_rank import failure
from tests.dist.ranks import write_result
from tests.support.waits import UPDATE_S, until
from tests.support.weights import NAMES, weights


def stage(job: dict[str, Any], version: int) -> list[tuple[str, torch.Tensor]]:
    sources = job["world_size"] - 1
    own = NAMES[job["rank"] :: sources] if job["rank"] < sources else []
    return [(name, weights(version)[name]) for name in own]


def failing(
    job: dict[str, Any], version: int, how: str, sent: list[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The second rank's tensors, of which the second does not come as it should; it dies once engines hold the first."""
    for number, (name, tensor) in enumerate(stage(job, version)):
        if number == 1 and how == "nan":
            tensor = torch.full_like(tensor, float("nan"))
        if number == 1 and how == "raises":
            raise ValueError("gather failed")
        if number == 1 and how == "slow":
            time.sleep(1.2 * job["engine_timeout_s"])
        if number == 1 and how == "dies":
            until(lambda: sent)
            write_result(job, {})
            os._exit(0)
        yield name, tensor


def run(job: dict[str, Any]) -> None:
    dist.init_process_group(
        "gloo", init_method=job["init_method"], rank=job["rank"], world_size=job["world_size"]
    )
    sent, told = list[int](), dict[str, Any]()
    broadcast = WeightGroup.broadcast

    def counted(self: WeightGroup, payload: torch.Tensor, *, timeout_s: float) -> None:
        broadcast(self, payload, timeout_s=timeout_s)
        sent.append(len(payload))

    WeightGroup.broadcast = counted
    options = {"staged": job.get("staged", False), "engine_timeout_s": job["engine_timeout_s"]}
    options |= {"group": dist.group.WORLD, "bucket_bytes": 1024}
    with WeightSync.whole(job["engines"], **options) as sync:
        sync.connect(timeout_s=UPDATE_S)
        version = 0
        for how in job["hows"]:
            version += 1
            given = failing(job, version, how, sent) if job["rank"] == 1 else iter(stage(job, version))
            sent.clear()
            said = failure(lambda v=version, given=given: sync.update(given, version=v, timeout_s=UPDATE_S))
            version -= bool(said)
            told[how] = {"said": said, "sent": list(sent), "routable": sync.routable()}
    write_result(job, told)
    os._exit(
        0
    )  # gloo's threads that still wait for a lost rank would abort the process (`transport/README.md`)
