"""What a whole update costs when the engine's loading is left out, beside a raw gloo broadcast of the same bytes.

Sender here, receivers in processes of their own. Every round interleaves all variants, on reused buffers.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from typing import Any

import torch

from r3channel.errors import EngineUnavailable
from r3channel.weights.group import WeightGroup, in_background
from r3channel.weights.progress import UpdateReport
from r3channel.weights.session import DEFAULT_BUCKET_BYTES, WeightSync
from r3channel.weights.sglang import EngineClient

_TIMEOUT_S = 120.0
BUCKET_BYTES = 64 << 20


class Client(EngineClient):
    """The receiver's two routes that an engine does not have."""

    def raw(self, sizes: list[int], *, group_name: str) -> None:
        self._command("/raw", {"sizes": sizes, "group_name": group_name}, timeout_s=_TIMEOUT_S)

    def digests(self) -> list[int]:
        return self._call("GET", "/model_info", None, timeout_s=_TIMEOUT_S)["digests"]


@contextlib.contextmanager
def receivers(count: int) -> Iterator[list[Client]]:
    command = [sys.executable, "-m", "r3channel.bench.weight_receiver"]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    try:
        yield [Client(f"http://127.0.0.1:{_port(child)}") for child in children]
    finally:
        for child in children:
            child.kill()
            child.communicate()


def _port(child: subprocess.Popen[str]) -> int:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise EngineUnavailable("the benchmark's receiver ended before it listened")
    return int(line)


def weights_of(total_bytes: int) -> list[tuple[str, torch.Tensor]]:
    """bfloat16 tensors of the sizes that experts, attention and routers of a MoE layer have, some 1 MB each on average."""
    shapes = [(768, 1024), (768, 1024), (1024, 768), (512, 1024), (128, 1024)]
    named, left, number = [], total_bytes, 0
    while left > 0:
        shape = shapes[number % len(shapes)]
        tensor = torch.empty(shape, dtype=torch.bfloat16).normal_()
        named.append((f"model.layers.{number}.weight", tensor))
        left -= tensor.nbytes
        number += 1
    return named


def measure(*, total_bytes: int, rounds: int) -> dict[str, Any]:
    """Medians over interleaved rounds: seconds of each variant. `wire` packs nothing beside the wire."""
    named = weights_of(total_bytes)
    nbytes = sum(tensor.nbytes for _, tensor in named)
    with receivers(1) as (client,):
        variants = {
            "packed": {"keep_copy": False, "on_nonfinite": "allow"},
            "digests": {"keep_copy": True, "on_nonfinite": "allow"},
            "checked": {"keep_copy": True, "on_nonfinite": "error"},
            "depth_1": {"keep_copy": True, "on_nonfinite": "allow", "depth": 1},
            "wire": {
                "keep_copy": False,
                "on_nonfinite": "allow",
                "depth": 1,
                "bucket_bytes": DEFAULT_BUCKET_BYTES,
            },
        }
        with contextlib.ExitStack() as stack:
            syncs = {
                name: stack.enter_context(_session([client], **options)) for name, options in variants.items()
            }
            raw = stack.enter_context(_Raw(client, nbytes))
            calls: dict[str, Callable[[], Any]] = {"raw": raw.whole, "raw_buckets": raw.buckets}
            for name, sync in syncs.items():
                calls[name] = _updater(sync, named)
            seen = _interleaved(calls, rounds=rounds)
            _check_digests(syncs["digests"], client, calls["digests"])
    medians = {name: _medians(values) for name, values in seen.items()}
    return {"bytes": nbytes, "tensors": len(named), "rounds": rounds, "variants": medians}


def measure_links(*, total_bytes: int, rounds: int) -> dict[str, float]:
    """Two receivers: a group each, and one for both. Median seconds of an update."""
    named = weights_of(total_bytes)
    with receivers(2) as clients, contextlib.ExitStack() as stack:
        each = stack.enter_context(_session(clients, links="each"))
        shared = stack.enter_context(_session(clients, links="shared"))
        calls = {"each": _updater(each, named), "shared": _updater(shared, named)}
        seen = _interleaved(calls, rounds=rounds)
    return {name: _medians(values)["wall_s"] for name, values in seen.items()}


def _session(clients: list[Client], **options: Any) -> WeightSync:
    sync = WeightSync(list(clients), **{"bucket_bytes": BUCKET_BYTES, **options})
    sync.connect(timeout_s=_TIMEOUT_S)
    return sync


def _updater(sync: WeightSync, named: list[tuple[str, torch.Tensor]]) -> Callable[[], dict[str, float]]:
    versions = iter(range(1, 1 << 30))

    def update() -> dict[str, float]:
        return _seconds(sync.update(iter(named), version=next(versions), timeout_s=_TIMEOUT_S))

    return update


def _seconds(report: UpdateReport) -> dict[str, float]:
    return {"wall_s": report.wall_s, "wire_s": report.seconds["wire"], **report.seconds}


def _check_digests(sync: WeightSync, client: Client, update: Callable[[], Any]) -> None:
    """Both ends hashed the same bytes, or the figures mean nothing."""
    update()
    assert sync.digests == tuple(client.digests()), "the receiver got other bytes than were sent"


class _Raw:
    """The limit: gloo's broadcast of as many bytes from one reused buffer, in one call and in bucket-sized ones."""

    def __init__(self, client: Client, nbytes: int) -> None:
        self._client, self._payload = client, torch.ones(nbytes, dtype=torch.uint8)
        self._group = WeightGroup("r3channel-bench-raw", world_size=2, timeout_s=_TIMEOUT_S)
        arguments = {"group_name": self._group.name, "backend": "gloo", "rank_offset": 1, "world_size": 2}
        joining = in_background(
            lambda: client.init_group(
                host=self._group.host, port=self._group.port, timeout_s=_TIMEOUT_S, **arguments
            ),
            name="bench",
        )
        self._group.join(timeout_s=_TIMEOUT_S)
        joining.result(_TIMEOUT_S)

    def whole(self) -> dict[str, float]:
        return self._send([len(self._payload)])

    def buckets(self) -> dict[str, float]:
        full, rest = divmod(len(self._payload), BUCKET_BYTES)
        return self._send([BUCKET_BYTES] * full + [rest] * bool(rest))

    def _send(self, sizes: list[int]) -> dict[str, float]:
        receiving = in_background(lambda: self._client.raw(sizes, group_name=self._group.name), name="bench")
        begun_s = time.monotonic()
        for size in sizes:
            self._group.broadcast(self._payload[:size], timeout_s=_TIMEOUT_S)
        wall_s = time.monotonic() - begun_s
        wait([receiving], timeout=_TIMEOUT_S)
        receiving.result()
        return {"wall_s": wall_s, "wire_s": wall_s}

    def __enter__(self) -> _Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self._group.close()


def _interleaved(
    calls: dict[str, Callable[[], dict[str, float]]], *, rounds: int
) -> dict[str, list[dict[str, float]]]:
    for call in calls.values():
        call()  # first touch of buffers, manifests made
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seen[name].append(call())
    return seen


def _medians(values: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(value.get(key, 0.0) for value in values) for key in values[0]}
