"""What routing costs an engine, in one run with what it is compared to.

`off`: no capture; `stock`: SGLang's int32; `r3channel`: our frames in the reply; `direct`: our frames past the reply.
`engine`: a real one on CPU with a small random model of 48 layers x top-8 of 128, so ratios of its CPU are an upper bound for
large models. One process serves all ways: from request to request another capturer, or none, stands in SGLang's place, since two
equal engines differ by 5 % from their places in memory alone. CPU time is that of the server's whole process family; the client's
is not in it. `off_again` is `off` once more: what the benchmark can resolve.
`scheduler`: what capture costs SGLang's scheduler thread at the shape of Qwen3-30B-A3B: its own functions, real capturers, in
one process (this file run as a program in the embedded environment). CPU time of the calling thread; fresh slots for every call,
in host caches that are larger than the processor's caches, as an engine's are.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from r3channel.bench.harness import (
    Effort,
    Parts,
    cpu_seconds_of,
    family_of,
    interleaved,
    posted,
    ratio,
    timed,
)
from r3channel.bench.wire import generate
from r3channel.config import ChannelConfig
from r3channel.errors import EngineUnavailable
from r3channel.model.presets import model_named
from r3channel.model.spec import RoutingSpec
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.wire.parcel import FrameReference
from r3channel.wire.routing import RowKind

if TYPE_CHECKING:
    from examples.embedded.sglang import EngineServer

WAYS = ("off", "stock", "r3channel", "direct", "off_again")
MODEL = "qwen3-30b-a3b"
SPEC = model_named(MODEL).spec
ROWS = (1000, 4000, 16000)
"""Of a request that finishes."""
PASS_ROWS = (256, 8192)
"""Of a forward pass: one that decodes, and one that prefills a chunk."""
BATCH = 32
"""Requests that decode together: a request's decoded rows lie this many slots apart."""
ANSWER = "R3CHANNEL-CALLS "
_TIMEOUT_S, _CHILD_TIMEOUT_S, _SETTLE_S = 300.0, 900.0, 30.0
_LAYERS, _PROMPT_TOKENS, _NEW_TOKENS = 48, 480, 4
"""One request a round: how several meet in a batch would differ from round to round."""
_PLUGIN = {
    "METADATA": "Metadata-Version: 2.1\nName: r3channel-bench\nVersion: 0\n",
    "entry_points.txt": "[sglang.srt.plugins]\nr3channel_bench = r3channel.bench.capture:register\n",
}


# -- a real engine ---------------------------------------------------------------------------------------------------------


def engine(effort: Effort) -> dict[str, Any]:
    """{"variants": {way: {"engine_cpu_us_per_token", "http_bytes_per_token", "engine_cpu_ratio_to_off"}}}."""
    layers = tuple(range(_LAYERS))
    spec = RoutingSpec(num_layers=_LAYERS, moe_layers=layers, num_experts=SPEC.num_experts, top_k=SPEC.top_k)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="r3channel-bench-")))
        relay = Relay(spec, TrainerLayout(), ChannelConfig(frame_timeout_s=_SETTLE_S))
        stack.callback(relay.close)
        server = stack.enter_context(
            _server(folder, relay_url=relay.serve(token_file=folder / "token"), token=folder / "token")
        )
        server.wait_ready(_TIMEOUT_S)
        asked = partial(_round, server, family_of(server.pid), relay, itertools.count())
        seen = interleaved({way: partial(asked, way) for way in WAYS}, rounds=effort.rounds_of(120, 25))
    cpu_us = {way: [us for us, _ in rounds] for way, rounds in seen.items()}
    without_us = [sum(pair) / 2 for pair in zip(cpu_us["off"], cpu_us["off_again"], strict=True)]
    bases = dict.fromkeys(WAYS, without_us) | {"off_again": cpu_us["off"]}
    variants = {
        way: {
            "engine_cpu_us_per_token": round(median(cpu_us[way]), 1),
            "engine_cpu_ratio_to_off": ratio(cpu_us[way], bases[way]),
            "http_bytes_per_token": round(median(nbytes for _, nbytes in rounds), 1),
        }
        for way, rounds in seen.items()
    }
    return {"pairs": len(without_us), "variants": variants}


def _server(folder: Path, *, relay_url: str, token: Path) -> EngineServer:
    from examples.embedded.model import write_model
    from examples.embedded.sglang import EngineOptions, EngineServer, environment

    plugin = folder / "r3channel_bench-0.dist-info"
    plugin.mkdir()
    for name, text in _PLUGIN.items():
        (plugin / name).write_text(text)
    options = EngineOptions(
        model=write_model(folder / "model", layers=_LAYERS, dense_layers=()),
        codec="stored",  # a random model repeats itself: what lz4 gains here, real routing does not give
        env={
            "R3CHANNEL_DELIVERY": "direct",
            "R3CHANNEL_RELAY_URL": relay_url,
            "R3CHANNEL_TOKEN_FILE": str(token),
            "PYTHONPATH": f"{folder}:{environment()['PYTHONPATH']}",
        },
    )
    return EngineServer(options)


