"""Weight updates of real SGLang engines on this machine: per tensor against flattened, and one engine filled beside another."""

from __future__ import annotations

import json
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from r3channel.embedded.model import write_model
from r3channel.embedded.sglang import EngineOptions, EngineServer
from r3channel.unproxied import urlopen
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.session import WeightSync
from r3channel.weights.sglang import EngineClient
from r3channel.weights.wires import WeightGroup, in_background

_TIMEOUT_S = 120.0
_READY_TIMEOUT_S = 240.0
LATENCY_S = 6.0
"""Of each latency run, disturbed and undisturbed."""

Named = list[tuple[str, torch.Tensor]]


def measure(folder: Path, *, pairs: int) -> dict[str, Any]:
    """Interleaved whole updates (pause to continue) of one engine: SGLang's own format, ours, ours in one bucket per MB."""
    model = write_model(folder / "model")  # 1,193 tensors
    named = _tensors(model)
    with (
        _engines(model, 1) as (url,),
        _PerTensor(EngineClient(url), named) as peer,
        WeightSync([url]) as flat,
        WeightSync([url], bucket_bytes=1 << 20) as small,
    ):
        flat.connect(timeout_s=_TIMEOUT_S)
        small.connect(timeout_s=_TIMEOUT_S)
        calls: dict[str, Callable[[], object]] = {
            "per_tensor": peer.update,
            "flattened": lambda: flat.update(iter(named), version=1, timeout_s=_TIMEOUT_S),
            "flattened_1_mb_buckets": lambda: small.update(iter(named), version=1, timeout_s=_TIMEOUT_S),
        }
        seen = _interleaved(calls, rounds=pairs)
    ratios = [slow / fast for slow, fast in zip(seen["per_tensor"], seen["flattened"], strict=True)]
    return {
        "tensors": len(named),
        "bytes": sum(tensor.nbytes for _, tensor in named),
        "pairs": pairs,
        "wall_s": {name: statistics.median(values) for name, values in seen.items()},
        "vs_per_tensor": statistics.median(ratios),
        "vs_per_tensor_range": [min(ratios), max(ratios)],
    }


def measure_surgical(folder: Path) -> dict[str, Any]:
    """Latency of one engine's requests while the other is filled again and again, and while nothing happens."""
    model = write_model(folder / "model")
    named = _tensors(model)
    with _engines(model, 2) as (healthy, other), WeightSync([healthy, other], keep_copy=True) as sync:
        sync.connect(timeout_s=_TIMEOUT_S)
        sync.update(iter(named), version=1, timeout_s=_TIMEOUT_S)
        _latencies(healthy, seconds=1.0)
        before = _latencies(healthy, seconds=LATENCY_S)
        fills: list[float] = []
        stop = threading.Event()

        def fill() -> None:
            while not stop.is_set():
                fills.append(sync.update_one(other, timeout_s=_TIMEOUT_S).wall_s)

        thread = threading.Thread(target=fill)
        thread.start()
        during = _latencies(healthy, seconds=LATENCY_S)
        stop.set()
        thread.join(_TIMEOUT_S)
        after = _latencies(healthy, seconds=LATENCY_S)
    return {
        "update_one_s": statistics.median(fills),
        "updates": len(fills),
        "undisturbed": _spread(before + after),
        "while_the_other_is_filled": _spread(during),
    }


@contextmanager
def _engines(model: Path, count: int) -> Iterator[list[str]]:
    servers = [EngineServer(EngineOptions(model=model, r3channel=False)) for _ in range(count)]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready(_READY_TIMEOUT_S)
        yield [server.url for server in servers]
    finally:
        for server in servers:
            server.close()


def _tensors(model: Path) -> Named:
    from safetensors.torch import load_file

    return list(load_file(model / "model.safetensors").items())


class _PerTensor:
    """SGLang's distributed update at its best: one call that names all tensors, their broadcasts posted at once."""

    def __init__(self, client: EngineClient, named: Named) -> None:
        self._client, self._tensors = client, [tensor for _, tensor in named]
        self._metas = [TensorMeta.of(name, tensor) for name, tensor in named]
        self._group = WeightGroup("r3channel-bench-per-tensor", world_size=2, timeout_s=_TIMEOUT_S)
        where = {"host": self._group.host, "port": self._group.port, "group_name": self._group.name}
        joining = in_background(
            lambda: client.init_group(
                **where, backend="gloo", rank_offset=1, world_size=2, timeout_s=_TIMEOUT_S
            ),
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
                self._metas, group_name=name, flush_cache=True, timeout_s=_TIMEOUT_S
            ),
            name="bench",
        )
        self._group.broadcast_each(self._tensors, timeout_s=_TIMEOUT_S)
        loading.result(_TIMEOUT_S)
        client.end(timeout_s=_TIMEOUT_S)
        client.set_version(1, timeout_s=_TIMEOUT_S)
        client.resume(timeout_s=_TIMEOUT_S)

    def __enter__(self) -> _PerTensor:
        return self

    def __exit__(self, *_: object) -> None:
        self._group.close()


def _interleaved(calls: dict[str, Callable[[], object]], *, rounds: int) -> dict[str, list[float]]:
    for call in calls.values():
        call()
    seen: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begun_s = time.monotonic()
            call()
            seen[name].append(time.monotonic() - begun_s)
    return seen


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
