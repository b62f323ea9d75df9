"""`bench relay` as a user runs it: every path ends alike, the keys are there, and nothing outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from r3channel.bench.relay import MODELS
from r3channel.bench.relay_peers import ALL
from tests.support.children import ROOT
from tests.support.waits import RUN_S, until

pytestmark = [pytest.mark.dist, pytest.mark.full]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "r3channel.cli", "bench", "relay", "--quick", "--json", "--rounds", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
    )
    yield child
    child.kill()
    child.wait(RUN_S)


@pytest.mark.timeout(600)
def test_all_paths_end_alike_and_every_promised_key_is_there(bench: subprocess.Popen[str]) -> None:
    stdout, stderr = bench.communicate(timeout=RUN_S)  # paths that end differently raise EndStatesDiffer
    assert bench.returncode == 0, stderr[-4000:]
    report = json.loads(stdout)
    assert set(report["paths"]) == set(ALL)
    for values in report["paths"].values():
        assert values["wall_s"] > 0 and values["cpu_s"] > 0
        assert {"manager_cpu_us_per_token", "bytes_per_token"} <= set(values)
    assert set(report["seal_ms"]) == {"64", "8192"}
    placed = report["body_to_placed_cpu_us_per_token"]
    assert set(placed) == set(MODELS) and min(placed.values()) > 0
    assert all(report["socket_cpu_us_per_token"][way] > 0 for way in ("in_band", "direct", "stock"))
    assert report["case"] == {"model": MODELS[0], "tokens": 262_144, "dp": 4}


def test_a_benchmark_that_is_killed_takes_its_processes_along(bench: subprocess.Popen[str]) -> None:
    def family() -> list[psutil.Process]:
        assert bench.poll() is None, "it ended by itself"
        return psutil.Process(bench.pid).children(recursive=True)

    until(lambda: sum("Rank" in _title(one) for one in family()) >= 4, "ranks that started", limit_s=RUN_S)
    parts = family()
    bench.send_signal(signal.SIGKILL)
    # Ray's agents first try to tell a server that is gone, too
    _, alive = psutil.wait_procs(parts, timeout=RUN_S)
    assert not [_title(process) for process in alive]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
