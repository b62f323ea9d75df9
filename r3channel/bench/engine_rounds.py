"""CPU time, throughput and bytes of real engines that differ only in how routing leaves them, in interleaved rounds.

All servers are alive at once and idle but one; every round gives each the same requests. CPU time is that of the server's
whole process family; the client's is not in it.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from r3channel.bench.timing import rounds_of
from r3channel.config import ChannelConfig
from r3channel.embedded.model import write_model
from r3channel.embedded.sglang import EngineOptions, EngineServer
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.spec import RoutingSpec
from r3channel.unproxied import urlopen

VARIANTS = ("off", "stock", "r3channel", "direct")
_TIMEOUT_S = 300.0
_SETTLE_S = 30.0


@dataclass(frozen=True, slots=True)
class Load:
    """What one round asks of each engine."""

    layers: int
    rounds: int
    requests: int
    prompt_tokens: int
    new_tokens: int

    @property
    def tokens(self) -> int:
        return self.requests * (self.prompt_tokens + self.new_tokens)


FULL = Load(layers=48, rounds=12, requests=8, prompt_tokens=480, new_tokens=32)
QUICK = Load(layers=4, rounds=2, requests=4, prompt_tokens=60, new_tokens=8)


@dataclass
class Seen:
    """One variant's rounds."""

    cpu_us_per_token: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    bytes_per_token: list[float] = field(default_factory=list)


def measure(load: Load, *, tp: int = 1) -> dict[str, dict[str, Any]]:
    """Of engines of `tp` ranks each.

    {variant: {"engine_cpu_us_per_token", "tokens_per_s", "http_bytes_per_token", "engine_cpu_ratio_to_off"}}.
    """
    spec = RoutingSpec(num_layers=load.layers, moe_layers=tuple(range(load.layers)), num_experts=128, top_k=8)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="r3channel-bench-")))
        relay = Relay(spec, TrainerLayout(), ChannelConfig(frame_timeout_s=_SETTLE_S))
        stack.callback(relay.close)
        servers = _start(load, folder, relay_url=relay.serve(token_file=folder / "token"), stack=stack, tp=tp)
        seen = {name: Seen() for name in servers}
        for number in rounds_of(load.rounds + 1, "engines"):
            prompts = _prompts(load, number)
            for name in sorted(servers, key=lambda name: (number + VARIANTS.index(name)) % len(VARIANTS)):
                _round(servers[name], prompts, load, relay=relay, seen=seen[name] if number else Seen())
    return {name: _summary(name, seen) for name in servers}


def _start(load: Load, folder: Path, *, relay_url: str, stack: ExitStack, tp: int) -> dict[str, EngineServer]:
    model = write_model(folder / "model", layers=load.layers, dense_layers=())
    direct = {
        "R3CHANNEL_DELIVERY": "direct",
        "R3CHANNEL_RELAY_URL": relay_url,
        "R3CHANNEL_TOKEN_FILE": str(folder / "token"),
        "R3CHANNEL_SENT_PREFIX_BYTES": "0",  # every prompt is another one
    }
    servers = {}
    for name in VARIANTS:
        options = EngineOptions(
            model=model,
            r3channel=name in ("r3channel", "direct"),
            capture=name != "off",
            tp=tp,
            max_total_tokens=16384,
            codec="stored",  # a random model repeats itself: what lz4 gains here, real routing does not give
            env=direct if name == "direct" else {},
        )
        servers[name] = stack.enter_context(EngineServer(options))
        servers[name].wait_ready(_TIMEOUT_S)  # one after the other: starts are the heaviest part
    return servers


def _prompts(load: Load, number: int) -> list[list[int]]:
    """Never seen before by an engine, so that no prefix cache helps."""
    rng = np.random.default_rng(number)
    return rng.integers(4, 512, (load.requests, load.prompt_tokens)).tolist()


def _round(server: EngineServer, prompts: list[list[int]], load: Load, *, relay: Relay, seen: Seen) -> None:
    capture = server.options.capture
    sent = relay.metrics.value("r3channel_bytes_total", leg="engine_direct")
    cpu_s, start_s = family_cpu_s(server.pid), time.monotonic()
    with ThreadPoolExecutor(len(prompts)) as pool:
        bodies = list(pool.map(lambda prompt: _generate(server.url, prompt, load, capture), prompts))
    wall_s = time.monotonic() - start_s
    replies = [json.loads(body) for body in bodies]
    if server.options.env:
        _receive(relay, prompts, replies)
    seen.cpu_us_per_token.append((family_cpu_s(server.pid) - cpu_s) / load.tokens * 1e6)
    seen.tokens_per_s.append(load.requests * load.new_tokens / wall_s)
    rows = load.tokens - load.requests
    direct = relay.metrics.value("r3channel_bytes_total", leg="engine_direct") - sent
    seen.bytes_per_token.append((sum(map(len, bodies)) + direct) / rows)


def _receive(relay: Relay, prompts: list[list[int]], replies: list[dict[str, Any]]) -> None:
    """The relay's part of direct delivery: the engine's sender is done when every frame is here."""
    names = [reply["meta_info"]["id"] for reply in replies]
    for name, prompt, reply in zip(names, prompts, replies, strict=True):
        relay.add(name, reply, prompt + reply["output_ids"])
    deadline_s = time.monotonic() + _SETTLE_S
    while relay.status()["waiting"] and time.monotonic() < deadline_s:
        time.sleep(0.005)
    relay.discard(names)


def _generate(url: str, prompt: list[int], load: Load, capture: bool) -> bytes:
    sampling = {"max_new_tokens": load.new_tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_routed_experts": capture}
    request = urllib.request.Request(
        url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urlopen(request, timeout_s=_TIMEOUT_S) as reply:
        return reply.read()


def family_cpu_s(pid: int) -> float:
    """CPU seconds of a process and its children so far."""
    import psutil

    top = psutil.Process(pid)
    return sum(sum(process.cpu_times()[:2]) for process in (top, *top.children(recursive=True)))


def _summary(name: str, seen: Mapping[str, Seen]) -> dict[str, Any]:
    own, off = seen[name], seen["off"]
    ratios = [mine / base for mine, base in zip(own.cpu_us_per_token, off.cpu_us_per_token, strict=True)]
    return {
        "engine_cpu_us_per_token": round(statistics.median(own.cpu_us_per_token), 1),
        "engine_cpu_ratio_to_off": round(statistics.median(ratios), 4),
        "engine_cpu_ratio_quartiles": [round(value, 4) for value in np.percentile(ratios, (25, 75)).tolist()],
        "tokens_per_s": round(statistics.median(own.tokens_per_s), 1),
        "http_bytes_per_token": round(statistics.median(own.bytes_per_token), 1),
    }
