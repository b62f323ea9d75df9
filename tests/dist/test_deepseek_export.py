"""DeepSeek-V3's family leaves Megatron whole: MLA, shared expert, biased router, dense first layer, from any layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.embedded.sglang import environment
from tests.dist import deepseek
from tests.dist.ranks import ROOT, run_ranks

pytestmark = pytest.mark.dist


def export(folder: Path, layout: str) -> list[dict[str, Any]]:
    return run_ranks("tests.dist.deepseek_export", folder / layout, job={"layout": layout}, timeout_s=120)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepseek")


@pytest.fixture(scope="module")
def one(out: Path) -> dict[str, Any]:
    return export(out, "dp=1")[0]


def test_every_name_of_the_checkpoint_is_there(one: dict[str, Any]) -> None:
    moe = deepseek.LAYERS - 1
    per_layer = 2 + 7  # norms; q and kv down, their norms, up, and the output projection
    assert len(one["digests"]) == 3 + per_layer * deepseek.LAYERS + 3 + moe * (2 + 3 + 3 * deepseek.EXPERTS)
    assert {name.rpartition(".mlp.")[2] for name in one["digests"] if "gate." in name} == {
        "gate.weight",
        "gate.e_score_correction_bias",
    }


def test_routers_are_never_rounded(one: dict[str, Any]) -> None:
    layers = range(1, deepseek.LAYERS)
    parts = ("e_score_correction_bias", "weight")
    assert one["float32"] == [f"model.layers.{layer}.mlp.gate.{part}" for layer in layers for part in parts]


def test_transformers_loads_the_export_and_computes_the_same_log_probs(
    one: dict[str, Any], out: Path
) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/dist/hf_logprobs.py"), str(out / "dp=1" / "hf")],
        env=environment(r3channel=False), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["missing_keys"] == found["unexpected_keys"] == found["mismatched_keys"] == []
    assert found["worst"] < 1e-4


SHARDED = [
    "tp=2,ep=2",
    *(pytest.param(text, marks=pytest.mark.full) for text in ("dp=2,ep=2", "tp=2,ep=2,pp=2")),
]


@pytest.mark.parametrize("layout", SHARDED)
def test_a_sharded_run_exports_what_one_rank_does(one: dict[str, Any], out: Path, layout: str) -> None:
    for rank in export(out, layout):
        assert rank["digests"] == one["digests"]
