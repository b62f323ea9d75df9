"""A DeepSeek-V3-like model on real Megatron: MLA, biased sigmoid, MTP, recompute, live rows, audit; and every misuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.embedded.model import write_model
from tests.dist import megatron_features, megatron_traps
from tests.dist.ranks import facts_of, run_ranks

pytestmark = pytest.mark.dist


def run(folder: Path, layout: str) -> list[dict[str, Any]]:
    return run_ranks("tests.dist.megatron_features", folder / layout, job={"layout": layout}, timeout_s=170)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("features"), "dp=1")[0]


def test_every_fact_of_the_driver_holds_on_one_rank(one: dict[str, Any]) -> None:
    assert one["passed"] == list(facts_of(megatron_features.__name__))


def test_every_known_misuse_of_the_driver_raises_its_typed_error(tmp_path: Path) -> None:
    job = {"layout": "dp=1", "model": str(write_model(tmp_path / "model", experts=32, top_k=4))}
    (result,) = run_ranks("tests.dist.megatron_traps", tmp_path, job=job, timeout_s=150)
    assert result["passed"] == list(facts_of(megatron_traps.__name__))


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
    check(one, run(tmp_path, "dp=2,ep=2"), routers=(*ROUTERS, MTP))


@pytest.mark.full
def test_mla_sigmoid_bias_and_mtp_replay_with_tensor_parallelism(one: dict[str, Any], tmp_path: Path) -> None:
    """Ids, loss, and the gradient of the router that no MLA backward comes before: in megatron-core 0.16.1 the local layer
    spec's MLA does not sum the gradient of k_pos_emb over TP (multi_latent_attention.py:607), with and without replay."""
    check(one, run(tmp_path, "tp=2"), routers=(MTP,))
