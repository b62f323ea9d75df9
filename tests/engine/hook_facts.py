"""Facts about the hooks and about weight updates that need SGLang's classes in the process, so they are gathered in one child.

Every public function but `main` is a case, and runs in a fork of one process that has imported SGLang once: what it patches is
gone with its fork.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

from tests.support.waits import PROGRAM_S


def _register_with(**environment: str) -> str:
    """What `plugin.register` ends the process with, or ''."""
    from r3channel.engine import sglang_plugin as plugin

    os.environ.update(environment)
    try:
        plugin.register()
    except SystemExit as end:
        return str(end.code)
    return ""


def plugin_with_a_name_gone() -> str:
    from sglang.srt.state_capturer import base

    del base.TopkCaptureOutput.finalize
    return _register_with(R3CHANNEL_ENGINE="1")


def plugin_with_unknown_codec() -> str:
    return _register_with(R3CHANNEL_ENGINE="1", R3CHANNEL_CODEC="brotli")


def plugin_off() -> dict[str, Any]:
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.state_capturer import routed_experts

    before = routed_experts.RoutedExpertsCapturer
    _register_with(R3CHANNEL_ENGINE="0")
    HookRegistry.apply_hooks()
    return {
        "same_class": routed_experts.RoutedExpertsCapturer is before,
        "engine_modules": [name for name in sys.modules if name.startswith("r3channel.engine")],
    }


def plugin_on() -> dict[str, Any]:
    ended = _register_with(R3CHANNEL_ENGINE="1")
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
    from sglang.srt.model_executor import model_runner
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()
    collect: Any = SchedulerBatchResultProcessor._maybe_collect_routed_experts
    return {
        "ended": ended,
        "capturer_of_model_runner": model_runner.RoutedExpertsCapturer.__name__,
        "collect_is_wrapped": hasattr(collect, "__wrapped__"),
    }


def _device_batch(capturer_type: Any, **attributes: Any) -> tuple[Any, Any]:
    """A capturer whose buffer is on a device that cannot be read, and the end of a decode pass on it."""
    from types import SimpleNamespace

    import torch

    capturer = object.__new__(capturer_type)
    buffer = torch.zeros((8, 4, 9), dtype=torch.int32, device="meta")
    capturer.device_cache = SimpleNamespace(buffer=buffer)
    capturer.topk_size = 8
    for name, value in attributes.items():
        setattr(capturer, name, value)
    batch = SimpleNamespace(
        out_cache_loc=torch.zeros(3, dtype=torch.int64, device="meta"),
        out_cache_loc_virtual=None,
        forward_mode=SimpleNamespace(is_decode=lambda: True),
    )
    return capturer, batch


def _under_watch(function: Callable[[], Any]) -> dict[str, Any]:
    from tests.engine.host_copies import HostCopies

    error = ""
    with HostCopies() as watch:
        try:
            function()
        except NotImplementedError as refused:  # meta tensors hold nothing to copy
            error = str(refused)[:60]
    return {"blocking": watch.blocking, "seen": watch.seen, "error": error}


def our_forward_end() -> dict[str, Any]:
    from contextlib import nullcontext
    from types import SimpleNamespace

    from r3channel.engine import sglang as room
    from r3channel.engine.capture import LayerSelection, SlotRows
    from r3channel.engine.copy_stream import PassCopies, Stream, Streams
    from r3channel.model.spec import RoutingSpec

    spec = RoutingSpec(num_layers=4, moe_layers=(1, 2, 3), num_experts=128, top_k=8)
    streams: Any = Streams()
    capturer, batch = _device_batch(
        room.FrameCapturer,
        passes=PassCopies(
            SlotRows(spec, slots=8), LayerSelection(spec, device="meta"), most_rows=8, device="meta",
            streams=streams, timed=nullcontext, counted=print,
        ),
        outlet=SimpleNamespace(),  # one that replies
        _version=("0", 0),
    )  # fmt: skip
    room.weight_version = lambda: "0"
    forward = Stream()
    streams.forward = lambda: forward
    streams.copies.run = lambda call: None  # what the copy stream is given is not the forward's
    return _under_watch(lambda: capturer.on_forward_end(batch, False, None, no_copy_to_cpu=True))


def forward_end_of_a_rank_that_does_not_reply() -> dict[str, Any]:
    from r3channel.engine import sglang as room

    capturer, batch = _device_batch(room.FrameCapturer, outlet=None)
    return _under_watch(lambda: capturer.on_forward_end(batch, False, None, no_copy_to_cpu=True))


def stock_forward_end_without_overlap() -> dict[str, Any]:
    from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer

    capturer, batch = _device_batch(RoutedExpertsCapturer, host_cache=None)
    return _under_watch(lambda: capturer.on_forward_end(batch, False, None, no_copy_to_cpu=False))


def routers_of_a_model() -> list[list[Any]]:
    """What is found in a model whose routers have each kind of output."""
    from types import SimpleNamespace

    import torch
    from sglang.srt.layers.moe import hash_topk, topk
    from sglang.srt.layers.moe.utils import MoeRunnerBackend, RoutingMethodType

    from r3channel.engine import sglang_engine as room

    shared = topk.SharedExpertsConfig()  # no model is served here that would say
    topk.get_model = hash_topk.get_model = lambda: SimpleNamespace(shared_experts=shared)
    backends = (
        "triton", "triton_kernel", "flashinfer_trtllm", "flashinfer_mxfp4", "flashinfer_trtllm_routed",
    )  # fmt: skip
    routers: list[Any] = [topk.TopK(2, layer_id=layer) for layer in range(len(backends))]
    for router, backend in zip(routers, backends, strict=True):
        method = RoutingMethodType.Renormalize  # one that trtllm's kernel can do itself
        router.bind_runner_backend(MoeRunnerBackend(backend), routing_method_type=method)
    routers.append(topk.TopK(2, layer_id=5, output_format=topk.TopKOutputFormat.BYPASSED))
    routers.append(topk.TopK(2, layer_id=6, allow_routed_experts_capture=False))
    routers.append(hash_topk.HashTopK(2, 8, vocab_size=4, layer_id=7))
    return [list(router) for router in room._routers(torch.nn.ModuleList(routers))]


def routing_past_the_weights() -> list[str]:
    """What is said at start of models that route past the hook, one of these two."""
    from types import SimpleNamespace

    from r3channel.engine import sglang_tensors as room
    from r3channel.wire.token_tensors import tensors_of

    models = [importlib.import_module(f"sglang.srt.models.{name}") for name in ("qwen3_moe", "llada2")]
    blocks = [type("Block", (), {"__module__": model.__name__})() for model in models]
    past = room.past_weights(SimpleNamespace(modules=lambda: blocks), "sglang.srt.layers.moe.topk")
    values = {"disaggregation_mode": "null", "speculative_algorithm": None, "device": "npu"}
    found = room.refused_tensors(values, tensors_of("combine_weights"), vocabulary=9, past=past)
    return [text.partition(" routes past")[0] for _, text in found]


def kept_masks() -> Any:
    """What is streamed of two rows and of none more, what is framed, and the frame of a request for no token."""
    import numpy as np
    from sglang.srt.sampling.sampling_mask import SamplingMaskRows

    from r3channel.engine.token_tensors import KeptMasks, tensor_frame
    from r3channel.errors import RoutingError
    from r3channel.wire.tensor_frame import parse_tensors
    from r3channel.wire.token_tensors import tensors_of

    kept, streamed = KeptMasks(SamplingMaskRows(), support=False), list[Any]()
    for ids in ([5, 6, 7], [8]):
        kept.append(np.array(ids, np.int32), np.array([-0.5], np.float32))
        streamed.append(kept.take().to_lists(False))
    streamed.append(kept.take().to_lists(False))

    def framed(kept: KeptMasks, name: str, new: int) -> list[Any]:
        (tensor,) = tensors_of(name)
        frame = tensor_frame(tensor, kept, prompt_tokens=4, new_tokens=new, request_id="r")
        (rows,) = parse_tensors(frame, [tensor], where="x")
        return [rows.first_row, rows.lengths_T.tolist(), rows.entries_N.tolist()]

    rows = [framed(kept, "sampling_masks", new) for new in (2, 0)]
    support = KeptMasks(SamplingMaskRows(), support=True)
    support.append(np.array([5, 6], np.int32), np.array([-0.5, -1.5], np.float32))
    streamed.append(support.take().to_lists(True))
    rows.append(framed(support, "sampling_support", 1))
    try:
        framed(support, "sampling_masks", 1)
    except RoutingError as error:
        return {"streamed": streamed, "rows": rows, "refused": str(error)}
    return None


def weight_update() -> dict[str, Any]:
    """What refusals, and an order without a bracket, rely on."""
    import torch
    from sglang.srt import constants
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqOutput
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.model_loader import loader
    from sglang.srt.server_args import ServerArgs

    from r3channel.weights.refusals import refused_model

    class Derives(torch.nn.Module):
        derived = False

        def post_load_weights(self) -> None:
            self.derived = True

    def refused(serialised: bool) -> list[str]:
        layer: Any = torch.nn.Module()
        layer.quant_method = Fp8LinearMethod(Fp8Config(is_checkpoint_fp8_serialized=serialised))
        return list(refused_model(torch.nn.Sequential(layer)))

    loader.post_load_weights(model := Derives())
    make: Any = ServerArgs  # its fields are made at run time
    return {
        "settings": list(make(model_path="none").__struct_fields__),
        "manager": list(SchedulerWeightUpdaterManager.__dataclass_fields__),
        "answer": UpdateWeightsFromDistributedReqOutput(success=True, message="").success,
        "released": constants.GPU_MEMORY_TYPE_WEIGHTS, "derives": model.derived, "online": refused(False),
        "serialised": refused(True),
    }  # fmt: skip


def float8_error() -> list[float]:
    """The largest errors of our float8 blocks as SGLang reads them: in rows of small and of ordinary values."""
    import torch
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    from examples.float8_blocks import quantise

    weight = torch.randn(320, 200, generator=torch.Generator().manual_seed(3))
    weight[:128] *= 1e-4  # one scale for the whole tensor would lose these
    found = block_quant_dequant(*quantise(weight, (128, 128)), [128, 128], torch.float32)
    parts = slice(0, 128), slice(128, 320)
    return [float((found[rows] - weight[rows]).norm() / weight[rows].norm()) for rows in parts]


def main() -> None:
    import sglang.srt.managers.scheduler_components.batch_result_processor
    import sglang.srt.model_executor.model_runner  # noqa: F401

    own = {name: case for name, case in globals().items() if getattr(case, "__module__", "") == __name__}
    cases = {name: case for name, case in own.items() if name != "main" and not name.startswith("_")}
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as forks:
        facts = {name: forks.apply_async(case).get(PROGRAM_S) for name, case in cases.items()}
    print("FACTS " + json.dumps(facts))
