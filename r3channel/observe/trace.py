"""Reads the trace files of a run's processes (`trace_file.py`) as one Chrome trace, which Perfetto opens.

A sample is a flow: an arrow from where it was generated over the relay to the trainer that replays it. Times are the wall
clock's: what is compared across nodes is off by as much as their clocks.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from r3channel.errors import ConfigError
from r3channel.observe.stage_clock import Span

_US = 1e6
Event = dict[str, Any]
"""One event of a Chrome trace, times in microseconds since 1970."""


def read(folder: Path) -> tuple[list[Event], list[str]]:
    """Read the events of all files of a run.

    Returns:
        The events, numbered by process, and a sentence for each half-written line, which is left out.

    Raises:
        ConfigError: the folder has no events.
    """
    events: list[Event] = []
    said: list[str] = []
    for number, path in enumerate(sorted(folder.glob("*.trace")), 1):
        for at, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                events += [json.loads(line.rstrip(b",")) | {"pid": number}] if line != b"[" else []
            except ValueError:
                said.append(f"{path.name}: line {at} is half-written and was left out")
    if not events:
        raise ConfigError(f"{folder} has no spans; expected the folder of a run's --r3-trace")
    return events, said


def chrome_trace(events: Iterable[Event]) -> dict[str, Any]:
    """Return the JSON object that Perfetto opens.

    Times begin with the first event. The points of each sample become an arrow.
    """
    ordered = sorted(events, key=_ts)
    moved = [event | {"ts": event["ts"] - ordered[0]["ts"]} for event in ordered]
    rest = [event for event in moved if event.get("cat") != "sample"]
    points = [event for event in moved if event.get("cat") == "sample"]
    return {"traceEvents": [*rest, *_flows(points, rest)], "displayTimeUnit": "ms"}


def spans_of(events: Sequence[Event]) -> dict[str, list[Span]]:
    """Return the spans of each process, in seconds since 1970.

    Processes of one name are together, as when one was started again.
    """
    named = {
        (event["name"], event["pid"], event["tid"]): event["args"] for event in events if event["ph"] == "M"
    }
    found = defaultdict[str, list[Span]](list)
    for event in (event for event in events if event["ph"] == "X"):
        begin_s, thread = event["ts"] / _US, named["thread_name", event["pid"], event["tid"]]["name"]
        span = Span(event["name"], event["args"]["step"], thread, begin_s, begin_s + event["dur"] / _US)
        found[named["process_name", event["pid"], 0]["name"]].append(span)
    return dict(found)


def _flows(points: Iterable[Event], rest: Iterable[Event]) -> Iterator[Event]:
    """Yield arrows that join the points of each sample."""
    ways, tracks = defaultdict[str, list[Event]](list), defaultdict[tuple[int, int], list[Event]](list)
    for point in points:
        ways[point["name"]].append(point)
    for event in (event for event in rest if event["ph"] == "X"):
        tracks[event["pid"], event["tid"]].append(event)
    for number, way in enumerate(ways.values(), 1):
        kinds = ["s", *"t" * (len(way) - 2), "f"] if len(way) > 1 else []
        for kind, point in zip(kinds, way, strict=False):
            # Perfetto wants each point within a span of its thread
            at = _nearest_inside(tracks[point["pid"], point["tid"]], point["ts"])
            yield point | {"ph": kind, "id": number, "bp": "e", "ts": at}


def _nearest_inside(track: Sequence[Event], at: float) -> float:
    after = bisect_right(track, at, key=_ts)
    near = track[max(after - 1, 0) : after + 1]
    ends = (min(max(at, event["ts"]), event["ts"] + event["dur"]) for event in near)
    return min(ends, key=lambda moved: abs(moved - at), default=at)


def _ts(event: Event) -> float:
    return event["ts"]
