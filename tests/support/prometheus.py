"""A real Prometheus beside a run: it finds the pages as an operator's would, by files of targets."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from examples.embedded.sglang import free_port
from r3channel.transport.network import urlopen
from tests.support.waits import PROGRAM_S

PROMETHEUS = shutil.which("prometheus")


@contextmanager
def prometheus(work: Path, targets: Path, *, every: str, rules: str = "") -> Iterator[str]:
    """The address of its API; empty where there is no Prometheus. `rules` are a file's text."""
    if PROMETHEUS is None:
        yield ""
        return
    files = [{"files": [f"{targets}/*.json"], "refresh_interval": "1s"}]
    times = {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": "1s"}
    scrapes = [{"job_name": "r3channel", "file_sd_configs": files}]
    config = {"global": times, "rule_files": ["rules.yml"], "scrape_configs": scrapes}
    (work / "rules.yml").write_text(rules)
    (work / "prometheus.yml").write_text(json.dumps(config))
    address = f"127.0.0.1:{free_port()}"
    places = {"config.file": work / "prometheus.yml", "storage.tsdb.path": work / "prometheus"}
    places |= {"web.listen-address": address}
    with open(work / "prometheus.log", "w") as log:
        command = [PROMETHEUS, *(f"--{name}={place}" for name, place in places.items())]
        child = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://{address}/api/v1"
    finally:
        child.kill()
        child.wait(PROGRAM_S)


def answer(api: str, query: str) -> list[Any]:
    """The series that it gives."""
    with urlopen(f"{api}/{query}", timeout_s=PROGRAM_S) as page:
        return json.load(page)["data"]["result"]
