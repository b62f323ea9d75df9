"""SGLang's settings that rows can depend on: which are tested, which were judged by reading SGLang, which are refused. Data only.

`refusals` and `r3channel doctor --engine` judge by this table, and the table in this room's README is made of it.

A setting that is not here was neither tested nor read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from r3channel.config import REFUSALS


class Verdict(StrEnum):
    TESTED = "tested"
    """A test runs the real SGLang with it and compares ids with a reference."""
    READ = "by reading"
    """The sources of the releases named in `sglang_hooks.READ_AGAINST` were read for what it does to rows."""
    REFUSED = "refused"
    """The engine does not start with it unless R3CHANNEL_ALLOW has its word."""


class Setting(NamedTuple):
    names: str
    """SGLang's server arguments, shell patterns, separated by blanks."""
    verdict: Verdict
    values: str
    """Which of its values this is about, for the reader."""
    why: str
    """What was tested, or read; of a refusal the word that overrides it, whose reason `config.REFUSALS` has."""
    covers: Callable[[Any], bool] = lambda value: True

    def matches(self, name: str, value: Any) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.names.split()) and self.covers(value)


class Together(NamedTuple):
    """Settings that are taken one by one and refused together."""

    names: str
    """For the reader."""
    word: str
    why: str
    covers: Callable[[Mapping[str, Any]], bool]


