"""Whole runs of the demo, each once per session."""

from __future__ import annotations

import json
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dashboards.dashboard import dashboard
from tests.support import children
from tests.support.children import ROOT
from tests.support.prometheus import answer, prometheus
from tests.support.waits import RUN_S, SOON_S, await_memory, meanwhile

OLDER_RAY = {"RAY_ADDRESS": "127.0.0.1:1", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
"""What a cluster that was started before leaves in the environment."""


@dataclass
class Run:
    """One finished run."""

    code: int
    result: dict[str, Any]
    """The JSON object in the last line of stdout."""
    stderr: str
    folder: Path
    pages: dict[str, list[str]] = field(default_factory=dict)
    """/metrics of each process, scraped while it ran."""
    panels: dict[str, int] = field(default_factory=dict)
    """The dashboard's expressions -> how many series each gave in a real Prometheus; empty without one."""


RunDemo = Callable[..., Run]


def run(folder: Path, *options: str, channel: bool = True) -> Run:
    """Run the demo as a user would; with `--report` in the options its /metrics are scraped on the way."""
    await_memory(6, "a run of the demo")
    command = ("-m", "examples.demo") if channel else (f"{ROOT}/examples/async_grpo/train_async.py",)
    pages = dict[str, list[str]]()
    with meanwhile(lambda: _scrape(folder / "report/endpoints.json", pages), every_s=0.5):
        done = children.run(*command, *options, "--json", cwd=folder, limit_s=RUN_S, **OLDER_RAY)
    lines = done.stdout.strip().splitlines()
    said = f"no JSON at the end; {done.returncode}:\n{done.stderr[-4000:]}"
    assert lines and lines[-1].startswith("{"), said
    return Run(done.returncode, json.loads(lines[-1]), done.stderr, folder, pages)


def _scrape(endpoints: Path, pages: dict[str, list[str]]) -> None:
    urls = json.loads(endpoints.read_text())["metrics"] if endpoints.is_file() else {}
    for name, url in urls.items():
        # a process may end between two looks
        with suppress(OSError), urllib.request.urlopen(url, timeout=SOON_S) as page:
            pages.setdefault(name, []).append(page.read().decode())


def _series(api: str, expr: str, begin_s: float) -> int:
    """Return how many series an expression of the dashboard gave over the run."""
    expr = expr.replace("$__rate_interval", "20s").replace("$run", ".*")
    query = urllib.parse.urlencode({"query": expr, "start": begin_s, "end": time.time(), "step": 1})
    found = answer(api, f"query_range?{query}")
    return sum(any(value != "NaN" for _, value in series["values"]) for series in found)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The default run: DP2 x TP2 with sequence parallelism, three steps, everything written."""
    folder = tmp_path_factory.mktemp("demo")
    written = ("--report", "report", "--dump", "dump", "--record", "record", "--export", "export")
    with prometheus(folder, folder / "report/targets", every="1s") as api:
        begin_s = time.time()
        found = run(folder, "--steps", "3", *written, "--weights-manifest", "committed.json")
        asked = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
        return replace(found, panels={expr: _series(api, expr, begin_s) for expr in asked if api})


@pytest.fixture(scope="session")
def run_small(tmp_path_factory: pytest.TempPathFactory) -> RunDemo:
    """One step of few samples, for what a short run can show."""

    def start(*options: str, channel: bool = True) -> Run:
        folder = tmp_path_factory.mktemp("small")
        layout = () if "--layout" in options else ("--layout", "dp=1,tp=1,pp=1,cp=1")
        return run(folder, "--steps", "1", "--samples", "8", *layout, *options, channel=channel)

    return start
