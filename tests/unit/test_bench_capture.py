"""`r3channel bench capture --json` prints what its readers expect; the figures themselves need a quiet machine."""

from __future__ import annotations

import json

import pytest

from r3channel import cli

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(600)]  # four engines, one by one


def test_the_result_has_every_variant_and_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "capture", "--json", "--quick", "--rounds", "8"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    variants = report["variants"]
    assert list(variants) == ["off", "stock", "r3channel", "direct", "off_again"]
    for values in variants.values():
        assert set(values["engine_cpu_ratio_to_off"]) == {"median", "low", "high"}
    # Each request was served by the capturer that its id named: no rows, int32, frames in base64, frames past the reply.
    sent = [variants[way]["http_bytes_per_token"] for way in ("off", "direct", "r3channel", "stock")]
    assert sent[0] < 2 < 384 < sent[1] < 400 < 512 < sent[2] < 530 < 2048 <= sent[3]
    for name, rows, ways in (("reply", "1000 4000 16000", 4), ("pass", "256 8192", 3)):
        for figures in (report[f"{name}_us"], report[f"{name}_of_stock"]):
            assert list(figures) == rows.split() and all(len(by_way) == ways for by_way in figures.values())
    nbytes, us = report["topk_bytes"], report["topk_us"]
    assert nbytes["ours"] < 740 < 1366 < nbytes["binary"] + 1 < nbytes["stock"] and min(us.values()) > 0
