"""The reverse path into real engines, beside SGLang's own two formats and a raw gloo broadcast.

`engine`: whole updates of 1,193 tensors (10 MB). `pauses`: how long an engine of 61 MB stands still. `large`: 540 MB, compared at
the engine, beside a raw gloo broadcast of as many bytes. `serving`: requests of an engine that is updated twice a second.
`reshard`: two Megatron ranks (TP 2) fill one engine of two ranks by the exact plan (each is this file run as a program).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from r3channel.bench.harness import Effort, Parts, timed
from r3channel.embedded.model import write_model
from r3channel.embedded.sglang import EngineOptions, engines
from r3channel.transport.process_group import in_background
from r3channel.unproxied import urlopen
from r3channel.weights.group import WeightGroup
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.progress import UpdateReport
from r3channel.weights.session import WeightSync
from r3channel.weights.sglang import EngineClient

TARGETS = {
    "own_loader_vs_per_tensor": 7.0,
    "own_loader_vs_flattened": 2.0,
    "pause_of_flattened": 0.2,
    "engine_digests_of_raw_gloo": 0.6,
    "colocated_vs_flattened": 6.0,
    "p95_at_two_updates_a_second": 2.5,
}
"""The third and the last are wanted below, the others above."""
WAYS: dict[str, dict[str, Any]] = {
    "flattened": {"staged": False},
    "staged": {"staged": True},
    "colocated": {"staged": True, "wire": "shared_memory"},
}
_TIMEOUT_S, _READY_TIMEOUT_S = 120.0, 240.0
_TRAINERS = 2

Named = list[tuple[str, torch.Tensor]]


@contextmanager
def _model(*, hidden: int = 64) -> Iterator[tuple[Path, Named]]:
    from safetensors.torch import load_file

    torch.set_num_threads(1)  # trainer and engine share the machine
    with tempfile.TemporaryDirectory(prefix="r3channel-bench-") as folder:
        model = write_model(Path(folder) / "model", hidden=hidden)
        yield model, list(load_file(model / "model.safetensors").items())


@contextmanager
def _engine(model: Path, *, tp: int = 1) -> Iterator[str]:
    env = {"R3CHANNEL_WEIGHTS": "1"}
    options = EngineOptions(model=model, r3channel=False, env=env, tp=tp, capture=tp == 1)
    with engines(options, 1, timeout_s=_READY_TIMEOUT_S) as (url,):
        yield url


def _updates(url: str, named: Named, rounds: int) -> dict[str, list[UpdateReport]]:
    """By way, one after another: a session holds its engine."""
    found = {}
    for name, options in WAYS.items():
        with WeightSync([url], **options) as sync:
            sync.connect(timeout_s=_TIMEOUT_S)
            reports = [sync.update(iter(named), version=1, timeout_s=_TIMEOUT_S) for _ in range(rounds + 1)]
            found[name] = reports[1:]
    return found


def _walls_s(reports: dict[str, list[UpdateReport]]) -> dict[str, float]:
    return {name: median(report.wall_s for report in found) for name, found in reports.items()}


def _pause_s(report: UpdateReport) -> float:
    """From the pause to the engine's serving again. Staged bytes are packed and moved before it."""
    stages = ("pause", "begin", "commit", "end", "resume")
    if report.way != "staged":
        stages = (*stages, "pack", "digest", "wait_send", "convert", "plan", "verify")
    return sum(report.seconds.get(stage, 0.0) for stage in stages)


def engine(effort: Effort) -> dict[str, Any]:
    rounds = effort.rounds_of(12, 3)
    with _model() as (model, named), _engine(model) as url:
        with _PerTensor(EngineClient(url), named) as peer:
            update = timed(peer.update, clock=time.monotonic)
            per_tensor_s = median([update() for _ in range(rounds + 1)][1:])
        reports = _updates(url, named, rounds)
    wall_s, nbytes = {"per_tensor": per_tensor_s, **_walls_s(reports)}, sum(t.nbytes for _, t in named)
    found = {
        "tensors": len(named),
        "bytes": nbytes,
        "parameters_compared": reports["staged"][-1].verified,
        "wall_s": wall_s,
    }
    ratio = {
        "own_loader_vs_per_tensor": per_tensor_s / wall_s["staged"],
        "own_loader_vs_flattened": wall_s["flattened"] / wall_s["staged"],
    }
    return {"engine": found, "ratio": ratio, "targets": TARGETS}


