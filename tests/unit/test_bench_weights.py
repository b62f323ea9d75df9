"""The weights benchmark says what it promises."""

from __future__ import annotations

import json

import pytest

from r3channel.bench import run


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_the_benchmark_gives_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["weights", "--quick", "--rounds", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["large"]["wall_s"]["raw_gloo"] > 0 < min(result["pauses"]["pause_s"].values())
    assert result["engine"]["wall_s"].keys() == {"per_tensor", "flattened", "staged", "colocated", "grouped"}
    assert result["engine"]["parameters_compared"] > 30
