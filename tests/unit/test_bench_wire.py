"""`r3channel bench wire`: the shape of what it prints, its data and its bounds."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from r3channel import bench
from r3channel.bench import wire
from r3channel.bench.routing_data import REGIMES, entropy_bytes_per_token, generate
from r3channel.cli import main
from r3channel.distinct import find_duplicate
from r3channel.models import model_named


def test_the_json_has_every_codec_regime_and_bound(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "QUICK", wire.Effort(rows=32, rounds=1, chain_bytes=1 << 16))
    assert main(["bench", "wire", "--json", "--quick", "--model", "kimi-k2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["memcpy_gbps"] > 0 and report["prefix_sharing"]["ratio"] <= 0.79
    results = report["results"]
    assert {result["regime"] for result in results} == set(REGIMES)
    assert {result["codec"] for result in results} >= {
        "auto", "stored", "lz4", "packed9", "set", "json-base64-int32", "orjson-pybase64-int32", "int16-lz4", "int16-zstd-1",
    }  # fmt: skip
    fields = {
        "model",
        "regime",
        "codec",
        "bytes_per_token",
        "encode_gbps",
        "decode_gbps",
        "entropy_bytes_per_token",
    }
    assert all(set(result) == fields for result in results)
    assert {chain["codec"] for chain in report["verify_decode_place"]} == {"stored", "lz4"}


def test_without_zstandard_its_codec_is_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "QUICK", wire.Effort(rows=32, rounds=1, chain_bytes=1 << 16))
    monkeypatch.setattr(wire, "REGIMES", ("U",))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert main(["bench", "wire", "--json", "--quick", "--model", "qwen3-30b-a3b"]) == 0
    codecs = {result["codec"] for result in json.loads(capsys.readouterr().out)["results"]}
    assert "lz4" in codecs and not codecs & {"set", "int16-zstd-1"}


def test_an_unknown_benchmark_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "speed"]) == 2
    assert "wire" in capsys.readouterr().err
    assert bench.run([]) == 0


@pytest.mark.parametrize("regime", REGIMES)
def test_synthetic_rows_are_sets_in_range_and_reproducible(regime: str) -> None:
    model = model_named("deepseek-v3")
    ids = generate(model, regime=regime, rows=8)
    assert ids.dtype == model.spec.id_dtype and find_duplicate(ids) is None
    assert np.array_equal(ids, generate(model, regime=regime, rows=8))


def test_entropy_of_uniform_rows_is_that_of_counting() -> None:
    model = model_named("qwen3-30b-a3b")
    ordered, unordered = entropy_bytes_per_token(generate(model, regime="U", rows=1024), num_experts=128)
    assert ordered == pytest.approx(334.1, rel=0.01) and unordered == pytest.approx(242.3, rel=0.01)