def pauses(effort: Effort) -> dict[str, Any]:
    with _model(hidden=160) as (model, named), _engine(model) as url:
        reports = _updates(url, named, effort.rounds_of(12, 3))
    pause_s = {name: median(map(_pause_s, found)) for name, found in reports.items()}
    ratio = {
        "colocated_vs_flattened": pause_s["flattened"] / pause_s["colocated"],
        "pause_of_flattened": pause_s["staged"] / pause_s["flattened"],
    }
    return {"pauses": {"bytes": sum(t.nbytes for _, t in named), "pause_s": pause_s}, "ratio": ratio}


def large(effort: Effort) -> dict[str, Any]:
    rounds = effort.rounds_of(8, 2)
    with _model(hidden=effort.of(480, 160)) as (model, named), _engine(model) as url:
        reports = _updates(url, named, rounds)
    nbytes = sum(tensor.nbytes for _, tensor in named)
    raw_s, wall_s = _raw_gloo_s(nbytes, rounds), _walls_s(reports)
    found = {
        "bytes": nbytes,
        "parameters_compared": reports["staged"][-1].verified,
        "wall_s": {**wall_s, "raw_gloo": raw_s},
        "pause_s": median(map(_pause_s, reports["staged"])),
    }
    ratio = {
        "engine_digests_of_raw_gloo": raw_s / wall_s["staged"],
        "colocated_digests_of_raw_gloo": raw_s / wall_s["colocated"],
    }
    return {"large": found, "ratio": ratio}


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
    """Median seconds of a broadcast of one reused buffer to another process, until it has it."""
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{folder}/rendezvous"
        with subprocess.Popen([sys.executable, "-c", _PEER, where, str(nbytes), str(rounds + 1)]):
            dist.init_process_group("gloo", init_method=where, rank=0, world_size=2)
            payload = torch.ones(nbytes, dtype=torch.uint8)
            sent = timed(lambda: (dist.broadcast(payload, 0), dist.barrier()), clock=time.monotonic)
            seconds = [sent() for _ in range(rounds + 1)]
            dist.destroy_process_group()
    return median(seconds[1:])


def serving(effort: Effort) -> dict[str, Any]:
    seconds, walls_s, stop = effort.of(12.0, 2.0), [], threading.Event()
    with _model(hidden=160) as (model, named), _engine(model) as url, WeightSync([url], staged=True) as sync:
        sync.connect(timeout_s=_TIMEOUT_S)

        def update() -> None:
            begun_s = time.monotonic()
            walls_s.append(sync.update(iter(named), version=1, timeout_s=_TIMEOUT_S).wall_s)
            stop.wait(0.5 - (time.monotonic() - begun_s))

        def updates() -> None:
            while not stop.is_set():
                update()

        update()
        _latencies(url, seconds=1.0)
        before = _latencies(url, seconds=seconds)
        thread = threading.Thread(target=updates)
        thread.start()
        try:
            during = _latencies(url, seconds=seconds)
        finally:
            stop.set()
            thread.join(_TIMEOUT_S)
        quiet = _spread(before + _latencies(url, seconds=seconds))
    busy = _spread(during)
    found = {
        "update_s": median(walls_s),
        "updates_per_s": len(walls_s) / seconds,
        "undisturbed": quiet,
        "while_it_is_updated": busy,
    }
    return {"serving": found, "ratio": {"p95_at_two_updates_a_second": busy["p95_s"] / quiet["p95_s"]}}


def _latencies(url: str, *, seconds: float) -> list[float]:
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    body = json.dumps({"input_ids": list(range(5, 25)), "sampling_params": sampling}).encode()
    found, end_s = [], time.monotonic() + seconds
    while (begun_s := time.monotonic()) < end_s:
        request = urllib.request.Request(url + "/generate", body, {"Content-Type": "application/json"})
        with urlopen(request, timeout_s=_TIMEOUT_S) as reply:
            reply.read()
        found.append(time.monotonic() - begun_s)
    return found


def _spread(latencies_s: list[float]) -> dict[str, float]:
    ordered = sorted(latencies_s)
    p50_s, p95_s = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.95))
    return {"requests": len(ordered), "p50_s": p50_s, "p95_s": p95_s}


