"""`bench relay --scale`: how our own cost grows with tokens, layers and ranks, fitted as cost = fixed + slope * size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from r3channel.bench.relay.cluster import two_nodes
from r3channel.bench.relay.results import OWN, paths_of
from r3channel.bench.relay.rounds import Rounds
from r3channel.bench.relay.workload import Case

TOKENS = (65_536, 131_072, 262_144, 524_288, 1_048_576)
LAYERS = (12, 24, 48, 96)
RANKS = (1, 2, 4)
COSTS = ("wall_s", "cpu_s", "manager_cpu_s")
FLAT_PERCENT = 15.0
_AT_TOKENS = 131_072
_STORE_BYTES = 128 << 20


def measure(*, model: str, quick: bool) -> dict[str, Any]:
    """Per swept quantity the points, and per cost the fit and the flatness of cost per unit."""
    rounds = 3 if quick else 9
    tokens = TOKENS[:3] if quick else TOKENS
    cases = {
        "tokens": [(count, Case(model=model, tokens=count, layout="dp=4")) for count in tokens],
        "layers": [
            (count, Case(model=model, tokens=_AT_TOKENS, layout="dp=4", layers=count)) for count in LAYERS
        ],
        "ranks": [(dp, Case(model=model, tokens=_AT_TOKENS, layout=f"dp={dp}")) for dp in RANKS],
    }
    with two_nodes(store_bytes=_STORE_BYTES):
        processes = Rounds(max(RANKS))
        found = {name: _sweep(processes, points, rounds=rounds) for name, points in cases.items()}
        processes.close()
    return {"model": model, "rounds": rounds, "flat_percent": FLAT_PERCENT, **found}


def _sweep(processes: Rounds, cases: Sequence[tuple[int, Case]], *, rounds: int) -> dict[str, Any]:
    points = [_point(processes, size, case, rounds=rounds) for size, case in cases]
    sizes = [point["size"] for point in points]
    return {
        "points": points,
        "fit": {cost: fit_line(sizes, [point[cost] for point in points]) for cost in COSTS},
    }


def _point(processes: Rounds, size: int, case: Case, *, rounds: int) -> dict[str, Any]:
    values = paths_of(processes.run(case, (OWN,), rounds=rounds, whole=0), tokens=case.tokens)[OWN]
    return {
        "size": size,
        "tokens": case.tokens,
        "wall_s": values["wall_s"],
        "cpu_s": values["cpu_s"],
        "manager_cpu_s": values["manager_cpu_us_per_token"] * case.tokens / 1e6,
        "peak_staging_bytes": processes.peak_staging_bytes[OWN],
    }


def fit_line(sizes: Sequence[float], costs: Sequence[float]) -> dict[str, float]:
    """Least squares of cost = fixed + slope * size, and how far the cost per unit of size is from flat.

    >>> found = fit_line([1, 2, 4], [3, 5, 9])
    >>> round(found["fixed"], 6), round(found["slope"], 6), round(found["flat_percent"], 1)
    (1.0, 2.0, 14.3)
    """
    size, cost = np.asarray(sizes, float), np.asarray(costs, float)
    (fixed, slope), *_ = np.linalg.lstsq(np.stack([np.ones_like(size), size], axis=1), cost, rcond=None)
    each = cost / size
    middle = (each.max() + each.min()) / 2
    return {
        "fixed": float(fixed),
        "slope": float(slope),
        "flat_percent": float(100 * (each.max() - middle) / middle),
    }
