"""Models of a server whose prefills lie in memory as those of a prefill graph, and are reported as such: a CPU has no such graph.

SGLANG_EXTERNAL_MODEL_PACKAGE names this package, so every scheduler imports it. SGLang itself pads the batch of each rank to one
of `SIZES`, as it does where a graph will run; the pass is run without one, and `on_forward_end` is told what a GPU would tell it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_exec

SIZES = [16, 64]
_prepare = ForwardBatch.prepare_mlp_sync_batch
_forward = ModelRunner._forward_raw


def _padded_for_a_graph(batch: Any, runner: Any) -> None:
    batch.can_run_dp_prefill_cuda_graph = True
    get_exec().graph.cuda_graph_config.prefill.bs = SIZES
    _prepare(batch, runner)


def _reported_as_a_graph(runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    runner.decode_cuda_graph_runner = SimpleNamespace(bs=8, can_run_graph=lambda _: False)
    runner.prefill_cuda_graph_runner = SimpleNamespace(
        capture_num_tokens=SIZES, can_run_graph=lambda _: False
    )
    output = _forward(runner, batch, *args, **kwargs)
    output.can_run_graph = batch.is_extend_in_batch and batch.dp_padding_mode.is_max_len()
    return output


setattr(ForwardBatch, "prepare_mlp_sync_batch", _padded_for_a_graph)  # noqa: B010
setattr(ModelRunner, "_forward_raw", _reported_as_a_graph)  # noqa: B010
