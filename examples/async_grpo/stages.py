"""A run's times: the table of stages that the demo prints, and requests side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from r3channel.observe.stage_clock import STAGES
from r3channel.observe.trace import Span


def stage_table(seconds: Mapping[str, Mapping[str, float]]) -> str:
    """One line per stage that some process was in, one column per process, in the order of `STAGES`.

    `seconds` is {process: {stage: seconds}}, of all threads of a process.
    """
    processes = list(seconds)
    rows = [["stage (seconds)", *processes]]
    for stage in STAGES:
        if any(stage in seconds[process] for process in processes):
            rows.append([stage, *(_cell(seconds[process].get(stage)) for process in processes)])
    return _align(rows)


def in_slots(intervals: Iterable[tuple[float, float]], *, stage: str, step: int) -> list[Span]:
    """One span for each interval, in its order; those that overlap are on threads of their own, so that a track can show them."""
    free_s: list[float] = []
    found: dict[int, Span] = {}
    for at, (start_s, end_s) in sorted(enumerate(intervals), key=lambda item: item[1]):
        slot = next((slot for slot, ended_s in enumerate(free_s) if ended_s <= start_s), len(free_s))
        free_s[slot : slot + 1] = [end_s]
        found[at] = Span(stage, step, f"slot {slot}", start_s, end_s)
    return [found[at] for at in sorted(found)]


def _cell(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"


def _align(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        numbers = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append("  ".join([row[0].ljust(widths[0]), *numbers]))
    return "\n".join(lines)
