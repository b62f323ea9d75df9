"""Weight updates of real SGLang engines on this machine: per tensor against flattened, and one engine filled beside another."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from r3channel.bench import reshard_ranks
from r3channel.embedded.model import write_model
from r3channel.embedded.sglang import EngineOptions, engines
from r3channel.transport.process_group import in_background
from r3channel.unproxied import urlopen
from r3channel.weights.group import WeightGroup
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.progress import UpdateReport
from r3channel.weights.session import WeightSync
from r3channel.weights.sglang import EngineClient

_TIMEOUT_S = 120.0
_READY_TIMEOUT_S = 240.0
LATENCY_S = 6.0
"""Of each latency run, disturbed and undisturbed."""

Named = list[tuple[str, torch.Tensor]]


def measure(folder: Path, *, pairs: int) -> dict[str, Any]:
    """Whole updates of one engine: SGLang's own formats, and ours over TCP and in shared memory."""
    model = write_model(folder / "model")  # 1,193 tensors
    named = _tensors(model)
    with (
        _engines(model, 1, receiving=True) as (url,),
        _PerTensor(EngineClient(url), named) as peer,
    ):
        per_tensor_s = statistics.median(_timed(peer.update, pairs))
        reports = _updates(url, named, pairs)
    wall_s = {name: statistics.median(one.wall_s for one in found) for name, found in reports.items()}
    return {
        "tensors": len(named),
        "bytes": sum(tensor.nbytes for _, tensor in named),
        "rounds": pairs,
        "parameters_compared": reports["staged"][-1].verified,
        "wall_s": {"per_tensor": per_tensor_s, **wall_s},
        "ratio": {
            "own_loader_vs_per_tensor": per_tensor_s / wall_s["staged"],
            "own_loader_vs_flattened": wall_s["flattened"] / wall_s["staged"],
        },
    }


def measure_pauses(folder: Path, *, hidden: int, rounds: int) -> dict[str, Any]:
    """How long one engine is paused for an update, by way."""
    model = write_model(folder / f"model-{hidden}", hidden=hidden)
    named = _tensors(model)
    with _engines(model, 1, receiving=True) as (url,):
        reports = _updates(url, named, rounds)
    pause_s = {name: statistics.median(map(_pause_s, found)) for name, found in reports.items()}
    return {
        "bytes": sum(tensor.nbytes for _, tensor in named),
        "pause_s": pause_s,
        "ratio": {
            "colocated_vs_flattened": pause_s["flattened"] / pause_s["colocated"],
            "pause_of_flattened": pause_s["staged"] / pause_s["flattened"],
        },
    }


def _updates(url: str, named: Named, rounds: int) -> dict[str, list[UpdateReport]]:
    """By way, one after another: a session holds its engine."""
    found = {}
    for name, options in _WAYS.items():
        with WeightSync([url], **options) as sync:
            sync.connect(timeout_s=_TIMEOUT_S)
            sync.update(iter(named), version=1, timeout_s=_TIMEOUT_S)
            found[name] = [sync.update(iter(named), version=1, timeout_s=_TIMEOUT_S) for _ in range(rounds)]
    return found


_WAYS: dict[str, dict[str, Any]] = {
    "flattened": {"staged": False},
    "staged": {"staged": True},
    "colocated": {"staged": True, "wire": "shared_memory"},
}


def _pause_s(report: UpdateReport) -> float:
    """From the pause to the engine's serving again. Staged bytes are packed and moved before it."""
    stages = ("pause", "begin", "commit", "end", "resume")
    if report.way != "staged":
        stages = (*stages, "pack", "digest", "wait_send", "convert", "plan", "verify")
    return sum(report.seconds.get(stage, 0.0) for stage in stages)


def _timed(call: Callable[[], object], rounds: int) -> list[float]:
    call()
    found = []
    for _ in range(rounds):
        begun_s = time.monotonic()
        call()
        found.append(time.monotonic() - begun_s)
    return found


def measure_large(folder: Path, *, hidden: int, rounds: int) -> dict[str, Any]:
    """One large model to a real engine, by way, beside raw gloo of as many bytes. Staged bytes are compared there."""
    model = write_model(folder / f"model-{hidden}", hidden=hidden)
    named = _tensors(model)
    nbytes = sum(tensor.nbytes for _, tensor in named)
    with _engines(model, 1, receiving=True) as (url,):
        reports = _updates(url, named, rounds)
    raw = _raw_gloo(nbytes, rounds)
    wall_s = {name: statistics.median(report.wall_s for report in found) for name, found in reports.items()}
    return {
        "bytes": nbytes,
        "tensors": len(named),
        "parameters_compared": reports["staged"][-1].verified,
        **{f"{name}_s": seconds for name, seconds in wall_s.items()},
        "pause_s": statistics.median(map(_pause_s, reports["staged"])),
        "raw_s": statistics.median(raw),
    }


