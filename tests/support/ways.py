"""Seconds of a weight update by each way, computed from measured rates, for the table on the weights' page."""

from __future__ import annotations

import math

MODELS = (("Qwen3-30B-A3B", 61, 4), ("Qwen3-235B-A22B", 470, 8), ("DeepSeek-V3, float8", 671, 16))
"""Name, GB, and ranks of an engine."""
LINKS_GBIT_S = (400, 12.5)
"""One rank's share of the network: a card of its own, or an eighth of 100 Gbit/s."""
STAGED_GB_S = {"tcp": 2.2, "shared_memory": 2.6}
"""Into one rank's copy, checked and verified: 542 MB in 0.24 and 0.21 s, the update less its pause (`bench weights --only large`,
two cores of an AMD EPYC for trainer and engine, load 0.7)."""
CHANGE_OVER_GB_S = 48
"""From a copy in locked memory into an H100's parameters (`make gpu`)."""
WAYS = (*STAGED_GB_S, "nccl", "broadcast")


def seconds_of(way: str, *, gigabytes: float, ranks: int, gbit_s: float) -> tuple[float, float]:
    """Return the seconds that an engine is paused, and those of the whole update.

    There are as many trainer ranks as engine ranks, so both ends of the network carry the same. Over `nccl` and in a broadcast
    bytes travel during the pause, as fast as the link allows.

    >>> [seconds_of(way, gigabytes=96, ranks=4, gbit_s=8) for way in ("tcp", "nccl", "broadcast")]
    [(0.5, 24.5), (24.5, 24.5), (96.0, 96.0)]
    >>> [round(seconds_of("tcp", gigabytes=2.2, ranks=1, gbit_s=gbit_s)[1], 2) for gbit_s in (400, 8)]
    [1.05, 2.25]
    >>> [round(seconds_of("shared_memory", gigabytes=2.6, ranks=1, gbit_s=gbit_s)[1], 2) for gbit_s in (400, 8)]
    [1.05, 1.05]
    """
    link_gb_s = math.inf if way == "shared_memory" else gbit_s / 8
    if way == "broadcast":  # each rank gets the whole model, and loads it as it comes
        return gigabytes / link_gb_s, gigabytes / link_gb_s
    part = gigabytes / ranks
    travel_s, change_over_s = part / min(link_gb_s, STAGED_GB_S.get(way, math.inf)), part / CHANGE_OVER_GB_S
    return change_over_s + (travel_s if way == "nccl" else 0.0), travel_s + change_over_s