class _PerTensor:
    """SGLang's distributed update at its best: one call that names all tensors, their broadcasts posted at once."""

    def __init__(self, client: EngineClient, named: Named) -> None:
        self._client, self._tensors = client, [tensor for _, tensor in named]
        self._metas = [TensorMeta.of(name, tensor) for name, tensor in named]
        self._group = WeightGroup("r3channel-bench-per-tensor", world_size=2)
        where = {"host": self._group.host, "port": self._group.port, "group_name": self._group.name}
        joining = in_background(
            lambda: client.init_group(**where, backend="gloo", world_size=2, timeout_s=_TIMEOUT_S),
            name="bench",
        )
        self._group.join(timeout_s=_TIMEOUT_S)
        joining.result(_TIMEOUT_S)

    def update(self) -> None:
        client, name = self._client, self._group.name
        client.pause("retract", timeout_s=_TIMEOUT_S)
        client.begin(timeout_s=_TIMEOUT_S)
        loading = in_background(
            lambda: client.update_tensors(
                self._metas, group_name=name, flush_cache=True, load_format=None, timeout_s=_TIMEOUT_S
            ),
            name="bench",
        )
        wire = self._group.wire
        assert wire is not None
        flats = [tensor.view(-1).view(torch.uint8) for tensor in self._tensors]
        for sending in [wire.start_broadcast(0, flat, timeout_s=_TIMEOUT_S) for flat in flats]:
            sending.wait(timeout_s=_TIMEOUT_S)
        loading.result(_TIMEOUT_S)
        client.end(timeout_s=_TIMEOUT_S)
        client.set_version(1, timeout_s=_TIMEOUT_S)
        client.resume(timeout_s=_TIMEOUT_S)

    def __enter__(self) -> _PerTensor:
        return self

    def __exit__(self, *_: object) -> None:
        self._group.close()


def reshard(effort: Effort) -> dict[str, Any]:
    """`bytes_of_model`: what all ranks sent for one update, of the model's bytes. `largest_share_held`: of any trainer rank."""
    with _model() as (model, named), _engine(model, tp=2) as url:
        job = {"model": str(model), "url": url, "rounds": effort.rounds_of(8, 2)}
        job["meet"] = f"file://{model.parent / 'reshard-meet'}"
        commands = [
            [sys.executable, "-m", "r3channel.bench.weights", json.dumps({**job, "rank": rank})]
            for rank in range(_TRAINERS)
        ]
        ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        try:
            said = [
                json.loads(rank.communicate(timeout=_READY_TIMEOUT_S)[0].splitlines()[-1]) for rank in ranks
            ]
        finally:
            for rank in ranks:
                rank.kill()
    model_bytes = sum(tensor.nbytes for _, tensor in named)
    found = {
        "bytes_of_model": sum(rank["sent"] for rank in said) / model_bytes,
        "largest_share_held": max(rank["held"] for rank in said) / model_bytes,
        "update_s": said[0]["update_s"],
        "parameters_compared": said[0]["verified"],
    }
    return {"reshard": found}


def _trainer_rank(job: dict[str, Any]) -> dict[str, Any]:
    from r3channel.embedded import megatron
    from r3channel.plan.layout import TrainerLayout
    from r3channel.weights.convert import hf_shards

    torch.set_num_threads(1)
    layout = TrainerLayout.parse(f"tp={_TRAINERS}")
    megatron.init_distributed(rank=job["rank"], world_size=_TRAINERS, init_method=job["meet"], layout=layout)
    trained = megatron.build(job["model"], layout, dtype="float32")
    with WeightSync([job["url"]], plan="exact", group=torch.distributed.group.WORLD) as sync:
        sync.connect(timeout_s=_READY_TIMEOUT_S)
        shards = hf_shards(trained.bridge, trained.chunks)
        versions = range(1, job["rounds"] + 2)
        reports = [sync.update(shards, version=number, timeout_s=_READY_TIMEOUT_S) for number in versions]
    megatron.close_distributed()
    return {
        "sent": reports[-1].sent_bytes,
        "held": sum(shard.tensor.nbytes for shard in shards),
        "verified": reports[-1].verified,
        "update_s": median(report.wall_s for report in reports[1:]),
    }


PARTS: Parts = {part.__name__: part for part in (engine, pauses, large, serving, reshard)}

if __name__ == "__main__":
    print(json.dumps(_trainer_rank(json.loads(sys.argv[1]))))
