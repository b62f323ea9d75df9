"""`r3channel bench weights`: the reverse path beside SGLang's own per-tensor update and beside a raw gloo broadcast.

Each part adds its keys to one result, so that a path that another module measures is one more entry of `PARTS`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from r3channel.bench import (
    reshard_plan,
    weight_ablation,
    weight_engine,
    weight_pair,
    weight_reshard,
    weight_wire,
)
from r3channel.report import commands
from r3channel.weights.refit import MODES

TARGETS = {
    "vs_per_tensor": 4.0,
    "of_raw_gloo": 0.5,
    "wire_of_raw_gloo": 0.9,
    "shared_memory_vs_gloo": 3.0,
}

Result = dict[str, Any]
Part = Callable[[Path, bool], Result]


def run(argv: Sequence[str]) -> int:
    parser = commands.parser("bench", prog="bench weights", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="64 MB and few rounds: shows that it runs, not how fast"
    )
    parser.add_argument("--only", choices=sorted(PARTS), action="append", help="repeatable; all by default")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    result = measure(quick=options.quick, only=options.only)
    print(json.dumps(result) if options.json else text(result))
    return 0


def measure(*, quick: bool, only: Sequence[str] | None = None) -> Result:
    """All parts, or those named, merged into one object: paths, limit, ratio, and details by part."""
    torch.set_num_threads(1)  # the sender's threads and the receiver share the machine; so do a trainer's
    result: Result = {"targets": TARGETS, "quick": quick}
    with tempfile.TemporaryDirectory(prefix="r3channel-bench-") as folder:
        for name in only or PARTS:
            _merge(result, PARTS[name](Path(folder), quick))
    return result


def engine(folder: Path, quick: bool) -> Result:
    """Per tensor against flattened, on a real engine."""
    found = weight_engine.measure(folder, pairs=3 if quick else 12)
    wall_s, gigabytes = found["wall_s"], found["bytes"] / 1e9
    return {
        "paths": {
            name: {"wall_s": wall_s[name], "gbps": gigabytes / wall_s[name]}
            for name in ("per_tensor", "flattened")
        },
        "ratio": {"vs_per_tensor": found["vs_per_tensor"]},
        "engine": found,
    }


def wire(folder: Path, quick: bool) -> Result:
    """A whole update without the engine's loading, against a raw broadcast of the same bytes."""
    found = weight_wire.measure(total_bytes=(64 if quick else 512) << 20, rounds=3 if quick else 20)
    seconds = {name: values["wall_s"] for name, values in found["variants"].items()}
    limit_s = min(seconds["raw"], seconds["raw_buckets"])
    return {
        "limit": {"raw_gloo_gbps": found["bytes"] / 1e9 / limit_s},
        "ratio": {
            "of_raw_gloo": limit_s / seconds["digests"],
            "wire_of_raw_gloo": limit_s / found["variants"]["wire"]["wire_s"],
        },
        "ablation": {
            "packed_of_raw": limit_s / seconds["packed"],
            "digests_of_raw": limit_s / seconds["digests"],
            "checked_for_nan_of_raw": limit_s / seconds["checked"],
            "depth_1_of_raw": limit_s / seconds["depth_1"],
        },
        "wire": found,
    }


def pair(folder: Path, quick: bool) -> Result:
    """One trainer and one engine process: shared memory and one-sided writes beside gloo; the pipeline's depth 1 beside 2."""
    found = weight_pair.measure(total_bytes=(64 if quick else 512) << 20, rounds=3 if quick else 12)
    wall_s, gigabytes = found["wall_s"], found["bytes"] / 1e9
    ways = [name for name in ("shared_memory", "one_sided") if name in wall_s]
    return {
        "paths": {name: {"wall_s": wall_s[name], "gbps": gigabytes / wall_s[name]} for name in ways},
        "skipped": found["skipped"],
        "ratio": {
            "shared_memory_vs_gloo": wall_s["gloo_raw"] / wall_s["shared_memory"],
            "shared_memory_vs_gloo_update": wall_s["gloo_depth_2"] / wall_s["shared_memory"],
        },
        "ablation": {
            "pipeline_depth_1_s": wall_s["gloo_depth_1"],
            "pipeline_depth_2_s": wall_s["gloo_depth_2"],
            "pipeline_depth_2_vs_1": wall_s["gloo_depth_1"] / wall_s["gloo_depth_2"],
        },
        "pair": found,
    }


