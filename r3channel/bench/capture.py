"""What routing costs an engine, in one run with what it is compared to.

`off`: no capture; `stock`: SGLang's int32; `r3channel`: our frames in the reply; `direct`: our frames past the reply.
`engines`: real ones on CPU with a small random model of 48 layers x top-8 of 128, so ratios of engine CPU are an upper bound for
large models. All are alive at once and idle but one; every round gives each the same requests. CPU time is that of the server's
whole process family; the client's is not in it.
`scheduler`: what capture costs SGLang's scheduler thread at the shape of Qwen3-30B-A3B: its own functions on the real classes, in
one process (this file run as a program in the embedded environment). CPU time of the calling thread; fresh slots for every call,
in a host cache that is larger than the processor's caches, as an engine's is.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from r3channel.bench.harness import Effort, Parts, cpu_seconds_of, family_of, interleaved, posted, timed
from r3channel.bench.wire import generate, hello_of
from r3channel.config import ChannelConfig, EngineConfig
from r3channel.errors import EngineUnavailable
from r3channel.model.presets import model_named
from r3channel.model.spec import RoutingSpec
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.wire.parcel import FrameReference
from r3channel.wire.routing import RowKind

if TYPE_CHECKING:
    from examples.embedded.sglang import EngineServer

VARIANTS = ("off", "stock", "r3channel", "direct")
MODEL = "qwen3-30b-a3b"
SPEC = model_named(MODEL).spec
ROWS = (1000, 4000, 16000)
BATCH = 32
"""Requests that decode together: a request's decoded rows lie this many slots apart."""
ANSWER = "R3CHANNEL-CALLS "
_TIMEOUT_S, _CHILD_TIMEOUT_S, _SETTLE_S = 300.0, 900.0, 30.0


class Load(NamedTuple):
    """What one round asks of each engine."""

    layers: int
    requests: int
    prompt_tokens: int
    new_tokens: int

    @property
    def tokens(self) -> int:
        return self.requests * (self.prompt_tokens + self.new_tokens)


FULL, QUICK = Load(48, 8, 480, 32), Load(4, 4, 60, 8)


def engines(effort: Effort) -> dict[str, Any]:
    """{variant: {"engine_cpu_us_per_token", "tokens_per_s", "http_bytes_per_token", "engine_cpu_ratio_to_off"}}."""
    load = effort.of(FULL, QUICK)
    spec = RoutingSpec(num_layers=load.layers, moe_layers=tuple(range(load.layers)), num_experts=128, top_k=8)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="r3channel-bench-")))
        relay = Relay(spec, TrainerLayout(), ChannelConfig(frame_timeout_s=_SETTLE_S))
        stack.callback(relay.close)
        servers = _start(load, folder, relay_url=relay.serve(token_file=folder / "token"), stack=stack)
        calls = {
            name: partial(_round, server, load, relay, itertools.count()) for name, server in servers.items()
        }
        seen = interleaved(calls, rounds=effort.rounds_of(12, 2))
    off_us = [cpu_us for cpu_us, _, _ in seen["off"]]
    return {"variants": {name: _summary(rows, off_us) for name, rows in seen.items()}}


def _start(load: Load, folder: Path, *, relay_url: str, stack: ExitStack) -> dict[str, EngineServer]:
    from examples.embedded.model import write_model
    from examples.embedded.sglang import EngineOptions, EngineServer

    model = write_model(folder / "model", layers=load.layers, dense_layers=())
    direct = {
        "R3CHANNEL_DELIVERY": "direct",
        "R3CHANNEL_RELAY_URL": relay_url,
        "R3CHANNEL_TOKEN_FILE": str(folder / "token"),
    }
    servers = {}
    for name in VARIANTS:
        options = EngineOptions(
            model=model,
            r3channel=name in ("r3channel", "direct"),
            capture=name != "off",
            max_total_tokens=16384,
            codec="stored",  # a random model repeats itself: what lz4 gains here, real routing does not give
            env=direct if name == "direct" else {},
        )
        servers[name] = stack.enter_context(EngineServer(options))
        servers[name].wait_ready(_TIMEOUT_S)  # one after the other: starts are the heaviest part
    return servers


