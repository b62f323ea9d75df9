"""The FrameCapturer that an engine makes, under SGLang's TopK in padded decode and prefill graphs: from logits to frames.

Passes overlap. Formats that it cannot see are refused; sync-debug mode stays silent. Costs are held against SGLang's capturer.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from r3channel.config import EngineConfig
from r3channel.errors import ConfigError
from r3channel.model.spec import RoutingSpec
from r3channel.wire.frame import parse_frame
from r3channel.wire.routing import RowKind
from r3channel.wire.token_tensors import tensors_of
from tests.gpu.facts import Facts, silence, words_of

SPEC = RoutingSpec(num_layers=6, moe_layers=tuple(range(6)), num_experts=128, top_k=8)
DEEP = replace(SPEC, num_layers=48, moe_layers=tuple(range(48)))
"""A pass takes as long as one of Qwen3-30B-A3B."""
DECODED, DECODE_SIZE, PREFILL_SIZES, MOST = 12, 16, (16, 64), 64
"""Rows of a decode pass; those that its graph, and prefill graphs, are padded to."""
HIDDEN, READ = 2048, 80 * 3 * 768
"""The sizes of a decode pass through Qwen3-30B-A3B: it reads about 80 of a layer's experts."""
IN_FLIGHT = 2
WEIGHTS = "combine_weights"
CLOSE = 2e-3
"""A weight of two kernels, as float16."""


class Runner(SimpleNamespace):
    """As much of SGLang's model runner."""

    def forward(self) -> None: ...


