"""The reverse path into real engines, beside SGLang's own two formats and a raw gloo broadcast.

`engine`: whole updates of 1,193 tensors (10 MB). `pauses`: how long an engine of 61 MB stands still. `large`: 540 MB, compared at
the engine, beside a raw gloo broadcast of as many bytes. `size`: what one of 64 trainer ranks of Qwen3-235B's experts learns of
its own parameters, and what linking 64 engine ranks costs it. It uses no values and sends nothing.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import Mock

import torch

from r3channel.bench.harness import Effort, Parts, time_call
from r3channel.transport.process_group import in_background
from r3channel.weights import convert, loader_map
from r3channel.weights.config import SyncConfig
from r3channel.weights.engine import EngineHandle
from r3channel.weights.geometry import Needs, report_of
from r3channel.weights.groups import WeightGroup
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.progress import Deadline, UpdateReport
from r3channel.weights.rank_link import RankLink
from r3channel.weights.ranks import TrainerRanks
from r3channel.weights.send_planner import SendPlanner, UpdateSpec, check_complete
from r3channel.weights.session import WeightSync

WAYS: dict[str, dict[str, Any]] = {
    "flattened": {"staged": False}, "staged": {"staged": True}, "colocated": {"staged": True, "wire": "shared_memory"},
    "grouped": {"wire": "gloo"},
}  # fmt: skip
_TIMEOUT_S, _READY_TIMEOUT_S = 120.0, 240.0

Named = list[tuple[str, torch.Tensor]]


@contextmanager
def _engine(*, hidden: int = 64) -> Iterator[tuple[str, Named]]:
    """Start a real engine of a small model.

    Yield its address and the model's tensors.
    """
    from safetensors.torch import load_file

    from examples.embedded.model import write_model
    from examples.embedded.sglang import EngineOptions, engines

    torch.set_num_threads(1)  # trainer and engine share the machine
    with tempfile.TemporaryDirectory(prefix="r3channel-bench-") as folder:
        model = write_model(Path(folder) / "model", hidden=hidden)
        named = list(load_file(model / "model.safetensors").items())
        options = EngineOptions(model=model, r3channel=False, env={"R3CHANNEL_WEIGHTS": "1"})
        with engines(options, 1, timeout_s=_READY_TIMEOUT_S) as (url,):
            yield url, named


def _updates(url: str, named: Named, rounds: int) -> dict[str, Any]:
    """Return medians by way, measured one way after another.

    A session holds its engine, so ways cannot be interleaved.
    """
    reports: dict[str, list[UpdateReport]] = {}
    for name, options in WAYS.items():
        make = partial(WeightSync.sharded, group=None) if name == "grouped" else WeightSync.whole
        with make([url], **options) as sync:
            sync.connect(timeout_s=_TIMEOUT_S)
            update = partial(sync.update, named, version=1, timeout_s=_TIMEOUT_S)
            reports[name] = [update() for _ in range(rounds + 1)][1:]
    return {
        "tensors": len(named), "bytes": sum(tensor.nbytes for _, tensor in named),
        "parameters_compared": reports["staged"][-1].verified,
        "wall_s": {name: median(report.wall_s for report in found) for name, found in reports.items()},
        "pause_s": {name: median(report.paused_s for report in found) for name, found in reports.items()},
    }  # fmt: skip


def engine(effort: Effort) -> dict[str, Any]:
    rounds = effort.rounds_of(12, 3)
    with _engine() as (url, named):
        with _per_tensor(EngineHandle(url), named) as peer:
            update = time_call(peer, clock=time.monotonic)
            per_tensor_s = median([update() for _ in range(rounds + 1)][1:])
        found = _updates(url, named, rounds)
    found["wall_s"] = {"per_tensor": per_tensor_s, **found["wall_s"]}
    return {"engine": found}


def pauses(effort: Effort) -> dict[str, Any]:
    with _engine(hidden=160) as (url, named):
        return {"pauses": _updates(url, named, effort.rounds_of(12, 3))}


def large(effort: Effort) -> dict[str, Any]:
    rounds = effort.rounds_of(8, 2)
    with _engine(hidden=effort.choose(480, 160)) as (url, named):
        found = _updates(url, named, rounds)
    found["wall_s"]["raw_gloo"] = _raw_gloo_s(found["bytes"], rounds)
    return {"large": found}


_PEER = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=sys.argv[1], rank=1, world_size=2)
payload = torch.empty(int(sys.argv[2]), dtype=torch.uint8)
for _ in range(int(sys.argv[3])):
    dist.broadcast(payload, 0)
    dist.barrier()
dist.destroy_process_group()
"""


