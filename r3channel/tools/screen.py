"""Draws a channel as one screen of text: samples, processes, stages, faults. Needs rich (extra `metrics`); reads nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from r3channel.observe.metric_table import LABELS
from r3channel.observe.stage_clock import STAGES
from r3channel.tools.metrics_page import Between
from r3channel.tools.stages import ROUTING_WAITS

_SAMPLES, _BYTES, _STAGE = "r3channel_samples_total", "r3channel_bytes_total", "r3channel_stage_seconds"
_ROLES = ("relay", "trainer", "engine")
_MOST = 8
"""Lines per role at most: the processes that wait longest for routing."""
_FAULTS: tuple[tuple[str, dict[str, str], str], ...] = (
    ("r3channel_rejected_total", {}, "replies, frames or steps refused"),
    (_SAMPLES, {"outcome": "live"}, "samples left to the live router"),
    (_SAMPLES, {"outcome": "expired"}, "samples that no step took in time"),
    ("r3channel_ids_different_total", {}, "ids at routers that are not the engines'"),
    ("r3channel_group_resets_total", {}, "connections given up"),
    ("r3channel_fallback_shards_total", {}, "shards over the fallback transport"),
    ("r3channel_weight_updates_total", {"result": "failed"}, "weight updates failed"),
    ("r3channel_weight_updates_total", {"result": "unknown"}, "weight updates that may have been committed"),
    ("r3channel_engine_frames_total", {"way": "given_up"}, "frames given up"),
    ("r3channel_recording_lost_steps", {}, "steps that a recording could not keep"),
    ("r3channel_engines_silent", {}, "engines without hello"),
)
"""Metric, labels, what a value above 0 means."""
_MUST_BE_1 = {
    "r3channel_background_thread_alive": "its thread has ended",
    "r3channel_engine_greeted": "no relay has taken its hello",
}


def screen(processes: Sequence[Between], *, height: int = 0) -> Group:
    """The whole screen; with a `height`, the stages that took the least time are left out."""
    up = [one for one in processes if not one.now.fault]
    head = [_title(processes), *_down(processes), *_samples(up)]
    tables = [_processes(role, [one for one in up if one.now.role == role]) for role in _ROLES]
    shown = [table for table in tables if table.row_count]
    faults = _faults(processes)
    used = len(head) + sum(table.row_count + 2 for table in shown) + len(faults) + 3
    return Group(*head, "", *_spaced([*shown, _stages(up, max(height - used, 3) if height else 0)]), *faults)


def faults_of(processes: Iterable[Between]) -> Iterator[str]:
    """The faults since each process began, and how much of each is new."""
    for one in processes:
        if one.now.fault:
            yield f"{one.now.place} does not answer: {one.now.fault}"
        for name, labels, meaning in _FAULTS:
            for series in one.now.found(name, **labels):
                if series.value:
                    new = one.grew(name, **series.labels)
                    why = f", reason {series.labels['reason']}" if "reason" in series.labels else ""
                    yield f"{one.now.role} {one.now.place}: {series.value:,.0f} {meaning}{why} ({new:+,.0f})"
        for name, meaning in _MUST_BE_1.items():
            if any(series.value != 1 for series in one.now.found(name)):
                yield f"{one.now.role} {one.now.place}: {meaning}"


def _title(processes: Sequence[Between]) -> Text:
    runs = sorted({one.now.labels_of("run") for one in processes} - {""})
    down = sum(bool(one.now.fault) for one in processes)
    pages = f"{len(processes)} page(s), {down} down" if down else f"{len(processes)} page(s)"
    return Text(" ".join(["r3channel", *runs, "-", pages]), style="bold")


def _down(processes: Iterable[Between]) -> list[Text]:
    return [Text(fault, style="bold red") for fault in faults_of(one for one in processes if one.now.fault)]


def _samples(up: Sequence[Between]) -> list[Text]:
    """The balance of all relays, in the words of the alert that watches it."""
    relays = [one for one in up if one.now.role == "relay"]
    if not relays:
        return []
    sums = {one: sum(r.now.sum(_SAMPLES, outcome=one) for r in relays) for one in LABELS["outcome"]}
    sums["in flight"] = sum(relay.now.sum("r3channel_samples_in_flight") for relay in relays)
    parts = " + ".join(f"{count:,.0f} {name}" for name, count in sums.items() if count and name != "received")
    rates = " in, ".join(
        f"{sum(relay.rate(_SAMPLES, outcome=one) for relay in relays):,.1f}/s"
        for one in ("received", "delivered")
    )
    return [Text(f"samples: {sums['received']:,.0f} received = {parts or 0}; {rates} delivered")]


_Cell = Callable[[Between], str]


def _value(name: str) -> _Cell:
    return lambda one: f"{one.now.sum(name):,.0f}" if one.now.found(name) else "-"


def _rate(name: str, unit: float = 1, **labels: str) -> _Cell:
    return lambda one: f"{one.rate(name, **labels) / unit:,.1f}"


def _of(part: str, whole: str) -> _Cell:
    return lambda one: (
        f"{one.now.sum(part) / 2**20:,.1f} of {one.now.sum(whole) / 2**20:,.0f}"
        if one.now.found(whole)
        else "-"
    )


def _waits(*stages: str) -> _Cell:
    return lambda one: f"{sum(_share(one, stage) for stage in stages):.1%}"


def _share(one: Between, stage: str) -> float:
    return one.rate(f"{_STAGE}_sum", stage=stage)


_VERSION = ("version", _value("r3channel_weight_version"))
_COLUMNS: dict[str, tuple[tuple[str, _Cell], ...]] = {
    "relay": (
        ("samples", _value("r3channel_samples_in_flight")),
        ("steps", _value("r3channel_steps_in_flight")),
        ("oldest s", _value("r3channel_oldest_in_flight_seconds")),
        ("store MiB", _of("r3channel_store_bytes", "r3channel_store_limit_bytes")),
        ("sent MiB/s", _rate(_BYTES, 2**20, leg="wire_sent")),
        ("engines", _value("r3channel_engines_greeted")),
    ),
    "trainer": (
        _VERSION,
        ("steps", _value("r3channel_steps_total")),
        ("landed MiB/s", _rate(_BYTES, 2**20, leg="landed")),
        ("waits: routing", _waits(*ROUTING_WAITS)),
        ("rollout", _waits("wait_generation")),
    ),
    "engine": (
        _VERSION,
        ("frames/s", _rate("r3channel_engine_frames_total")),
        ("queue MiB", _of("r3channel_engine_queue_bytes", "r3channel_engine_queue_limit_bytes")),
    ),
}  # fmt: skip
"""Role -> title and cell of each column."""


def _processes(role: str, own: Sequence[Between]) -> Table:
    table = _table(role, *(title for title, _ in _COLUMNS[role]))
    for one in sorted(own, key=lambda one: -sum(_share(one, stage) for stage in ROUTING_WAITS))[:_MOST]:
        table.add_row(one.now.place, *(cell(one) for _, cell in _COLUMNS[role]))
    if len(own) > _MOST:
        table.add_row(f"and {len(own) - _MOST} more")
    return table


def _stages(up: Sequence[Between], most: int) -> Table:
    """The slowest process of each role, stage by stage: share of a thread's time, and milliseconds of one span."""
    table = _table("stage", *(f"{role} {what}" for role in _ROLES for what in ("busy", "ms")))
    slowest = {
        (role, stage): max(
            (one for one in up if one.now.role == role), key=lambda one: _share(one, stage), default=None
        )
        for role in _ROLES
        for stage in STAGES
    }
    shares = {key: _share(one, key[1]) if one else 0.0 for key, one in slowest.items()}
    longest = {stage: max(shares[role, stage] for role in _ROLES) for stage in STAGES}
    shown = sorted((stage for stage in STAGES if longest[stage]), key=lambda stage: -longest[stage])
    for stage in sorted(shown[: most or None], key=STAGES.index):
        cells = [_stage_cells(slowest[role, stage], stage) for role in _ROLES]
        table.add_row(stage, *(cell for pair in cells for cell in pair))
    return table


def _stage_cells(one: Between | None, stage: str) -> tuple[str, str]:
    spans = one.grew(f"{_STAGE}_count", stage=stage) if one else 0
    if one is None or not spans:
        return "", ""
    return f"{_share(one, stage):.1%}", f"{1000 * one.grew(f'{_STAGE}_sum', stage=stage) / spans:,.1f}"


def _faults(processes: Sequence[Between]) -> list[Text]:
    if not any(faults_of(processes)):
        return [Text("no fault", style="green")]
    return [Text(fault, style="red") for fault in faults_of(one for one in processes if not one.now.fault)]


def _table(first: str, *titles: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold cyan")
    table.add_column(first, no_wrap=True)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _spaced(tables: Iterable[Table]) -> Iterator[Table | str]:
    for table in tables:
        yield table
        yield ""
