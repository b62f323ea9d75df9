"""slime's own way and the channel, from slime's own loop, in turn: bytes on each leg, memory, seconds of each step.

R3TEST_UPSTREAM=FOLDER python -m tests.upstream.slime_cpu.compare --work DIR [--rounds 3] [--dp 2] [--tp 2] [--layers 24] ...
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

from tests.upstream.slime_cpu.run import options_of, run


def main(argv: list[str]) -> int:
    rounds = int(argv[argv.index("--rounds") + 1]) if "--rounds" in argv else 1
    kept = [word for at, word in enumerate(argv) if "--rounds" not in (word, argv[at - 1] if at else "")]
    found: dict[str, list[dict[str, float]]] = {"stock": [], "channel": []}
    for number in range(rounds):
        for name, more in (("stock", ["--stock"]), ("channel", [])):
            options = options_of([*more, *kept])
            options.work = Path(options.work, f"{name}-{number}")
            result = run(options)
            if result["exit"] or result["rows"]["differ"] or result["rows"]["missing"]:
                print(f"{name}: {result['rows']}\n{result['tail']}")
                return 1
            found[name].append(_figures(result, steps=options.steps))
    for line in found["stock"][0]:
        stock, channel = (median(one[line] for one in found[name]) for name in ("stock", "channel"))
        times = stock / channel if channel else float("inf")
        print(f"{line:58} {stock:14,.1f} {channel:14,.1f}   {times:6.1f}")
    return 0


def _figures(result: dict[str, Any], *, steps: int) -> dict[str, float]:
    """The first step is left out of trainers' waits: they join in it. The manager's times are means over all steps."""
    manager = result["processes"]["manager"]
    trainers = [each for name, each in result["processes"].items() if name.startswith("trainer")]
    tokens = manager["tokens"]
    seconds = [{"waits": each["seconds"]["routing"]} | each["seconds"] for each in trainers]

    def slowest(what: str) -> float:
        return 1e3 * median(max(each[what][step] for each in seconds) for step in range(1, steps))

    return {
        "reply: routing, bytes a token": manager["reply_bytes"] / tokens,
        "object store: what all parts hold, bytes a token": manager["store_bytes"] / tokens,
        "manager: taking routing out of replies, ms a step": 1e3 * sum(manager["seconds"]["reply"]) / steps,
        "manager: convert, split, (seal), put: ms a step": 1e3 * sum(manager["seconds"]["split"]) / steps,
        "trainers: routing taken, the slowest, ms a step": slowest("routing"),
        "trainers: of it wait_relay + wait_wire": slowest("waits"),
        "manager: peak memory, MiB": manager["peak_rss"] / 2**20,
        "trainer: peak memory, the largest, MiB": max(each["peak_rss"] for each in trainers) / 2**20,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
