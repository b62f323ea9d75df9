"""`r3channel top`: a running channel on one screen: samples, processes, stages, faults.

`run_model` reads what the processes report; this module draws it. Drawing needs rich (extra `metrics`), imported at that point.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING

from r3channel.observe.metric_table import LABELS
from r3channel.observe.stage_clock import ROUTING_WAITS, STAGES
from r3channel.tools import commands
from r3channel.tools.run_model import TIMEOUT_S, Between, Look, faults_of, urls_of

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

_AT_ONCE = 16
_SAMPLES, _BYTES, _STAGE = "r3channel_samples_total", "r3channel_bytes_total", "r3channel_stage_seconds"
_ROLES = ("relay", "trainer", "engine")
_MOST = 8
"""Most lines per role. They show the processes that wait longest for routing."""


def run(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        watch = _Watch(options.targets, pool)
        time.sleep(options.every)
        if options.once:
            processes = watch.look()
            console.print(screen(processes))
            return 1 if not processes or any(faults_of(processes)) else 0
        with Live(screen=True, console=console, auto_refresh=False) as live:
            while True:
                live.update(screen(watch.look(), height=console.height), refresh=True)
                time.sleep(options.every)


def _parser() -> commands.Parser:
    parser = commands.parser("top")
    parser.add_argument(
        "targets",
        nargs="+",
        metavar="TARGET",
        help="URL of a page or of the relay's /targets, folder of targets (--r3-metrics-dir), or REPORT of a demo",
    )
    parser.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds between two looks")
    parser.add_argument(
        "--once", action="store_true", help="two looks, one screen, the end; exit 1 where something is wrong"
    )
    return parser


class _Watch:
    """Reads pages that come and go, and remembers the last state of each."""

    def __init__(self, targets: Sequence[str], pool: ThreadPoolExecutor) -> None:
        self._targets, self._pool = targets, pool
        self._last: dict[str, Look] = {}
        self.look()

    def look(self) -> list[Between]:
        urls = dict.fromkeys(url for target in self._targets for url in urls_of(target))
        now = list(self._pool.map(lambda url: Look.read(url, timeout_s=TIMEOUT_S), urls))
        processes = [Between(self._last.get(look.url, look), look) for look in now]
        self._last |= {look.url: look for look in now if not look.fault}
        return processes


def screen(processes: Sequence[Between], *, height: int = 0) -> Group:
    """Return the whole screen.

    Args:
        processes: two looks at each process.
        height: lines of the screen; the stages that took the least time are left out. 0: all are shown.
    """
    from rich.console import Group

    up = [process for process in processes if not process.now.fault]
    down = faults_of(process for process in processes if process.now.fault)
    head = [_title(processes), *(_text(fault, "bold red") for fault in down), *_samples(up)]
    tables = [_processes(role, [process for process in up if process.now.role == role]) for role in _ROLES]
    shown = [table for table in tables if table.row_count]
    faults = _faults(processes)
    used = len(head) + sum(table.row_count + 2 for table in shown) + len(faults) + 3
    shown.append(_stages(up, max(height - used, 3) if height else 0))
    return Group(*head, "", *chain.from_iterable((table, "") for table in shown), *faults)


def _title(processes: Sequence[Between]) -> Text:
    runs = sorted({process.now.labels_of("run") for process in processes} - {""})
    down = sum(bool(process.now.fault) for process in processes)
    pages = f"{len(processes)} page(s), {down} down" if down else f"{len(processes)} page(s)"
    return _text(" ".join(["r3channel", *runs, "-", pages]), "bold")


def _samples(up: Sequence[Between]) -> list[Text]:
    """Return all relays' balance, in the words of its alert."""
    relays = [process for process in up if process.now.role == "relay"]
    if not relays:
        return []
    sums = {name: sum(r.now.sum(_SAMPLES, outcome=name) for r in relays) for name in LABELS["outcome"]}
    sums["in flight"] = sum(relay.now.sum("r3channel_samples_in_flight") for relay in relays)
    parts = " + ".join(f"{count:,.0f} {name}" for name, count in sums.items() if count and name != "received")
    rates = " in, ".join(
        f"{sum(relay.rate(_SAMPLES, outcome=name) for relay in relays):,.1f}/s"
        for name in ("received", "delivered")
    )
    return [_text(f"samples: {sums['received']:,.0f} received = {parts or 0}; {rates} delivered")]


