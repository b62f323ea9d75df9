"""`bench replay` and the pairs of `bench e2e` on real Megatron: every figure is there, and they fit each other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.children import printed
from tests.support.waits import RUN_S

pytestmark = [pytest.mark.dist, pytest.mark.full]


def measured(*words: str) -> dict[str, Any]:
    bench = ("-m", "r3channel.cli", "bench", *words, "--quick", "--rounds", "2", "--json")
    return json.loads(printed(*bench, limit_s=RUN_S).splitlines()[-1])


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
