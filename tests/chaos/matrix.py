"""Kills each process when somebody reaches each stage of a row's way, or of the weights', and says how the loop went on."""

from __future__ import annotations

import random
import time
from collections import Counter
from itertools import product
from typing import Any

import psutil

from tests.chaos.loop import Loop
from tests.chaos.nemesis import Nemesis
from tests.chaos.shim import TABLE

LAYOUT = "dp=1,tp=2,pp=2,cp=1"
RANKS: tuple[str, ...] = ("TP0", "other TP rank", "later stage", "weight sender")
"""What each trainer rank of the layout stands for; all four send weights."""
PROCESSES: tuple[str, ...] = ("engine", "relay", *RANKS, "weight receiver")
STAGES = [stage for stages in TABLE["stages"].values() for stage in stages if stage != "prepare"]
Row = dict[str, Any]


def cells(seed: int, count: int) -> list[tuple[str, str]]:
    every = [*product(PROCESSES, STAGES)]
    return sorted(random.Random(seed).sample(every, min(count, len(every))), key=every.index)


def kill_at(loop: Loop, nemesis: Nemesis, process: str, stage: str) -> Row:
    """Two steps, in the first of which the process dies, and what they were given up for; seconds until both were over."""
    before, begun_s, pid = Counter(loop.failed), time.monotonic(), _pid(loop, process)
    nemesis.order(stage, f"kill {pid}")
    if stage == "link":  # engines are linked when trainers are new
        loop.attempt(loop.renew)
    for _ in range(2):
        loop.step()
    named = [*(loop.failed - before)]
    took_s, killed = time.monotonic() - begun_s, not psutil.pid_exists(pid)
    print(f"chaos: {process} killed at {stage}: {killed}, {named}, {took_s:.0f} s", flush=True)
    return {"process": process, "stage": stage, "killed": killed, "named": named, "took_s": round(took_s, 1)}


def _pid(loop: Loop, process: str) -> int:
    pids = {"engine": loop.pids["engine"][0], "relay": loop.pids["relay"][0]}
    pids |= dict(zip(RANKS, loop.pids["trainer"], strict=True))
    second = psutil.Process(loop.pids["engine"][1])
    return pids.get(process) or next(one.pid for one in second.children() if "scheduler" in one.name())


def table(rows: list[Row]) -> str:
    """As a page has it."""
    told = {(row["process"], row["stage"]): row for row in rows}
    lines = [f"| killed at | {' | '.join(PROCESSES)} |", "|---" * (len(PROCESSES) + 1) + "|"]
    lines += [
        f"| {stage} | {' | '.join(_word(told.get((each, stage))) for each in PROCESSES)} |"
        for stage in STAGES
    ]
    return "\n".join(lines)


def _word(row: Row | None) -> str:
    if row is None or not row["killed"]:
        return "not reached" if row else ""
    return f"{', '.join(row['named']) or 'recovered'}, {row['took_s']:.0f} s"
