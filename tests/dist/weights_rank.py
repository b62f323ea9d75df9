"""Real Megatron ranks that give their own shards of the weights: to real engines, by the README's lines, and tied over stages."""

from __future__ import annotations

import os
import runpy
from collections import deque
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from examples.embedded import megatron
from r3channel.errors import WeightUpdateFailed
from r3channel.plan.layout import TrainerLayout
from r3channel.weights import convert
from r3channel.weights.convert import hf_shards, hf_weights
from r3channel.weights.groups import WeightGroup
from r3channel.weights.session import WeightSync
from tests.dist import deepseek
from tests.dist.ranks import ROOT, megatron_world
from tests.support.waits import UPDATE_S, until
from tests.support.weights import checksums, connected


def run(job: dict[str, Any]) -> dict[str, Any]:
    """`job["what"]` is one of the functions below."""
    with megatron_world(job) as layout:
        return {"exact": exact, "readme": readme, "tied": tied}[job["what"]](job, layout)


def scale(chunks: list[torch.nn.Module], factor: float) -> None:
    """The same on every rank: a power of two, so that the expected bytes are known without a rounding."""
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.mul_(factor)


def exact(job: dict[str, Any], layout: TrainerLayout) -> dict[str, Any]:
    """Publishes to engines, also what is spoilt."""
    model = megatron.build(job["model"], layout, dtype=job["dtype"])
    asked = job["engines"] if job["rank"] == 0 else ()  # by one rank, for their checksums
    result: dict[str, Any] = {"reports": [], **broadcast(job, model, asked)}
    how: dict[str, Any] = {"group": dist.group.WORLD, "verify": True, "make": WeightSync.sharded}

    def publish(sync: WeightSync, version: int, factor: float) -> None:
        scale(model.chunks, factor)
        report = sync.update(hf_shards(model.bridge, model.chunks), version=version, timeout_s=UPDATE_S)
        result["reports"].append([report.version, report.verified, report.sent_bytes])

    with connected(job["engines"], **how) as sync:
        for version in (1, 2):
            publish(sync, version, 2.0)
        report = sync.update_one(job["engines"][0], timeout_s=UPDATE_S)
        result["one"] = [report.version, report.verified]
    result["over_tcp"] = checksums(*asked)
    with connected(job["engines"], wire="gloo", **how) as sync:
        for version, factor in ((3, 2.0), (4, 2.0), (5, 0.25)):  # the last are those that came over TCP
            publish(sync, version, factor)
            result["changed" if version == 3 else "in_a_group"] = checksums(*asked)
        if sync.held is not None and job["rank"] == 0:
            sync.held.write(job["manifest"])
        result["refused"] = spoiled(sync, model, job["rank"])
    return result


def broadcast(job: dict[str, Any], model: Any, asked: Iterable[str]) -> dict[str, Any]:
    """Broadcast twice, at last what the second version is over TCP: experts from the ranks that hold them, one sender for each.
    Tells what this rank sends, and the bytes that it gathers: so, and where the stage's first rank sends all."""
    from megatron.core import parallel_state as mpu

    came, gathered, sent, send = [0], convert._gather, list[int](), WeightGroup.broadcast

    def counted(weight: torch.Tensor, *, group: Any) -> list[torch.Tensor]:
        came[-1] += weight.nbytes * (dist.get_world_size(group) - 1)
        return gathered(weight, group=group)

    def noted(group: WeightGroup, payload: torch.Tensor, *, timeout_s: float) -> None:
        send(group, payload, timeout_s=timeout_s)
        sent.append(len(payload))

    ranks = mpu.get_data_parallel_rank(with_context_parallel=True), mpu.get_tensor_model_parallel_rank()
    first = ranks == (0, 0)
    own = mpu.get_expert_data_parallel_rank() == 0 and mpu.get_expert_tensor_parallel_rank() == 0
    given = partial(hf_weights, model.bridge, model.chunks, source=first)
    found = dict[str, Any]()
    options: Any = {"group": dist.group.WORLD, "staged": False, "bucket_bytes": 1 << 20}
    with (
        patch.object(convert, "_gather", counted), patch.object(WeightGroup, "broadcast", noted),
        WeightSync.whole(job["engines"], **options) as sync,
    ):  # fmt: skip
        sync.connect(timeout_s=UPDATE_S)
        for version in (1, 2):
            scale(model.chunks, 2.0)
            sent.clear()
            report = sync.update(given(experts=own), version=version, timeout_s=UPDATE_S)
            found["sent"] = [sum(sent), report.payload_bytes]
        found |= {"broadcast": checksums(*asked), "sends": [name for name, _ in given(experts=own)]}
        for experts in (own, None):
            came.append(0)
            deque(given(experts=experts), maxlen=0)
    scale(model.chunks, 0.25)
    return found | {"gathered": came[1:]}


def spoiled(sync: WeightSync, model: Any, rank: int) -> str:
    """The last rank's shards are NaN: every rank raises, and no engine is touched."""
    shards = hf_shards(model.bridge, model.chunks)
    if rank == dist.get_world_size() - 1:
        for shard in shards:  # of which replicas may send the others
            shard.tensor.fill_(float("nan"))
    try:
        sync.update(shards, version=6, timeout_s=UPDATE_S)
    except WeightUpdateFailed as error:
        return str(error)
    return ""


def readme(job: dict[str, Any], layout: TrainerLayout) -> dict[str, Any]:
    """Runs the lines of the room's README. Before the second update one engine is killed; before the third it has the second's
    weights again."""
    os.chdir(job["out"])
    model = megatron.build(job["model"], layout, dtype="float32")

    def train(version: int) -> None:
        scale(model.chunks, 2.0)
        if version == 2:
            Path("kill").touch()
            until(Path("killed").exists, "an engine's end", limit_s=UPDATE_S)
        if version == 3 and job["rank"] == 0:
            one, other = checksums(*job["engines"])
            print("the engines are", "equal" if one == other else "not equal")

    own = {"bridge": model.bridge, "chunks": model.chunks, "engines": job["engines"], "train": train}
    script, page = Path(f"readme_{job['rank']}.py"), ROOT / "r3channel" / "weights" / "README.md"
    script.write_text(page.read_text().split("```python\n")[1].split("```")[0])
    sync = runpy.run_path(str(script), own)["sync"]
    return {"version": sync.version, "evicted": sync.evicted, "states": len(sync.engine_states)}


def tied(job: dict[str, Any], layout: TrainerLayout) -> dict[str, Any]:
    """The names that a rank of a model with tied embeddings gives."""
    config, model = deepseek.hf_config(), deepseek.build(tied=True, mtp_num_layers=None)
    config.tie_word_embeddings = True
    bridge = deepseek.bridge_of(config, model.config)
    names = [name for name, _ in hf_weights(bridge, [model])]
    stage, silent = ([n for n, _ in hf_weights(bridge, [model], source=gives)] for gives in (True, False))
    assert silent == []
    return {"names": names, "stage": stage, "shards": [s.meta.name for s in hf_shards(bridge, [model])]}
