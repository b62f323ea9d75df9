"""A run's times: the table of stages that the demo prints, and requests side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from r3channel.observe.stage_clock import STAGES
from r3channel.observe.trace import Span


def stage_table(seconds: Mapping[str, Mapping[str, float]]) -> str:
    """One line per stage that some process was in, one column per process, in the order of `STAGES`.

    `seconds` is {process: {stage: seconds}}, of all threads of a process.
    """
    rows = [["stage (seconds)", *seconds]]
    for stage in STAGES:
        if any(stage in own for own in seconds.values()):
            rows.append([stage, *(f"{own[stage]:.3f}" if stage in own else "-" for own in seconds.values())])
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows)


def in_slots(intervals: Iterable[tuple[float, float]], *, stage: str, step: int) -> list[Span]:
    """One span for each interval, in its order; those that overlap are on threads of their own, so that a track can show them."""
    free_s: list[float] = []
    found: dict[int, Span] = {}
    for at, (start_s, end_s) in sorted(enumerate(intervals), key=lambda item: item[1]):
        slot = next((slot for slot, ended_s in enumerate(free_s) if ended_s <= start_s), len(free_s))
        free_s[slot : slot + 1] = [end_s]
        found[at] = Span(stage, step, f"slot {slot}", start_s, end_s)
    return [found[at] for at in sorted(found)]
