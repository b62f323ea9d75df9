"""The only module of the trainer room that touches Megatron: routers, parallel state, and the names we rely on.

The names in `NAMES` were read in the releases of `READ_AGAINST`; `check_names()` says which ones the installed release lacks.
Routers are bound by `layer_number`, never by construction order or through the class-level registry of `RouterReplay`. Megatron
is imported inside the functions, so that a missing name is reported and not an ImportError. Nothing here knows about steps or
ids.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import math
import pkgutil
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from r3channel.errors import ConfigError, RouterUnsupported
from r3channel.model.spec import RoutingSpec
from r3channel.plan.layout import RankCoords, TrainerLayout
from r3channel.trainer.adapters.megatron_refusals import refuse_unsupported
from r3channel.trainer.router import RouterHandle

log = logging.getLogger(__name__)
READ_AGAINST = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")

NAMES: tuple[tuple[str, str], ...] = (
    ("megatron.core.transformer.moe.router_replay", "RouterReplay.get_replay_topk"),
    ("megatron.core.transformer.moe.router", "TopKRouter"),
    ("megatron.core.transformer", "TransformerConfig.moe_enable_routing_replay"),
    ("megatron.core.transformer.transformer_block", "get_num_layers_to_build"),
    ("megatron.core.parallel_state", "get_tensor_model_parallel_group"),
    ("megatron.core.parallel_state", "get_tensor_model_parallel_src_rank"),
    ("megatron.core.parallel_state", "get_data_parallel_rank"),
    ("megatron.core.parallel_state", "get_pipeline_model_parallel_rank"),
    ("megatron.core.parallel_state", "get_context_parallel_rank"),
)
"""(module, dotted name) of each thing that this adapter uses."""
_AXES = {"dp": "data", "pp": "pipeline_model", "cp": "context", "tp": "tensor_model", "ep": "expert_model"}
"""Megatron's names for a layout's axes."""


def version() -> str:
    """Return the version of the installed megatron-core."""
    return str(importlib.import_module("megatron.core").__version__)


def _numbers(release: str) -> list[int]:
    return [*map(int, re.findall(r"\d+", release)[:3])]


def check_names() -> list[str]:
    """Return the names that the installed Megatron lacks.

    The call imports Megatron.

    Returns:
        A line for each name; [] when all are there.
    """
    return [f"{module}.{name} is missing" for module, name in NAMES if not _exists(module, name)]


def _exists(module: str, name: str) -> bool:
    try:
        pkgutil.resolve_name(f"{module}:{name}")
    except (ImportError, AttributeError):
        return False
    return True


def routers(chunks: Sequence[torch.nn.Module], layout: TrainerLayout) -> dict[int, RouterHandle]:
    """Return this rank's routers; see `trainer.router.Adapter`."""
    check_layout(layout, config=config_of(chunks))
    installed, newest = version(), READ_AGAINST[-1]
    if _numbers(installed) > _numbers(newest):
        log.warning("r3channel: megatron-core %s is newer than %s, the last read", installed, newest)
    return routers_by_layer(chunks, mtp_layers=len(layout.mtp))


def routers_by_layer(chunks: Sequence[torch.nn.Module], *, mtp_layers: int = 0) -> dict[int, RouterHandle]:
    """Return this rank's routers by global 0-based layer, ascending.

    Routers of MTP layers are left out and choose for themselves, unless `mtp_layers` is given.

    Args:
        chunks: This rank's model chunks.
        mtp_layers: How many MTP layers to bind. MTP layer i is then layer num_layers + i. They are bound by their place: their
            `layer_number` differs between versions.

    Raises:
        RouterUnsupported: The config would make a router ignore or drop replayed ids, or two routers claim one layer.
    """
    found: dict[int, RouterHandle] = {}
    refuse_unsupported(config_of(chunks))
    for chunk, model in enumerate(chunks):
        own = _language_model(model)
        for router in (*_chunk_routers(chunk, own), *_mtp_routers(chunk, own, mtp_layers)):
            if router.layer in found:
                raise RouterUnsupported(
                    f"decoder layer {router.layer}: routers in chunks {found[router.layer].chunk} and {chunk}; "
                    "expected one. Were chunks of two models passed?"
                )
            found[router.layer] = router
    return dict(sorted(found.items()))


def _language_model(model: Any) -> Any:
    while isinstance(inner := getattr(model, "module", None), torch.nn.Module):
        model = inner
    # A wrapper of several models is refused, because it decides which tokens its decoder sees.
    if hasattr(model, "decoder"):
        return model
    inner = [name for name, child in model.named_modules() if name and hasattr(child, "decoder")]
    raise RouterUnsupported(
        f"a {type(model).__name__} has no decoder of its own; looked at `.decoder` of the chunk without its `.module` wrappers. "
        f"Modules with a decoder inside: {inner[:3] or 'none'}. Is it a vision-language wrapper? Then attach to its language "
        "model, and let the plan count the tokens that the decoder sees"
    )


def _routers_in(layers: Iterable[Any]) -> Iterator[tuple[int, Any, Any]]:
    from megatron.core.transformer.moe.router import TopKRouter

    for index, layer in enumerate(layers):
        yield from ((index, layer, module) for module in layer.modules() if isinstance(module, TopKRouter))


def _chunk_routers(chunk: int, model: Any) -> Iterator[RouterHandle]:
    for index, layer, module in _routers_in(model.decoder.layers):
        number = module.layer_number
        if number is None or number != layer.layer_number:
            raise RouterUnsupported(
                f"router in decoder layer {layer.layer_number} (1-based) says layer_number {number}; expected the same"
            )
        yield _handle(chunk, number - 1, module, index=index)


