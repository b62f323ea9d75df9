"""`r3channel bench capture --json` prints what its readers expect; the figures themselves need a quiet machine."""

from __future__ import annotations

import json

import pytest

from r3channel import cli

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(600)]  # four engines, one by one


def test_the_result_has_every_variant_and_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "capture", "--json", "--quick"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(report["variants"]) == ["off", "stock", "r3channel", "direct"]
    for values in report["variants"].values():
        assert values["engine_cpu_us_per_token"] > 0
        assert values["tokens_per_s"] > 0
        assert values["http_bytes_per_token"] > 0
    ours, stock = (report["variants"][name] for name in ("r3channel", "stock"))
    assert ours["http_bytes_per_token"] < stock["http_bytes_per_token"] / 2
    scheduler_us = report["scheduler_us"]
    assert set(scheduler_us) == {"stock", "r3channel", "direct"}
    assert all(set(spent) == {"1000", "4000", "16000"} for spent in scheduler_us.values())
    assert scheduler_us["r3channel"]["16000"] < scheduler_us["stock"]["16000"]
    assert set(report["ratios"]["direct"]["scheduler_to_stock"]) == {"1000", "4000", "16000"}