def _round(
    server: EngineServer, pids: Sequence[int], relay: Relay, numbers: Iterator[int], way: str
) -> tuple[float, float]:
    """(CPU us per token, bytes per row). The prompt was never seen before by the engine, so that no prefix cache helps."""
    number = next(numbers)
    prompt = np.random.default_rng(number).integers(4, 512, _PROMPT_TOKENS).tolist()
    request = {
        "rid": f"{way}:{number}",
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": _NEW_TOKENS, "temperature": 0, "ignore_eos": True},
        "return_routed_experts": not way.startswith("off"),
    }
    sent, cpu_s = relay.metrics.value("r3channel_bytes_total", leg="engine_direct"), cpu_seconds_of(pids)
    body = posted(server.url, request)
    if way == "direct":
        _receive(relay, prompt, json.loads(body))
    cpu_us = (cpu_seconds_of(pids) - cpu_s) * 1e6 / (_PROMPT_TOKENS + _NEW_TOKENS)
    nbytes = len(body) + relay.metrics.value("r3channel_bytes_total", leg="engine_direct") - sent
    return cpu_us, nbytes / (_PROMPT_TOKENS + _NEW_TOKENS - 1)


def _receive(relay: Relay, prompt: list[int], reply: dict[str, Any]) -> None:
    """The relay's part of direct delivery: the engine's sender is done when the frame is here."""
    name = reply["meta_info"]["id"]
    relay.add(name, reply, prompt + reply["output_ids"])
    deadline_s = time.monotonic() + _SETTLE_S
    while relay.status()["waiting"] and time.monotonic() < deadline_s:
        time.sleep(0.005)
    relay.discard([name])


def register() -> None:
    """SGLang's plug-in in that engine: each request says by its id, `way:number`, which capturer it is served with."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    ways: dict[str, Callable[[], Any]] = {}
    srt = "sglang.srt"
    HookRegistry.register(
        f"{srt}.model_executor.model_runner.ModelRunner.init_routed_experts_capturer",
        partial(_keep_capturers, ways),
        HookType.AFTER,
    )
    HookRegistry.register(
        f"{srt}.managers.scheduler.Scheduler.handle_generate_request",
        lambda _scheduler, request, **_: ways[request.rid.partition(":")[0]](),
        HookType.BEFORE,
    )


def _keep_capturers(ways: dict[str, Callable[[], Any]], result: Any, runner: Any) -> None:
    from sglang.srt.state_capturer import routed_experts

    del result
    ours: Any = routed_experts.get_global_experts_capturer()
    stock = type(ours).__mro__[1](
        runner.model_config,
        num_tokens=len(ours.host_cache.buffer),
        max_running_requests=runner.max_running_requests,
        num_fused_shared_experts=0,
        device=runner.device,
    )
    sender = ours.outlet._sender

    def serve(capturer: Any, sender: Any = None) -> None:
        ours.outlet._sender = sender
        routed_experts.set_global_experts_capturer(capturer)

    ways |= {way: partial(serve, None) for way in WAYS}
    ways |= {"stock": partial(serve, stock), "r3channel": partial(serve, ours)}
    ways["direct"] = partial(serve, ours, sender)


# -- the scheduler's thread ------------------------------------------------------------------------------------------------


def scheduler(effort: Effort) -> dict[str, Any]:
    """In a child: SGLang's classes need the embedded environment from the first import on."""
    from examples.embedded.sglang import environment

    command = [sys.executable, "-m", "r3channel.bench.capture"]
    command += [str(effort.rounds_of(40, 5)), str(effort.of(120_000, 20_000))]
    child = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S, check=False
    )
    for line in child.stdout.splitlines():
        if line.startswith(ANSWER):
            return json.loads(line.removeprefix(ANSWER))
    raise EngineUnavailable(f"SGLang's own functions could not be measured:\n{child.stderr[-2000:]}")


