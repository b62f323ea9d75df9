"""A run's times: the table of stages that the demo prints, and how much of the relay's work no trainer waited for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from r3channel.observe.stage_clock import STAGES, Span, merge_intervals
from r3channel.tools.report_page import ROUTING_WAITS, WORK


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


def hidden_share(relay: Iterable[Span], trainers: Iterable[Span]) -> float:
    """The share of the relay's work for its steps that no trainer waited for; 0.0 without work: nothing was shown to be hidden.

    Work is what the relay does between `seal` and the last acknowledgement (`WORK`). To wait is to wait for routing
    (`ROUTING_WAITS`): a trainer that waits for the next rollout waits for no relay.
    """
    waits = merge_intervals((one.start_s, one.end_s) for one in trainers if one.stage in ROUTING_WAITS)
    total_s = exposed_s = 0.0
    for work in (one for one in relay if one.stage in WORK):
        total_s += work.seconds
        exposed_s += sum(
            max(0.0, min(work.end_s, end) - max(work.start_s, start))
            for start, end in waits
            if start < work.end_s and end > work.start_s
        )
    return 1.0 - exposed_s / total_s if total_s > 0 else 0.0


def seconds_by_stage(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds of each stage, in the order in which stages were first entered."""
    seconds: dict[str, float] = {}
    for one in spans:
        seconds[one.stage] = seconds.get(one.stage, 0.0) + one.seconds
    return seconds


def waits_of(spans: Iterable[Span]) -> dict[int, float]:
    """Step -> seconds that one trainer stood still for its routing."""
    seconds: dict[int, float] = {}
    for one in spans:
        if one.stage in ROUTING_WAITS and one.step is not None:
            seconds[one.step] = seconds.get(one.step, 0.0) + one.seconds
    return seconds


def _cell(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"


def _align(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        numbers = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append("  ".join([row[0].ljust(widths[0]), *numbers]))
    return "\n".join(lines)
