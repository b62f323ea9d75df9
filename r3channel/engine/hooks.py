"""The names of SGLang that the engine room relies on, and a check of each. Imports SGLang only when asked, by name.

Read against SGLang 0.5.23. When a release moves one of these, `check_hooks` says which, before anything is patched.
"""

from __future__ import annotations

import inspect
import pkgutil
from typing import Any, NamedTuple

READ_AGAINST = "0.5.23"
_SRT = "sglang.srt"

CAPTURER = f"{_SRT}.state_capturer.routed_experts.RoutedExpertsCapturer"
COLLECT = (
    f"{_SRT}.managers.scheduler_components.batch_result_processor"
    ".SchedulerBatchResultProcessor._maybe_collect_routed_experts"
)


class Name(NamedTuple):
    """A dotted name and, for a callable, parameters that it must still have."""

    path: str
    parameters: tuple[str, ...] = ()


HOOKED: tuple[Name, ...] = (
    Name(CAPTURER),
    Name(COLLECT, ("self", "req")),
)
"""What is replaced or wrapped."""

RELIED_ON: tuple[Name, ...] = (
    *HOOKED,
    Name(f"{_SRT}.plugins.hook_registry.HookRegistry.register", ("target", "hook", "hook_type")),
    Name(f"{_SRT}.plugins.hook_registry.HookType.AROUND"),
    Name(f"{_SRT}.plugins.hook_registry.HookType.REPLACE"),
    Name(f"{CAPTURER}.create", ("model", "model_config", "num_tokens", "max_running_requests", "device")),
    Name(
        f"{CAPTURER}.__init__",
        ("model_config", "num_tokens", "max_running_requests", "num_fused_shared_experts", "device"),
    ),
    Name(f"{CAPTURER}._get_local_slice", ("forward_batch", "can_run_graph", "cuda_graph_batch")),
    Name(
        f"{CAPTURER}.on_forward_end",
        ("forward_batch", "can_run_graph", "cuda_graph_batch", "no_copy_to_cpu"),
    ),
    Name(f"{CAPTURER}.get_topk", ("req_pool_idx", "seqlen", "req_to_token_pool", "start_len")),
    Name(f"{_SRT}.state_capturer.routed_experts.get_global_experts_capturer"),
    Name(f"{_SRT}.state_capturer.base.TopkCaptureOutput", ("out_cache_loc", "topk", "host_cache")),
    Name(f"{_SRT}.state_capturer.base.TopkCaptureOutput.map_device_tensors", ("fn",)),
    Name(f"{_SRT}.state_capturer.base.TopkCaptureOutput.finalize"),
    Name(f"{_SRT}.state_capturer.base.BaseHostCache.destroy"),
    Name(f"{_SRT}.state_capturer.base.BaseHostCache._log_allocation"),
    Name(f"{_SRT}.state_capturer.base.ALLOC_MEMORY_FUNCS"),
    Name(f"{_SRT}.state_capturer.base.HostTensorAllocator"),
    Name(f"{_SRT}.model_executor.forward_batch_info.ForwardMode.is_decode"),
    Name(f"{_SRT}.layers.moe.topk.TopK.__init__", ("top_k", "layer_id")),
    Name(f"{_SRT}.runtime_context.get_serving"),
    Name(f"{_SRT}.runtime_context.get_exec"),
    Name(f"{_SRT}.runtime_context.get_spec"),
    Name(f"{_SRT}.runtime_context.get_disagg"),
    Name(f"{_SRT}.runtime_context.get_parallel"),
    Name(f"{_SRT}.runtime_context.get_memory"),
    Name(f"{_SRT}.runtime_context.get_schedule"),
    Name(f"{_SRT}.arg_groups.fields.serving.Serving.weight_version"),
    Name(f"{_SRT}.arg_groups.fields.spec.Spec.speculative_algorithm"),
    Name(f"{_SRT}.arg_groups.fields.disagg.Disagg.disaggregation_mode"),
    Name(f"{_SRT}.arg_groups.fields.memory.Memory.enable_hierarchical_cache"),
    Name(f"{_SRT}.arg_groups.fields.memory.Memory.enable_lmcache"),
    Name(f"{_SRT}.arg_groups.fields.schedule.Schedule.enable_mixed_chunk"),
)


def check_hooks() -> list[str]:
    """One line for each name that is gone or has other parameters; empty when the hooks will apply.

    Imports SGLang, which on a machine without a GPU needs the environment of `r3channel.embedded`. Patches nothing.
    """
    return [problem for name in RELIED_ON if (problem := _problem(name)) is not None]


def _problem(name: Name) -> str | None:
    try:
        found = pkgutil.resolve_name(name.path)
    except (ImportError, AttributeError) as error:
        return f"{name.path} is gone ({error}); r3channel was read against SGLang {READ_AGAINST}"
    missing = [parameter for parameter in name.parameters if parameter not in _parameters(found)]
    if missing:
        return f"{name.path} no longer takes {', '.join(missing)}; r3channel was read against SGLang {READ_AGAINST}"
    return None


def _parameters(found: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(found).parameters)
