"""A real Prometheus beside a run: it finds the pages as an operator's would, and answers each panel of the dashboard."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from r3channel.tools.dashboard import dashboard
from r3channel.transport.http import urlopen

PROMETHEUS = shutil.which("prometheus")
LIMIT_S = 60.0


@contextmanager
def scraped(folder: Path) -> Iterator[dict[str, int]]:
    """Scrapes what `folder`/report/targets names; on the way out the yielded dict has, per expression of the dashboard, how
    many series it gave over the run. Stays empty where there is no Prometheus."""
    answers: dict[str, int] = {}
    if PROMETHEUS is None:
        yield answers
        return
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [
            {
                "job_name": "r3channel",
                "file_sd_configs": [{"files": [f"{folder}/report/targets/*.json"], "refresh_interval": "1s"}],
            }
        ],
    }
    (folder / "prometheus.json").write_text(json.dumps(config))
    begin_s, port = time.time(), _free_port()
    child = subprocess.Popen(
        [
            *(PROMETHEUS, f"--config.file={folder}/prometheus.json", f"--storage.tsdb.path={folder}/tsdb"),
            *(f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"),
        ]
    )
    try:
        url = f"http://127.0.0.1:{port}"
        _await(url)
        yield answers
        for panel in dashboard()["panels"]:
            for target in panel.get("targets", ()):
                answers[target["expr"]] = _series(url, target["expr"], begin_s)
    finally:
        child.kill()
        child.wait(LIMIT_S)


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def _await(url: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        try:
            urlopen(f"{url}/-/ready", timeout_s=5.0).close()
            return
        except OSError:
            assert time.monotonic() < deadline_s, "Prometheus did not start"
            time.sleep(0.2)


def _series(url: str, expr: str, begin_s: float) -> int:
    query = urllib.parse.urlencode(
        {
            "query": expr.replace("$__rate_interval", "20s").replace("$run", ".*"),
            "start": begin_s,
            "end": time.time(),
            "step": 1,
        }
    )
    with urlopen(f"{url}/api/v1/query_range?{query}", timeout_s=LIMIT_S) as reply:
        found: list[Any] = json.loads(reply.read())["data"]["result"]
    return sum(any(value != "NaN" for _, value in series["values"]) for series in found)