def _among(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _above(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and value > least


def _is_on(value: Any) -> bool:
    return bool(value)


TESTED, READ, REFUSED = Verdict
_ASIDE = "no row depends on it"
_INPUT = "ids are taken where TopK leaves them, whatever computed its input: "

SETTINGS: tuple[Setting, ...] = (
    Setting(
        "speculative_algorithm",
        REFUSED,
        "all but EAGLE, EAGLE3, STANDALONE; with DP attention these too, except in slime's image",
        "speculative",
        lambda value: value not in (None, "NONE", "EAGLE", "EAGLE3", "STANDALONE"),
    ),
    Setting("speculative_eagle_topk", REFUSED, "above 1", "speculative", _above(1)),
    Setting("disaggregation_mode", REFUSED, "prefill, decode", "disaggregation", lambda value: value != "null"),
    Setting("pp_size", REFUSED, "above 1", "pp", _above(1)),
    Setting(
        "enable_hierarchical_cache enable_lmcache enable_flexkv enable_unified_cache_external_linker",
        REFUSED,
        "on",
        "external_cache",
        _is_on,
    ),
    Setting("enable_two_batch_overlap", REFUSED, "on", "two_batch_overlap", _is_on),
    Setting("enable_pdmux", REFUSED, "on", "pdmux", _is_on),
    Setting(
        "moe_a2a_backend",
        REFUSED,
        "all but none, deepep, deepep_v2",
        "a2a",
        lambda value: value not in (None, "none", "deepep", "deepep_v2"),
    ),
    Setting("attn_cp_size", REFUSED, "above 1", "prefill_cp", _above(1)),
    Setting("enable_prefill_cp enable_*_context_parallel", REFUSED, "on", "prefill_cp", _is_on),
    Setting("enable_*_swa_bounded_replay", REFUSED, "on", "swa_replay", _is_on),
    # -- tested on the real SGLang, ids against a reference -------------------------------------------------------------
    Setting("tp_size", TESTED, "1, 2", "in-band and direct: `test_parallel_engine`", _among(1, 2)),
    Setting(
        "attn_dp_size enable_dp_attention",
        TESTED,
        "1, 2; on",
        "eager, and as after a prefill graph: `test_parallel_engine`",
        _among(1, 2, True, False),
    ),
    Setting("dp_size", TESTED, "1, 2", "behind SGLang's own controller: `test_parallel_engine`", _among(1, 2)),
    Setting("ep_size", TESTED, "1, 2", "with experts on both ranks: `test_parallel_engine`", _among(1, 2)),
    Setting("ep_num_redundant_experts", TESTED, "0, 2", "with `ep_size`: `test_parallel_engine`", _among(0, 2)),
    Setting("ep_dispatch_algorithm", TESTED, "dynamic", "with `ep_size`: `test_parallel_engine`", _among("dynamic")),
    Setting("chunked_prefill_size", TESTED, "any", "prompts in several chunks: `test_engine_server`"),
    Setting(
        "enable_mixed_chunk",
        TESTED,
        "on, off",
        "rows of a pass that decodes and prefills are of kind UNKNOWN: `test_engine_server`",
    ),
    Setting("disable_overlap_schedule", TESTED, "on, off", "with retraction: `test_engine_server`"),
    Setting("enable_return_routed_experts weight_version", TESTED, "any", "`test_engine_server`"),
    Setting(
        "speculative_algorithm speculative_eagle_topk",
        TESTED,
        "EAGLE, STANDALONE; 1",
        "greedy, with and without overlap, in-band and direct, with retraction: `test_speculative`, `test_older_engine`",
        _among("EAGLE", "STANDALONE", 1),
    ),
    Setting(
        "mamba_radix_cache_strategy",
        TESTED,
        "no_buffer",
        "linear attention, with a second turn: `test_families`",
        _among("no_buffer"),
    ),
    Setting("device", TESTED, "cpu", "every test of `tests/engine`", _among("cpu")),
    Setting("attention_backend", TESTED, "torch_native", "every test of `tests/engine`", _among("torch_native")),
    Setting("dtype", TESTED, "float32", "ids equal transformers', order included", _among("float32")),
    Setting("moe_a2a_backend", TESTED, "none", "every test of `tests/engine`", _among(None, "none")),
    # -- read ------------------------------------------------------------------------------------------------------------
    Setting(
        "speculative_algorithm enable_multi_layer_eagle",
        READ,
        "EAGLE3; on, off",
        "the draft has other inputs or several layers, which are not captured; the target verifies in the same pass",
    ),
    Setting("tp_size dp_size attn_dp_size", READ, "any other", "each rank captures all its rows; one of them replies"),
    Setting("ep_size moe_dense_tp_size", READ, "any", "ids are logical, and taken before they are dispatched"),
    Setting(
        "enable_eplb eplb_* ep_num_redundant_experts ep_dispatch_algorithm init_expert_location expert_distribution_*",
        READ,
        "any",
        "ids are taken before logical experts are mapped to physical ones; SGLang's rebalancing does not run on a CPU",
    ),
    Setting("moe_a2a_backend deepep_*", READ, "deepep, deepep_v2", "SGLang gathers the ids over the attention group"),
    Setting(
        "moe_runner_backend",
        READ,
        "any",
        "each router's output format is looked at when the model is built; refused as `kernel_routing` where ids never appear",
    ),
    Setting("enable_lora* lora_paths mm_process_config", READ, "off", "0.5.15.post1 writes so itself", lambda value: not value),
    Setting(
        "disable_shared_experts_fusion enforce_shared_experts_fusion",
        READ,
        "any",
        "shared experts are the last columns, which are cut off on the device",
    ),
    Setting("device", READ, "cuda", "copies as SGLang makes them; `tests/gpu` has the streams", _among("cuda")),
    Setting(
        "cuda_graph_* disable_cuda_graph* disable_*_cuda_graph enable_cudagraph_gc enable_profile_cuda_graph "
        "torch_compile_max_bs",
        READ,
        "any",
        "the write into the capture buffer is part of the graph; with DP attention its size says where rows lie",
    ),
    Setting(
        "*attention_backend dsa_*_backend dsv4_*_backend dtype kv_cache_dtype quantization quantization_param_path "
        "*_gemm_* triton_attention_* flashinfer_* disable_flashinfer_autotune enable_fused_qk_norm_rope "
        "enable_fp32_* enable_tf32_matmul enable_deterministic_inference rl_on_policy_target sampling_backend "
        "grammar_backend linear_attn_*_backend torchao_config",
        READ,
        "any",
        _INPUT + "kernels and number formats",
    ),
    Setting(
        "*allreduce_fusion* disable_custom_all_reduce enable_nccl_nvls enable_symm_mem enable_torch_symm_mem "
        "enable_mscclpp pre_warm_nccl enable_p2p_check enable_dp_lm_head boundary_reduction",
        READ,
        "any",
        _INPUT + "collectives",
    ),
    Setting(
        "max_running_requests max_queued_requests max_total_tokens max_prefill_tokens mem_fraction_static *mamba_*cache* "
        "page_size disable_radix_cache radix_eviction_policy* disable_chunked_prefix_cache "
        "swa_full_tokens_ratio disable_hybrid_swa_memory "
        "prefill_m* prefill_d* schedule_* *priority* retraction_policy num_continuous_decode_steps scheduler_recv_interval "
        "enable_prefill_delayer enable_dynamic_chunking min_free_slots_delay load_balance_method",
        READ,
        "any",
        "rows are kept by KV slot, so it is alike when a token is computed and with which others",
    ),
    Setting(
        "cpu_offload_gb offload_* enable_memory_saver enable_*weights_cpu_backup load_format model_* *weight_load* "
        "remote_instance_* checkpoint_engine_* weight_cache_* trust_remote_code context_length revision "
        "json_model_override_args download_dir modelopt_* rl_quant_profile delete_ckpt_after_loading decrypted_* "
        "engine_info_bootstrap_port custom_pull_weights_*",
        READ,
        "any; of model_impl: auto, sglang",
        _ASIDE + ": weights, where they come from and lie",
        lambda value: value not in ("transformers", "mindspore"),
    ),
    Setting(
        "host port nccl_port nnodes node_rank dist_* gated_launch_port base_gpu_id gpu_id_step random_seed "
        "*watchdog_timeout sleep_on_idle custom_sigquit_handler numa_node gc_*",
        READ,
        "any",
        _ASIDE + ": processes and ports",
    ),
    Setting(
        "*tokenizer* fastapi_root_path enable_http* http2_* grpc_port grpc_response_timeout_secs grpc_worker_threads ssl_* "
        "enable_ssl_refresh *api_key served_model_name *chat_template* completion_template file_storage_path "
        "enable_cache_report return_*put_ids reasoning_parser strip_thinking_cache enable_strict_thinking tool_* "
        "sampling_defaults asr_* preferred_sampling_params stream_* batch_notify_size constrained_json_* "
        "enable_custom_logit_processor *watermark* *return_hidden_states* sampling_mask_max_tokens disable_outlines_disk_cache "
        "skip_server_warmup warmups enable_response_store sidecar*",
        READ,
        "any",
        _ASIDE + ": requests and replies",
    ),
    Setting(
        "log_* uvicorn_* crash_dump_folder show_time_cost *metric* bucket_* *_tokens_buckets decode_log_interval "
        "enable_request_time_stats_logging kv_events_config load_*publish* enable_trace trace_modules otlp_* stat_loggers "
        "enable_mfu_metrics *_http_sidecar_port enable_layerwise_nvtx_marker",
        READ,
        "any",
        _ASIDE + ": logs, metrics, traces",
    ),
    Setting(
        "speculative_*",
        READ,
        "any",
        _ASIDE + ": what drafts a chain, its length, what of it is accepted; its rows are those of the pass that verified it",
    ),
    Setting(
        "disaggregation_* optimistic_prefill_* *hicache* lmcache_config_file flexkv_config_file *external_linker* cp_strategy "
        "*prefill_cp_mode pdmux_config_path sm_group_num tbo_token_distribution_threshold pp_*",
        READ,
        "any",
        _ASIDE + ", or it belongs to what is refused itself",
    ),
)  # fmt: skip


def has_dp_attention(values: Mapping[str, Any]) -> bool:
    return bool(values.get("enable_dp_attention")) or (values.get("attn_dp_size") or 1) > 1


TOGETHER: tuple[Together, ...] = (
    Together(
        "moe_runner_backend flashinfer_cutlass with DP attention",
        "a2a",
        "with FP4 experts each rank routes its own tokens before they are gathered, and its rows are looked for where they would "
        "lie behind those of the ranks before it",
        lambda values: values.get("moe_runner_backend") == "flashinfer_cutlass" and has_dp_attention(values),
    ),
)


def judged(name: str, value: Any) -> Setting | None:
    """The first line of the table that is about this value; None: neither tested nor read.

    >>> judged("pp_size", 2).verdict, judged("pp_size", 1).verdict, judged("enable_hisparse", True)
    (<Verdict.REFUSED: 'refused'>, <Verdict.READ: 'by reading'>, None)
    """
    return next((setting for setting in SETTINGS if setting.matches(name, value)), None)


def judgements(values: Mapping[str, Any], verdict: Verdict) -> Iterator[tuple[str, Any, Setting]]:
    """(name, value, line) of each value that has this verdict and that rows can depend on, by name."""
    for name in sorted(values):
        setting = judged(name, values[name])
        if setting is not None and setting.verdict is verdict and not setting.why.startswith(_ASIDE):
            yield name, values[name], setting


def refused(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(word, reason) of each value that is refused, and of those that are refused together."""
    for name, value, setting in judgements(values, Verdict.REFUSED):
        yield setting.why, f"{flag(name, value)}: {REFUSALS[setting.why]}"
    yield from ((pair.word, f"{pair.names}: {pair.why}") for pair in TOGETHER if pair.covers(values))


def flag(name: str, value: Any) -> str:
    """A setting as it is written on SGLang's command line.

    >>> flag("pp_size", 2), flag("enable_pdmux", True)
    ('--pp-size 2', '--enable-pdmux')
    """
    option = "--" + name.replace("_", "-")
    return option if value is True else f"{option} {value}"


# -- for the reader ------------------------------------------------------------------------------------------------------


def table_lines() -> list[str]:
    """The table as Markdown, for the room's page."""
    lines = [
        "| settings | values | | why; of what is refused also the word that overrides |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{pair.names}` | | {REFUSED} | {pair.why} (`{pair.word}`) |" for pair in TOGETHER]
    for setting in SETTINGS:
        refusal = setting.verdict is REFUSED
        why = f"{REFUSALS[setting.why]} (`{setting.why}`)" if refusal else setting.why
        names = " ".join(f"`{name}`" for name in setting.names.split())
        lines.append(f"| {names} | {setting.values} | {setting.verdict} | {why} |")
    return lines