class Engine:
    """As much of one as capture sees: settings, routers, the model runner that refuses or serves, the capturer, passes."""

    def __init__(self, device: str, spec: RoutingSpec = SPEC, *, tensors: str = "") -> None:
        from sglang.srt import runtime_context, server_args
        from sglang.srt.layers.moe import topk
        from sglang.srt.state_capturer import routed_experts
        from transformers import Qwen3MoeConfig

        if device == "cpu":
            on_a_cpu()
        from r3channel.engine import sglang as room

        self.device, self.spec, self.room, self._experts = device, spec, room, routed_experts
        self.tensors = tensors_of(tensors, spec)
        room.set_up(EngineConfig(token_tensors=tensors))
        make: Any = server_args.ServerArgs  # its fields are made at run time
        set_to = {"weight_version": "0", "chunked_prefill_size": MOST, "enable_return_routed_experts": True}
        ranks = runtime_context.SpawnRanks(world_rank=0)
        runtime_context.publish(
            make(model_path="dummy", device=device, **set_to), role="scheduler", ranks=ranks
        )
        alone: Any = SimpleNamespace(world_size=1)
        runtime_context.get_parallel().override_permanently(tp_group=alone)
        self.attention: Any = runtime_context.get_flags().dp
        shared = topk.SharedExpertsConfig()  # no model is served here that would say
        topk.get_model = lambda: SimpleNamespace(shared_experts=shared)
        experts: dict[str, Any] = {"num_experts": spec.num_experts, "num_experts_per_tok": spec.top_k}
        text = Qwen3MoeConfig(num_hidden_layers=spec.num_layers, mlp_only_layers=[], **experts)
        config = SimpleNamespace(hf_text_config=text, context_len=4096, vocab_size=1000)
        model = routers("triton", spec)
        self.runner = Runner(is_draft_worker=False, model_config=config, model=model)
        self.runner.prefill_cuda_graph_runner = SimpleNamespace(capture_num_tokens=PREFILL_SIZES)
        room.refuse_engine(self.runner)
        rows: dict[str, Any] = {"num_tokens": IN_FLIGHT * MOST, "max_running_requests": DECODED}
        served: Any = SimpleNamespace(shared_experts_config=shared)
        rows |= {"model": served, "model_config": config, "device": device}
        self.stock: Any = routed_experts.RoutedExpertsCapturer.create(**rows)
        # What the hooks do; to apply SGLang's hooks imports the whole engine.
        process, note = topk._post_process_topk_ids, room.note_weights
        topk._post_process_topk_ids = lambda *args, **more: (note(*args, **more), process(*args, **more))[1]
        setattr(routed_experts, "RoutedExpertsCapturer", room.FrameCapturer)  # noqa: B010
        self.capturer: Any = room.FrameCapturer.create(**rows)
        self.slots = torch.arange(IN_FLIGHT * MOST, device=device).view(IN_FLIGHT, MOST)
        self.pool = SimpleNamespace(req_to_token=self.slots.int())
        self.logits = torch.zeros((spec.num_layers, MOST, spec.num_experts), device=device)
        hidden, read, dtype = (HIDDEN, READ, torch.bfloat16) if device == "cuda" else (64, 64, torch.float32)
        self.hidden = torch.zeros((MOST, hidden), device=device, dtype=dtype)
        self.weight = torch.randn((hidden, read), device=device, dtype=dtype) / hidden**0.5

    def refusal(self, backend: str) -> str:
        """Why an engine whose experts run on this backend is refused; empty where it is not."""
        runner = Runner(**vars(self.runner) | {"model": routers(backend, self.spec)})
        return words_of(lambda: self.room.refuse_engine(runner), ConfigError)

    def captured_by(self, capturer: Any) -> None:
        """The passes from here on; None: by nobody."""
        self._experts.set_global_experts_capturer(capturer)

    def fill(self, rows: int, generator: torch.Generator) -> torch.Tensor:
        """Other logits, no two of a row alike; [rows, L, K, 2] of what their top-k must be, by id: ids and weights."""
        self.logits.copy_(torch.rand(self.logits.shape, generator=generator, device=self.device).argsort(-1))
        self.logits.mul_(0.05)
        chosen, ids_LTK = self.logits[:, :rows].topk(self.spec.top_k, -1)
        ids_LTK, order = ids_LTK.sort(-1)
        weights_LTK = chosen.softmax(-1).gather(-1, order)
        return torch.stack((ids_LTK.float(), weights_LTK), -1).transpose(0, 1)

    def forward(self, size: int) -> None:
        """One padded pass: for each layer where a prefill graph breaks, the router, and a product that reads as experts do."""
        from sglang.srt.model_executor.runner_backend_utils import breakable_cuda_graph as breakable

        hidden, pause = self.hidden[:size], getattr(breakable, "break_graph")  # noqa: B009 its type is lost
        for router, logits in zip(self.runner.model, self.logits, strict=True):
            pause()
            weights = router.forward_cuda(hidden, logits[:size]).topk_weights
            hidden = torch.tanh((hidden @ self.weight)[:, : hidden.shape[1]]) + weights.sum().to(hidden.dtype)

    def graph(self, size: int, *, prefill: bool = False) -> Any:
        """A pass as SGLang's graph for it; itself on a CPU."""
        from sglang.srt.model_executor.runner_backend_utils import breakable_cuda_graph as breakable

        for _ in range(3):
            self.forward(size)
        if self.device == "cpu":
            return SimpleNamespace(replay=lambda: self.forward(size))
        torch.cuda.synchronize()
        graph: Any = breakable.BreakableCUDAGraph() if prefill else torch.cuda.CUDAGraph()
        recording: Any = breakable.BreakableCUDAGraphCapture if prefill else torch.cuda.graph
        with recording(graph, pool=torch.cuda.graph_pool_handle(), stream=torch.cuda.Stream()):
            self.forward(size)
        return graph

    def end(self, number: int, *, rows: int = DECODED, prefill: bool = False, by: Any = None) -> Any:
        """The end of a pass of so many rows that a graph ran; `by` which capturer, ours unless said."""
        batch = SimpleNamespace(
            out_cache_loc=self.slots[number % IN_FLIGHT, :rows], out_cache_loc_virtual=None,
            forward_mode=SimpleNamespace(is_decode=lambda: not prefill, is_target_verify=lambda: False),
            _original_batch_size=1 if prefill else None, global_num_tokens_cpu=[rows],
        )  # fmt: skip
        return (by or self.capturer).on_forward_end(batch, True, DECODE_SIZE, no_copy_to_cpu=True)

    def frame(self, number: int, rows: int) -> tuple[Any, Any]:
        """The frame of a finished request that has the pass's slots, and [rows, L, K] of its weights where they are kept."""
        told = {"rid": str(number), "return_routed_experts": True, "origin_input_ids": [0] * rows}
        request: Any = SimpleNamespace(**told)
        asked, collect = (number % IN_FLIGHT, rows + 1, self.pool), self.capturer.get_topk
        self.room.collect_frame(lambda _, req: setattr(req, "routed_experts", collect(*asked)), None, request)
        frame = parse_frame(request.routed_experts.numpy().tobytes(), spec=self.spec)
        if not self.tensors:
            return frame, None
        weights_T = np.ascontiguousarray(request.r3channel_weights.entries(self.tensors[0], 0)[1])
        return frame, weights_T.view(np.float16).reshape(frame.ids().shape)


