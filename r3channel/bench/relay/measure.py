"""The measurements of `bench relay`: which cases and paths, how many rounds, in one process tree."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

from r3channel.bench import relay_rounds
from r3channel.bench.relay import costs
from r3channel.bench.relay.cluster import two_nodes
from r3channel.bench.relay.paths import ALL, DIRECT, LIMIT, OURS, STORE
from r3channel.bench.relay.results import OWN, paths_of, ratios_of
from r3channel.bench.relay.rounds import Rounds
from r3channel.bench.relay.workload import Case

TOKENS, LAYOUT = 262_144, "dp=4"
SLICED = "dp=1,tp=2,pp=2"
_FEW = (*OURS, *STORE[1:], *LIMIT)
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Effort:
    """`rounds` interleaved rounds of the main case, `whole` of them from the peers' replies on; then the sweep."""

    paths: tuple[str, ...]
    """Of the main case."""
    rounds: int
    whole: int
    sweep: tuple[tuple[int, str, tuple[str, ...], int], ...]
    """(tokens, layout, paths, rounds)."""
    socket: dict[str, int]
    costs: costs.Effort
    store_bytes: int


QUICK = Effort(
    (*OURS, *STORE, *DIRECT, *LIMIT),
    3,
    1,
    ((65_536, LAYOUT, OURS, 2),),
    {"rounds": 2, "samples": 4, "rows": 4096},
    costs.Effort(tokens=65_536, rounds=3),
    1 * _GIB,
)
"""Without straw and the paths on one raylet, which take as long as all others together and decide no ratio."""
FULL = Effort(
    ALL,
    20,
    5,
    (
        (65_536, LAYOUT, ALL, 20),
        (TOKENS, SLICED, (*OURS, *STORE, *LIMIT), 7),
        (1_048_576, LAYOUT, _FEW, 5),
    ),
    {"rounds": 12, "samples": 16, "rows": 4096},
    costs.Effort(tokens=0, rounds=9),
    3 * _GIB,
)


def measure(effort: Effort, *, model: str, rounds: int | None = None) -> dict[str, Any]:
    """All results as plain values; progress goes to stderr."""
    begin_s = time.monotonic()
    with two_nodes(store_bytes=effort.store_bytes):
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
    seen = processes.run(case, effort.paths, rounds=rounds, whole=effort.whole)
    report: dict[str, Any] = {
        "model": model,
        "tokens": TOKENS,
        "layout": LAYOUT,
        "rounds": rounds,
        "paths": paths_of(seen, tokens=TOKENS),
        "ratio": ratios_of(seen),
        "limit": {"raw_gloo_wall_s": _median_wall(seen, LIMIT[0])},
        "peak_staging_bytes": processes.peak_staging_bytes.get(OWN),
        "sweep": {},
    }
    processes = _sweep(effort, model, processes, report)
    report["skipped"] = processes.skipped | _nixl()
    processes.close()
    return report


def _sweep(effort: Effort, model: str, processes: Rounds, report: dict[str, Any]) -> Rounds:
    layout = LAYOUT
    for tokens, wanted, paths, rounds in effort.sweep:
        _say(f"{tokens:,} tokens, {wanted}: {rounds} rounds")
        if wanted != layout:  # torch.distributed has one default group per process
            skipped = processes.skipped
            processes.close()
            processes, layout = Rounds(4), wanted
            processes.skipped |= skipped
        usable = [path for path in paths if path not in processes.skipped]
        case = Case(model=model, tokens=tokens, layout=wanted)
        seen = processes.run(case, usable, rounds=rounds, whole=0)
        report["sweep"][_name(case)] = {
            "tokens": tokens,
            "layout": wanted,
            "paths": paths_of(seen, tokens=tokens),
            "ratio": ratios_of(seen),
            "peak_staging_bytes": processes.peak_staging_bytes.get(OWN),
        }
    return processes


def _name(case: Case) -> str:
    return f"{case.layout.replace('=', '').replace(',', '_')}_{case.tokens}"


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
