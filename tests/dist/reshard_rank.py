"""Worker of test_reshard_gloo.py: one trainer or engine rank, over real gloo."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from r3channel.errors import PlanMismatch, R3Error
from r3channel.transport.base import Rendezvous, Transport
from r3channel.transport.joining import join
from r3channel.weights.reshard import RankPlan, plan_reshard
from r3channel.weights.resharder import Resharder
from r3channel.weights.shardmap import ShardMap
from r3channel.weights.survey import survey
from tests.dist.ranks import write_result
from tests.reshard_cases import equals_oracle, held, side

TIMEOUT_S = 60.0
MESSAGE_BYTES = 1 << 20
TENSORS: list[tuple[str, torch.dtype, tuple[int, ...]]] = [
    ("embed", torch.bfloat16, (1003, 96)),
    ("scale", torch.float32, ()),
    ("empty", torch.bfloat16, (0, 7)),
    ("fp8", torch.float8_e4m3fn, (129, 65)),
    ("codes", torch.int8, (77, 33)),
    ("norm.rep", torch.bfloat16, (96,)),
    ("cast", torch.bfloat16, (40, 24)),
    ("oversized", torch.float32, (1501, 1024)),
    *((f"layer{i}", torch.bfloat16, (64, 32)) for i in range(40)),
]


def maps(trainers: int, engines: int) -> tuple[ShardMap, ShardMap]:
    """Trainers cut rows, engines columns; `cast` is float32 at the trainers."""
    wide = [(name, torch.float32 if name == "cast" else dtype, shape) for name, dtype, shape in TENSORS]
    return (
        side(wide, range(trainers), axis=0),
        side(TENSORS, range(trainers, trainers + engines), axis=1),
    )


def surveyed(
    transport: Transport, known: tuple[ShardMap, ShardMap], *, trainers: int
) -> tuple[ShardMap, ShardMap]:
    """This rank tells what it holds and nothing else; rank 0 gathers."""
    mine = known[transport.rank >= trainers]
    boxes = mine.held_by(transport.rank)
    report = [(meta, box) for meta in mine.metas for box in boxes.get(meta.name, ())]
    return survey(transport, report, trainers=trainers, timeout_s=TIMEOUT_S)


def joined(job: dict[str, Any], epoch: int) -> Transport:
    where = {key: job[key] for key in ("rank", "world_size", "host", "port")}
    return join(
        Rendezvous(backend="gloo", name=f"reshard/{epoch}", epoch=epoch, **where), timeout_s=TIMEOUT_S
    )


def two_updates(plan: RankPlan, transport: Transport, source: ShardMap, target: ShardMap) -> dict[str, Any]:
    resharder = Resharder(plan, transport, max_message_bytes=MESSAGE_BYTES)
    resharder.agree(timeout_s=TIMEOUT_S)
    result: dict[str, Any] = {"equal": []}
    filled = held(target, plan.rank, seed=None)
    for seed in (1, 2):
        report = resharder.run(held(source, plan.rank, seed=seed), filled, timeout_s=TIMEOUT_S)
        result["equal"].append(equals_oracle(target, filled, seed))
    return result | {"messages": report.messages, "sent": report.sent_bytes, "tensors": len(filled)}


def mismatch(plan: RankPlan, other: RankPlan, transport: Transport) -> str:
    try:
        Resharder(other if plan.rank == 1 else plan, transport).agree(timeout_s=TIMEOUT_S)
    except PlanMismatch as error:
        return str(error)
    return ""


def death(
    plan: RankPlan, transport: Transport, source: ShardMap, target: ShardMap, last_words: Callable[[], None]
) -> dict[str, Any]:
    """Rank 0 ends without a word to its peers when all have agreed; the others must not wait for ever."""
    resharder = Resharder(plan, transport, max_message_bytes=MESSAGE_BYTES)
    resharder.agree(timeout_s=TIMEOUT_S)
    if plan.rank == 0:
        last_words()
        os._exit(0)
    begin = time.monotonic()
    try:
        resharder.run(held(source, plan.rank, seed=1), held(target, plan.rank, seed=None), timeout_s=2.0)
    except R3Error as error:
        return {"died": type(error).__name__, "after_s": time.monotonic() - begin}
    return {"died": "", "after_s": 0.0}


def main(job: dict[str, Any]) -> None:
    known = maps(job["trainers"], job["world_size"] - job["trainers"])
    transport = joined(job, 1)
    source, target = surveyed(transport, known, trainers=job["trainers"])
    plan = plan_reshard(source, target, rank=job["rank"])
    result = two_updates(plan, transport, source, target)
    result |= {"surveyed": [source.digest, target.digest] == [shards.digest for shards in known]}
    other = plan_reshard(
        source, source.shifted(job["trainers"]), rank=job["rank"], world_size=plan.world_size
    )
    result |= {"mismatch": mismatch(plan, other, joined(job, 2)), "hashes": [plan.hash, other.hash]}
    result |= death(plan, joined(job, 3), source, target, lambda: write_result(job, result))
    write_result(job, result)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
