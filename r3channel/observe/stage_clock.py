"""Measures where the time of a process goes: named stages, per thread. It knows no stage's meaning.

    clock = StageClock("relay")
    with clock.span("ingest", step=3):          # ingest pauses while verify runs
        with clock.span("verify"):
            ...
    clock.totals()                              # {"ingest": ..., "verify": ...}, seconds

The spans of one thread never overlap, so they add up to at most the wall time; `coverage` says how close they come.
All times are `time.monotonic()` seconds: comparable between the processes of one machine, and never going back.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable

from r3channel.errors import UsageError
from r3channel.observe.trace import Span, TraceFile

STAGES: tuple[str, ...] = (
    # the path of a row, in order
    *("capture", "frame", "http", "ingest", "verify", "plan", "decode", "place"),
    *("send", "recv", "rebroadcast", "bind", "audit"),
    # the rollout manager's own
    *("assemble", "serialize"),
    # the trainer's own
    *("logprob", "forward", "backward", "optimizer", "train"),
    # the reverse path: weights from the trainer to the engines
    "weights",
    # waits: a process that waits says for whom
    *("wait_generation", "wait_relay", "wait_wire", "wait_join"),
)
WAITS: tuple[str, ...] = tuple(stage for stage in STAGES if stage.startswith("wait_"))
ROUTING_WAITS = tuple(stage for stage in WAITS if stage != "wait_generation")
"""A trainer's waits for the rows of its step; one that waits for the next rollout waits for no relay."""
_STAGE_SET = frozenset(STAGES)


