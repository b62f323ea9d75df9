"""Where two recordings of the same samples are not the same: the first place, and how much of each layer. Judges nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from r3channel.recordings.aligned_pair import AlignedPair
from r3channel.recordings.logprobs import SIDES
from r3channel.recordings.recording import Recording
from r3channel.recordings.step import RecordedStep
from r3channel.wire.routing import Ids
from r3channel.wire.tensor_frame import encode_tensor


def compare(first: Recording, second: Recording) -> dict[str, Any]:
    """The result of `r3channel diff --json`. Raises what reading does."""
    shared = sorted(set(first.steps) & set(second.steps))
    pairs = [(first.step(number), second.step(number)) for number in shared]
    steps = [_step(sides) | _beside(*pair) for pair in pairs for sides in AlignedPair.of(*pair)]
    counts = ("different", "order_only", "missing")
    beside = [value for step in steps for name in ("logprobs", "tensors") for value in step[name].values()]
    differ = any(beside) or any(step[name] for step in steps for name in counts)
    return {
        "only_first": sorted(set(first.steps) - set(second.steps)),
        "only_second": sorted(set(second.steps) - set(first.steps)), "steps": steps,
        "equal": bool(steps) and first.steps == second.steps and not differ,
    }  # fmt: skip


def _beside(first: RecordedStep, second: RecordedStep) -> dict[str, dict[str, float]]:
    """What came beside the ids: no difference where it is 0."""
    logged = first.logprobs and second.logprobs
    return {"logprobs": _logprobs(first, second) if logged else {}, "tensors": _tensors(first, second)}


def _logprobs(first: RecordedStep, second: RecordedStep) -> dict[str, float]:
    """Each side's largest difference, where both recordings have that side."""
    _, here, there = np.intersect1d(_places(first), _places(second), return_indices=True)
    largest = dict[str, float]()
    for name in SIDES:
        if name in first.logprobs and name in second.logprobs:
            apart = first.logprobs[name][here] - second.logprobs[name][there]
            largest[name] = float(np.abs(apart).max(initial=0))
    return largest


def _tensors(first: RecordedStep, second: RecordedStep) -> dict[str, float]:
    """By name the samples whose tensor is not the same, of tensors that both recordings have."""
    counts, names = dict[str, float](), {*first.tensors} & {*second.tensors}
    for tensor in {*first.ticket.tensors} & {*second.ticket.tensors}:
        pairs = ([side.tensor_whole(tensor, name) for side in (first, second)] for name in names)
        counts[tensor.name] = sum(encode_tensor(one) != encode_tensor(other) for one, other in pairs)
    return counts


def _places(step: RecordedStep) -> Ids:
    """One number for each (sample, position), the same in any order of the samples."""
    order = np.argsort(np.argsort([sample.sample_id for sample in step.ticket.samples]))
    return (order[step.logprobs["sample"]] << 32) + step.logprobs["position"]


def _step(sides: AlignedPair) -> dict[str, Any]:
    real_RL = differs_RL = sides.differs_RL
    if differs_RL.any() and sides.seen_RLK.shape[2] == sides.spec.top_k:
        real_RL = differs_RL & (np.sort(sides.want_RLK, -1) != np.sort(sides.seen_RLK, -1)).any(-1)
    cells = {"different": real_RL, "order_only": differs_RL & ~real_RL}
    layers = {
        str(layer): {name: int(hit_RL[:, place].sum()) for name, hit_RL in cells.items()}
        for place, layer in enumerate(sides.spec.moe_layers)
        if differs_RL[:, place].any()
    }
    report: dict[str, Any] = {"step": sides.ticket.step, "pass": sides.of_pass}
    report["rows"] = int(sides.both_R.sum())
    report |= {name: int(hit_RL.sum()) for name, hit_RL in cells.items()}
    report |= {"missing": int((sides.valid_R & ~sides.there_R).sum()), "layers": layers}
    for what, name in (("first", "different"), ("first_order_only", "order_only")):
        if cells[name].any():
            report[what] = sides.example(cells[name])
    return report


def text(result: dict[str, Any]) -> str:
    """The result as text for a terminal."""
    lines = []
    for step in result["steps"]:
        passed = f", {step['pass']}" if step["pass"] != "forward" else ""
        lines.append(
            f"step {step['step']}{passed}: {step['rows']:,} rows compared, {step['different']:,} rows of layers differ, "
            f"{step['order_only']:,} in their order only, {step['missing']:,} rows missing"
        )
        if step["logprobs"]:
            largest = ", ".join(f"{name} {value:g}" for name, value in step["logprobs"].items())
            lines.append(f"  log-probs, largest difference: {largest}")
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
    for name in ("first", "second"):
        if only := result[f"only_{name}"]:
            lines.append(f"only in the {name}: steps {only}")
    return "\n".join([*lines, "equal" if result["equal"] else "not equal"])
