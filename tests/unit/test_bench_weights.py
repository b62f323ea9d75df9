"""The weights benchmark runs without an engine where it can, and says what it promises."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from r3channel.bench import run, weights
from r3channel.weights.refit import MODES

PATH_KEYS = {"wall_s", "gbps"}


def found(capsys: pytest.CaptureFixture[str], *parts: str) -> dict[str, Any]:
    """What `r3channel bench weights --quick --json` prints for these parts."""
    only = [word for part in parts for word in ("--only", part)]
    assert run(["weights", "--quick", "--json", *only]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.dist
@pytest.mark.timeout(120)
def test_the_wire_part_gives_its_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    result = found(capsys, "wire")
    assert result["limit"]["raw_gloo_gbps"] > 0
    assert result["ratio"].keys() == {"of_raw_gloo", "wire_of_raw_gloo"} and min(result["ratio"].values()) > 0
    assert result["wire"]["variants"].keys() >= {"packed", "digests", "checked", "depth_1", "wire"}


@pytest.mark.dist
@pytest.mark.timeout(120)
def test_the_paths_without_an_engine_give_their_promised_keys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One-sided writes stay out: their library needs seconds to start. What is left out says why."""
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    result = found(capsys, "pair", "reshard")
    assert result["paths"].keys() == {"shared_memory", "reshard"}
    assert all(path.keys() == PATH_KEYS and min(path.values()) > 0 for path in result["paths"].values())
    assert result["skipped"].keys() == {"one_sided"} and "nixl-cu12" in result["skipped"]["one_sided"]
    assert result["ratio"]["shared_memory_vs_gloo"] > 0
    assert result["ablation"]["pipeline_depth_2_vs_1"] > 0
    assert result["reshard"]["messages"] > 0


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.timeout(180)
def test_one_sided_writes_are_a_path_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    result = found(capsys, "pair")
    assert result["paths"]["one_sided"].keys() == PATH_KEYS and result["skipped"] == {}


@pytest.mark.dist
@pytest.mark.timeout(120)
def test_nemo_rl_the_ablation_shows_what_each_step_saves(capsys: pytest.CaptureFixture[str]) -> None:
    steps = found(capsys, "refit")["ablation"]["refit"]
    control = [steps[mode]["control_bytes_per_receiver"] for mode in MODES]
    assert control[1] > control[2] > control[3] and control[0] > control[2]
    assert all(steps[mode]["wall_s"] > 0 for mode in MODES)


def test_the_text_names_every_path_ratio_and_step() -> None:
    step = {"wall_s": 0.5, "control_bytes_per_receiver": 1234}
    refit = dict.fromkeys(MODES, step) | {"receivers": 4, "tensors": 7, "buckets": 2}
    text = weights.text(
        {
            "paths": {"reshard": {"wall_s": 0.25, "gbps": 1.5}},
            "ratio": {"shared_memory_vs_gloo": 3.5},
            "ablation": {"pipeline_depth_2_vs_1": 1.25, "refit": refit},
            "skipped": {"one_sided": "no such library"},
        }
    )
    for words in ("reshard", "250.0 ms", "3.50  (target 3)", "1.250", *MODES, "1,234", "no such library"):
        assert words in text


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.timeout(300)
def test_the_whole_benchmark_gives_every_key_that_the_targets_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = found(capsys)
    assert result["paths"].keys() == {"per_tensor", "flattened", "shared_memory", "reshard", "one_sided"}
    assert all(path.keys() == PATH_KEYS for path in result["paths"].values())
    assert result["ratio"].keys() >= {"vs_per_tensor", "of_raw_gloo", "wire_of_raw_gloo"}
    assert result["plan"].keys() >= {"seconds", "imbalance"}
