"""What the run has shown: one JSON object, one table. Pure; it measures nothing itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import numpy as np

from examples.async_grpo.compare import Comparison
from examples.async_grpo.modules import channel_modules
from examples.async_grpo.stages import stage_table
from r3channel.model.spec import RoutingSpec
from r3channel.observe.trace import Span
from r3channel.plan.layout import TrainerLayout
from r3channel.tools.run_model import facts_of

_POINTS = 400
"""Tokens whose log-probs are drawn."""


def summarise(
    *, args: Any, spec: RoutingSpec, manager: dict[str, Any], trainers: list[dict[str, Any]], steps: list[dict[str, Any]],
    total: Comparison, reports: list[Any], wall_s: float, spans: dict[str, list[Span]], begin_s: float, faults: list[str],
) -> dict[str, Any]:  # fmt: skip
    """The JSON object of the run; of its spans those that began at `begin_s` or later count."""
    slowest = min(trainers, key=lambda trainer: trainer["coverage"])
    facts = facts_of({name: [one for one in own if one.start_s >= begin_s] for name, own in spans.items()})
    return facts | {
        "steps": len(steps),
        "rows": manager["tokens"] - manager["samples"],
        "rows_captured": manager["rows"],
        "ids_compared": total.ids_compared,
        "ids_different": total.ids_different,
        "rows_missing": total.rows_missing,
        "digests_checked": sum(trainer.get("digests_checked", 0) for trainer in trainers),
        "digests_different": sum(trainer.get("digests_different", 0) for trainer in trainers),
        "stage_coverage": slowest["coverage"],
        "coverage_by_process": {"relay": manager["coverage"]}
        | {f"trainer{trainer['rank']}": trainer["coverage"] for trainer in trainers},
        "samples_lost": manager["lost"],
        "faults": faults,
        "samples_by_outcome": manager.get("outcomes", {}),
        "rejected_by_reason": {why: count for why, count in manager.get("rejected", {}).items() if count},
        "default_bytes_per_token": 4 * spec.num_layers * spec.top_k,
        "expert_load": _expert_load(total, spec),
        "bytes_per_token": bytes_per_token(manager, trainers),
        "logprob_abs_diff": {name: _mean(steps, name) for name in ("replay_on", "replay_off")},
        "logprobs": _spread(steps[0]["logprobs"] if steps else []),
        "rows_by_version": manager.get("rows_by_version", {}),
        "routing_mismatch": [audit for step in steps for audit in step["routing_mismatch"]],
        "trainer_dtype": args.trainer_dtype,
        "weight_versions": [report.version for report in reports],
        "engines_routable": manager["routed"],
        "rows_by_staleness": _summed(trainer.get("rows_by_staleness", {}) for trainer in trainers),
        "weights_verified": min((report.verified for report in reports), default=0),
        "sglang_version": version("sglang"),
        "megatron_version": version("megatron-core"),
        "ray_version": version("ray"),
        "layout": str(TrainerLayout.parse(args.layout)),
        "engines": args.engines,
        "channel": bool(args.use_r3_channel),
        "channel_modules": sorted(
            {*channel_modules(), *manager["modules"], *(m for t in trainers for m in t["modules"])}
        ),
        "spec": spec.to_dict(),
        "wall_s": wall_s,
    }


def bytes_per_token(manager: dict[str, Any], trainers: list[dict[str, Any]]) -> dict[str, Any]:
    """Bytes on each leg. Engine legs: per captured row of every reply; the rest: per token of the trained samples."""
    trained, rows = max(manager["tokens"], 1), max(manager["rows"], 1)
    legs = manager["bytes"]
    return {
        "engine_frame": legs.get("engine_frame", 0) / rows,
        "engine_http": legs.get("engine_http", 0) / rows,
        "object_store": manager["put_bytes"] / trained,
        "wire": legs.get("wire_sent", 0) / trained,
        "landed_per_rank": {str(trainer["rank"]): trainer["landed"] / trained for trainer in trainers},
    }


def bytes_by_leg(manager: dict[str, Any], trainers: list[dict[str, Any]]) -> dict[str, Any]:
    """The counters behind `bytes_per_token`."""
    return manager["bytes"] | {
        "object_store": manager["put_bytes"],
        "landed_per_rank": {str(trainer["rank"]): trainer["landed"] for trainer in trainers},
        "received_per_rank": {str(trainer["rank"]): trainer["wire_received"] for trainer in trainers},
        "tokens_trained": manager["tokens"],
        "rows_captured": manager["rows"],
    }


def table(result: dict[str, Any], trainers: list[dict[str, Any]]) -> str:
    """The text at the end of the demo."""
    tokens, diff = result["bytes_per_token"], result["logprob_abs_diff"]
    landed = ", ".join(f"{value:.1f}" for value in tokens["landed_per_rank"].values())
    lines = [
        stage_table(result["stages_by_process_s"]),
        "",
        f"steps {result['steps']}, layout {result['layout']}, {result['wall_s']:.0f} s; coverage of the slowest rank "
        f"{result['stage_coverage']:.1%}",
        f"bytes a token: {tokens['engine_frame']:.1f} in the engine's frame, {tokens['engine_http']:.1f} in its reply, "
        f"{tokens['object_store']:.1f} through Ray, {tokens['wire']:.1f} sent to trainers; {landed} at each",
        f"|log-prob engine - {result['trainer_dtype']} trainer|, same batch, same weights: replay on "
        f"{diff['replay_on']:.5f}, replay off {diff['replay_off']:.5f}",
    ]
    lines += result["faults"]
    if result["routing_mismatch"]:
        pairs, different = Counter[int](), Counter[int]()
        for audit in result["routing_mismatch"]:  # of all ranks
            pairs[audit["step"]] += audit["pairs"]
            different[audit["step"]] += sum(layer["different"] for layer in audit["layers"])
        parts = ", ".join(f"{different[step] / pairs[step]:.1%}" for step in sorted(pairs) if pairs[step])
        lines.append(
            f"(token, layer) pairs for which the live router would have chosen otherwise, by step: {parts}"
        )
    if result["channel"]:
        lines.append(
            f"hidden: {result['hidden_fraction']:.1%} of the relay's work was waited for by no trainer; the slowest waited "
            f"{_mean_of(result['wait_s_by_step'].values()):.3f} s a step for its routing, {result['wait_fraction']:.1%} of a step"
        )
        lines.append(
            f"{result['ids_compared']:,} ids compared between engine and routers, {result['ids_different']} different; "
            f"{result['digests_checked']:,} digests checked at routers, {result['digests_different']} different"
        )
    return "\n".join(lines)


def _summed(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Over all ranks; ranks of one DP rank count the same rows."""
    found: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            found[key] = found.get(key, 0.0) + value
    return found


def _expert_load(total: Comparison, spec: RoutingSpec) -> dict[str, list[int]]:
    """Layer -> how often the engines chose each of its experts."""
    load = {layer: np.zeros(spec.num_experts, np.int64) for layer in spec.moe_layers}
    for step in total.engine:
        for layer, counts in load.items():
            counts += np.bincount(step["ids"][step["layer"] == layer].ravel(), minlength=spec.num_experts)
    return {str(layer): counts.tolist() for layer, counts in load.items()}


def _mean_of(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / max(len(found), 1)


def _spread(tokens: list[list[float]]) -> list[list[float]]:
    """[engine, replay on, replay off] of at most so many tokens, from all over the step."""
    return [[round(value, 4) for value in token] for token in tokens[:: len(tokens) // _POINTS + 1]]


def _mean(steps: list[dict[str, Any]], name: str) -> float:
    """Over the first step, in which rollout and trainer hold the same weights."""
    pairs = list(steps[0][name]) if steps else []
    return sum(total for total, _ in pairs) / max(sum(count for _, count in pairs), 1.0)
