"""`r3channel bench wire`: the shape of what it prints, its data and its bounds."""

from __future__ import annotations

import json

import numpy as np
import pytest

from r3channel.bench import wire
from r3channel.bench.wire import entropy_bytes_per_token, generate
from r3channel.cli import main
from r3channel.model.presets import model_named


def test_the_json_has_all_codecs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MODELS", ("kimi-k2",))
    monkeypatch.delitem(wire.REGIMES, "Zmid")
    monkeypatch.setattr(wire, "_MIN_S", 0.0)
    assert main(["bench", "wire", "--json", "--quick", "--rounds", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {result["codec"] for result in report["results"]} == {
        "auto", "stored", "lz4", "packed9", "set", "json-base64-int32",
    }  # fmt: skip
    figures = ("bytes_per_token", "encode_gbps", "decode_gbps", "entropy_bytes_per_token")
    assert all(result[figure] > 0 for result in report["results"] for figure in figures)


def test_every_way_gives_the_ids_again() -> None:
    model = model_named("deepseek-v3")
    ids_TLK = generate(model, regime="U", rows=16)
    wide_N = ids_TLK.reshape(16, -1).astype(np.int32)
    ways = wire.ways(ids_TLK, spec=model.spec)
    stock = (way := ways.pop("json-base64-int32")).decode(way.encode())
    assert np.array_equal(stock.reshape(16, -1)[:, -wide_N.shape[1] :], wide_N)  # dense layers come first
    for name, way in ways.items():
        decoded, kept = way.decode(way.encode()), np.sort(ids_TLK) if name == "set" else ids_TLK
        assert np.array_equal(np.sort(decoded) if name == "set" else decoded, kept), name


def test_entropy_of_uniform_rows_is_that_of_counting() -> None:
    model = model_named("qwen3-30b-a3b")
    ordered, unordered = entropy_bytes_per_token(generate(model, regime="U", rows=1024), num_experts=128)
    assert ordered == pytest.approx(334.1, rel=0.01) and unordered == pytest.approx(242.3, rel=0.01)
