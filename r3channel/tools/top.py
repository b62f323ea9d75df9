"""`r3channel top`: a running channel on one screen, from its metrics pages. Finds the pages and looks; screen.py draws."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.live import Live

from r3channel.errors import ConfigError
from r3channel.tools import commands
from r3channel.tools.metrics_page import Between, Look
from r3channel.tools.screen import faults_of, screen

_TIMEOUT_S = 5.0
_AT_ONCE = 16


def run(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        watch = _Watch(options.targets, pool)
        time.sleep(options.every)
        if options.once:
            found = watch.look()
            console.print(screen(found))
            return 1 if any(faults_of(found)) else 0
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
        help="URL of a page, folder of targets (--r3-metrics-dir), or REPORT of a demo",
    )
    parser.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds between two looks")
    parser.add_argument(
        "--once", action="store_true", help="two looks, one screen, the end; exit 1 where something is wrong"
    )
    return parser


def urls_of(target: str) -> list[str]:
    """The pages that a target names now. Raises ConfigError where it names none that could ever be."""
    if "://" in target:
        return [target]
    folder = Path(target, "targets") if Path(target, "targets").is_dir() else Path(target)
    if not folder.is_dir():
        raise ConfigError(
            f"{target}: neither a URL nor a folder. Processes that serve /metrics leave a file each in their --r3-metrics-dir"
        )
    groups = [group for file in sorted(folder.glob("*.json")) for group in _groups(file)]
    return [f"http://{one}/metrics" for group in groups for one in group["targets"]]


def _groups(file: Path) -> list[dict[str, list[str]]]:
    try:
        groups = json.loads(file.read_text())
    except FileNotFoundError:  # its process ended between two looks
        return []
    except ValueError as error:
        raise ConfigError(f"{file}: expected Prometheus's file_sd targets: {error}") from error
    if not isinstance(groups, list) or not all("targets" in group for group in groups):
        raise ConfigError(f"{file}: expected a list of file_sd groups. Is {file.parent} a folder of targets?")
    return groups


class _Watch:
    """Looks at pages that come and go, and remembers what each showed last."""

    def __init__(self, targets: Sequence[str], pool: ThreadPoolExecutor) -> None:
        self._targets, self._pool = targets, pool
        self._last: dict[str, Look] = {}
        self.look()

    def look(self) -> list[Between]:
        urls = dict.fromkeys(url for target in self._targets for url in urls_of(target))
        now = list(self._pool.map(lambda url: Look.at(url, timeout_s=_TIMEOUT_S), urls))
        found = [Between(self._last.get(look.url, look), look) for look in now]
        self._last |= {look.url: look for look in now if not look.fault}
        return found
