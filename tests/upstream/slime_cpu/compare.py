"""What routing replay costs in slime's own loop: without it, slime's own way, ours in the reply and direct, in turn.

    R3TEST_UPSTREAM=FOLDER make bench-slime ARGS="--layers 49 --top-k 8 --dp 2 --samples 16 --response-length 256"

Seconds are slime's own (`perf/step_time` and its parts), CPU is counted from outside, both without each run's first two steps,
in which processes warm up; seconds without the last step, too, beside which nothing is generated. `--picture FILE` draws steps
as bars.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from r3channel.bench.harness import stamp
from tests.upstream.slime_cpu.run import WARM_STEPS, options_of, run

WAYS = {
    "without replay": ["--live"],
    "slime's own replay": ["--stock"],
    "r3channel, in the reply": [],
    "r3channel, direct": ["--delivery", "direct"],
}
COLUMNS = {
    "step, s": "perf/step_time",
    "trainers wait, s": "perf/train_wait_time",
    "CPU s of a step: engine": "engines_cpu_s",
    "manager": "manager_cpu_s",
    "trainers": "trainers_cpu_s",
    "most in Ray's store, MB": "store_mb",
    "peak MB: manager": "manager_peak_mb",
    "a trainer": "trainers_peak_mb",
}
Figures = dict[str, list[float]]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make bench-slime", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--picture", type=Path, help="an SVG file")
    own, rest = parser.parse_known_args(argv)
    load = os.getloadavg()[0]
    found: dict[str, Figures] = {name: {each: [] for each in COLUMNS.values()} for name in WAYS}
    with tempfile.TemporaryDirectory(prefix="r3-slime-") as folder:
        for number in range(own.rounds):
            for name, words in WAYS.items():
                work = Path(folder, f"{number}-{'-'.join(words)}")
                result = run(
                    options_of(
                        ["--bare", "--work", str(work), "--sources", f"{folder}/sources", *words, *rest]
                    )
                )
                if result["exit"]:
                    print(f"{name} ended with {result['exit']}\n{result['tail']}", file=sys.stderr)
                    return 1
                _add(found[name], result)
                print(f"round {number}: {name}, {result['seconds']} s", file=sys.stderr)
    print(*_rows(found), sep="\n")
    print(json.dumps({"arguments": rest, "machine": stamp(load), "figures": found}))
    if own.picture:
        _draw(found, own.picture)
    return 0


def _add(figures: Figures, result: dict[str, Any]) -> None:
    """Add a run's figures: of each step, its seconds; of the run, CPU a step and the largest sizes."""
    steps = result["perf"][WARM_STEPS:-1]  # beside the last one nothing is generated
    for name in figures:
        if name.startswith("perf/"):
            figures[name] += [step[name] for step in steps]
        else:
            figures[name].append(result["use"][name] / (len(steps) + 1 if name.endswith("cpu_s") else 1))


def _interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, by 10,000 resamplings of fixed seed."""
    drawn = np.random.default_rng(0).choice(values, (10_000, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return float(low), float(high)


def _rows(found: dict[str, Figures]) -> list[str]:
    lines = ["| | " + " | ".join(COLUMNS) + " | step, of that without |", "|" + "---|" * (len(COLUMNS) + 2)]
    base = median(found["without replay"]["perf/step_time"])
    for name, figures in found.items():
        cells = [f"{median(values):.{1 if median(values) >= 10 else 2}f}" for values in figures.values()]
        low, high = _interval(figures["perf/step_time"])
        ratios = [value / base for value in (median(figures["perf/step_time"]), low, high)]
        lines.append(f"| {name} | " + " | ".join(cells) + " | {:.2f} ({:.2f} .. {:.2f}) |".format(*ratios))
    return lines


def _draw(found: dict[str, Figures], path: Path) -> None:
    """Draw each way's step as a bar, of it the trainers' wait, with the interval of its median."""
    from matplotlib import pyplot

    names = list(found)[::-1]
    steps = [median(found[name]["perf/step_time"]) for name in names]
    waits = [median(found[name]["perf/train_wait_time"]) for name in names]
    bounds = np.array([_interval(found[name]["perf/step_time"]) for name in names]).T
    figure, axes = pyplot.subplots(figsize=(9, 2.4), layout="constrained")
    axes.barh(names, waits, color="#8c959f", label="trainers wait")
    axes.barh(names, np.subtract(steps, waits), left=waits, color="#0969da", label="train and the rest")
    axes.errorbar(steps, names, xerr=np.abs(bounds - steps), fmt="none", ecolor="#1f2328", capsize=3)
    axes.set_xlabel("seconds of a step in slime's own loop (median, 95 % interval)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