def merge_intervals(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of `intervals`, sorted and disjoint.

    Empty intervals vanish.
    """
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


class _OpenSpan:
    """A span under way. While an inner span of the same thread runs, this one stands still."""

    __slots__ = ("_begun_s", "_clock", "_marked", "_own_s", "_resumed_s", "_stage", "_step")

    def __init__(self, clock: StageClock, stage: str, step: int | None) -> None:
        self._clock, self._stage, self._step = clock, stage, step
        self._own_s = self._resumed_s = 0.0

    def __enter__(self) -> None:
        stack = self._clock._stack()
        now = self._begun_s = time.monotonic()
        if stack:
            stack[-1]._pause(now)
            self._step = stack[-1]._step if self._step is None else self._step
        stack.append(self)
        self._marked = self._clock._marks
        if self._marked is not None:
            self._marked[0](self._stage)
        self._resumed_s = now

    def __exit__(self, *_: object) -> None:
        stack = self._clock._stack()
        now = time.monotonic()
        self._pause(now)
        stack.pop()
        if self._marked is not None:
            self._marked[1]()
        if stack:
            stack[-1]._resumed_s = now
        self._clock._observe(self._stage, self._own_s)

    def _pause(self, now: float) -> None:
        self._own_s += now - self._resumed_s
        self._clock._keep(self._stage, self._step, self._resumed_s, now)


class StageClock:
    """Where the time of one process goes, by stage and thread. Any thread may use it.

    The spans of a thread never overlap: an outer span pauses while an inner one runs, so they may be added up.
    The newest `max_spans` spans are kept; the totals go on counting.
    """

    def __init__(self, role: str, *, max_spans: int = 100_000) -> None:
        self.role = role
        self._spans: deque[tuple[str, int | None, str, float, float]] = deque(maxlen=max_spans)
        """Plain tuples, which the garbage collector leaves alone; it visited 100,000 `Span` objects again and again."""
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._observers: list[Callable[[str, float], None]] = []
        self._marks: tuple[Callable[[str], object], Callable[[], object]] | None = None
        self.trace: TraceFile | None = None
        """Where spans are appended when they end (`keep`)."""
        self._lock = threading.Lock()
        self._local = threading.local()
        self._stacks = weakref.WeakKeyDictionary[threading.Thread, list[_OpenSpan]]()

    def span(self, stage: str, *, step: int | None = None) -> _OpenSpan:
        """Return a context manager that measures one span of a stage.

        Args:
            stage: the stage that the time inside belongs to.
            step: the step; None takes the outer span's.
        """
        _check_stage(stage)
        if stage in WAITS and getattr(self._local, "ahead", False):
            stage = "recv"
        return _OpenSpan(self, stage, step)

    def keep(self, folder: str, process: str) -> None:
        """Append spans, from now on, to a file in `folder`.

        Nothing is done if `folder` is empty or this clock appends already.

        Args:
            folder: the folder of the file.
            process: the process's name in the trace.
        """
        if folder and self.trace is None:
            self.trace = TraceFile(folder, process)

    def mark_ahead(self) -> None:
        """Mark the calling thread as one that works ahead.

        Its waits stop no trainer, and count as `recv`.
        """
        self._local.ahead = True

    def record(self, stage: str, start_s: float, end_s: float, *, step: int | None = None) -> None:
        """Add a span of the calling thread that was measured elsewhere.

        It must not overlap this thread's open spans.
        """
        _check_stage(stage)
        if end_s < start_s:
            raise UsageError(
                f"span of {stage} ends at {end_s} before it starts at {start_s}; swapped arguments?"
            )
        self._keep(stage, step, start_s, end_s)
        self._observe(stage, end_s - start_s)

    def spans(self) -> list[Span]:
        """Return the finished spans that are kept, oldest first."""
        with self._lock:
            return [Span(*span) for span in self._spans]

    def totals(self) -> dict[str, float]:
        """Return the seconds of each stage over all threads.

        The stages are in the order of `STAGES`.
        """
        with self._lock:
            return {stage: self._totals[stage] for stage in STAGES if stage in self._totals}

    def open(self) -> dict[str, float]:
        """Return how long each stage's oldest open span has lasted.

        Returns:
            By stage, seconds since the span began. The time of inner spans counts too.
        """
        with self._lock:
            spans = [span for stack in self._stacks.values() for span in tuple(stack)]
        now, longest = time.monotonic(), dict[str, float]()
        for span in spans:
            longest[span._stage] = max(longest.get(span._stage, 0.0), now - span._begun_s)
        return longest

    def coverage(self, start_s: float, end_s: float, *, thread: str = "MainThread") -> float:
        """Return the share of wall time that finished spans explain.

        Args:
            start_s: the beginning, in time.monotonic() seconds.
            end_s: the end, later than the beginning.
            thread: the thread whose spans count.
        """
        if end_s <= start_s:
            raise UsageError(f"coverage from {start_s} to {end_s}: the end must be later than the start")
        mine = (span for span in self.spans() if span.thread == thread)
        merged = merge_intervals((max(s.start_s, start_s), min(s.end_s, end_s)) for s in mine)
        return sum(end - start for start, end in merged) / (end_s - start_s)

    def subscribe(self, observer: Callable[[str, float], None]) -> None:
        """Call `observer(stage, seconds)` at the end of each span.

        It runs on the span's own thread and must be quick.
        """
        self._observers.append(observer)

    def mark(self, push: Callable[[str], object], pop: Callable[[], object]) -> None:
        """Call `push` and `pop` where a span begins and ends.

        They run on the span's thread. With NVTX's calls a GPU's profiler shows stages beside kernels.
        """
        self._marks = push, pop

    def _stack(self) -> list[_OpenSpan]:
        try:
            return self._local.stack
        except AttributeError:
            stack = self._local.stack = []
            with self._lock:
                self._stacks[threading.current_thread()] = stack
            return stack

    def _keep(self, stage: str, step: int | None, start_s: float, end_s: float) -> None:
        if end_s == start_s:
            return
        span = stage, step, threading.current_thread().name, start_s, end_s
        with self._lock:
            self._spans.append(span)
            self._totals[stage] += end_s - start_s
        if self.trace is not None:
            self.trace.span(*span)

    def _observe(self, stage: str, seconds: float) -> None:
        for observer in self._observers:
            observer(stage, seconds)


def _check_stage(stage: str) -> None:
    if stage not in _STAGE_SET:
        raise UsageError(f"unknown stage {stage!r}; the stages are {', '.join(STAGES)}")
