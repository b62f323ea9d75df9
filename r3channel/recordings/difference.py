"""Where two recordings of the same samples are not the same: the first place, and how much of each layer. Judges nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from r3channel.recordings.aligned_pair import AlignedPair
from r3channel.recordings.logprobs import SIDES
from r3channel.recordings.recording import Recording
from r3channel.recordings.step import RecordedStep
from r3channel.wire.routing import Ids


def compare(first: Recording, second: Recording) -> dict[str, Any]:
    """The result of `r3channel diff --json`. Raises what reading does."""
    shared = sorted(set(first.steps) & set(second.steps))
    pairs = [(first.step(number), second.step(number)) for number in shared]
    steps = [_step(sides) | _logprobs(*pair) for pair in pairs for sides in AlignedPair.of(*pair)]
    return {
        "only_first": sorted(set(first.steps) - set(second.steps)),
        "only_second": sorted(set(second.steps) - set(first.steps)),
        "steps": steps,
        "equal": bool(steps)
        and first.steps == second.steps
        and not any(
            step["different"] or step["order_only"] or step["missing"] or any(step["logprobs"].values())
            for step in steps
        ),
    }


def _logprobs(first: RecordedStep, second: RecordedStep) -> dict[str, Any]:
    """Each side's largest difference, where both recordings have that side."""
    if not (first.logprobs and second.logprobs):
        return {"logprobs": {}}
    _, here, there = np.intersect1d(_places(first), _places(second), return_indices=True)
    sides = [name for name in SIDES if name in first.logprobs and name in second.logprobs]
    return {
        "logprobs": {
            name: float(np.abs(first.logprobs[name][here] - second.logprobs[name][there]).max(initial=0))
            for name in sides
        }
    }


def _places(step: RecordedStep) -> Ids:
    """One number for each (sample, position), the same in any order of the samples."""
    order = np.argsort(np.argsort([sample.sample_id for sample in step.ticket.samples]))
    return (order[step.logprobs["sample"]] << 32) + step.logprobs["position"]


def _step(sides: AlignedPair) -> dict[str, Any]:
    differs_RL, moe_layers = sides.differs_RL, sides.spec.moe_layers
    sorted_RL = np.zeros_like(differs_RL)
    rows, places = np.nonzero(differs_RL)
    if len(rows) and sides.seen_RLK.shape[2] == sides.spec.top_k:
        want, seen = sides.want_RLK[rows, places], sides.seen_RLK[rows, places]
        same = (np.sort(want, -1) == np.sort(seen, -1)).all(-1)
        sorted_RL[rows[same], places[same]] = True
    real_RL = differs_RL & ~sorted_RL
    missing = sides.valid_R & ~sides.there_R
    found: dict[str, Any] = {
        "step": sides.ticket.step,
        "pass": sides.of_pass,
        "rows": int(sides.both_R.sum()),
        "different": int(real_RL.sum()),
        "order_only": int(sorted_RL.sum()),
        "missing": int(missing.sum()),
        "layers": {
            str(layer): {
                "different": int(real_RL[:, place].sum()),
                "order_only": int(sorted_RL[:, place].sum()),
            }
            for place, layer in enumerate(moe_layers)
            if differs_RL[:, place].any()
        },
    }
    for what, cells in (("first", real_RL), ("first_order_only", sorted_RL)):
        if cells.any():
            row, place = (int(index[0]) for index in np.nonzero(cells))
            sample, position = sides.place(row)
            found[what] = {
                "sample": sample,
                "position": position,
                "layer": moe_layers[place],
                "expected": sides.want_RLK[row, place].tolist(),
                "seen": sides.seen_RLK[row, place].tolist(),
            }
    return found


def text(found: dict[str, Any]) -> str:
    """The result as text for a terminal."""
    lines = []
    for step in found["steps"]:
        passed = f", {step['pass']}" if step["pass"] != "forward" else ""
        lines.append(
            f"step {step['step']}{passed}: {step['rows']:,} rows compared, {step['different']:,} rows of layers differ, "
            f"{step['order_only']:,} in their order only, {step['missing']:,} rows missing"
        )
        if step["logprobs"]:
            largest = ", ".join(f"{name} {value:g}" for name, value in step["logprobs"].items())
            lines.append(f"  log-probs, largest difference: {largest}")
        for what, name in (("first", "first difference"), ("first_order_only", "first other order")):
            if one := step.get(what):
                lines.append(
                    f"  {name}: sample {one['sample']}, position {one['position']}, layer {one['layer']}: "
                    f"{one['expected']} and {one['seen']}"
                )
        lines += [
            f"  layer {layer:>4}: {counts['different']:,} different, {counts['order_only']:,} in their order only"
            for layer, counts in step["layers"].items()
        ]
    for name in ("first", "second"):
        if only := found[f"only_{name}"]:
            lines.append(f"only in the {name}: steps {only}")
    return "\n".join([*lines, "equal" if found["equal"] else "not equal"])
