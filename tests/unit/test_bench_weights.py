"""The weights benchmark says what it promises."""

from __future__ import annotations

import json

import pytest

from r3channel.bench import run, weights


def test_the_text_names_every_path_and_ratio() -> None:
    text = weights.text(
        {
            "paths": {"staged": {"wall_s": 0.25, "gbps": 1.5}},
            "ratio": {"own_loader_vs_flattened": 2.5},
            "plan": {"tensors": 45_215, "seconds_with_gathering": 1.5, "busiest_of_bound": {"8": 1.004}},
        }
    )
    for words in ("staged", "250.0 ms", "2.50  (target 2)", "45,215", "PP 8 1.004"):
        assert words in text


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_the_whole_benchmark_gives_every_key_that_the_targets_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = sorted(
        weights.PARTS.keys() - {"surgical"}
    )  # test_weight_fleet.py fills one engine beside another
    assert run(["weights", "--quick", "--json", *(word for part in parts for word in ("--only", part))]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ratio"].keys() >= weights.TARGETS.keys() and min(result["ratio"].values()) > 0
    assert result["paths"].keys() == {"per_tensor", "flattened", "staged", "colocated"}
    assert result["plan"].keys() >= {"seconds_with_gathering", "busiest_of_bound"}
    assert result["engine"]["parameters_compared"] > 30
    assert 1.0 <= result["reshard"]["bytes_of_model"] < 1.1 and result["reshard"]["largest_share_held"] < 1.0
