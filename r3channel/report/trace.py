"""The spans of a run as a Chrome trace, which Perfetto opens: a track for each thread of each process. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from r3channel.clock import Span

_US = 1e6


def trace_of(spans: Mapping[str, Iterable[Span]]) -> dict[str, Any]:
    """{process: its spans} -> the JSON object. Times begin with the first span; clocks of one machine agree."""
    found = {process: list(own) for process, own in spans.items()}
    zero_s = min((span.start_s for own in found.values() for span in own), default=0.0)
    events: list[dict[str, Any]] = []
    for number, (process, own) in enumerate(found.items(), 1):
        threads = {name: at for at, name in enumerate(dict.fromkeys(span.thread for span in own), 1)}
        events.append(_named("process_name", process, number, 0))
        events += [_named("thread_name", name, number, at) for name, at in threads.items()]
        events += [_event(span, number, threads[span.thread], zero_s) for span in own]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def spans_of(trace: Mapping[str, Any]) -> dict[str, list[Span]]:
    """The way back."""
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
