"""Prometheus over the pages of a run, with the project's own rules, in which a minute is six seconds: a job is short."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from examples.embedded.sglang import free_port
from r3channel.transport.http import urlopen

_RULES = Path(__file__).parents[3] / "dashboards/alerts.yml"
_TIMES = {"m": 6, "h": 360}
_FIRED = 'max by (alertname, reason, instance) (max_over_time(ALERTS{alertstate="firing"}[1d]))'


@contextmanager
def watched(work: Path) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Alert -> the labels with which it has fired, filled at the end; empty where there is no Prometheus."""
    fired: dict[str, list[dict[str, str]]] = {}
    if shutil.which("prometheus") is None:
        yield fired
        return
    rules = re.sub(r"(\d+)([mh])\b", lambda time: f"{int(time[1]) * _TIMES[time[2]]}s", _RULES.read_text())
    (work / "rules.yml").write_text(rules)
    files = [{"files": [f"{work}/told/*.json"], "refresh_interval": "1s"}]
    config = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"], "scrape_configs": [{"job_name": "r3channel", "file_sd_configs": files}],
    }  # fmt: skip
    (work / "prometheus.yml").write_text(json.dumps(config))
    address = f"127.0.0.1:{free_port()}"
    places = {
        "config.file": work / "prometheus.yml",
        "storage.tsdb.path": work / "prometheus",
        "web.listen-address": address,
    }
    with open(work / "prometheus.log", "w") as log:
        command = ["prometheus", *(f"--{name}={place}" for name, place in places.items())]
        child = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield fired
        time.sleep(2.0)  # the last evaluation
        with urlopen(f"http://{address}/api/v1/query?query={quote(_FIRED)}", timeout_s=20) as page:
            for one in json.load(page)["data"]["result"]:
                fired.setdefault(one["metric"].pop("alertname"), []).append(one["metric"])
    finally:
        child.terminate()
        child.wait(20)