_Cell = Callable[[Between], str]


def _value(name: str) -> _Cell:
    return lambda process: f"{process.now.sum(name):,.0f}" if process.now.find(name) else "-"


def _rate(name: str, unit: float = 1, **labels: str) -> _Cell:
    return lambda process: f"{process.rate(name, **labels) / unit:,.1f}"


def _share_cell(part: str, whole: str) -> _Cell:
    def cell(process: Between) -> str:
        mib = [process.now.sum(name) / 2**20 for name in (part, whole)]
        return "{:,.1f} of {:,.0f}".format(*mib) if process.now.find(whole) else "-"

    return cell


def _waits(*stages: str) -> _Cell:
    return lambda process: f"{sum(_share(process, stage) for stage in stages):.1%}"


def _share(process: Between, stage: str) -> float:
    return process.rate(f"{_STAGE}_sum", stage=stage)


_VERSION = ("version", _value("r3channel_weight_version"))
_COLUMNS: dict[str, tuple[tuple[str, _Cell], ...]] = {
    "relay": (
        ("samples", _value("r3channel_samples_in_flight")),
        ("steps", _value("r3channel_steps_in_flight")),
        ("oldest s", _value("r3channel_oldest_in_flight_seconds")),
        ("store MiB", _share_cell("r3channel_store_bytes", "r3channel_store_limit_bytes")),
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
        ("queue MiB", _share_cell("r3channel_engine_queue_bytes", "r3channel_engine_queue_limit_bytes")),
    ),
}  # fmt: skip
"""Role -> title of each column, and the function that makes its cells."""


def _processes(role: str, peers: Sequence[Between]) -> Table:
    table = _table(role, *(title for title, _ in _COLUMNS[role]))
    for peer in sorted(peers, key=lambda peer: -sum(_share(peer, stage) for stage in ROUTING_WAITS))[:_MOST]:
        table.add_row(peer.now.place, *(cell(peer) for _, cell in _COLUMNS[role]))
    if len(peers) > _MOST:
        table.add_row(f"and {len(peers) - _MOST} more")
    return table


def _stages(up: Sequence[Between], most: int) -> Table:
    table = _table("stage", *(f"{role} {measure}" for role in _ROLES for measure in ("busy", "ms")))
    slowest = {
        (role, stage): max(
            (peer for peer in up if peer.now.role == role), key=lambda peer: _share(peer, stage), default=None
        )
        for role in _ROLES
        for stage in STAGES
    }
    shares = {key: _share(peer, key[1]) if peer else 0.0 for key, peer in slowest.items()}
    longest = {stage: max(shares[role, stage] for role in _ROLES) for stage in STAGES}
    shown = sorted((stage for stage in STAGES if longest[stage]), key=lambda stage: -longest[stage])
    for stage in sorted(shown[: most or None], key=STAGES.index):
        cells = [_stage_cells(slowest[role, stage], stage) for role in _ROLES]
        table.add_row(stage, *(cell for pair in cells for cell in pair))
    return table


def _stage_cells(peer: Between | None, stage: str) -> tuple[str, str]:
    spans = peer.grew(f"{_STAGE}_count", stage=stage) if peer else 0
    if peer is None or not spans:
        return "", ""
    return f"{_share(peer, stage):.1%}", f"{1000 * peer.grew(f'{_STAGE}_sum', stage=stage) / spans:,.1f}"


def _faults(processes: Sequence[Between]) -> list[Text]:
    if not any(faults_of(processes)):
        return [_text("no fault", "green") if processes else _text("no process has left a page here", "red")]
    return [_text(fault, "red") for fault in faults_of(up for up in processes if not up.now.fault)]


def _table(first: str, *titles: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold cyan")
    table.add_column(first, no_wrap=True)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style=style)
