"""Benchmarks as a user runs them: figures are there and fit each other, paths end alike, and nothing outlives a command.

`bench relay`; `bench replay` and the pairs of `bench e2e` on real Megatron.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import psutil
import pytest

from r3channel.bench.relay import MODELS
from r3channel.bench.relay_peers import ALL
from tests.support.children import ROOT, printed
from tests.support.waits import RUN_S, until

pytestmark = [pytest.mark.dist, pytest.mark.full]
COMMAND, SHORT = ("-m", "r3channel.cli", "bench"), ("--quick", "--rounds", "2", "--json")


def measured(*words: str) -> dict[str, Any]:
    return json.loads(printed(*COMMAND, *words, *SHORT, limit_s=RUN_S).splitlines()[-1])


@pytest.mark.timeout(600)
def test_all_paths_end_alike_and_every_promised_key_is_there() -> None:
    report = measured("relay")  # paths that end differently raise EndStatesDiffer
    assert set(report["paths"]) == set(ALL)
    for values in report["paths"].values():
        assert values["wall_s"] > 0 and values["cpu_s"] > 0
        assert {"manager_cpu_us_per_token", "bytes_per_token"} <= set(values)
    assert set(report["seal_ms"]) == {"64", "8192"}
    placed = report["body_to_placed_cpu_us_per_token"]
    assert set(placed) == set(MODELS) and min(placed.values()) > 0
    assert all(report["socket_cpu_us_per_token"][way] > 0 for way in ("in_band", "direct", "stock"))
    assert report["case"] == {"model": MODELS[0], "tokens": 262_144, "dp": 4}


def test_a_benchmark_that_is_killed_takes_its_processes_along() -> None:
    bench = subprocess.Popen([sys.executable, *COMMAND, "relay", *SHORT], stdout=subprocess.DEVNULL, cwd=ROOT)

    def family() -> list[psutil.Process]:
        assert bench.poll() is None, "it ended by itself"
        return psutil.Process(bench.pid).children(recursive=True)

    try:
        until(
            lambda: sum("Rank" in _title(one) for one in family()) >= 4, "ranks that started", limit_s=RUN_S
        )
        parts = family()
    finally:
        bench.kill()
        bench.wait(RUN_S)
    # Ray's agents first try to tell a server that is gone, too
    _, alive = psutil.wait_procs(parts, timeout=RUN_S)
    assert not [_title(process) for process in alive]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def holds(interval: dict[str, float]) -> bool:
    return interval["low"] <= interval["median"] <= interval["high"]


def test_replay_says_what_it_adds_to_a_step_beside_the_same_step_twice() -> None:
    found = measured("replay")
    assert found["rounds"] == 2
    assert set(found["step_cpu_ms"]) == {"plain", "plain_again", "replay"}
    assert min(found["step_cpu_ms"].values()) > 0
    for name in ("replay_percent", "noise_percent"):
        assert holds(found[name]) and found[name]["low"] > -100
    assert found["operations"] == {"per_router": 0, "per_microbatch": 10}, "beside Megatron's own top-k"
    assert min(found["router_call_cpu_us"].values()) > 0 and 0 < found["router_calls_percent"] < 100


def test_a_trainers_step_through_the_channel_is_paired_with_the_same_step_without() -> None:
    found = measured("e2e", "--only", "pairs")["pairs"]
    assert found["pairs"] == 2 and min(found["step_cpu_ms"].values()) > 0
    for name in ("trainer_cpu_ratio", "noise_ratio"):
        assert holds(found[name]) and found[name]["low"] > 0
