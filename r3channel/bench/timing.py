"""CPU time of a call. Wall time moves by a factor of two on a shared machine, CPU time does not."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping


def rounds_of(count: int, what: str) -> Iterator[int]:
    """0 .. count-1; on a terminal with a bar and the time that is left, where tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return iter(range(count))
    return iter(tqdm(range(count), desc=what, disable=None, leave=False))


def cpu_seconds(call: Callable[[], object], *, rounds: int, min_s: float = 0.02) -> float:
    """Median CPU seconds of one call of this process, all threads, after one call to warm up."""
    return cpu_seconds_each({"": call}, rounds=rounds, min_s=min_s)[""]


def cpu_seconds_each(
    calls: Mapping[str, Callable[[], object]], *, rounds: int, min_s: float = 0.02
) -> dict[str, float]:
    """As `cpu_seconds`, for several calls whose rounds are interleaved, so that all see the same machine."""
    repeats = {name: _repeats(call, min_s=min_s) for name, call in calls.items()}
    seen: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seen[name].append(_once(call, repeats=repeats[name]))
    return {name: statistics.median(values) for name, values in seen.items()}


def _repeats(call: Callable[[], object], *, min_s: float) -> int:
    _once(call, repeats=1)
    return max(1, round(min_s / max(1e-6, _once(call, repeats=1))))


def _once(call: Callable[[], object], *, repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - start) / repeats
