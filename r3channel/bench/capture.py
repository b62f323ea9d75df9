"""`r3channel bench capture`: what routing costs an engine and a relay, in one run with what it is compared to.

`off`: no capture; `stock`: SGLang's int32; `r3channel`: our frames in the reply; `direct`: our frames past the reply. The
engines are real ones on CPU with a small random model of 48 layers x top-8 of 128, so ratios of engine CPU are an upper
bound for large models; the scheduler's figures are those of its own functions at the shape of Qwen3-30B-A3B.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from r3channel.bench import engine_rounds, relay_rounds
from r3channel.bench.machine import show
from r3channel.bench.scheduler_calls import ANSWER, ROWS
from r3channel.errors import EngineUnavailable
from r3channel.report import commands

_CHILD_TIMEOUT_S = 900.0


def run(argv: Sequence[str]) -> int:
    """Measure and print; exit status 0."""
    parser = commands.parser("bench", prog="bench capture", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="few rounds: the shape of the result only")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks of each engine (1)")
    options = parser.parse_args(list(argv))
    show(["capture", *argv], lambda: measure(quick=options.quick, tp=options.tp), _text, as_json=options.json)
    return 0


def measure(*, quick: bool, tp: int = 1) -> dict[str, Any]:
    """All results as plain values."""
    scheduler = _scheduler(rounds=3 if quick else 20, slots=20_000 if quick else 120_000)
    relay = relay_rounds.measure(
        rounds=2 if quick else 12, samples=2 if quick else 16, rows=512 if quick else 4096
    )
    variants = engine_rounds.measure(engine_rounds.QUICK if quick else engine_rounds.FULL, tp=tp)
    for name, values in variants.items():
        values.update(scheduler.get(name, {"scheduler_us_per_request": {}, "scheduler_us_per_step": 0.0}))
    return {
        "variants": variants,
        "relay_cpu_us_per_token": relay,
        "ratios": _ratios(variants, relay),
        "tp": tp,
    }


def _scheduler(*, rounds: int, slots: int) -> dict[str, Any]:
    """In a child: SGLang's classes need the embedded environment from the first import on."""
    from r3channel.embedded.sglang import environment

    command = [sys.executable, "-m", "r3channel.bench.scheduler_calls"]
    command += ["--rounds", str(rounds), "--slots", str(slots)]
    child = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S, check=False
    )
    for line in child.stdout.splitlines():
        if line.startswith(ANSWER):
            return json.loads(line.removeprefix(ANSWER))
    raise EngineUnavailable(f"SGLang's own functions could not be measured:\n{child.stderr[-2000:]}")


def _ratios(variants: dict[str, Any], relay: dict[str, float]) -> dict[str, Any]:
    stock = variants["stock"]["scheduler_us_per_request"]
    ratios: dict[str, Any] = {}
    for name in ("r3channel", "direct"):
        ours = variants[name]["scheduler_us_per_request"]
        ratios[name] = {
            "scheduler_to_stock": {rows: round(ours[rows] / stock[rows], 3) for rows in stock},
            "engine_cpu_to_off": variants[name]["engine_cpu_ratio_to_off"],
        }
    ratios["relay_cpu_inband_to_direct"] = round(relay["inband"] / relay["direct"], 2)
    ratios["relay_cpu_stock_to_direct"] = round(relay["stock"] / relay["direct"], 2)
    return ratios


def _text(report: dict[str, Any]) -> str:
    rows = [str(count) for count in ROWS]
    lines = [f"{'':12}{'engine CPU':>12}{'/ off':>8}{'tok/s':>9}{'HTTP B/token':>14}{'us/step':>9}"]
    lines[0] += "".join(f"{f'us @{count}':>11}" for count in rows)
    for name, values in report["variants"].items():
        line = f"{name:12}{values['engine_cpu_us_per_token']:12.1f}{values['engine_cpu_ratio_to_off']:8.3f}"
        line += f"{values['tokens_per_s']:9.1f}{values['http_bytes_per_token']:14.1f}"
        line += f"{values['scheduler_us_per_step']:9.1f}"
        per_request = values["scheduler_us_per_request"]
        lines.append(line + "".join(f"{per_request.get(count, 0.0):11.1f}" for count in rows))
    relay = report["relay_cpu_us_per_token"]
    lines.append("relay CPU, us/token: " + ", ".join(f"{way} {value:.3f}" for way, value in relay.items()))
    lines.append(f"ratios: {json.dumps(report['ratios'])}")
    return "\n".join(lines)
