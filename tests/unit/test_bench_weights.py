"""The weights benchmark says what it promises."""

from __future__ import annotations

import json

import pytest

from r3channel.bench import run, weights


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_the_benchmark_gives_every_key_that_the_targets_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["weights", "--quick", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ratio"].keys() >= weights.TARGETS.keys() and min(result["ratio"].values()) > 0
    assert result["engine"]["wall_s"].keys() == {"per_tensor", "flattened", "staged", "colocated"}
    assert result["engine"]["parameters_compared"] > 30