def on_a_cpu() -> None:
    """Plain memory for pinned, and torch's arithmetic for the kernel."""
    from sglang.srt.layers.moe import topk

    from examples.embedded import sglang_host

    def fused_topk(hidden_states: Any, gating_output: Any, topk: int, renormalize: bool, **_: Any) -> Any:
        return native(hidden_states, gating_output, topk, renormalize)

    native: Any = topk.fused_topk_torch_native
    sglang_host.register()
    setattr(topk, "fused_topk", fused_topk)  # noqa: B010


def routers(backend: str, spec: RoutingSpec) -> torch.nn.ModuleList:
    """Routers of a model whose experts run on this backend."""
    from sglang.srt.layers.moe import topk
    from sglang.srt.layers.moe.utils import MoeRunnerBackend, RoutingMethodType

    made: list[Any] = [topk.TopK(spec.top_k, layer_id=layer) for layer in spec.moe_layers]
    for router in made:
        method = RoutingMethodType.Renormalize  # one that trtllm's kernel can do itself
        router.bind_runner_backend(MoeRunnerBackend(backend), routing_method_type=method)
    return torch.nn.ModuleList(made)


def passes(engine: Engine, *, count: int, prefill: bool) -> int:
    """What differs. The next pass is launched before a copy is looked at, and nothing else waits for the device."""
    sizes = PREFILL_SIZES if prefill else (DECODE_SIZE,)
    graphs = {size: engine.graph(size, prefill=prefill) for size in sizes}
    generator = torch.Generator(engine.device).manual_seed(0)
    stream = torch.cuda.Stream() if engine.device == "cuda" else None
    waiting, different = list[tuple[Any, ...]](), 0
    for number in range(count):
        rows = 1 + 7 * number % MOST if prefill else DECODED
        wanted_TLK2 = engine.fill(rows, generator)
        graphs[min(size for size in sizes if size >= rows)].replay()
        output = engine.end(number, rows=rows, prefill=prefill)
        waiting.append((number, output, *to_host(output, wanted_TLK2, stream)))
        if len(waiting) == IN_FLIGHT:
            different += judged(engine, *waiting.pop(0), prefill=prefill)
    return different + sum(judged(engine, *one, prefill=prefill) for one in waiting)


def to_host(output: Any, wanted: torch.Tensor, stream: Any) -> tuple[torch.Tensor, Any]:
    """As SGLang's result copy: on a stream of its own, into pinned memory."""
    if stream is None:
        return wanted, SimpleNamespace(synchronize=lambda: None)

    def copy(there: torch.Tensor) -> torch.Tensor:
        there.record_stream(stream)  # else the next pass may get its memory before it has been read
        return torch.empty(there.shape, dtype=there.dtype, pin_memory=True).copy_(there, non_blocking=True)

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        output.map_device_tensors(copy)
        return copy(wanted), stream.record_event()


def judged(
    engine: Engine, number: int, output: Any, wanted_TLK2: torch.Tensor, done: Any, *, prefill: bool
) -> int:
    done.synchronize()
    output.finalize()
    frame, weights_TLK = engine.frame(number, len(wanted_TLK2))
    kind = RowKind.PREFILLED if prefill else RowKind.DECODED
    ids_TLK, wanted_ids, wanted_weights = frame.ids(), *np.moveaxis(wanted_TLK2.numpy(), -1, 0)
    order = ids_TLK.argsort(-1)
    differing = int((np.take_along_axis(ids_TLK, order, -1) != wanted_ids).sum())
    if weights_TLK is not None:
        apart_TLK = np.abs(np.take_along_axis(weights_TLK, order, -1) / wanted_weights - 1)
        differing += int((~(apart_TLK < CLOSE)).sum())
    return differing + sum(span.kind != kind for span in frame.provenance)