def _round(
    server: EngineServer, load: Load, relay: Relay, numbers: Iterator[int]
) -> tuple[float, float, float]:
    """(CPU us per token, tokens/s, bytes per row). Prompts were never seen before by an engine, so that no prefix cache helps."""
    rng = np.random.default_rng(next(numbers))
    prompts = rng.integers(4, 512, (load.requests, load.prompt_tokens)).tolist()
    options = {"max_new_tokens": load.new_tokens, "temperature": 0, "ignore_eos": True}
    wanted = {"sampling_params": options, "return_routed_experts": server.options.capture}
    requests = [{"input_ids": prompt, **wanted} for prompt in prompts]
    sent = relay.metrics.value("r3channel_bytes_total", leg="engine_direct")
    pids = family_of(server.pid)
    cpu_s, start_s = cpu_seconds_of(pids), time.monotonic()
    with ThreadPoolExecutor(len(prompts)) as pool:
        bodies = list(pool.map(partial(posted, server.url), requests))
    wall_s = time.monotonic() - start_s
    if server.options.env:
        _receive(relay, prompts, [json.loads(body) for body in bodies])
    cpu_us = (cpu_seconds_of(pids) - cpu_s) / load.tokens * 1e6
    direct = relay.metrics.value("r3channel_bytes_total", leg="engine_direct") - sent
    nbytes = sum(map(len, bodies)) + direct
    return cpu_us, load.requests * load.new_tokens / wall_s, nbytes / (load.tokens - load.requests)


def _receive(relay: Relay, prompts: list[list[int]], replies: list[dict[str, Any]]) -> None:
    """The relay's part of direct delivery: the engine's sender is done when every frame is here."""
    names = [reply["meta_info"]["id"] for reply in replies]
    for name, prompt, reply in zip(names, prompts, replies, strict=True):
        relay.add(name, reply, prompt + reply["output_ids"])
    deadline_s = time.monotonic() + _SETTLE_S
    while relay.status()["waiting"] and time.monotonic() < deadline_s:
        time.sleep(0.005)
    relay.discard(names)


def _summary(rows: list[tuple[float, float, float]], off_us: list[float]) -> dict[str, Any]:
    cpu_us, tokens_per_s, nbytes = (list(column) for column in zip(*rows, strict=True))
    ratios = [mine / base for mine, base in zip(cpu_us, off_us, strict=True)]
    return {
        "engine_cpu_us_per_token": round(median(cpu_us), 1),
        "engine_cpu_ratio_to_off": round(median(ratios), 4),
        "engine_cpu_ratio_quartiles": [round(value, 4) for value in np.percentile(ratios, (25, 75)).tolist()],
        "tokens_per_s": round(median(tokens_per_s), 1),
        "http_bytes_per_token": round(median(nbytes), 1),
    }


# -- the scheduler's thread ------------------------------------------------------------------------------------------------


def scheduler(effort: Effort) -> dict[str, Any]:
    """In a child: SGLang's classes need the embedded environment from the first import on."""
    from examples.embedded.sglang import environment

    command = [sys.executable, "-m", "r3channel.bench.capture"]
    command += [str(effort.rounds_of(20, 3)), str(effort.of(120_000, 20_000))]
    child = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S, check=False
    )
    for line in child.stdout.splitlines():
        if line.startswith(ANSWER):
            return json.loads(line.removeprefix(ANSWER))
    raise EngineUnavailable(f"SGLang's own functions could not be measured:\n{child.stderr[-2000:]}")


def scheduler_us(*, rounds: int, slots: int) -> dict[str, Any]:
    """{"scheduler_us": {variant: {rows of a request that ends: us}}, "ratios": {variant: {"scheduler_to_stock"}}}."""
    rng, ways = np.random.default_rng(0), _ends_of_a_request(slots)
    found: dict[str, dict[str, float]] = {name: {} for name in ways}
    for rows in ROWS:
        calls = {
            name: partial(_thread_us, end, partial(_slots_of, rows, slots, rng)) for name, end in ways.items()
        }
        for name, values in interleaved(calls, rounds=rounds, warm_up=2).items():
            found[name][str(rows)] = round(median(values), 1)
    stock = found["stock"]
    ratios = {
        name: {"scheduler_to_stock": {rows: round(found[name][rows] / us, 3) for rows, us in stock.items()}}
        for name in ("r3channel", "direct")
    }
    return {"scheduler_us": found, "ratios": ratios}


