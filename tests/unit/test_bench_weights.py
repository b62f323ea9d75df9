"""The weights benchmark runs without an engine where it can, and says what it promises."""

from __future__ import annotations

import json

import pytest

from r3channel.bench import run


@pytest.mark.dist
@pytest.mark.timeout(120)
def test_the_wire_part_gives_its_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["weights", "--quick", "--only", "wire", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["limit"]["raw_gloo_gbps"] > 0
    assert found["ratio"].keys() == {"of_raw_gloo", "wire_of_raw_gloo"} and min(found["ratio"].values()) > 0
    assert found["wire"]["variants"].keys() >= {"packed", "digests", "checked", "depth_1", "wire"}