def _raw_gloo_s(nbytes: int, rounds: int) -> float:
    """Return the median seconds of a broadcast to another process.

    One buffer is reused. A broadcast ends when the other process has it.
    """
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{folder}/rendezvous"
        with subprocess.Popen([sys.executable, "-c", _PEER, where, str(nbytes), str(rounds + 1)]):
            dist.init_process_group("gloo", init_method=where, rank=0, world_size=2)
            payload = torch.ones(nbytes, dtype=torch.uint8)
            sent = time_call(lambda: (dist.broadcast(payload, 0), dist.barrier()), clock=time.monotonic)
            seconds = [sent() for _ in range(rounds + 1)]
            dist.destroy_process_group()
    return median(seconds[1:])


@contextmanager
def _per_tensor(client: EngineHandle, named: Named) -> Iterator[Callable[[], None]]:
    """Yield a call that runs SGLang's distributed update at its best.

    One request names all tensors, and their broadcasts are posted at once.
    """
    metas = [TensorMeta.of(name, tensor) for name, tensor in named]
    flats = [tensor.view(-1).view(torch.uint8) for _, tensor in named]
    group = WeightGroup("r3channel-bench-per-tensor", world_size=2)
    wait: dict[str, Any] = {"timeout_s": _TIMEOUT_S}
    joining = in_background(lambda: client.init_group(group.where, **wait), name="bench")
    group.join(**wait)
    joining.result(_TIMEOUT_S)
    wire = group.wire
    assert wire is not None
    options = {"group_name": group.name, "flush_cache": True, "load_format": None, **wait}

    def update() -> None:
        client.pause("retract", **wait)
        client.begin(**wait)
        loading = in_background(lambda: client.update_tensors(metas, **options), name="bench")
        for sending in [wire.start_broadcast(0, flat, **wait) for flat in flats]:
            sending.wait(**wait)
        loading.result(_TIMEOUT_S)
        client.end(**wait)
        client.commit(1, **wait)
        client.resume(**wait)

    try:
        yield update
    finally:
        group.close()


_RANKS, _KINDS, _EXPERTS = 64, 8, {"fc1": (3072, 4096), "fc2": (4096, 1536)}


def size(effort: Effort) -> dict[str, Any]:
    """Measure what linking costs a rank of a large model.

    Engine ranks are of 8 kinds. Each kind takes all tensors, in its own order.

    Returns:
        CPU seconds, and the resident MB that linking adds.
    """
    from psutil import Process

    parts = [convert.Part("embedding", torch.empty(37_984, 4096, device="meta"), 0, 1, 4)]
    for number, fc in itertools.product(range(effort.choose(94, 4) * 128), _EXPERTS):
        parts.append(convert.Part(f"{number}.{fc}", torch.empty(_EXPERTS[fc], device="meta"), -1, 0, 1))
    make = partial(convert.shards_of, parts, convert.merged_tp, _gate_and_up, owner=torch.nn.Module())
    found: dict[str, Any] = {"places_first_and_again_s": [time_call(make)() for _ in range(2)]}
    held = [(shard.meta, shard.box) for shard in make()[1:]]
    metas, told = [meta for meta, _ in held], list[str]()
    items = (len(held) + _KINDS) * max(box.numel for _, box in held)
    whole = TensorMeta(name="all", dtype=metas[0].dtype, shape=(items,))
    for first in range(_KINDS):
        rows = ((n, box, 0, (n + first) * box.numel, (box.shape[1], 1)) for n, (_, box) in enumerate(held))
        parts_P = tuple(map(loader_map.Part, *zip(*rows, strict=True)))
        told.append(json.dumps(Needs((whole,), loader_map.PartTable.of(parts_P)).to_dict()))
    ranks, reports = TrainerRanks(), [report_of(held[rank::_RANKS]) for rank in range(_RANKS)]
    vars(ranks).update(size=_RANKS, exchange=lambda value, _: [value], exchange_bytes=lambda *_: reports)
    planner, links, deadline = SendPlanner(ranks, SyncConfig(engines=[])), list[RankLink](), Deadline(600, "link")  # fmt: skip

    def link() -> None:
        planner.survey(UpdateSpec((tuple(held[::_RANKS]),), None, tuple(metas)), deadline)
        needs = (Needs.from_dict(json.loads(told[rank % _KINDS]), 1 << 20) for rank in range(_RANKS))
        links.extend(RankLink("engine", rank, Mock(), one, "", 0) for rank, one in enumerate(needs))
        check_complete(links, metas, names=True)
        planner.aim(links, deadline)

    before = Process().memory_info().rss
    found |= {"tensors": len(metas), "link_64_s": time_call(link)()}
    return {"size": found | {"link_64_mb": (Process().memory_info().rss - before) / 1e6}}


def _gate_and_up(name: str, whole: torch.Tensor) -> Named:
    halves = whole.chunk(2) if "fc1" in name else [whole]
    return [(f"{name}.{number}", half) for number, half in enumerate(halves)]


PARTS: Parts = {part.__name__: part for part in (engine, pauses, large, size)}
