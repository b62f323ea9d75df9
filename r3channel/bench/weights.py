"""`r3channel bench weights`: the reverse path into real engines, beside SGLang's own two formats and a raw gloo broadcast.

Each part adds its keys to one result.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from r3channel.bench import reshard_plan, weight_engine
from r3channel.bench.machine import show
from r3channel.report import commands

TARGETS = {
    "own_loader_vs_per_tensor": 7.0,
    "own_loader_vs_flattened": 2.0,
    "pause_of_flattened": 0.2,
    "engine_digests_of_raw_gloo": 0.6,
    "colocated_vs_flattened": 6.0,
    "p95_at_two_updates_a_second": 2.5,
}
"""The third and the last are wanted below, the others above."""

Result = dict[str, Any]
Part = Callable[[Path, bool], Result]


def run(argv: Sequence[str]) -> int:
    parser = commands.parser("bench", prog="bench weights", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it runs, not how fast")
    parser.add_argument("--only", choices=sorted(PARTS), action="append", help="repeatable; all by default")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    show(
        ["weights", *argv],
        lambda: measure(quick=options.quick, only=options.only),
        text,
        as_json=options.json,
    )
    return 0


def measure(*, quick: bool, only: Sequence[str] | None = None) -> Result:
    """All parts, or those named, merged into one object: paths, ratio, and details by part."""
    torch.set_num_threads(1)  # trainer and engine share the machine
    result: Result = {"targets": TARGETS, "quick": quick}
    with tempfile.TemporaryDirectory(prefix="r3channel-bench-") as folder:
        for name in only or PARTS:
            _merge(result, PARTS[name](Path(folder), quick))
    return result


def engine(folder: Path, quick: bool) -> Result:
    """Whole updates of one real engine: SGLang per tensor, SGLang flattened, staged, staged in shared memory."""
    found = weight_engine.measure(folder, pairs=3 if quick else 12)
    wall_s, gigabytes = found["wall_s"], found["bytes"] / 1e9
    return {
        "paths": {name: {"wall_s": s, "gbps": gigabytes / s} for name, s in wall_s.items()},
        "ratio": found["ratio"],
        "engine": found,
    }


def pauses(folder: Path, quick: bool) -> Result:
    """The pause of one real engine of 61 MB: SGLang flattened, staged, staged in shared memory."""
    found = weight_engine.measure_pauses(folder, hidden=160, rounds=3 if quick else 12)
    return {"ratio": found["ratio"], "pauses": found}


def large(folder: Path, quick: bool) -> Result:
    """A model of 540 MB (512 MiB) to a real engine, its digests compared there, beside a raw gloo broadcast of as many bytes."""
    found = weight_engine.measure_large(folder, hidden=160 if quick else 480, rounds=2 if quick else 8)
    ratio = {
        "engine_digests_of_raw_gloo": found["raw_s"] / found["staged_s"],
        "colocated_digests_of_raw_gloo": found["raw_s"] / found["colocated_s"],
    }
    limit = {"raw_gloo_gbps": found["bytes"] / 1e9 / found["raw_s"]}
    return {"limit": limit, "ratio": ratio, "large": found}


def surgical(folder: Path, quick: bool) -> Result:
    """One of two real engines filled alone, beside the other one's request latency."""
    return {"surgical": weight_engine.measure_surgical(folder)}


def serving(folder: Path, quick: bool) -> Result:
    """Requests of one real engine of 61 MB that is updated twice a second, beside those of an undisturbed one."""
    found = weight_engine.measure_serving(folder, hidden=160, seconds=2.0 if quick else 12.0)
    busy, quiet = found["while_it_is_updated"]["p95_s"], found["undisturbed"]["p95_s"]
    return {"ratio": {"p95_at_two_updates_a_second": busy / quiet}, "serving": found}


def reshard(folder: Path, quick: bool) -> Result:
    """The exact plan from two Megatron ranks (TP 2) to one real engine of two ranks: bytes moved of the model's."""
    return {"reshard": weight_engine.measure_reshard(folder, rounds=2 if quick else 8)}


def plan(folder: Path, quick: bool) -> Result:
    """The exact reshard plan of a DeepSeek-V3-like model, 256 -> 256 ranks, as one rank makes it. No bytes move."""
    found = [reshard_plan.measure(stages=stages) for stages in (1, 8)]
    keys = ("seconds_with_gathering", "seconds", "tensors", "imbalance")
    busiest = {str(one["stages"]): one["busiest_gb"] / one["floor_gb"] for one in found}
    return {"plan": {key: found[1][key] for key in keys} | {"busiest_of_bound": busiest, "by_stages": found}}


PARTS: dict[str, Part] = {p.__name__: p for p in (engine, pauses, large, surgical, serving, reshard, plan)}
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
        lines.append(f"{name:28s} {value:.2f}{target}")
    if "limit" in result:
        lines.append(f"raw gloo broadcast   {result['limit']['raw_gloo_gbps']:.2f} GB/s")
    if "plan" in result:
        found = result["plan"]
        lines.append(
            f"plan of {found['tensors']:,} tensors, maps gathered: {found['seconds_with_gathering']:.2f} s; busiest of its "
            f"bound {', '.join(f'PP {pp} {share:.3f}' for pp, share in found['busiest_of_bound'].items())}"
        )
    if "reshard" in result:
        found = result["reshard"]
        lines.append(
            f"exact reshard TP 2 -> TP 2: {found['bytes_of_model']:.2f} of the model's bytes moved; no trainer rank held more "
            f"than {found['largest_share_held']:.2f} of it"
        )
    if "surgical" in result:
        lines.append(_latency_line(result["surgical"]))
    return "\n".join(lines)


def _latency_line(found: Result) -> str:
    quiet, busy = found["undisturbed"], found["while_the_other_is_filled"]
    return (
        f"one engine filled alone in {found['update_one_s'] * 1e3:.0f} ms, {found['updates']} times; the other's requests: "
        f"p50 {quiet['p50_s'] * 1e3:.1f} -> {busy['p50_s'] * 1e3:.1f} ms, p95 {quiet['p95_s'] * 1e3:.1f} -> "
        f"{busy['p95_s'] * 1e3:.1f} ms"
    )