def scheduler_us(*, rounds: int, slots: int) -> dict[str, Any]:
    """{"reply_us" | "pass_us" | "pass_us_per_token" | "write_us": {way: {rows: us}}, "ratios": {way: {"reply_to_stock", ...}}}.

    `reply`: from a request's end until its reply is with the socket, less the same without routing; `pass`: the end of a forward
    pass, the host's write included; `write`: that write alone.
    """
    thread = SchedulerThread(slots)
    reply_us = _medians_us(thread.replies(), ROWS, thread.table, rounds=rounds)
    off_us = reply_us.pop("off")
    us = {
        "reply": {
            way: {rows: by_rows[rows] - off_us[rows] for rows in by_rows} for way, by_rows in reply_us.items()
        },
        "pass": _medians_us(thread.passes(), PASS_ROWS, thread.batch, rounds=rounds),
        "write": _medians_us(thread.writes(), PASS_ROWS, thread.rows_of_a_pass, rounds=rounds),
    }
    ratios: dict[str, dict[str, Any]] = {"r3channel": {}, "direct": {}}
    for name, by_way in us.items():
        for way in ratios.keys() & by_way.keys():
            ratios[way][f"{name}_to_stock"] = {
                rows: us / by_way["stock"][rows] for rows, us in by_way[way].items()
            }
    per_token = {
        way: {rows: us / int(rows) for rows, us in by_rows.items()} for way, by_rows in us["pass"].items()
    }
    return {f"{name}_us": by_way for name, by_way in us.items()} | {
        "pass_us_per_token": per_token,
        "ratios": ratios,
    }


def _medians_us(
    ways: Mapping[str, Callable[[Any], object]],
    sizes: Sequence[int],
    draw: Callable[[int], Any],
    *,
    rounds: int,
) -> dict[str, dict[str, float]]:
    """{way: {rows: CPU us of this thread}}; what `draw(rows)` makes for a call is not in its time."""
    seen: dict[str, dict[str, float]] = {name: {} for name in ways}
    for rows in sizes:
        calls = {name: partial(_thread_us, way, partial(draw, rows)) for name, way in ways.items()}
        for name, values in interleaved(calls, rounds=rounds, warm_up=2).items():
            seen[name][str(rows)] = median(values)
    return seen


def _thread_us(call: Callable[[Any], object], draw: Callable[[], Any]) -> float:
    drawn = draw()
    return timed(lambda: call(drawn), clock=time.thread_time)() * 1e6


