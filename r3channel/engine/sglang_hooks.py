"""The names of SGLang that the engine room relies on, per version, and a check of each. Imports SGLang only when asked, by name.

Read against SGLang 0.5.15.post1 and 0.5.23; what lies between follows one of the two tables or is refused. When a release
moves a name, `check_hooks` says which, before anything is patched.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import pkgutil
from collections.abc import Mapping
from typing import Any, NamedTuple

from r3channel.errors import PluginNotApplied

READ_AGAINST = ("0.5.15.post1", "0.5.23")
_SRT = "sglang.srt"

CAPTURER = f"{_SRT}.state_capturer.routed_experts.RoutedExpertsCapturer"
COLLECT = (
    f"{_SRT}.managers.scheduler_components.batch_result_processor"
    ".SchedulerBatchResultProcessor._maybe_collect_routed_experts"
)
MASKS = (
    f"{_SRT}.managers.scheduler_components.batch_result_processor"
    ".SchedulerBatchResultProcessor.add_sampling_mask_return_values"
)
RELEASE = f"{_SRT}.managers.schedule_batch.release_req"
INIT_BATCH = f"{_SRT}.model_executor.forward_batch_info.ForwardBatch.init_new"
TRANSFERRED = (
    f"{_SRT}.disaggregation.decode_schedule_batch_mixin"
    ".ScheduleBatchDisaggregationDecodeMixin.prepare_for_prebuilt"
)
INIT_CAPTURER = f"{_SRT}.model_executor.model_runner.ModelRunner.init_routed_experts_capturer"
UPDATER = f"{_SRT}.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATES = tuple(
    f"{UPDATER}.update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc")
)
_BASE = f"{_SRT}.state_capturer.base"
_ROWS = f"{_SRT}.sampling.sampling_mask.SamplingMaskRows"
_CONTEXT = f"{_SRT}.runtime_context"
_FIELDS = f"{_SRT}.arg_groups.fields"
_ARGS = f"{_SRT}.server_args.ServerArgs"


class Name(NamedTuple):
    """A dotted name and, for a callable, parameters that it must still have."""

    path: str
    parameters: tuple[str, ...] = ()


_COMMON: tuple[Name, ...] = (
    Name(CAPTURER),
    Name(COLLECT, ("self", "req")),
    Name(INIT_BATCH, ("batch",)),
    Name(RELEASE, ("req", "req_to_token_pool")),
    Name(f"{_SRT}.managers.schedule_batch.ScheduleBatch.decoding_reqs"),
    Name(TRANSFERRED, ("self",)),
    Name(INIT_CAPTURER, ("self",)),
    Name(f"{_SRT}.model_executor.model_runner.ModelRunner.forward"),
    Name(f"{_SRT}.plugins.hook_registry.HookRegistry.register", ("target", "hook", "hook_type")),
    Name(f"{_SRT}.plugins.hook_registry.HookType.AROUND"),
    Name(f"{_SRT}.plugins.hook_registry.HookType.BEFORE"),
    Name(f"{_SRT}.plugins.hook_registry.HookType.AFTER"),
    Name(f"{_SRT}.plugins.hook_registry.HookType.REPLACE"),
    Name(f"{CAPTURER}.create", ("model_config", "num_tokens", "max_running_requests", "device")),
    Name(
        f"{CAPTURER}.__init__",
        ("model_config", "num_tokens", "max_running_requests", "num_fused_shared_experts", "device"),
    ),
    Name(f"{CAPTURER}._get_local_slice", ("forward_batch", "can_run_graph", "cuda_graph_batch")),
    Name(
        f"{CAPTURER}.on_forward_end", ("forward_batch", "can_run_graph", "cuda_graph_batch", "no_copy_to_cpu")
    ),
    Name(f"{CAPTURER}.get_topk", ("req_pool_idx", "seqlen", "req_to_token_pool", "start_len")),
    Name(f"{_SRT}.state_capturer.routed_experts.get_global_experts_capturer"),
    Name(f"{_BASE}.TopkCaptureOutput.map_device_tensors", ("fn",)),
    Name(f"{_BASE}.TopkCaptureOutput.finalize"),
    Name(f"{_SRT}.model_executor.forward_batch_info.ForwardMode.is_decode"),
    Name(f"{_SRT}.model_executor.forward_batch_info.ForwardMode.is_target_verify"),
    Name(f"{_SRT}.model_executor.forward_batch_info.ForwardMode.is_extend_without_speculative"),
    Name(f"{_SRT}.model_executor.forward_batch_info.ForwardBatch._original_batch_size"),
    Name(f"{_SRT}.layers.moe.topk.TopK.__init__", ("top_k", "layer_id", "output_format")),
    Name(f"{_SRT}.layers.moe.topk.TopKConfig.output_format"),
    Name(f"{_SRT}.layers.moe.topk.TopKOutputFormat.STANDARD"),
    Name(f"{_SRT}.layers.moe.hash_topk.HashTopK.__init__", ("layer_id",)),
    Name(f"{_CONTEXT}.get_parallel"),
    Name(f"{_CONTEXT}.get_server_args"),
    Name(f"{_ARGS}.url"),
)

_SINCE_BAGS: tuple[Name, ...] = (
    Name(f"{CAPTURER}.create", ("model", "model_config")),
    Name(f"{_BASE}.BaseHostCache.destroy"),
    Name(f"{_CONTEXT}.get_serving"),
    Name(f"{_FIELDS}.serving.Serving.weight_version"),
    Name(f"{_FIELDS}.exec_.ExecFeatures.enable_return_routed_experts"),
    Name(f"{_CONTEXT}.max_speculative_num_draft_tokens"),
    Name(f"{_FIELDS}.spec.Spec.speculative_algorithm"),
    Name(f"{_FIELDS}.spec.Spec.speculative_eagle_topk"),
    Name(f"{_FIELDS}.parallel.Parallel.attn_dp_size"),
    Name(f"{_FIELDS}.disagg.Disagg.disaggregation_mode"),
    Name(f"{_FIELDS}.disagg.Disagg.enable_pdmux"),
    Name(f"{_FIELDS}.memory.Memory.enable_hierarchical_cache"),
    Name(f"{_FIELDS}.memory.Memory.enable_lmcache"),
    Name(f"{_FIELDS}.memory.Memory.enable_flexkv"),
    Name(f"{_FIELDS}.memory.Memory.enable_unified_cache_external_linker"),
    Name(f"{_FIELDS}.exec_.ExecOverlap.enable_two_batch_overlap"),
    Name(f"{_FIELDS}.exec_.ExecMoe.moe_a2a_backend"),
    Name(f"{_FIELDS}.exec_.ExecFeatures.enable_decoder_swa_bounded_replay"),
    Name(f"{_FIELDS}.parallel.Parallel.pp_size"),
    Name(f"{_FIELDS}.parallel.Parallel.attn_cp_size"),
    Name(f"{_FIELDS}.parallel.Parallel.enable_prefill_cp"),
    Name(f"{_ARGS}.resolved_dict", ("self",)),
    Name(MASKS, ("self", "i", "req", "output")),
    Name(f"{_ROWS}.append", ("token_ids", "logprobs")),
    Name(f"{_ROWS}.view", ("self",)),
    Name(f"{_ROWS}.take", ("self",)),
)
"""0.5.23: settings as asked for and as resolved; a change of the weight version reaches the scheduler."""

_BEFORE_BAGS: tuple[Name, ...] = (
    Name(f"{CAPTURER}.create", ("enable", "num_fused_shared_experts")),
    *(
        Name(f"{_ARGS}.{field}")
        for field in (
            "enable_return_routed_experts",
            "weight_version",
            "speculative_algorithm",
            "disaggregation_mode",
            "pp_size",
            "enable_hierarchical_cache",
            "enable_lmcache",
            "enable_two_batch_overlap",
            "enable_pdmux",
            "moe_a2a_backend",
            "moe_runner_backend",
            "attn_cp_size",
            "enable_prefill_cp",
        )
    ),
    Name(f"{_ARGS}.max_speculative_num_draft_tokens"),
    *(Name(path, ("self", "recv_req")) for path in UPDATES),
)
"""0.5.15.post1: one object of settings. Only a weight update that names its version tells the scheduler."""

TABLES: Mapping[str, tuple[Name, ...]] = {
    "0.5.15.post1": (*_COMMON, *_BEFORE_BAGS),
    "0.5.23": (*_COMMON, *_SINCE_BAGS),
}
"""Version -> every name that is relied on there."""


def installed_version() -> str:
    """SGLang's version from its metadata; nothing of it is imported."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def hooked(table: str) -> tuple[str, ...]:
    """What is replaced or wrapped under a table of `TABLES`."""
    return (
        CAPTURER,
        COLLECT,
        INIT_BATCH,
        RELEASE,
        TRANSFERRED,
        INIT_CAPTURER,
        *(UPDATES if table == "0.5.15.post1" else ()),
    )