def _thread_us(call: Callable[[Any], object], draw: Callable[[], Any]) -> float:
    drawn = draw()
    return timed(lambda: call(drawn), clock=time.thread_time)() * 1e6


def _slots_of(rows: int, slots: int, rng: np.random.Generator) -> torch.Tensor:
    """int32 [1, rows + 1]: a quarter prefilled in one run of slots, the rest decoded among `BATCH` requests."""
    prompt, start = rows // 4, int(rng.integers(slots))
    decoded = start + prompt + np.arange(rows + 1 - prompt) * BATCH
    table_T = np.concatenate([start + np.arange(prompt), decoded]) % slots
    return torch.from_numpy(table_T.astype(np.int32))[None]


def _ends_of_a_request(slots: int) -> dict[str, Callable[[torch.Tensor], Any]]:
    """By variant, what the scheduler does with a request's slots before its reply can be sent: SGLang's capturer and its
    collecting method, on a host cache of our making, and the same through our hooks."""
    from sglang.srt.managers.scheduler_components import batch_result_processor as module
    from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer

    from r3channel.engine import sglang as room
    from r3channel.engine.capture import SlotRows
    from r3channel.engine.frame_sender import Outlet

    ids = torch.from_numpy(generate(model_named(MODEL), regime="U", rows=256))
    ids = ids.repeat(-(-slots // len(ids)), 1, 1)[:slots]  # a block that repeats
    rows = SlotRows(SPEC, ids)
    rows._stamps.fill_(rows._stamp((3, int(RowKind.DECODED))))
    hello = hello_of(SPEC, delivery="inband")

    def way(
        kind: type, *, collect: Any, host_cache: Any, sender: Any = None
    ) -> Callable[[torch.Tensor], Any]:
        capturer: Any = object.__new__(kind)
        capturer.topk_size, capturer.host_cache, capturer.spec = SPEC.top_k, host_cache, SPEC
        capturer.outlet = Outlet(EngineConfig(), hello)
        capturer.outlet._sender = sender

        def end(table: torch.Tensor) -> Any:
            module.get_global_experts_capturer = room.get_global_experts_capturer = lambda: capturer
            prompt = table.shape[1] // 4
            req = SimpleNamespace(
                rid="r", return_routed_experts=True, routed_experts=None, routed_experts_start_len=0
            )
            req.origin_input_ids, req.output_ids_through_stop = [1] * prompt, [1] * (table.shape[1] - prompt)
            req.kv = SimpleNamespace(req_pool_idx=0)
            collect(SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table)), req)
            return req.routed_experts

        return end

    theirs: Any = module.SchedulerBatchResultProcessor._maybe_collect_routed_experts
    ours = partial(
        way,
        room.FrameCapturer,
        collect=partial(room.collect_frame, theirs),
        host_cache=SimpleNamespace(rows=rows),
    )
    stock_cache = SimpleNamespace(buffer=ids.to(torch.int32))
    return {
        "stock": way(RoutedExpertsCapturer, collect=theirs, host_cache=stock_cache),
        "r3channel": ours(),
        "direct": ours(sender=SimpleNamespace(offer=partial(_queued, deque(maxlen=4)))),
    }


def _queued(waiting: deque[Any], unfinished: Any) -> FrameReference:
    """A sender whose other thread is never scheduled: what it would do is not the scheduler thread's cost."""
    waiting.append(unfinished)
    return FrameReference(
        sample_key=unfinished.sample_key,
        boot_id=1,
        serial=1,
        first_row=unfinished.first_row,
        rows=unfinished.rows,
    )


PARTS: Parts = {"scheduler": scheduler, "engines": engines}

if __name__ == "__main__":
    print(ANSWER + json.dumps(scheduler_us(rounds=int(sys.argv[1]), slots=int(sys.argv[2]))), flush=True)
