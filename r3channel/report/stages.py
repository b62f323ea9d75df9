"""The per-stage table and the hidden share of send time, from finished measurements. Pure; prints nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from r3channel.clock import STAGES, Span, merge_intervals


def stage_table(
    seconds: Mapping[str, Mapping[str, float]], *, wall_s: Mapping[str, float] | None = None
) -> str:
    """One line per stage that some process was in, one column per process, in the order of `STAGES`.

    `seconds` is {process: {stage: seconds}}. Where `wall_s` has a process, two lines say what its spans add up to and
    which share of its wall time that is; leave out processes whose spans come from several threads at once.
    """
    processes = list(seconds)
    rows = [["stage (seconds)", *processes]]
    for stage in STAGES:
        if any(stage in seconds[process] for process in processes):
            rows.append([stage, *(_cell(seconds[process].get(stage)) for process in processes)])
    if wall_s:
        sums = {process: sum(seconds[process].values()) for process in processes}
        rows.append(["sum", *(_cell(sums[process]) for process in processes)])
        rows.append(["wall", *(_cell(wall_s.get(process)) for process in processes)])
        rows.append(["coverage", *(_share(sums[process], wall_s.get(process)) for process in processes)])
    return _align(rows)


def hidden_share(send_spans: Iterable[Span], wait_spans: Iterable[Span]) -> float:
    """Share of the send time that lies outside every wait; 0.0 without sends: nothing was shown to be hidden."""
    waits = merge_intervals((wait.start_s, wait.end_s) for wait in wait_spans)
    total_s = exposed_s = 0.0
    for send in send_spans:
        total_s += send.seconds
        exposed_s += sum(
            max(0.0, min(send.end_s, end) - max(send.start_s, start))
            for start, end in waits
            if start < send.end_s and end > send.start_s
        )
    return 1.0 - exposed_s / total_s if total_s > 0 else 0.0


def _cell(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"


def _share(part_s: float, wall_s: float | None) -> str:
    return f"{part_s / wall_s:.1%}" if wall_s else "-"


def _align(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        numbers = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append("  ".join([row[0].ljust(widths[0]), *numbers]))
    return "\n".join(lines)