class SchedulerThread:
    """As much of SGLang's scheduler as capture sees: settings, capturers with full host caches, ends of passes, replies."""

    def __init__(self, slots: int) -> None:
        from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer

        from r3channel.engine import sglang as room

        self._slots, self._rng, self._replies = slots, np.random.default_rng(0), _Replies()
        ids = torch.from_numpy(generate(model_named(MODEL), regime="U", rows=256))
        self._ids_TLK = ids.repeat(max(PASS_ROWS) // len(ids), 1, 1)
        config = _published()
        self.capturers: dict[str, Any] = {}
        for name, kind in {"stock": RoutedExpertsCapturer, "r3channel": room.FrameCapturer}.items():
            self.capturers[name] = kind(
                config, num_tokens=slots, max_running_requests=1, num_fused_shared_experts=0, device="cpu"
            )
            self.capturers[name].device_cache.buffer.copy_(self._ids_TLK)
            for first in range(0, slots, max(PASS_ROWS)):  # every slot has been written once
                slots_T = torch.arange(first, min(slots, first + max(PASS_ROWS)))
                self._end_pass(self.capturers[name], _batch(slots_T))

    # -- what a call is given --

    def table(self, rows: int) -> torch.Tensor:
        """int32 [1, rows + 1]: a quarter prefilled in one run of slots, the rest decoded among `BATCH` requests."""
        self._replies.drain()  # the one before
        prompt, start = rows // 4, int(self._rng.integers(self._slots))
        decoded = start + prompt + np.arange(rows + 1 - prompt) * BATCH
        table_T = np.concatenate([start + np.arange(prompt), decoded]) % self._slots
        return torch.from_numpy(table_T.astype(np.int32))[None]

    def rows_of_a_pass(self, rows: int) -> torch.Tensor:
        """int64 [rows]: slots, as they come when many requests have come and gone."""
        return torch.from_numpy(self._rng.permutation(self._slots)[:rows])

    def batch(self, rows: int) -> Any:
        return _batch(self.rows_of_a_pass(rows))

    # -- what is measured --

    def passes(self) -> dict[str, Callable[[Any], None]]:
        return {name: partial(self._end_pass, capturer) for name, capturer in self.capturers.items()}

    def _end_pass(self, capturer: Any, batch: Any) -> None:
        output = capturer.on_forward_end(batch, False, None, no_copy_to_cpu=True)
        output.map_device_tensors(torch.Tensor.cpu)
        output.finalize()

    def writes(self) -> dict[str, Callable[[torch.Tensor], None]]:
        from sglang.srt.state_capturer.base import TopkCaptureOutput

        from r3channel.engine.capture import SlotRows

        host_cache, ids32_TLK = self.capturers["stock"].host_cache, self._ids_TLK.to(torch.int32)
        rows = SlotRows(SPEC, torch.ones((self._slots, *self._ids_TLK.shape[1:]), dtype=self._ids_TLK.dtype))

        def stock(slots_T: torch.Tensor) -> None:
            TopkCaptureOutput(slots_T, ids32_TLK[: len(slots_T)], host_cache).finalize()

        def ours(slots_T: torch.Tensor) -> None:
            rows.write(slots_T, self._ids_TLK[: len(slots_T)], weight_version=1, kind=RowKind.DECODED)

        return {"stock": stock, "r3channel": ours}

    def replies(self) -> dict[str, Callable[[torch.Tensor], None]]:
        """From the end of a request with these slots until its reply is with the socket."""
        sender = SimpleNamespace(offer=partial(_queued, deque(maxlen=4)), close=lambda: None)
        ours, send = self.capturers["r3channel"], self._replies.send
        ends = {"off": (None, None), "stock": (self.capturers["stock"], None)}
        ends |= {"r3channel": (ours, None), "direct": (ours, sender)}

        def end(capturer: Any, sender: Any, table: torch.Tensor) -> None:
            ours.outlet._sender = sender
            send(_collected(capturer, table))

        return {name: partial(end, *with_) for name, with_ in ends.items()}


def _published() -> Any:
    """SGLang's settings of this process, and the configuration of a model of our shape."""
    from sglang.srt import runtime_context, server_args
    from transformers import Qwen3MoeConfig

    from examples.embedded import sglang_host

    sglang_host.register()  # plain memory for pinned
    make: Any = server_args.ServerArgs  # its fields are made at run time
    asked = {
        "weight_version": "0",
        "chunked_prefill_size": max(PASS_ROWS),
        "enable_return_routed_experts": True,
    }
    ranks = runtime_context.SpawnRanks(world_rank=0)
    runtime_context.publish(make(model_path="dummy", device="cpu", **asked), role="scheduler", ranks=ranks)
    experts: dict[str, Any] = {"num_experts": SPEC.num_experts, "num_experts_per_tok": SPEC.top_k}
    text = Qwen3MoeConfig(num_hidden_layers=SPEC.num_layers, mlp_only_layers=[], **experts)
    return SimpleNamespace(hf_text_config=text, context_len=4096)


def _batch(slots_T: torch.Tensor) -> Any:
    """A forward pass that decodes these slots, as far as capturers ask."""
    mode = SimpleNamespace(is_decode=lambda: True, is_target_verify=lambda: False)
    return SimpleNamespace(
        out_cache_loc=slots_T, out_cache_loc_virtual=None, forward_mode=mode, _original_batch_size=None
    )


def _collected(capturer: Any, table: torch.Tensor) -> Any:
    """What SGLang's method, through our hook, leaves for the reply of a request whose slots are `table`."""
    from sglang.srt.managers.scheduler_components import batch_result_processor as module
    from sglang.srt.state_capturer.routed_experts import set_global_experts_capturer

    from r3channel.engine.sglang import collect_frame

    set_global_experts_capturer(capturer)
    prompt = table.shape[1] // 4
    req = SimpleNamespace(
        rid="r",
        return_routed_experts=capturer is not None,
        routed_experts=None,
        routed_experts_start_len=0,
        origin_input_ids=[1] * prompt,
        output_ids_through_stop=[1] * (table.shape[1] - prompt),
        kv=SimpleNamespace(req_pool_idx=0),
    )
    processor = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table))
    collect_frame(module.SchedulerBatchResultProcessor._maybe_collect_routed_experts, processor, req)
    return req.routed_experts


class _Replies:
    """The scheduler's socket to the detokenizer, and the detokenizer's end of it."""

    def __init__(self) -> None:
        import msgspec
        import zmq
        from sglang.srt.managers import io_struct
        from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper

        self._kind: Any = io_struct.BatchTokenIDOutput
        self._fields = [field.name for field in msgspec.structs.fields(self._kind) if field.required]
        context = zmq.Context.instance()
        self._detokenizer, ours = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self._detokenizer.bind("inproc://replies")
        ours.connect("inproc://replies")
        self._sender = SenderWrapper(ours)

    def send(self, routed_experts: Any) -> None:
        empty = {name: [] for name in self._fields}
        self._sender.send_output(self._kind(**{**empty, "routed_experts": [routed_experts]}))

    def drain(self) -> None:
        while self._detokenizer.poll(0):
            self._detokenizer.recv()


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


PARTS: Parts = {"scheduler": scheduler, "engine": engine}

if __name__ == "__main__":
    print(ANSWER + json.dumps(scheduler_us(rounds=int(sys.argv[1]), slots=int(sys.argv[2]))), flush=True)