def is_patched() -> bool:
    """Whether SGLang's sources have the hooks in them (patches/), on by R3CHANNEL_ENGINE=1. Ask before hooks are registered.

    Raises PluginNotApplied where they have some of the hooks only.
    """
    paths = [path for path in hooked(matching_table() or "") if path != CAPTURER]
    bare = [path for path in paths if not hasattr(pkgutil.resolve_name(path), "r3channel_hook")]
    if 0 < len(bare) < len(paths):
        raise PluginNotApplied(
            f"this SGLang was patched by another r3channel, which had no hook in {', '.join(bare)}; put SGLang's own files back, "
            "then `r3channel patch apply`"
        )
    return not bare


def matching_table() -> str | None:
    """The table whose names are all there: the installed version's own, or the one that a version between follows."""
    own = installed_version()
    candidates = [own] if own in TABLES else sorted(TABLES, reverse=True)
    return next((table for table in candidates if not _problems(table)), None)


def check_hooks() -> list[str]:
    """One line for each name that is gone or has other parameters; empty when the hooks will apply.

    Imports SGLang, which on a machine without a GPU needs the environment of `examples.embedded`. Patches nothing.
    """
    if importlib.util.find_spec("sglang") is None:
        return [f"SGLang is not installed; r3channel was read against SGLang {' and '.join(READ_AGAINST)}"]
    if matching_table() is not None:
        return []
    own = installed_version()
    if own in TABLES:
        return _problems(own)
    return min((_problems(table) for table in TABLES), key=len)


def _problems(table: str) -> list[str]:
    return [problem for name in TABLES[table] if (problem := _problem(name)) is not None]


def _problem(name: Name) -> str | None:
    where = f"r3channel was read against SGLang {' and '.join(READ_AGAINST)}, this is {installed_version()}"
    try:
        found = pkgutil.resolve_name(name.path)
    except (ImportError, AttributeError) as error:
        return f"{name.path} is gone ({error}); {where}"
    missing = [parameter for parameter in name.parameters if parameter not in _parameters(found)]
    if missing:
        return f"{name.path} no longer takes {', '.join(missing)}; {where}"
    return None


def _parameters(found: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(found).parameters)
