"""Summaries and differences of recordings, as plain values and as text.

`summarize` tells what each step of a recording holds, and which experts it loads. `compare` tells where two recordings of the
same samples differ. Neither judges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from r3channel.recordings.aligned_pair import AlignedPair
from r3channel.recordings.logprobs import SIDES
from r3channel.recordings.recording import Recording
from r3channel.recordings.step import RecordedStep
from r3channel.wire.routing import Ids, RowKind
from r3channel.wire.tensor_frame import encode_tensor


def summarize(recording: Recording) -> dict[str, Any]:
    """Return the result of `r3channel inspect --json`.

    Raises:
        R3Error: a step cannot be read; the errors are those of `Recording.step`.
    """
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
    names = {"abs_diff": "trainer", "abs_diff_replay_off": "natural"} if "engine" in columns else {}
    number = {"tokens": len(columns["trainer"])} if columns else {}
    return number | {
        name: float(np.abs(columns[side] - columns["engine"]).mean())
        for name, side in names.items()
        if side in columns and len(columns[side])
    }


def _count(load_LE: Ids, ids_TLK: Ids) -> None:
    for place, load_E in enumerate(load_LE):
        counts = np.bincount(ids_TLK[:, place].ravel().astype(np.int64).clip(0), minlength=len(load_E))
        load_E += counts[: len(load_E)]


def _load(layer: int, load_E: Ids) -> dict[str, Any]:
    return {
        "layer": layer, "busiest": int(load_E.argmax()),
        "busiest_over_mean": round(float(load_E.max() / load_E.mean()), 3) if load_E.any() else 0.0,
        "idle_experts": int((load_E == 0).sum()),
    }  # fmt: skip


def table_of(summary: dict[str, Any]) -> str:
    """Return the summary as text for a terminal."""
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
            lines.append(f"       log-probs: {_list_values(logprobs)}")
    lines.append(f"{'layer':>6} {'busiest expert':>15} {'of mean load':>13} {'idle experts':>13}")
    lines += [
        f"{load['layer']:>6} {load['busiest']:>15} {load['busiest_over_mean']:>13.2f} {load['idle_experts']:>13}"
        for load in summary["load"]
    ]
    return "\n".join(lines)


def _list_values(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


# -- two recordings --------------------------------------------------------------------------------------------------------------


def compare(first: Recording, second: Recording) -> dict[str, Any]:
    """Return the result of `r3channel diff --json`.

    Raises:
        R3Error: a step cannot be read, or two steps do not fit; the errors are those of `Recording.step` and `AlignedPair.of`.
    """
    shared, alike = sorted(set(first.steps) & set(second.steps)), first.manifest.side == second.manifest.side
    pairs = [(first.step(number), second.step(number)) for number in shared]
    steps = [
        _compare_ids(sides, alike) | {"logprobs": _largest_difference(*pair), "tensors": _tensors(*pair)}
        for pair in pairs
        for sides in AlignedPair.align(*pair)
    ]
    counts = ("different", "order_only", "missing")
    beside = [value for step in steps for name in ("logprobs", "tensors") for value in step[name].values()]
    differ = any(beside) or any(step[name] for step in steps for name in counts)
    cut = {one.number: names for one, other in pairs if (names := sorted({*one.cut, *other.cut}))}
    return {
        "only_first": sorted(set(first.steps) - set(second.steps)),
        "only_second": sorted(set(second.steps) - set(first.steps)), "cut": cut, "steps": steps,
        "equal": bool(steps) and first.steps == second.steps and not (differ or cut),
    }  # fmt: skip


def _largest_difference(first: RecordedStep, second: RecordedStep) -> dict[str, float]:
    shared = [name for name in SIDES if name in first.logprobs and name in second.logprobs]
    if not shared:
        return {}
    _, here, there = np.intersect1d(_places(first), _places(second), return_indices=True)
    apart = {name: first.logprobs[name][here] - second.logprobs[name][there] for name in shared}
    return {name: float(np.abs(apart_N).max(initial=0)) for name, apart_N in apart.items()}


def _tensors(first: RecordedStep, second: RecordedStep) -> dict[str, float]:
    """Count samples whose tensors differ, by tensor."""
    counts, names = dict[str, float](), {*first.tensors} & {*second.tensors}
    for tensor in {*first.ticket.tensors} & {*second.ticket.tensors}:
        pairs = ([side.tensor_whole(tensor, name) for side in (first, second)] for name in names)
        counts[tensor.name] = sum(encode_tensor(one) != encode_tensor(other) for one, other in pairs)
    return counts


def _places(step: RecordedStep) -> Ids:
    """Return a number for each (sample, position), whatever the samples' order."""
    order = np.argsort(np.argsort([sample.sample_id for sample in step.ticket.samples]))
    return (order[step.logprobs["sample"]] << 32) + step.logprobs["position"]


def _compare_ids(sides: AlignedPair, alike: bool) -> dict[str, Any]:
    # Routers may have rows that their engine has not: those that the live router chose.
    missing_R = sides.valid_R != sides.there_R if alike else sides.valid_R & ~sides.there_R
    real_RL = differs_RL = sides.differs_RL
    if differs_RL.any() and sides.seen_RLK.shape[2] == sides.spec.top_k:
        real_RL = differs_RL & (np.sort(sides.want_RLK, -1) != np.sort(sides.seen_RLK, -1)).any(-1)
    cells = {"different": real_RL, "order_only": differs_RL & ~real_RL}
    layers = {
        str(layer): {name: int(hit_RL[:, place].sum()) for name, hit_RL in cells.items()}
        for place, layer in enumerate(sides.spec.moe_layers)
        if differs_RL[:, place].any()
    }
    firsts = {"first": "different", "first_order_only": "order_only"}
    return {
        "step": sides.ticket.step, "pass": sides.of_pass, "rows": int(sides.both_R.sum()),
        **{name: int(hit_RL.sum()) for name, hit_RL in cells.items()},
        "missing": int(missing_R.sum()), "layers": layers,
        **{what: sides.example(cells[name]) for what, name in firsts.items() if cells[name].any()},
    }  # fmt: skip


def text_of(result: dict[str, Any]) -> str:
    """Return the result of `compare` as text for a terminal."""
    lines = []
    for step in result["steps"]:
        passed = f", {step['pass']}" if step["pass"] != "forward" else ""
        lines.append(
            f"step {step['step']}{passed}: {step['rows']:,} rows compared, {step['different']:,} rows of layers differ, "
            f"{step['order_only']:,} in their order only, {step['missing']:,} rows missing"
        )
        if step["logprobs"]:
            lines.append(f"  log-probs, largest difference: {_list_values(step['logprobs'])}")
        lines += [f"  {name}: another in {samples:,} samples" for name, samples in step["tensors"].items()]
        for what, name in (("first", "first difference"), ("first_order_only", "first other order")):
            if example := step.get(what):
                lines.append(
                    f"  {name}: sample {example['sample']}, position {example['position']}, layer {example['layer']}: "
                    f"{example['expected']} and {example['seen']}"
                )
        lines += [
            f"  layer {layer:>4}: {counts['different']:,} different, {counts['order_only']:,} in their order only"
            for layer, counts in step["layers"].items()
        ]
    lines += [f"step {n}: cut, and not compared: {', '.join(own[:5])}" for n, own in result["cut"].items()]
    both = ((name, result[f"only_{name}"]) for name in ("first", "second"))
    lines += [f"only in the {name}: steps {only}" for name, only in both if only]
    return "\n".join([*lines, "equal" if result["equal"] else "not equal"])
