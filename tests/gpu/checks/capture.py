"""The real FrameCapturer under SGLang's real TopK: passes that overlap, padded and replayed from a CUDA graph, against a copy
that waits. Sync-debug mode stays silent; what capture costs a loop of small MoE layers."""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from r3channel.spec import RoutingSpec
from tests.gpu.facts import Facts, main

SPEC = RoutingSpec(num_layers=6, moe_layers=tuple(range(6)), num_experts=128, top_k=8)
ROWS, PADDED, HIDDEN = 12, 16, 256
IN_FLIGHT = 2


class Engine:
    """As much of a model runner as capture sees: routers, the capturer, a pass, its copy to the host."""

    def __init__(self, device: str) -> None:
        from sglang.srt import runtime_context, server_args
        from sglang.srt.layers.moe import topk
        from sglang.srt.layers.moe.utils import MoeRunnerBackend
        from sglang.srt.state_capturer import routed_experts

        from r3channel.engine import sglang as room
        from r3channel.engine.capture import LayerSelection, SlotRows

        self.device = device
        make: Any = server_args.ServerArgs  # its fields are made at run time
        arguments = make(model_path="dummy", device=device, weight_version="0")
        runtime_context.publish(arguments, role="scheduler", ranks=None)
        room.weight_version = lambda: "0"
        self._experts: Any = routed_experts
        shared = topk.SharedExpertsConfig()  # no model is served here that would say
        topk.get_model = lambda: SimpleNamespace(shared_experts=shared)
        self.routers: list[Any] = [topk.TopK(SPEC.top_k, layer_id=layer) for layer in range(SPEC.num_layers)]
        for router in self.routers:
            router.bind_runner_backend(MoeRunnerBackend("triton"))
        self.capturer: Any = object.__new__(room.FrameCapturer)
        buffer = torch.zeros((PADDED, SPEC.num_layers, SPEC.top_k), dtype=torch.int32, device=device)
        self.capturer.device_cache = SimpleNamespace(
            buffer=buffer, capture=lambda layer, ids: buffer[: len(ids), layer].copy_(ids)
        )
        self.capturer.topk_size, self.capturer.num_fused_shared_experts = SPEC.top_k, 0
        self.capturer._selection = LayerSelection(SPEC, device=device)
        self.capturer._version, self.capturer.outlet = ("0", 0), "one that replies"
        slots = torch.zeros((PADDED * 4, SPEC.num_moe_layers, SPEC.top_k), dtype=torch.uint8)
        self.capturer.host_cache = SimpleNamespace(rows=SlotRows(SPEC, slots))
        self.hidden = torch.zeros((PADDED, HIDDEN), device=device)
        self.logits = torch.zeros((SPEC.num_layers, PADDED, SPEC.num_experts), device=device)
        self.weight = torch.randn((HIDDEN, HIDDEN), device=device) / HIDDEN**0.5
        self.batches = [self._batch(number) for number in range(IN_FLIGHT)]
        self.chosen: list[torch.Tensor] = []

    def _batch(self, number: int) -> Any:
        slots_T = torch.arange(number * ROWS, (number + 1) * ROWS, device=self.device)
        mode = SimpleNamespace(is_decode=lambda: True, is_target_verify=lambda: False)
        return SimpleNamespace(
            out_cache_loc=slots_T, out_cache_loc_virtual=None, forward_mode=mode, _original_batch_size=None
        )

    def capturing(self, on: bool) -> None:
        self._experts.set_global_experts_capturer(self.capturer if on else None)

    def forward(self) -> None:
        """One padded pass: every router, and a dense product in the place of the experts."""
        hidden = self.hidden
        for router, logits in zip(self.routers, self.logits, strict=True):
            call = router.forward_cuda if self.device == "cuda" else router.forward_native
            output = call(hidden, logits)
            hidden = torch.tanh(hidden @ self.weight) + output.topk_weights.sum()

    def fill(self, generator: torch.Generator) -> torch.Tensor:
        """Other logits; what their top-k must be."""
        self.logits.copy_(torch.rand(self.logits.shape, generator=generator, device=self.device))
        return self.logits[:, :ROWS].topk(SPEC.top_k, -1).indices.sort(-1).values.to(torch.uint8)


