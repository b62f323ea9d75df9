"""A recording at a glance: what each step holds, and which experts it loads. Plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from r3channel.recordings.recording import Recording
from r3channel.wire.routing import Ids, RowKind


def summarize(recording: Recording) -> dict[str, Any]:
    """The result of `r3channel inspect --json`. Raises what reading does."""
    manifest, spec = recording.manifest, recording.manifest.spec
    load_LE = np.zeros((spec.num_moe_layers, spec.num_experts), np.int64)
    steps = [_step(recording, number, load_LE) for number in recording.steps]
    return {
        "side": manifest.side, "spec": spec.to_dict(), "layout": str(manifest.layout), "tokens": manifest.tokens,
        "versions": dict(manifest.versions), "steps": steps,
        **{name: sum(step[name] for step in steps) for name in ("samples", "rows", "bytes")},
        "load": [_load(layer, load_E) for layer, load_E in zip(spec.moe_layers, load_LE, strict=True)],
    }  # fmt: skip


def _step(recording: Recording, number: int, load_LE: Ids) -> dict[str, Any]:
    step = recording.step(number)
    kinds, rows = Counter[str](), 0
    for sample in step.samples:
        ids_TLK, there_T = step.ids(sample.sample_id)
        rows += int(there_T.sum())
        _count(load_LE, ids_TLK[there_T])
        for span in sample.provenance:
            kinds[RowKind(span.kind).name.lower()] += span.end - span.start
    return {
        "step": number, "samples": len(step.samples), "cut": list(step.cut), "rows": rows,
        "turns": sum(map(len, step.frames.values())), "weight_versions": list(step.ticket.weight_versions),
        "kinds": dict(kinds), "torn_bytes": recording.segment(number).torn_bytes, "bytes": recording.nbytes(number),
        "logprobs": _logprobs(step.logprobs),
    }  # fmt: skip


def _logprobs(columns: Mapping[str, Ids]) -> dict[str, float]:
    """Their number, and how far the trainer's are from the engine's; nothing where there are none."""
    names = {"abs_diff": "trainer", "abs_diff_replay_off": "natural"} if "engine" in columns else {}
    number = {"tokens": len(columns["trainer"])} if columns else {}
    return number | {
        name: float(np.abs(columns[side] - columns["engine"]).mean())
        for name, side in names.items()
        if side in columns and len(columns[side])
    }


def _count(load_LE: Ids, ids_TLK: Ids) -> None:
    layers, experts = load_LE.shape
    for place in range(layers):
        counts = np.bincount(ids_TLK[:, place].ravel().astype(np.int64).clip(0), minlength=experts)
        load_LE[place] += counts[:experts]


def _load(layer: int, load_E: Ids) -> dict[str, Any]:
    return {
        "layer": layer, "busiest": int(load_E.argmax()),
        "busiest_over_mean": round(float(load_E.max() / load_E.mean()), 3) if load_E.any() else 0.0,
        "idle_experts": int((load_E == 0).sum()),
    }  # fmt: skip


def table(summary: dict[str, Any]) -> str:
    """The summary as text for a terminal."""
    spec = summary["spec"]
    lines = [
        f"{summary['side']} side: {len(summary['steps'])} steps, {summary['samples']:,} samples, {summary['rows']:,} rows, "
        f"{summary['bytes'] / 1e6:,.1f} MB; {len(spec['moe_layers'])} MoE layers, top-{spec['top_k']} of {spec['num_experts']}; "
        f"{summary['layout']}",
        "written with " + ", ".join(f"{name} {version}" for name, version in summary["versions"].items()),
        f"{'step':>6} {'samples':>8} {'rows':>10} {'MB':>9}  {'versions':12} kinds",
    ]
    for step in summary["steps"]:
        kinds = " ".join(f"{name} {count}" for name, count in step["kinds"].items())
        versions = ",".join(map(str, step["weight_versions"]))
        cut = f"CUT: {len(step['cut'])} samples" if step["cut"] else ""
        lines.append(
            f"{step['step']:>6} {step['samples']:>8,} {step['rows']:>10,} {step['bytes'] / 1e6:>9.2f}  {versions:12} "
            f"{kinds:34} {cut}".rstrip()
        )
        if logprobs := step["logprobs"]:
            lines.append(
                "       log-probs: " + ", ".join(f"{name} {value:g}" for name, value in logprobs.items())
            )
    lines.append(f"{'layer':>6} {'busiest expert':>15} {'of mean load':>13} {'idle experts':>13}")
    lines += [
        f"{load['layer']:>6} {load['busiest']:>15} {load['busiest_over_mean']:>13.2f} {load['idle_experts']:>13}"
        for load in summary["load"]
    ]
    return "\n".join(lines)
