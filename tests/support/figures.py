"""Tables of measured figures: `figures.txt` says what they show, `figures.json` keeps that of each benchmark's own `--json`.

`python -m tests.support.pages RESULT.json...` keeps the figures of fresh results, and writes the tables on the pages.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from r3channel.bench.harness import describe
from r3channel.errors import ConfigError

KEPT = Path(__file__).with_name("figures.json")
_TABLES = Path(__file__).with_name("figures.txt")
_FIGURE = re.compile(r"\{(\w+)/([\w/]+?)(?:\*(\d+))?:([^}]+)\}")
"""Benchmark, way to the figure in its JSON, factor, format."""


def keep(file: Path) -> None:
    """Keep what the tables show of a benchmark's result, in the place of an older one, with its command and its machine.

    Raises:
        ConfigError: the file is no result of `r3channel bench`, or a figure is not in it; nothing is kept.
    """
    try:
        result = json.loads(file.read_text().splitlines()[-1])
        bench = result["command"].split()[2]
        wanted = {figure[2] for figure in _FIGURE.finditer(_TABLES.read_text()) if figure[1] == bench}
        fresh = {"command": result["command"], "machine": result["machine"]}
        describe(fresh["machine"])  # older results have a text there
        fresh["figures"] = {path: _figure(result, path) for path in wanted}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{file}: {error!r}; expected all that `r3channel bench NAME --json` prints, with every part measured"
        ) from error
    KEPT.write_text(json.dumps(_kept() | {bench: fresh}, indent=1, sort_keys=True) + "\n")


def lines(name: str) -> list[str]:
    """The table in Markdown. To each row come the commands that measured it, and on what."""
    head, *rows = _TABLES.read_text().split(f"[{name}]\n")[1].split("\n\n")[0].splitlines()
    kept = _kept()
    rule = "|---" * (head.count("|") + 1) + "|"
    return [f"{head} command | measured on |", rule, *(_row(row, kept) for row in rows)]


def _row(row: str, kept: dict[str, Any]) -> str:
    benches = [kept[bench] for bench in dict.fromkeys(figure[1] for figure in _FIGURE.finditer(row))]
    commands = ", ".join(f"`{bench['command']}`" for bench in benches)
    machines = "; ".join(describe(bench["machine"]) for bench in benches)

    def told(figure: re.Match[str]) -> str:
        return format(kept[figure[1]]["figures"][figure[2]] * int(figure[3] or 1), figure[4])

    return f"{_FIGURE.sub(told, row)} {commands} | {machines} |".strip()


def _kept() -> dict[str, Any]:
    return json.loads(KEPT.read_text())


def _figure(result: Any, path: str) -> float:
    """Four digits: what stands behind them is noise."""
    for name in path.split("/"):
        result = result[name]
    return float(f"{result:.4g}")
