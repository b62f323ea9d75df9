"""A run's trace: the file into which each process appends its spans, and all files read as one Chrome trace for Perfetto.

A line is one event of a Chrome trace, written whole in one call, so a file can be read while its process runs and after it was
killed; each file opens in Perfetto, too.

A sample is a flow: an arrow from where it was generated over the relay to the trainer that replays it. Times are the wall
clock's: what is compared across nodes is off by as much as their clocks.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3channel.errors import ConfigError

log = logging.getLogger(__name__)

_US = 1e6
Event = dict[str, Any]
"""One event of a Chrome trace, times in microseconds since 1970."""


@dataclass(frozen=True, slots=True)
class Span:
    """The time from `start_s` to `end_s` (time.monotonic) that one thread was in one stage."""

    stage: str
    step: int | None
    thread: str
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class TraceFile:
    """The file of one process; any thread may write. It stays open until the process ends, which may be at any time."""

    def __init__(self, folder: str | Path, process: str) -> None:
        """Create the process's file in `folder`.

        Raises:
            ConfigError: the folder cannot be made or written.
        """
        self._pid, self._wall_s = os.getpid(), time.time() - time.monotonic()
        name = f"{re.sub(r'[^a-z0-9]+', '-', process)}-{socket.gethostname()}-{self._pid}.trace"
        self._threads: dict[str, int] = {}
        self._lock = threading.Lock()
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.write(self._file, b"[\n")
        except OSError as error:
            raise ConfigError(f"trace {str(folder)!r}: {error}; expected a folder to write into") from error
        self._write({"ph": "M", "name": "process_name", "args": {"name": process}}, 0, time.monotonic())

    def span(self, stage: str, step: int | None, thread: str, start_s: float, end_s: float) -> None:
        """Append a span; the arguments are the values of a `Span`.

        Times are this process's time.monotonic.
        """
        at, seconds = self._wall_us(start_s), (end_s - start_s) * _US
        # written as text: json.dumps takes longer than all the rest, and this runs several times a sample
        self._append(
            f'{{"ph":"X","name":"{stage}","pid":{self._pid},"tid":{self._number(thread)},"ts":{at:.1f},"dur":{seconds:.1f},'
            f'"args":{{"step":{"null" if step is None else step}}}}}'
        )

    def sample(self, name: str, *, thread: str = "", at_s: float = 0.0) -> None:
        """Append the point at which a sample was here.

        Args:
            name: the sample.
            thread: the thread; empty for the calling one.
            at_s: time.monotonic() seconds; 0.0 for now.
        """
        event = {"ph": "i", "s": "t", "name": name, "cat": "sample"}
        number = self._number(thread or threading.current_thread().name)
        self._write(event, number, at_s or time.monotonic())

    def note(self, name: str, values: Mapping[str, Any]) -> None:
        """Append what a step has shown, in values for JSON."""
        event = {"ph": "i", "s": "p", "name": name, "cat": "note", "args": dict(values)}
        self._write(event, 0, time.monotonic())

    def _number(self, thread: str) -> int:
        with self._lock:
            if thread not in self._threads:
                self._threads[thread] = number = len(self._threads) + 1
                event = {"ph": "M", "name": "thread_name", "args": {"name": thread}}
                self._write(event, number, time.monotonic())
            return self._threads[thread]

    def _write(self, event: dict[str, Any], thread: int, at_s: float) -> None:
        placed = {"pid": self._pid, "tid": thread, "ts": round(self._wall_us(at_s), 1)}
        self._append(json.dumps(event | placed, separators=(",", ":")))

    def _append(self, line: str) -> None:
        try:
            os.write(self._file, f"{line},\n".encode())
        except OSError as error:  # a full disk costs the trace, and nothing else
            log.warning("r3channel: a line of this process's trace is lost: %s", error)

    def _wall_us(self, at_s: float) -> float:
        return (at_s + self._wall_s) * _US


# -- all files of a run -----------------------------------------------------------------------------------------------------


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

    Processes of one name are together, as when one was started again. Who could not write its name, on a full disk, has none.

    >>> event = {"ph": "X", "name": "send", "pid": 1, "tid": 2, "ts": 5e6, "dur": 1e6, "args": {"step": 3}}
    >>> spans_of([event])
    {'unnamed': [Span(stage='send', step=3, thread='unnamed', start_s=5.0, end_s=6.0)]}
    """
    named = defaultdict[Any, dict[str, str]](lambda: {"name": "unnamed"})
    for event in (event for event in events if event["ph"] == "M"):
        named[event["name"], event["pid"], event["tid"]] = event["args"]
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
