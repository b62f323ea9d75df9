"""`r3channel report RUN...`: the page of each run that was made with `--report`, from what lies in its folder."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from r3channel.errors import ConfigError
from r3channel.tools import commands


def run(argv: Sequence[str]) -> int:
    parser = commands.parser("report")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder that the demo's --report has filled")
    for folder in parser.parse_args(argv).runs:
        print(write_page(Path(folder)))
    return 0


def write_page(folder: Path) -> Path:
    """Write report.html beside report.json and trace.json. Raises ConfigError where one is missing or matplotlib is."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the page of a run needs matplotlib: pip install 'r3channel[plot]'")
    from r3channel.observe.trace import spans_of
    from r3channel.tools.report_page import page

    try:
        result = json.loads((folder / "report.json").read_text())
        trace = json.loads((folder / "trace.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder}: expected report.json and trace.json of a run with --report: {error}"
        ) from error
    path = folder / "report.html"
    path.write_text(page(result, spans_of(trace)))
    return path