def check(device: str, facts: Facts) -> None:
    torch.manual_seed(0)
    engine, count = Engine(device), 200 if facts.small else 2000
    for backend, name in (("triton_kernel", "TRITON_KERNEL"), ("flashinfer_trtllm", "BYPASSED")):
        told = engine.refusal(backend)
        facts.expect(f"{name} refused", told[:40], f"layer 5: {name}" in told, "by name at start")
    rows_are_right(engine, facts, count)


def weights(device: str, facts: Facts) -> None:
    """The same passes with the weight of each id, and what they cost."""
    torch.manual_seed(0)
    engine = Engine(device, SPEC if facts.small else DEEP, tensors=WEIGHTS)
    rows_are_right(engine, facts, 50 if facts.small else 500)
    costs(engine, facts)


def rows_are_right(engine: Engine, facts: Facts, count: int) -> None:
    engine.captured_by(engine.capturer)
    with torch.inference_mode():
        for name, prefill in (("decode", False), ("prefill", True)):
            engine.attention.enabled = prefill  # DP attention of one rank
            different = passes(engine, count=count, prefill=prefill)
            facts.expect(f"{name}: what differs in {count} passes", different, different == 0, "0")
        engine.attention.enabled = False
        if engine.device == "cuda":
            told = words_of(
                silence()(lambda: engine.end(0)), RuntimeError
            )  # what torch says of the first one
            facts.expect("synchronisations in on_forward_end", told, not told, "none")
        else:
            facts.left_out.append("synchronisations and graphs: there are no streams on a CPU")


def cost(device: str, facts: Facts) -> None:
    costs(Engine(device, SPEC if facts.small else DEEP), facts)


def costs(engine: Engine, facts: Facts) -> None:
    """Three loops take turns: no capturer, SGLang's own and ours."""
    capturers = {"none": None, "SGLang's": engine.stock, "ours": engine.capturer}
    rounds, count = (2, 20) if facts.small else (10, 30)
    graphs, ends_us = {}, {name: list[float]() for name in capturers}
    with torch.inference_mode():
        for name, capturer in capturers.items():
            engine.captured_by(capturer)
            graphs[name] = engine.graph(DECODE_SIZE)
        seconds = {name: list[float]() for name in capturers}
        for _, name in itertools.product(range(1 + rounds), capturers):
            engine.captured_by(capturers[name])  # on a CPU a pass asks again
            seconds[name].append(timed(engine, graphs[name], capturers[name], count, ends_us[name]))
    facts.note("pass without capture, ms", statistics.median(seconds["none"][1:]) / count * 1e3)
    share, p99_us = dict[str, float](), dict[str, float]()
    for name in ("SGLang's", "ours"):
        pairs = zip(seconds["none"][1:], seconds[name][1:], strict=True)
        share[name] = statistics.median(off / on for off, on in pairs)
        p99_us[name] = float(np.percentile(ends_us[name][count:], 99))
    facts.note("throughput with capture, of without, by capturer", share)
    facts.note("on_forward_end p99, us, by capturer", p99_us)
    facts.limit("throughput with ours", share["ours"], share["ours"] >= 0.99, "at least 0.99 of without")
    ratio = p99_us["ours"] / p99_us["SGLang's"]
    facts.limit("on_forward_end p99, of SGLang's", ratio, ratio <= 2, "at most 2")


def timed(engine: Engine, graph: Any, capturer: Any, count: int, ends_us: list[float]) -> float:
    """Seconds of so many passes, two in flight at most; how long the end of each keeps the thread goes to `ends_us`."""
    stream = torch.cuda.Stream() if engine.device == "cuda" else None
    nothing, done = torch.empty(0, device=engine.device), SimpleNamespace(synchronize=lambda: None)
    begin = time.perf_counter()
    for number in range(count):
        graph.replay()
        if capturer is not None:
            end = time.perf_counter()
            output = engine.end(number, by=capturer)
            ends_us.append((time.perf_counter() - end) * 1e6)
            before, done = done, to_host(output, nothing, stream)[1]
            before.synchronize()
    if stream is not None:
        torch.cuda.synchronize()
    return time.perf_counter() - begin