def _mtp_routers(chunk: int, model: Any, wanted: int) -> Iterator[RouterHandle]:
    block = getattr(model, "mtp", None)
    if not wanted or block is None:
        return
    if len(block.layers) != wanted:
        raise ConfigError(f"the layout maps {wanted} MTP layers; the model has {len(block.layers)}")
    for index, _, module in _routers_in(block.layers):
        # Full recompute by "block" leaves MTP layers out.
        yield _handle(chunk, module.config.num_layers + index, module, index=math.inf)


def _handle(chunk: int, layer: int, module: Any, *, index: float) -> RouterHandle:
    if module.router_replay is None:
        raise RouterUnsupported(
            f"decoder layer {layer}: the router has no RouterReplay; "
            "was moe_enable_routing_replay set after the model was built?"
        )
    return RouterHandle(
        layer=layer, chunk=chunk, module=module, replay=module.router_replay, top_k=module.topk,
        num_experts=module.config.num_moe_experts, recomputed=_is_recomputed(module.config, index),
        counts=lambda: module.local_tokens_per_expert,  # for the update of the expert bias
    )  # fmt: skip


def _is_recomputed(config: Any, index: float) -> bool:
    """Return whether the router of the chunk's layer `index` is recomputed."""
    if config.recompute_granularity == "full":
        return config.recompute_method == "uniform" or index < config.recompute_num_layers
    # Of the modules of selective recompute only `moe` runs the router again (not moe_act, mlp, layernorm).
    return config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ())


def config_of(chunks: Sequence[torch.nn.Module]) -> Any:
    """Return the TransformerConfig of the chunks' model."""
    return _language_model(chunks[0]).config


def spec_from_config(chunks: Sequence[torch.nn.Module]) -> RoutingSpec:
    """Return the routing shape of the chunks' model."""
    return RoutingSpec.from_megatron(config_of(chunks))


def parallel_coords() -> RankCoords:
    """Return where Megatron placed this process."""
    return RankCoords(**_of_axes("rank", "dp", "pp", "cp", "tp"))


def _of_axes(what: str, *names: str) -> dict[str, int]:
    """Return this process's rank or the world size along these axes.

    `what` is `rank` or `world_size`; the axes are the layout's.
    """
    from megatron.core import parallel_state

    return {name: getattr(parallel_state, f"get_{_AXES[name]}_parallel_{what}")() for name in names}


def input_ids(
    input_ids: torch.Tensor | None = None, _at: Any = None, _mask: Any = None, decoder_input: Any = None, *_: Any, **_more: Any
) -> torch.Tensor | None:  # fmt: skip
    """Return the token ids of a call of GPTModel.

    The result is None where the call has embeddings, which GPTModel prefers.

    >>> input_ids("ids", "positions", "mask", None, "labels"), input_ids("ids", decoder_input="embeddings", labels="labels")
    ('ids', None)
    """
    return input_ids if decoder_input is None else None


def tp_group() -> Any:
    """Return Megatron's tensor-parallel process group of this rank."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def check_layout(layout: TrainerLayout, *, config: Any) -> None:
    """Compare `layout` with Megatron's parallel state and the model's config.

    Args:
        layout: The trainer's layout.
        config: The model's TransformerConfig.

    Raises:
        ConfigError: Sizes differ, each named with both values, or the rank order is not Megatron's default.
    """
    from megatron.core import parallel_state

    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    sizes = _of_axes("world_size", *_AXES)
    theirs = {**sizes, "vpp": chunks, "sequence_parallel": bool(config.sequence_parallel)}
    different = [
        f"{name}: layout {ours}, Megatron {size}"
        for name, size in theirs.items()
        if (ours := getattr(layout, name)) != size
    ]
    if different:
        raise ConfigError("the layout is not what Megatron was started with: " + "; ".join(different))
    _check_rank_order(layout)
    _check_stages(layout, config)


def _check_stages(layout: TrainerLayout, config: Any) -> None:
    # Every rank checks every stage: otherwise a rank whose own layers fit would wait for one that raised.
    planned = [size // layout.vpp for size in layout.stage_sizes(config.num_layers)]
    for stage, chunk in itertools.product(range(layout.pp), range(layout.vpp)):
        theirs = _decoder_layers(config, stage, chunk if layout.vpp > 1 else None)
        if theirs != planned[stage]:
            custom = getattr(config, "pipeline_model_parallel_layout", None)
            raise ConfigError(
                f"pipeline stage {stage}, chunk {chunk}: Megatron builds {theirs} decoder layers, the layout plans "
                f"{planned[stage]} (pipeline_model_parallel_layout={custom!r}). The plan gives all stages but the first and the "
                "last, and all chunks of a stage, equal parts"
            )


def _decoder_layers(config: Any, stage: int, chunk: int | None) -> int:
    custom = getattr(config, "pipeline_model_parallel_layout", None)
    if custom is not None:
        return sum(kind.name == "decoder" for kind in custom.layout[stage][chunk or 0])
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    return get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage)


def _check_rank_order(layout: TrainerLayout) -> None:
    from megatron.core import parallel_state

    coords = parallel_coords()
    ours = layout.rank(RankCoords(dp=coords.dp, pp=coords.pp, cp=coords.cp, tp=0))
    theirs = parallel_state.get_tensor_model_parallel_src_rank()
    if ours != theirs:
        raise ConfigError(
            f"first rank of the TP group at {coords}: layout {ours}, Megatron {theirs}. "
            "Expected Megatron's default order tp-cp-ep-dp-pp."
        )
