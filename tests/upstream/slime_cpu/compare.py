"""What routing replay costs in slime's own loop: without it, slime's own way, ours in the reply and direct, in turn.

    R3TEST_UPSTREAM=FOLDER make bench-slime ARGS="--rounds 2 --steps 5 --layers 25 --top-k 8 --response-length 256"

Seconds are slime's own (`perf/step_time` and its parts), without each run's first two steps: processes warm up in them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles

from r3channel.bench.harness import stamp
from tests.upstream.slime_cpu.run import options_of, run

WAYS = {
    "without replay": ["--live"],
    "slime's own replay": ["--stock"],
    "r3channel in the reply": [],
    "r3channel direct": ["--delivery", "direct"],
}
PARTS = {
    "step": "perf/step_time",
    "of it trainers wait": "perf/train_wait_time",
    "of it train": "perf/train_time",
}
WARM = 2


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make bench-slime", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    own, rest = parser.parse_known_args(argv)
    load = os.getloadavg()[0]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory(prefix="r3-slime-") as folder:
        for number in range(own.rounds):
            for name, words in WAYS.items():
                work = Path(folder, f"{number}-{len(words)}-{'-'.join(words)}")
                result = run(
                    options_of(["--work", str(work), "--sources", f"{folder}/sources", *words, *rest])
                )
                if result["exit"] or result["rows"].get("differ") or result["rows"].get("missing"):
                    print(
                        f"{name} ended with {result['exit']}: {result['rows']}\n{result['tail']}",
                        file=sys.stderr,
                    )
                    return 1
                found[name] += result["perf"][WARM:]
                print(f"round {number}: {name}, {result['seconds']} s", file=sys.stderr)
    print(
        "| s a step, median (quartiles) | "
        + " | ".join(PARTS)
        + " | step, of that without |\n|---|---|---|---|---|"
    )
    base = median(one[PARTS["step"]] for one in found["without replay"])
    for name, steps in found.items():
        cells = []
        for part in PARTS.values():
            low, middle, high = quantiles((one[part] for one in steps), n=4)
            cells.append(f"{middle:.2f} ({low:.2f} .. {high:.2f})")
        ratio = median(one[PARTS["step"]] for one in steps) / base
        print(f"| {name} | " + " | ".join(cells) + f" | {ratio:.3f} |")
    print(json.dumps({"arguments": rest, "machine": stamp(load), "steps": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
