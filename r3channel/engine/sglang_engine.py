"""The SGLang engine that this process serves: its settings and versions, why it does not start, and what it says of itself.

Read against the versions in `sglang_hooks.READ_AGAINST`. The hooks of capture (`sglang`) ask here.
"""

from __future__ import annotations

import inspect
import logging
import secrets
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from sglang.srt import runtime_context
from sglang.srt.layers.moe import topk as routing
from sglang.srt.layers.moe.hash_topk import HashTopK
from sglang.srt.layers.moe.topk import TopK, TopKOutputFormat

import r3channel
from r3channel.config import EngineConfig
from r3channel.engine import refusals, sglang_tensors
from r3channel.engine.frame_sender import is_costly
from r3channel.engine.sglang_hooks import hooked_names, installed_version, matching_table
from r3channel.errors import ConfigError
from r3channel.model.spec import RoutingSpec
from r3channel.transport.process_group import nccl_version, torch_version
from r3channel.wire.hello import Hello
from r3channel.wire.token_tensors import tensors_of

log = logging.getLogger(__name__)
HAS_BAGS = hasattr(runtime_context, "get_serving")
"""Whether SGLang keeps its settings in bags by theme. 0.5.23 does; 0.5.15.post1 has one object."""
engine_config = EngineConfig()
_table = ""
"""The table of `sglang_hooks.TABLES` that this SGLang follows."""
model_runner: Any = None
"""The model runner whose passes are captured."""
_scales: Callable[[Any], object] = getattr(
    routing, "is_routed_scaling_factor_fused_in_topk", attrgetter("apply_routed_scaling_factor_on_output")
)
"""Returns whether a router's scaling factor is in its weights. The attribute alone does not decide it: ROCm (0.5.23)."""
_announced_version: str | None = None
"""The version of the last weight update, where SGLang does not tell its scheduler of versions (0.5.15.post1)."""


def set_up(config: EngineConfig) -> None:
    """Keep the configuration and the table of SGLang names.

    Call this once per process, before any hook is called.

    Args:
        config: The engine's settings.

    Raises:
        ConfigError: If the codec is unknown, lacks its package or is too costly for in-band delivery, or if this SGLang does not
            return a requested token tensor.
    """
    global engine_config, _table
    is_costly(config)  # an unknown codec ends the start, not the first request
    masks = [tensor.name for tensor in tensors_of(config.token_tensors) if tensor.made_by == "mask_rows"]
    if masks and not HAS_BAGS:
        raise ConfigError(f"R3CHANNEL_TOKEN_TENSORS: SGLang {installed_version()} returns no {masks}")
    engine_config = config
    _table = matching_table() or ""  # before a hook changes the names that are looked up


def settings() -> dict[str, Any]:
    """Return the settings that SGLang runs with, by argument name.

    The weight version is the one that the scheduler knows now.
    """
    args: Any = runtime_context.get_server_args()
    values = args.resolved_dict() if HAS_BAGS else vars(args)
    return {**values, "weight_version": weight_version()}


def asked_for() -> dict[str, Any]:
    """Return the settings that differ from SGLang's defaults.

    0.5.15.post1 overwrites its arguments with the values that it resolves, so each resolved value is judged, too.
    """
    args: Any = runtime_context.get_server_args()
    plain: Any = type(args)(model_path="none")  # for which 0.5.15.post1 resolves nothing
    names = args.__struct_fields__ if HAS_BAGS else vars(plain)
    shown = [name for name in names if not name.startswith("_")]  # the others are internal to its parser
    values = settings()
    return {name: values[name] for name in shown if getattr(args, name) != getattr(plain, name)}


def weight_version() -> str:
    """Return the weight version that SGLang's scheduler knows now."""
    if HAS_BAGS:
        return runtime_context.get_serving().weight_version
    args: Any = runtime_context.get_server_args()
    return args.weight_version if _announced_version is None else _announced_version


def note_weight_version(result: Any, updater: Any, recv_req: Any) -> None:
    """Keep the version of a successful weight update; hook AFTER it.

    In 0.5.15.post1 the version is in the request and reaches the scheduler nowhere else.
    """
    global _announced_version
    del updater
    if result.success and recv_req.weight_version is not None:
        _announced_version = recv_req.weight_version


def streams_replies() -> bool:
    """Return whether this rank replies to requests.

    Of the ranks that share a request one replies; the others need not gather its rows.
    """
    parallel = runtime_context.get_parallel()
    return parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0


