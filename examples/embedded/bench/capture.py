"""What routing costs an engine, in one run with what it is compared to.

`off`: no capture; `stock`: SGLang's int32; `r3channel`: our frames in the reply; `direct`: our frames past the reply.
`engine`: a real engine on CPU with a small random model of 48 layers x top-8 of 128, so ratios of its CPU are an upper bound for
large models. One process serves all ways: from request to request another capturer, or none, takes SGLang's place, because two
engines without capture differed by 2 to 5 %, steadily. CPU time is that of the server's whole process family, without the
client's. `off_again` is `off` once more: its difference from `off` is the smallest one that the benchmark can resolve.
`scheduler`: what capture costs SGLang's scheduler thread at the shape of Qwen3-30B-A3B: its own functions, real capturers, in
one process (this file run as a program in the embedded environment). CPU time of the calling thread. Every call uses fresh slots,
in host caches that are larger than the processor's caches, as an engine's are.
"""

from __future__ import annotations

import base64
import itertools
import json
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import torch

from r3channel.bench.harness import Effort, Parts, cpu_seconds_of, family_of, interleave, medians_s, ratio
from r3channel.bench.wire import generate
from r3channel.config import ChannelConfig, EngineConfig
from r3channel.engine.sglang_tensors import add_tensors, declare, take_topk
from r3channel.engine.token_tensors import KeptTopk, pack_topk, tensor_frame
from r3channel.errors import EngineUnavailable
from r3channel.model.presets import model_named
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.memory import Store
from r3channel.relay.relay import Relay
from r3channel.relay.reply import Base64Text, split_reply
from r3channel.relay.verify import keep_tensors
from r3channel.transport.network import urlopen
from r3channel.wire.token_tensors import tensors_of

WAYS = ("off", "stock", "r3channel", "direct", "off_again")
MODEL = "qwen3-30b-a3b"
SPEC = model_named(MODEL).spec
ROWS, PASS_ROWS = (1000, 4000, 16000), (256, 8192)
"""Rows of a request that finishes, and rows of a forward pass: one that decodes, one that prefills a chunk."""
PART_ROWS = (8, 1000, 16000)
"""Rows of a request whose reply is measured part by part; at the first, what does not grow with rows."""
BATCH = 32
"""Requests that decode together: a request's decoded rows lie this many slots apart."""
Ways = Mapping[str, Callable[[Any], object]]
_PASSES = 64
_NAME = "examples.embedded.bench.capture"
_TIMEOUT_S, _TRAIL_S = 600.0, 0.02
"""The second is the time for work that an engine does after its reply."""
_PROMPT_TOKENS, _NEW_TOKENS = 480, 4
"""Tokens of a round's only request. Several requests would share batches differently from round to round."""


# -- a real engine ---------------------------------------------------------------------------------------------------------


def engine(effort: Effort) -> dict[str, Any]:
    """Measure an engine's CPU and bytes per token, by way.

    Returns:
        {"variants": {way: {"engine_cpu_ratio_to_off", "http_bytes_per_token"}}}, and the number of pairs.
    """
    from examples.embedded.sglang import EngineOptions, EngineServer

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="r3channel-bench-")))
        relay = stack.enter_context(closing(Relay(SPEC, TrainerLayout(), ChannelConfig())))
        options = EngineOptions(**_options(folder, relay.serve(token_file=folder / "token")))
        server = stack.enter_context(EngineServer(options))
        server.wait_ready(_TIMEOUT_S)
        asked = partial(_round, server.url + "/generate", family_of(server.pid), relay, itertools.count())
        seen = interleave({way: partial(asked, way) for way in WAYS}, rounds=effort.rounds_of(160, 40))
    cpu_us, nbytes = ({way: [pair[of] for pair in seen[way]] for way in WAYS} for of in (0, 1))
    base = [sum(pair) / 2 for pair in zip(cpu_us["off"], cpu_us["off_again"], strict=True)]
    variants = {
        way: {
            "engine_cpu_ratio_to_off": ratio(cpu_us[way], cpu_us["off"] if way == "off_again" else base),
            "http_bytes_per_token": round(median(nbytes[way]), 1),
        }
        for way in WAYS
    }
    return {"pairs": len(cpu_us["off"]), "variants": variants}


