"""Kills each process when somebody reaches each stage of a row's way, or of the weights', and says how the loop went on."""

from __future__ import annotations

import random
import time
from itertools import product
from pathlib import Path
from typing import Any

from tests.chaos.loop import Loop
from tests.chaos.nemesis import Nemesis
from tests.chaos.shim import TABLE

OPTIONS = {"layout": "dp=1,tp=2,pp=2,cp=1", "samples": 8}
"""Short steps: a cell has two or three."""
RANKS: tuple[str, ...] = ("TP0", "other TP rank", "later stage", "weight sender")
"""What each trainer rank of the layout stands for; all four send weights."""
PROCESSES: tuple[str, ...] = ("engine", "relay", *RANKS, "weight receiver")
STAGES = [stage for stages in TABLE["stages"].values() for stage in stages if stage != "prepare"]
FIRST = [tuple[str, str](cell) for cell in TABLE["first"]]
Row = dict[str, Any]


def cells(seed: int, count: int) -> list[tuple[str, str]]:
    """The first nine, so many of the others by the seed, or all 63."""
    every = [*product(PROCESSES, STAGES)]
    others = [cell for cell in every if cell not in FIRST]
    chosen = random.Random(seed).sample(others, min(count, len(others)))
    return FIRST if count == len(FIRST) else every if count >= len(every) else sorted(chosen, key=every.index)


def kill_at(loop: Loop, nemesis: Nemesis, process: str, stage: str) -> Row:
    """Steps until one after the kill has gone well with all engines, five at most; what the others were given up for, and seconds
    until then."""
    before, begun_s, whole = len(loop.failed), time.monotonic(), False
    order = nemesis.order(stage, f"kill {_file_of(loop, nemesis.folder, process)}")
    if stage == "link":  # engines are linked when trainers are new
        loop.phase = "link"
        loop.attempt(loop.renew)
    for number in range(5):
        is_late = not order.exists()
        loop.attempt(loop.await_engines)
        whole = loop.step() and is_late and len(loop.routable) == len(loop.engines)
        if whole or loop.hung or (number and order.exists()):
            break
    row: Row = {"process": process, "stage": stage, "killed": not order.exists(), "whole": whole}
    row |= {"named": [*dict.fromkeys(loop.failed[before:])], "took_s": round(time.monotonic() - begun_s, 1)}
    order.unlink(missing_ok=True)
    print("chaos:", *(f"{key} {value}," for key, value in row.items()), flush=True)
    return row


def _file_of(loop: Loop, folder: Path, process: str) -> str:
    """The name of a file with its id. Trainers, whose next lives begin while engines are linked, and schedulers write theirs."""
    if process in RANKS:
        return f"rank{RANKS.index(process)}"
    if process == "weight receiver":
        return f"scheduler{loop.pids['engine'][1]}"
    (folder / process).write_text(str(loop.pids[process][0]))
    return process


def table(rows: list[Row]) -> str:
    """As a page has it."""
    told = {(row["process"], row["stage"]): row for row in rows}
    lines = [["killed at", *PROCESSES], ["---"] * (len(PROCESSES) + 1)]
    lines += [[stage, *(_word(told.get((each, stage))) for each in PROCESSES)] for stage in STAGES]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _word(row: Row | None) -> str:
    if row is None or not row["killed"]:
        return "not reached" if row else ""
    named = ", then ".join(row["named"]) if row["whole"] else "not recovered"
    return f"{named or 'recovered'}, {row['took_s']:.0f} s"