def reshard(folder: Path, quick: bool) -> Result:
    """Exact reshard over gloo, 2 trainer ranks to 2 engine ranks."""
    found = weight_reshard.measure(total_bytes=(48 if quick else 512) << 20, rounds=3 if quick else 10)
    path = {"wall_s": found["wall_s"], "gbps": found["bytes"] / 1e9 / found["wall_s"]}
    return {"paths": {"reshard": path}, "reshard": found}


def refit(folder: Path, quick: bool) -> Result:
    """Packed refit step by step, from one message per tensor to cached metadata."""
    found = weight_ablation.measure(total_bytes=(32 if quick else 256) << 20, rounds=3 if quick else 10)
    return {"ablation": {"refit": found}}


def links(folder: Path, quick: bool) -> Result:
    """A group for each of two receivers against one for both."""
    return {
        "links_s": weight_wire.measure_links(
            total_bytes=(32 if quick else 256) << 20, rounds=3 if quick else 10
        )
    }


def surgical(folder: Path, quick: bool) -> Result:
    """One of two real engines filled alone, beside the other one's request latency."""
    return {"surgical": weight_engine.measure_surgical(folder)}


def plan(folder: Path, quick: bool) -> Result:
    """The exact reshard plan of a DeepSeek-V3-like model, 256 -> 256 ranks, as one rank makes it. No bytes move."""
    return {"plan": reshard_plan.measure()}


PARTS: dict[str, Part] = {
    "engine": engine,
    "wire": wire,
    "pair": pair,
    "reshard": reshard,
    "refit": refit,
    "links": links,
    "surgical": surgical,
    "plan": plan,
}
"""Name -> what measures it. Each returns keys of the result; dictionaries of equal name are joined."""


def _merge(result: Result, found: Result) -> None:
    for key, value in found.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] |= value
        else:
            result[key] = value


def text(result: Result) -> str:
    """For a person: one line per path, ratio and step."""
    lines = []
    for name, path in result.get("paths", {}).items():
        lines.append(f"{name:14s} {path['wall_s'] * 1e3:8.1f} ms  {path['gbps']:.3f} GB/s")
    for name, value in result.get("ratio", {}).items():
        target = f"  (target {TARGETS[name]:g})" if name in TARGETS else ""
        lines.append(f"{name:20s} {value:.2f}{target}")
    if "limit" in result:
        lines.append(f"raw gloo broadcast   {result['limit']['raw_gloo_gbps']:.2f} GB/s")
    for name in ("ablation", "links_s"):
        if name in result:
            numbers = {key: value for key, value in result[name].items() if key != "refit"}
            lines += [f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in numbers.items())] * bool(
                numbers
            )
    lines += _refit_lines(result.get("ablation", {}).get("refit"))
    lines += [f"{name:14s} left out: {why}" for name, why in result.get("skipped", {}).items()]
    if "plan" in result:
        found = result["plan"]
        lines.append(
            f"plan of {found['tensors']:,} tensors: {found['seconds']:.2f} s, imbalance {found['imbalance']:.3f}"
        )
    if "surgical" in result:
        lines.append(_latency_line(result["surgical"]))
    return "\n".join(lines)


def _refit_lines(found: Result | None) -> list[str]:
    if found is None:
        return []
    lines = [
        f"packed refit to {found['receivers']} receivers, {found['tensors']} tensors in {found['buckets']} buckets:"
    ]
    for mode in MODES:
        step = found[mode]
        lines.append(
            f"  {mode:14s} {step['wall_s'] * 1e3:8.1f} ms  {step['control_bytes_per_receiver']:9,} control bytes per receiver"
        )
    return lines


def _latency_line(found: Result) -> str:
    quiet, busy = found["undisturbed"], found["while_the_other_is_filled"]
    return (
        f"one engine filled alone in {found['update_one_s'] * 1e3:.0f} ms, {found['updates']} times; the other's requests: "
        f"p50 {quiet['p50_s'] * 1e3:.1f} -> {busy['p50_s'] * 1e3:.1f} ms, p95 {quiet['p95_s'] * 1e3:.1f} -> "
        f"{busy['p95_s'] * 1e3:.1f} ms"
    )