def _options(folder: Path, relay_url: str) -> dict[str, Any]:
    from examples.embedded.model import write_model
    from examples.embedded.sglang import environment

    plugin = folder / "r3channel_bench-0.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Name: r3channel-bench\nVersion: 0\n")
    (plugin / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nr3channel_bench = {_NAME}:register\n")
    env = {"R3CHANNEL_RELAY_URL": relay_url, "R3CHANNEL_TOKEN_FILE": str(folder / "token")}
    env |= {"R3CHANNEL_DELIVERY": "direct", "PYTHONPATH": f"{folder}:{environment()['PYTHONPATH']}"}
    # A random model repeats itself: lz4 gains there what it would not gain with real routing.
    options = {"env": env, "codec": "stored", "extra_args": ("--disable-radix-cache",)}
    return options | {"model": write_model(folder / "model", layers=SPEC.num_layers, dense_layers=())}


def _round(url: str, pids: list[int], relay: Relay, numbers: Iterator[int], way: str) -> tuple[float, float]:
    """Send one request and return (CPU us per token, bytes per row).

    Every round asks for the same tokens, and finds no prefix of them in the engine.
    """

    def sent_bytes() -> float:
        return relay.metrics.value("r3channel_bytes_total", leg="engine_direct")

    request = {
        "rid": f"{way}:{next(numbers)}", "input_ids": np.random.default_rng(0).integers(4, 512, _PROMPT_TOKENS).tolist(),
        "sampling_params": {"max_new_tokens": _NEW_TOKENS, "temperature": 0, "ignore_eos": True},
        "return_routed_experts": not way.startswith("off"),
    }  # fmt: skip
    question = urllib.request.Request(url, json.dumps(request).encode(), {"Content-Type": "application/json"})
    before, deadline_s, cpu_s = sent_bytes(), time.monotonic() + _TIMEOUT_S, cpu_seconds_of(pids)
    with urlopen(question, timeout_s=_TIMEOUT_S) as reply:
        body = reply.read()
    while way == "direct" and sent_bytes() == before and time.monotonic() < deadline_s:
        time.sleep(0.002)
    time.sleep(_TRAIL_S)
    cpu_us, tokens = (cpu_seconds_of(pids) - cpu_s) * 1e6, _PROMPT_TOKENS + _NEW_TOKENS
    return cpu_us / tokens, (len(body) + sent_bytes() - before) / (tokens - 1)


def register() -> None:
    """Register the plug-in of the engine that is measured.

    A request's id, `way:number`, says which capturer serves the request.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    ways: dict[str, Callable[[], None]] = {}
    made = "sglang.srt.model_executor.model_runner.ModelRunner.init_routed_experts_capturer"
    HookRegistry.register(made, partial(_keep_capturers, ways), HookType.AFTER)
    asked = "sglang.srt.managers.scheduler.Scheduler.handle_generate_request"
    HookRegistry.register(asked, lambda _, request, **__: ways[request.rid.split(":")[0]](), HookType.BEFORE)


def _keep_capturers(ways: dict[str, Callable[[], None]], _result: Any, runner: Any) -> None:
    from sglang.srt.state_capturer import routed_experts as room

    ours: Any = room.get_global_experts_capturer()
    slots, requests = runner.max_total_num_tokens + runner.page_size, runner.max_running_requests
    stock = _capturer(type(ours).__mro__[1], runner.model_config, slots, requests=requests)
    outlet, sender = ours.outlet, ours.outlet.sender

    def serve(capturer: Any, sender: Any = None) -> None:
        outlet.sender = sender
        room.set_global_experts_capturer(capturer)

    ways |= {way: partial(serve, None) for way in WAYS} | {"stock": partial(serve, stock)}
    ways |= {"r3channel": partial(serve, ours), "direct": partial(serve, ours, sender)}


def _capturer(kind: Any, model_config: Any, slots: int, *, requests: int) -> Any:
    sizes = {"num_tokens": slots, "max_running_requests": requests, "num_fused_shared_experts": 0}
    return kind(model_config, device="cpu", **sizes)


# -- the scheduler's thread ------------------------------------------------------------------------------------------------


def scheduler(effort: Effort) -> dict[str, Any]:
    """Measure the scheduler's thread in a child process.

    SGLang's classes need the embedded environment from the first import on. All that the child has started ends with it.

    Raises:
        EngineUnavailable: If the child does not end in time, or ends with a status other than 0.
    """
    from examples.embedded.sglang import environment, kill_family

    sizes = str(effort.rounds_of(40, 10)), str(effort.choose(120_000, 20_000))
    command, pipe = [sys.executable, "-m", _NAME, *sizes], subprocess.PIPE
    child = subprocess.Popen(command, env=environment(), stdout=pipe, stderr=pipe, text=True)
    try:
        stdout, stderr = child.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise EngineUnavailable(f"{shlex.join(command)} did not end within {_TIMEOUT_S:.0f} s") from error
    finally:
        kill_family(child)
    if child.returncode:
        raise EngineUnavailable(
            f"{shlex.join(command)} ended with status {child.returncode}:\n{stderr[-4000:]}"
        )
    return json.loads(stdout.splitlines()[-1])


def scheduler_us(*, rounds: int, slots: int) -> dict[str, Any]:
    """Measure the scheduler thread's CPU for replies and passes.

    `reply` lasts from a request's end until its rows are in the message to the detokenizer. `pass` is the end of a forward pass,
    the host's write included.

    Returns:
        {"reply_us": {rows: {way: us}}, "reply_of_stock": {rows: {way: ratio}}, "reply_calls": {way: calls}, ...}, the same for
        `pass`, and the parts of a reply of ours: {"parts": {rows: {part: {"us", "calls"}}}}.
    """
    thread, result = SchedulerThread(slots), dict[str, Any]()
    for name, ways, sizes, draw in (
        ("reply", thread.replies(), ROWS, thread.request),
        ("pass", thread.passes(), PASS_ROWS, thread.batch),
    ):
        us = {rows: _medians_us(ways, partial(draw, rows), rounds) for rows in sizes}
        of_stock = {rows: {way: one / of["stock"] for way, one in of.items()} for rows, of in us.items()}
        calls = {way: _count_calls(end, draw(sizes[0]))[0] for way, end in ways.items()}
        result |= {f"{name}_us": us, f"{name}_of_stock": of_stock, f"{name}_calls": calls}
    return result | {"parts": {rows: _parts(thread, rows, rounds) for rows in PART_ROWS}}


def _parts(thread: SchedulerThread, rows: int, rounds: int) -> dict[str, dict[str, float]]:
    def cost(measure: Callable[..., tuple[float, Any]]) -> dict[str, float]:
        whole, _ = measure(thread.replies()["r3channel"], thread.request(rows))
        costs, made = dict[str, float](), thread.request(rows)
        for name, part in thread.parts().items():
            costs[name], made = measure(part, made)
        return costs | {"rest": whole - costs["gather"] - costs["head"] - costs["message"]}

    us, calls = [cost(_take_cpu_us) for _ in range(rounds + 2)][2:], cost(_count_calls)
    return {name: {"us": median(each[name] for each in us), "calls": count} for name, count in calls.items()}


def _medians_us(ways: Ways, draw: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Return the median CPU us of this thread by way.

    The time to make what `draw` returns for a call is not counted.
    """

    calls = {name: lambda way=way: _take_cpu_us(way, draw())[0] for name, way in ways.items()}
    return {name: median(values) for name, values in interleave(calls, rounds=rounds, warm_up=2).items()}


def _take_cpu_us(call: Callable[[Any], Any], given: Any) -> tuple[float, Any]:
    """Return the call's CPU us of this thread, and what it has made."""
    begin_s = time.thread_time()
    made = call(given)
    return (time.thread_time() - begin_s) * 1e6, made


def _count_calls(call: Callable[[Any], Any], given: Any) -> tuple[int, Any]:
    """Return how many calls of Python and of C are made inside the call, and what it has made."""
    events = list[str]()
    sys.setprofile(lambda _frame, event, _value: events.append(event))
    made = call(given)
    sys.setprofile(None)
    return events.count("call") + events.count("c_call") - 1, made  # the last one ends the count


class SchedulerThread:
    """The parts of SGLang's scheduler that capture sees: settings, capturers with full host caches, ends of passes and
    requests.
    """

    def __init__(self, slots: int) -> None:
        from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer

        from r3channel.engine import sglang as room

        self._slots, self._rng, config = slots, np.random.default_rng(0), _publish_settings()
        ids = torch.from_numpy(generate(model_named(MODEL), regime="U", rows=256))
        self._ids_TLK = ids.repeat(max(PASS_ROWS) // len(ids), 1, 1)
        kinds = {"stock": RoutedExpertsCapturer, "r3channel": room.FrameCapturer}
        self._capturers = {name: _capturer(kind, config, slots, requests=1) for name, kind in kinds.items()}
        engine: Any = room.engine
        runner = Mock()
        engine.engine_config, engine.model_runner = EngineConfig(token_tensors="combine_weights"), runner
        runner.model.modules.return_value = ()
        self._capturers["weights"] = _capturer(room.FrameCapturer, config, slots, requests=1)
        for name, end in self.passes().items():
            self._capturers[name].device_cache.buffer.copy_(self._ids_TLK)
            for slots_T in torch.randperm(slots).split(max(PASS_ROWS)):  # every slot has been written once
                end(_batch(slots_T))

    def request(self, rows: int) -> Any:
        """Make a request that ends.

        A quarter of its rows were prefilled in one run of slots; the rest were decoded among `BATCH` requests.

        Args:
            rows: Number of its rows.
        """
        prompt, start = rows // 4, int(self._rng.integers(self._slots))
        decoded = start + prompt + np.arange(rows + 1 - prompt) * BATCH
        table_T = np.concatenate([start + np.arange(prompt), decoded]) % self._slots
        pool = SimpleNamespace(req_to_token=torch.from_numpy(table_T.astype(np.int32))[None])
        req: Any = SimpleNamespace(rid="r", return_routed_experts=True, routed_experts_start_len=0)
        req.origin_input_ids, req.output_ids_through_stop = range(rows + 1), range(0)
        req.finished = lambda: True
        req.kv, req.processor = SimpleNamespace(req_pool_idx=0), SimpleNamespace(req_to_token_pool=pool)
        return req

    def batch(self, rows: int) -> Any:
        """Make a pass over slots in random order.

        Slots come in this order after many requests have come and gone.

        Args:
            rows: Number of its rows.
        """
        return _batch(torch.from_numpy(self._rng.permutation(self._slots)[:rows]))

    def passes(self) -> Ways:
        def end(capturer: Any, batch: Any) -> None:
            output = capturer.on_forward_end(batch, False, None, no_copy_to_cpu=True)
            output.map_device_tensors(torch.Tensor.cpu)
            output.finalize()

        return {name: partial(end, capturer) for name, capturer in self._capturers.items()}

    def parts(self) -> dict[str, Callable[[Any], Any]]:
        """Return the parts of our reply in order. Each takes what the part before it has made."""
        from orjson import dumps
        from sglang.srt.managers.detokenizer_manager import DetokenizerManager
        from sglang.srt.managers.io_struct import _msgpack_encoder as message

        rows = self._capturers["r3channel"].rows

        def gather(req: Any) -> Any:
            slots_T = req.processor.req_to_token_pool.req_to_token[0, :-1].numpy()
            return rows.gather_frame(slots_T, first_row=0, sample_key=0, hashed=True)

        return {
            "gather": gather,
            "head": lambda made: torch.frombuffer(made.encode(), dtype=torch.uint8),
            "message": lambda reply: (reply, message.encode(reply))[0],
            "base64": lambda reply: DetokenizerManager._b64_encode_per_request([reply]),
            "meta_info": lambda texts: dumps({"meta_info": {"routed_experts": texts[0]}}),
        }

    def replies(self) -> Ways:
        from sglang.srt.managers.io_struct import _msgpack_encoder as message
        from sglang.srt.managers.scheduler_components.batch_result_processor import (
            SchedulerBatchResultProcessor as Processor,
        )
        from sglang.srt.state_capturer.routed_experts import set_global_experts_capturer

        from r3channel.engine.frame_sender import Sender
        from r3channel.engine.sglang import collect_frame

        outlet = self._capturers["r3channel"].outlet
        # Its thread is not started.
        queue = Sender(EngineConfig(relay_url="http://x:1"), outlet._hello, token="", metrics=outlet.metrics)

        def end(name: str, req: Any) -> None:
            outlet.sender = queue if name == "direct" else None
            set_global_experts_capturer(self._capturers["r3channel" if name == "direct" else name])
            collect_frame(Processor._maybe_collect_routed_experts, req.processor, req)
            if name == "weights":
                add_tensors(None, [req])
            message.encode(req.routed_experts)
            queue._waiting.clear()
            queue._bytes = 0

        return {name: partial(end, name) for name in ("stock", "r3channel", "direct", "weights")}


# -- the sampler's likeliest tokens ----------------------------------------------------------------------------------------


def topk_us(*, rounds: int) -> dict[str, Any]:
    """Measure a response token with its 128 likeliest tokens.

    A way lasts from the sampler's log-probs to the replies' JSON, for a batch: `stock`, SGLang's lists; `binary`, int32 and
    float32 in base64, as slime's engines answer; `ours`. `choose`, and `choose_packed` of ours, are the part that a GPU does
    where there is one. `manager` lasts from our replies to rest in a relay.

    Returns:
        {"topk_us": {way: us}, "topk_bytes": {way: bytes}}, both per token.
    """
    from orjson import dumps
    from sglang.srt.layers.logprob_processor import get_top_logprobs
    from sglang.srt.managers.io_struct import _msgpack_encoder as message

    (tensor,), store, passes = tensors_of("topk_logprobs:128"), Store(1 << 30), range(_PASSES)
    logprobs_BV = torch.log_softmax(torch.randn(BATCH, 1024, generator=torch.manual_seed(0)), -1)
    declare([tensor])
    told: dict[str, Any] = {"where": "", "key": None, "tokens": _PASSES + 1, "held_rows": 0, "room_s": 1.0}

    def keep_logprobs(take: Callable[..., Any]) -> list[list[list[Any]]]:
        """Return [values, ids][request][token], as SGLang's processor keeps them."""
        both = [take(logprobs_BV, [128] * BATCH, no_copy_to_cpu=True) for _ in passes]
        return [[[each[part][at].tolist() for each in both] for at in range(BATCH)] for part in (0, 1)]

    def text(data: bytes) -> bytes:
        message.encode(data)
        return dumps({"meta_info": {"routed_experts": base64.b64encode(data).decode()}})

    def stock() -> Iterator[bytes]:
        for two in zip(*keep_logprobs(get_top_logprobs), strict=True):
            message.encode(two)
            yield dumps([[(*one, None) for one in zip(*row, strict=True)] for row in zip(*two, strict=True)])

    def binary() -> Iterator[bytes]:
        both = [[logprobs, ids.int()] for logprobs, ids in (logprobs_BV.topk(128) for _ in passes)]
        for at in range(BATCH):
            yield text(
                b"".join(np.stack([each[part].numpy()[at] for each in both]).tobytes() for part in (0, 1))
            )

    def ours() -> Iterator[bytes]:
        for rows in keep_logprobs(partial(take_topk, get_top_logprobs))[0]:
            frame = tensor_frame(tensor, KeptTopk(rows), prompt_tokens=1, new_tokens=_PASSES, request_id="r")
            yield text(bytes(frame))

    def kept_at_rest(body: bytes) -> None:
        source = Base64Text(split_reply(body)[1] or "")
        keep_tensors(source, store, (tensor,), **told).block.free()

    replies = {way: [*way()] for way in (stock, binary, ours)}
    calls: dict[str, Any] = {way.__name__: lambda way=way: [*way()] for way in replies}
    calls["manager"] = lambda: [*map(kept_at_rest, replies[ours])]
    device = {
        "choose": partial(logprobs_BV.topk, 128),
        "choose_packed": partial(pack_topk, logprobs_BV, tensor),
    }
    calls |= {name: lambda call=call: [call() for _ in passes] for name, call in device.items()}
    us = {call: s / (BATCH * _PASSES) * 1e6 for call, s in medians_s(calls, rounds=rounds).items()}
    return {
        "topk_us": us,
        "topk_bytes": {way.__name__: len(own[0]) / _PASSES for way, own in replies.items()},
    }


def _publish_settings() -> Any:
    """Publish SGLang's settings in this process.

    Return the configuration of a model of our shape.
    """
    from sglang.srt import runtime_context, server_args
    from transformers import Qwen3MoeConfig

    from examples.embedded import sglang_host

    sglang_host.register()  # plain memory instead of pinned memory
    make: Any = server_args.ServerArgs  # its fields are made at run time
    asked = {"chunked_prefill_size": max(PASS_ROWS), "enable_return_routed_experts": True}
    ranks = runtime_context.SpawnRanks(world_rank=0)
    runtime_context.publish(make(model_path="dummy", device="cpu", **asked), role="scheduler", ranks=ranks)
    return SimpleNamespace(hf_text_config=Qwen3MoeConfig(num_hidden_layers=SPEC.num_layers), context_len=4096)


def _batch(slots_T: torch.Tensor) -> Any:
    """Return a forward pass that decodes these slots.

    It has the fields that capturers ask for.
    """
    mode = SimpleNamespace(is_decode=lambda: True, is_target_verify=lambda: False)
    return SimpleNamespace(out_cache_loc=slots_T, out_cache_loc_virtual=None, forward_mode=mode)


PARTS: Parts = {"scheduler": scheduler, "engine": engine}

if __name__ == "__main__":
    made = scheduler_us(rounds=int(sys.argv[1]), slots=int(sys.argv[2])) | topk_us(rounds=int(sys.argv[1]))
    print(json.dumps(made), flush=True)
