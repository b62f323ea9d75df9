"""The measurements of `bench relay`: which cases and paths, how many rounds, in one process tree."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

from r3channel.bench import relay_rounds
from r3channel.bench.relay import costs
from r3channel.bench.relay.cluster import two_nodes
from r3channel.bench.relay.paths import ALL, LIMIT
from r3channel.bench.relay.results import OWN, paths_of, ratios_of
from r3channel.bench.relay.rounds import Rounds
from r3channel.bench.relay.workload import Case

TOKENS, LAYOUT = 262_144, "dp=4"
_STORE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Effort:
    """`rounds` interleaved rounds of all paths, `whole` of them from the peers' replies on."""

    rounds: int
    whole: int
    socket: dict[str, int]
    costs: costs.Effort


QUICK = Effort(
    3,
    1,
    {"rounds": 2, "samples": 4, "rows": 4096},
    costs.Effort(tokens=65_536, rounds=3),
)
FULL = Effort(
    20,
    5,
    {"rounds": 12, "samples": 16, "rows": 4096},
    costs.Effort(tokens=0, rounds=9),
)


def measure(effort: Effort, *, model: str, rounds: int | None = None) -> dict[str, Any]:
    """All results as plain values; progress goes to stderr."""
    begin_s = time.monotonic()
    with two_nodes(store_bytes=_STORE_BYTES):
        report = _relay(effort, model, rounds or effort.rounds)
    _say("from the socket")
    socket = relay_rounds.measure(**effort.socket)
    report["socket_cpu_us_per_token"] = {
        "in_band": socket["inband"],
        "direct": socket["direct"],
        "stock": socket["stock"],
    }
    _say("part by part")
    report |= costs.measure(effort.costs)
    report["seconds"] = time.monotonic() - begin_s
    return report


def _relay(effort: Effort, model: str, rounds: int) -> dict[str, Any]:
    processes = Rounds(4)
    case = Case(model=model, tokens=TOKENS, layout=LAYOUT)
    _say(f"{model}, {TOKENS:,} tokens, {LAYOUT}: {rounds} rounds")
    seen = processes.run(case, ALL, rounds=rounds, whole=effort.whole)
    report: dict[str, Any] = {
        "model": model,
        "tokens": TOKENS,
        "layout": LAYOUT,
        "rounds": rounds,
        "paths": paths_of(seen, tokens=TOKENS),
        "ratio": ratios_of(seen),
        "limit": {"raw_gloo_wall_s": _median_wall(seen, LIMIT[0])},
        "peak_staging_bytes": processes.peak_staging_bytes.get(OWN),
    }
    report["skipped"] = processes.skipped | _nixl()
    processes.close()
    return report


def _median_wall(seen: Any, path: str) -> float:
    return paths_of({path: seen[path]}, tokens=1)[path]["wall_s"]


def _nixl() -> dict[str, str]:
    import importlib.util

    if importlib.util.find_spec("nixl") is None:
        return {
            "ray_direct_nixl": "ModuleNotFoundError: No module named 'nixl', which Ray's NIXL transport imports"
        }
    return {
        "ray_direct_nixl": "nixl is installed; only the gloo transport of Ray Direct Transport is measured"
    }


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} bench relay: {text}", file=sys.stderr, flush=True)