def replica() -> int:
    """Return the index of this process among those that reply.

    These are data-parallel copies of the engine, or groups of DP attention.
    """
    parallel: Any = runtime_context.get_parallel()
    return getattr(parallel, "dp_rank", None) or getattr(parallel, "attn_dp_rank", None) or 0


def verified_tokens() -> int:
    """Return how many tokens of a request one pass verifies at most.

    It is 1 where nothing is drafted.
    """
    context: Any = runtime_context
    if HAS_BAGS:
        return context.max_speculative_num_draft_tokens() or 1
    return context.get_server_args().max_speculative_num_draft_tokens or 1


def unchunked_tokens(model_config: Any) -> int:
    """Return how many tokens a prefill has at most without chunking.

    Such a prefill has several prompts up to a budget, or one prompt. Return 0 where prompts are chunked.
    """
    values = settings()
    if values["chunked_prefill_size"] > 0:
        return 0
    return max(values["max_prefill_tokens"], model_config.context_len)


def engine_spec(model_config: Any) -> RoutingSpec:
    """Return the routing of the model that this engine serves.

    Args:
        model_config: SGLang's configuration of the model.
    """
    return RoutingSpec.from_hf_config(model_config.hf_text_config)


def engine_hello(spec: RoutingSpec, *, context: int) -> Hello:
    args: Any = runtime_context.get_server_args()
    config, weighs = engine_config, "combine_weights" in engine_config.token_tensors
    return Hello(
        engine=config.name or args.url(), boot_id=secrets.randbits(63), spec_digest=spec.digest, spec=spec.to_dict(),
        sglang=installed_version(), r3channel=r3channel.__version__, hooks=hooked_names(_table), delivery=config.delivery,
        codec=config.codec, allowed=tuple(sorted(config.allowed)), unread=tuple(refusals.unread(asked_for())),
        weighing=sglang_tensors.weighing(model_runner.model, _scales) if weighs else (),
        torch=torch_version(), nccl=nccl_version(), context=context, kept_bytes=config.kept_bytes,
    )  # fmt: skip


def refuse_engine(runner: Any) -> None:
    """End the start, with every reason, if rows would be wrong unseen.

    Hook BEFORE `ModelRunner.init_routed_experts_capturer`. Without --enable-return-routed-experts it only logs a warning; a draft
    worker is ignored.

    Raises:
        ConfigError: With every reason that R3CHANNEL_ALLOW does not override.
    """
    global model_runner
    if runner.is_draft_worker:
        return
    model_runner, values, model_config = runner, settings(), runner.model_config
    if not values["enable_return_routed_experts"]:
        log.warning(
            "r3channel is on, but the engine was started without --enable-return-routed-experts: no routing"
        )
        return
    found = [*refusals.refusals(values, spec=engine_spec(model_config), routers=_routers(runner.model))]
    if not _tells_graphs_in_tokens(runner):
        found += refusals.refused_chains(values)
    if tensors := tensors_of(engine_config.token_tensors):
        past = sglang_tensors.past_weights(runner.model, routing.__name__)
        vocabulary = model_config.vocab_size
        found += sglang_tensors.refused_tensors(values, tensors, vocabulary=vocabulary, past=past)
    found += refusals.refused_unread(refusals.unread(asked_for()))
    refusals.refuse(found, allowed=engine_config.allowed)


def _tells_graphs_in_tokens(runner: Any) -> bool:
    # slime's image does; other releases tell a capturer a graph's size in requests
    return "num_tokens_per_bs" in inspect.unwrap(type(runner).forward).__code__.co_consts


def _routers(model: Any) -> Iterator[refusals.Router]:
    for module in model.modules():
        if isinstance(module, HashTopK):
            layer = -1 if module.layer_id is None else module.layer_id
            yield refusals.Router(layer, "HashTopK, a table by token")
        elif isinstance(module, TopK):
            yield refusals.Router(module.layer_id, _unseen(module))


def _unseen(router: Any) -> str:
    config = router.topk_config
    if not getattr(config, "allow_routed_experts_capture", True):
        return "its capture is switched off"
    if config.output_format is not None:
        return "" if config.output_format is TopKOutputFormat.STANDARD else config.output_format.name
    backend = "" if HAS_BAGS else settings()["moe_runner_backend"]
    standard = backend == "flashinfer_mxfp4" and router.is_fp4_experts
    return backend if backend in refusals.KERNEL_ROUTING and not standard else ""
