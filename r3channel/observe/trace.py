"""The spans of a run as a Chrome trace, which Perfetto opens: a track for each thread of each process. Pure.

A sample is a flow: an arrow from where it was generated over the relay to the first pass that used its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from r3channel.observe.stage_clock import Span

_US = 1e6


class Point(NamedTuple):
    """Where a sample was at a moment."""

    process: str
    thread: str
    at_s: float


def trace_of(
    spans: Mapping[str, Iterable[Span]], flows: Mapping[str, Sequence[Point]] | None = None
) -> dict[str, Any]:
    """{process: its spans} -> the JSON object. Times begin with the first span; clocks of one machine agree.

    `flows` is {sample: its way}. A point outside all spans of its thread is moved into the nearest.
    """
    found = {process: list(own) for process, own in spans.items()}
    zero_s = min((span.start_s for own in found.values() for span in own), default=0.0)
    events: list[dict[str, Any]] = []
    tracks: dict[tuple[str, str], tuple[int, int]] = {}
    for number, (process, own) in enumerate(found.items(), 1):
        threads = {name: at for at, name in enumerate(dict.fromkeys(span.thread for span in own), 1)}
        tracks |= {(process, name): (number, at) for name, at in threads.items()}
        events.append(_named("process_name", process, number, 0))
        events += [_named("thread_name", name, number, at) for name, at in threads.items()]
        events += [_event(span, number, threads[span.thread], zero_s) for span in own]
    for number, (sample, way) in enumerate((flows or {}).items(), 1):
        moved = [_within(found[point.process], point) for point in way]
        kinds = ["s", *"t" * (len(way) - 2), "f"]
        events += [
            _flow(kind, sample, number, tracks[point.process, point.thread], point.at_s - zero_s)
            for kind, point in zip(kinds, moved, strict=True)
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def in_slots(intervals: Iterable[tuple[float, float]], *, stage: str, step: int) -> list[Span]:
    """One span for each interval, in its order; those that overlap are on threads of their own, so that a track can show them."""
    free_s: list[float] = []
    found: dict[int, Span] = {}
    for at, (start_s, end_s) in sorted(enumerate(intervals), key=lambda item: item[1]):
        slot = next((slot for slot, ended_s in enumerate(free_s) if ended_s <= start_s), len(free_s))
        free_s[slot : slot + 1] = [end_s]
        found[at] = Span(stage, step, f"slot {slot}", start_s, end_s)
    return [found[at] for at in sorted(found)]


def _within(own: Iterable[Span], point: Point) -> Point:
    near = min(
        (one for one in own if one.thread == point.thread),
        key=lambda one: max(one.start_s - point.at_s, point.at_s - one.end_s),
    )
    return point._replace(at_s=min(max(point.at_s, near.start_s), near.end_s))


def spans_of(trace: Mapping[str, Any]) -> dict[str, list[Span]]:
    """The spans of a trace that `trace_of` made."""
    events = trace["traceEvents"]
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M"
    }
    found: dict[str, list[Span]] = {
        name: [] for (kind, _, _), name in names.items() if kind == "process_name"
    }
    for event in (event for event in events if event["ph"] == "X"):
        begin_s, thread = event["ts"] / _US, names["thread_name", event["pid"], event["tid"]]
        span = Span(event["name"], event["args"].get("step"), thread, begin_s, begin_s + event["dur"] / _US)
        found[names["process_name", event["pid"], 0]].append(span)
    return found


def _flow(kind: str, sample: str, number: int, track: tuple[int, int], at_s: float) -> dict[str, Any]:
    event = {"ph": kind, "cat": "sample", "name": sample, "id": number, "ts": at_s * _US, "bp": "e"}
    return event | {"pid": track[0], "tid": track[1]}


def _named(kind: str, name: str, process: int, thread: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _event(span: Span, process: int, thread: int, zero_s: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.stage,
        "cat": "wait" if span.stage.startswith("wait_") else "work",
        "pid": process,
        "tid": thread,
        "ts": (span.start_s - zero_s) * _US,
        "dur": span.seconds * _US,
        "args": {} if span.step is None else {"step": span.step},
    }