_PEER = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=sys.argv[1], rank=1, world_size=2)
payload = torch.empty(int(sys.argv[2]), dtype=torch.uint8)
for _ in range(int(sys.argv[3])):
    dist.broadcast(payload, 0)
    dist.barrier()
dist.destroy_process_group()
"""


def _raw_gloo(nbytes: int, rounds: int) -> list[float]:
    """Seconds of each broadcast of one reused buffer to another process, until it has it."""
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{folder}/rendezvous"
        command = [sys.executable, "-c", _PEER, where, str(nbytes), str(rounds + 1)]
        with subprocess.Popen(command):
            dist.init_process_group("gloo", init_method=where, rank=0, world_size=2)
            payload = torch.ones(nbytes, dtype=torch.uint8)

            def once() -> None:
                dist.broadcast(payload, 0)
                dist.barrier()

            found = _timed(once, rounds)
            dist.destroy_process_group()
    return found


def measure_surgical(folder: Path) -> dict[str, Any]:
    """Latency of one engine's requests while the other is filled again and again, and while nothing happens."""
    model = write_model(folder / "model")
    named = _tensors(model)
    with _engines(model, 2) as (healthy, other), WeightSync([healthy, other], keep_copy=True) as sync:
        sync.connect(timeout_s=_TIMEOUT_S)
        sync.update(iter(named), version=1, timeout_s=_TIMEOUT_S)
        _latencies(healthy, seconds=1.0)
        before = _latencies(healthy, seconds=LATENCY_S)
        with _repeated(lambda: sync.update_one(other, timeout_s=_TIMEOUT_S).wall_s, every_s=0.0) as fills:
            during = _latencies(healthy, seconds=LATENCY_S)
        after = _latencies(healthy, seconds=LATENCY_S)
    return {
        "update_one_s": statistics.median(fills),
        "updates": len(fills),
        "undisturbed": _spread(before + after),
        "while_the_other_is_filled": _spread(during),
    }


def measure_serving(folder: Path, *, hidden: int, seconds: float) -> dict[str, Any]:
    """Latency of an engine's requests while it is updated twice a second, staged, and while nothing happens."""
    model = write_model(folder / f"model-{hidden}", hidden=hidden)
    named = _tensors(model)

    def update() -> float:
        return sync.update(iter(named), version=1, timeout_s=_TIMEOUT_S).wall_s

    with _engines(model, 1, receiving=True) as (url,), WeightSync([url], staged=True) as sync:
        sync.connect(timeout_s=_TIMEOUT_S)
        update()
        _latencies(url, seconds=1.0)
        before = _latencies(url, seconds=seconds)
        with _repeated(update, every_s=0.5) as walls:
            during = _latencies(url, seconds=seconds)
        after = _latencies(url, seconds=seconds)
    return {
        "bytes": sum(tensor.nbytes for _, tensor in named),
        "update_s": statistics.median(walls),
        "updates_per_s": len(walls) / seconds,
        "undisturbed": _spread(before + after),
        "while_it_is_updated": _spread(during),
    }


@contextmanager
def _repeated(call: Callable[[], float], *, every_s: float) -> Iterator[list[float]]:
    """Inside, a thread makes the call again and again, from start to start at least `every_s`; what it returned."""
    found: list[float] = []
    stop = threading.Event()

    def repeat() -> None:
        while not stop.is_set():
            begun_s = time.monotonic()
            found.append(call())
            stop.wait(every_s - (time.monotonic() - begun_s))

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join(_TIMEOUT_S)


def measure_reshard(folder: Path, *, rounds: int) -> dict[str, Any]:
    """Two Megatron ranks fill one engine of two ranks."""
    model = write_model(folder / "model")
    with _engines(model, 1, receiving=True, tp=2) as (url,):
        return reshard_ranks.measure(model, url, folder=folder, rounds=rounds)


@contextmanager
def _engines(model: Path, count: int, *, receiving: bool = False, tp: int = 1) -> Iterator[list[str]]:
    env = {"R3CHANNEL_WEIGHTS": "1"} if receiving else {}
    options = EngineOptions(model=model, r3channel=False, env=env, tp=tp, capture=tp == 1)
    with engines(options, count, timeout_s=_READY_TIMEOUT_S) as urls:
        yield urls


def _tensors(model: Path) -> Named:
    from safetensors.torch import load_file

    return list(load_file(model / "model.safetensors").items())


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
        client = self._client
        client.pause("retract", timeout_s=_TIMEOUT_S)
        client.begin(timeout_s=_TIMEOUT_S)
        name = self._group.name
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
    at = {name: ordered[int(share * (len(ordered) - 1))] for name, share in (("p50", 0.5), ("p95", 0.95))}
    return {"requests": len(ordered), **{f"{name}_s": value for name, value in at.items()}}
