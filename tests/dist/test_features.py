"""A DeepSeek-V3-like model on real Megatron: MLA, biased sigmoid with groups, MTP, partial recompute, live rows, audit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dist.ranks import ROOT, run_ranks

pytestmark = pytest.mark.dist

SCRIPT = ROOT / "tests/dist/megatron_features.py"


def run(folder: Path, layout: str, size: int) -> list[dict[str, Any]]:
    return run_ranks(SCRIPT, folder / layout, world_size=size, job={"layout": layout}, timeout_s=170)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("features"), "dp=1", 1)[0]


def test_every_fact_of_the_driver_holds_on_one_rank(one: dict[str, Any]) -> None:
    assert len(one["passed"]) == SCRIPT.read_text().count("\ndef test_")


def check(one: dict[str, Any], ranks: list[dict[str, Any]], *, routers: tuple[str, ...]) -> None:
    """Loss and router gradients of one rank, with the MTP router on its own and mapped."""
    for prefix in ("", "mtp_"):
        loss = sum(rank[f"{prefix}loss"] for rank in ranks) / len(ranks)
        assert loss == pytest.approx(one[f"{prefix}loss"], rel=1e-5)
        wanted = one[f"{prefix}gradients"]
        assert len(wanted) == 4 and all(name in wanted for name in routers)
        for rank in ranks:
            for name in routers:
                found, expected = np.array(rank[f"{prefix}gradients"][name]), np.array(wanted[name])
                assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected), (prefix, name)


ROUTERS = tuple(f"decoder.layers.{layer}.mlp.router.weight" for layer in (1, 2, 3))
MTP = "mtp.layers.0.transformer_layer.mlp.router.weight"


@pytest.mark.full
def test_mla_sigmoid_bias_and_mtp_train_with_expert_parallelism_as_on_one_rank(
    one: dict[str, Any], tmp_path: Path
) -> None:
    check(one, run(tmp_path, "dp=2,ep=2", 2), routers=(*ROUTERS, MTP))


@pytest.mark.full
def test_mla_sigmoid_bias_and_mtp_replay_with_tensor_parallelism(one: dict[str, Any], tmp_path: Path) -> None:
    """Ids, loss, and the gradient of the router that no MLA backward comes before: in megatron-core 0.16.1 the local layer
    spec's MLA does not sum the gradient of k_pos_emb over TP (multi_latent_attention.py:607), with and without replay."""
    check(one, run(tmp_path, "tp=2", 2), routers=(MTP,))