def graph_of(engine: Engine) -> Any:
    """The pass as a decode graph; itself on a CPU."""
    for _ in range(3):
        engine.forward()
    if engine.device == "cpu":
        return SimpleNamespace(replay=engine.forward)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        engine.forward()
    return graph


def passes(engine: Engine, graph: Any, count: int) -> tuple[int, list[float]]:
    """(ids that differ, microseconds of each on_forward_end). The next pass is launched before the copy of one is looked at."""
    generator = torch.Generator(engine.device).manual_seed(0)
    copy_stream = torch.cuda.Stream() if engine.device == "cuda" else None
    waiting: list[tuple[Any, Any, torch.Tensor]] = []
    different, spent_us = 0, list[float]()
    for number in range(count + IN_FLIGHT):
        if number < count:
            wanted = engine.fill(generator)
            graph.replay()
            begin = time.perf_counter()
            output = engine.capturer.on_forward_end(
                engine.batches[number % IN_FLIGHT], True, PADDED, no_copy_to_cpu=True
            )
            spent_us.append((time.perf_counter() - begin) * 1e6)
            waiting.append((output, to_host(output, copy_stream), wanted))
        if number >= IN_FLIGHT:
            output, copied, wanted = waiting.pop(0)
            if copied is not None:
                copied.synchronize()
            output.finalize()
            slots = engine.batches[(number - IN_FLIGHT) % IN_FLIGHT].out_cache_loc.cpu()
            found = output.rows.ids[slots].sort(-1).values.transpose(0, 1)
            different += int((found != wanted.cpu()).sum())
    return different, spent_us


def to_host(output: Any, stream: Any) -> Any:
    """As SGLang's result copy: on a stream of its own, into pinned memory."""
    if stream is None:
        return None
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        output.map_device_tensors(
            lambda device_tensor: torch.empty(
                device_tensor.shape, dtype=device_tensor.dtype, pin_memory=True
            ).copy_(device_tensor, non_blocking=True)
        )
        return stream.record_event()


def ends_silently(engine: Engine) -> str:
    """What torch says of a synchronisation in `on_forward_end`; empty for none."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.capturer.on_forward_end(engine.batches[0], True, PADDED, no_copy_to_cpu=True)
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def throughput(engine: Engine, graphs: dict[bool, Any]) -> float:
    """Passes per second with capture, of without: the median of interleaved pairs."""

    def seconds(on: bool) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for number in range(200):
            graphs[on].replay()
            if on:
                output = engine.capturer.on_forward_end(
                    engine.batches[number % 2], True, PADDED, no_copy_to_cpu=True
                )
                to_host(output, stream)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    stream = torch.cuda.Stream()
    return statistics.median(seconds(False) / seconds(True) for _ in range(20))


def check(device: str, facts: Facts) -> None:
    torch.manual_seed(0)
    engine = Engine(device)
    engine.capturing(False)
    plain = graph_of(engine)
    engine.capturing(True)
    captured = graph_of(engine)
    with torch.inference_mode():
        different, spent_us = passes(engine, captured, 10_000 if device == "cuda" else 200)
    facts.figures["passes"] = len(spent_us)
    facts.expect("ids that differ", different, different == 0, "0")
    if device == "cpu":
        facts.left_out.append("synchronisations, graphs and times of capture: there are no streams on a CPU")
        return
    told = ends_silently(engine)
    facts.expect("synchronisations in on_forward_end", told, not told, "none")
    p99_us = float(np.percentile(spent_us[100:], 99))
    facts.expect("on_forward_end p99, us", p99_us, p99_us <= 100, "at most 100")
    share = throughput(engine, {False: plain, True: captured})
    facts.expect("throughput with capture, of without", share, share >= 0.99, "at least 0.99")


if __name__ == "__main__":
    main(check)
