"""Settings of a Megatron config that routing replay cannot work with, as data, and the one check that reads them.

This module reads attributes and imports no Megatron.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import not_
from typing import Any

from r3channel.errors import RouterUnsupported

_REFUSED: dict[str, Callable[[Any], bool]] = {
    "on": bool, "off": not_, "given": lambda value: value is not None, "not none": lambda value: value != "none",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Refusal:
    """One setting of Megatron's `TransformerConfig`."""

    setting: str
    when: str
    """The values that are refused: a word of `_REFUSED`, or the word itself, alone or in a list."""
    why: str
    since: str
    """The first release of megatron-core, from 0.16.1 on, that has it."""

    def refuses(self, value: Any) -> bool:
        return _REFUSED[self.when](value) if self.when in _REFUSED else self.when in value


_RANDOM = "the router's logits are random, and so are the weights of the replayed experts"
_GRAPH = "a captured router keeps the ids of the capture: static buffers of 0.17 to 0.19 record, none replays"
_DROPS = "drops tokens after the replay"

REFUSALS = (
    Refusal("moe_enable_routing_replay", "off", "routers have no RouterReplay", "0.16.1"),
    Refusal("moe_router_fusion", "on", "the fused router returns before the replay", "0.16.1"),
    Refusal("moe_router_load_balancing_type", "sinkhorn", "chooses without asking for ids", "0.16.1"),
    Refusal("moe_router_load_balancing_type", "quantile_balancing", "chooses without asking for ids", "0.19.2"),
    Refusal("moe_router_force_load_balancing", "on", _RANDOM, "0.16.1"),
    Refusal("moe_router_force_biased", "given", _RANDOM, "0.17.1"),
    Refusal("moe_input_jitter_eps", "given", "noise in the router's input: the engine's weights had none", "0.16.1"),
    Refusal("moe_expert_capacity_factor", "given", _DROPS, "0.16.1"),
    Refusal("moe_expert_rank_capacity_factor", "given", _DROPS, "0.18.2"),
    Refusal(
        "overlap_moe_expert_parallel_comm", "on", "runs a layer's parts by a schedule of its own, the forward pass of one "
        "micro-batch inside the backward pass of another", "0.16.1",
    ),
    Refusal(
        "hybrid_context_parallel", "on", "cuts every micro-batch over other ranks; the plan has one cut for a step", "0.16.1"
    ),
    Refusal("cuda_graph_impl", "not none", _GRAPH, "0.16.1"),
    Refusal("enable_cuda_graph", "on", _GRAPH, "0.16.1"),
    Refusal("external_cuda_graph", "on", _GRAPH, "0.16.1"),
)  # fmt: skip


def refuse_unsupported(config: Any) -> None:
    """Raise `RouterUnsupported` if a setting makes replay impossible.

    A setting that the installed release lacks is passed over.

    Args:
        config: Megatron's TransformerConfig.

    Raises:
        RouterUnsupported: Names every setting under which replayed ids are ignored, dropped, stale or blurred.
    """
    bad = [
        f"{row.setting}={value!r} ({row.why})"
        for row in REFUSALS
        if hasattr(config, row.setting) and row.refuses(value := getattr(config, row.setting))
    ]
    if bad:
        raise RouterUnsupported("routing replay cannot work with this Megatron config: " + "; ".join(bad))
