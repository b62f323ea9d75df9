"""A DeepSeek-V3-like model on real Megatron: MLA, biased sigmoid, MTP, recompute, live rows, audit; every misuse; and its export
from any layout, whole: MLA, shared expert, biased router, dense first layer. On newer releases of megatron-core, each laid over
the installed one, every fact on one rank; the layouts run on the newest of them in tests/dist/test_layouts.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from r3channel.trainer.adapters.megatron import READ_AGAINST
from tests.dist import deepseek, megatron_features, megatron_traps
from tests.dist.ranks import facts_of, run_ranks
from tests.engine.reference import reference_ids
from tests.upstream.wheels import unpacked

pytestmark = pytest.mark.dist


Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def run(out: Path) -> Run:
    """Each layout once."""

    @cache
    def start(layout: str) -> list[dict[str, Any]]:
        job = {"layout": layout, "export": layout != "tp=2", "facts": layout in ("dp=1", "dp=2,ep=2", "tp=2")}
        return run_ranks("tests.dist.megatron_features", out / layout, job=job)

    return start


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


@pytest.fixture(scope="module")
def one(run: Run) -> dict[str, Any]:
    return run("dp=1")[0]


@pytest.mark.long
def test_every_fact_of_the_driver_holds_on_one_rank(one: dict[str, Any]) -> None:
    assert one["passed"] == list(facts_of(megatron_features.__name__))


@pytest.mark.long
def test_every_known_misuse_of_the_driver_raises_its_typed_error(tmp_path: Path) -> None:
    (result,) = run_ranks("tests.dist.megatron_traps", tmp_path, job={"layout": "dp=1"})
    assert result["passed"] == list(facts_of(megatron_traps.__name__))


ROUTERS = tuple(f"decoder.layers.{layer}.mlp.router.weight" for layer in (1, 2, 3))
MTP = "mtp.layers.0.transformer_layer.mlp.router.weight"


@pytest.mark.full
@pytest.mark.parametrize(("layout", "routers"), [("dp=2,ep=2", (*ROUTERS, MTP)), ("tp=2", (MTP,))])
def test_mla_sigmoid_bias_and_mtp_train_on_two_ranks_as_on_one(
    one: dict[str, Any], run: Run, layout: str, routers: tuple[str, ...]
) -> None:
    """Loss and router gradients, with the MTP router on its own and mapped. With TP it is the gradient of the router that no MLA
    backward comes before: in megatron-core 0.16.1 the local layer spec's MLA does not sum the gradient of k_pos_emb over TP
    (multi_latent_attention.py:607), with and without replay."""
    ranks = run(layout)
    for prefix in ("", "mtp_"):
        loss = sum(rank[f"{prefix}loss"] for rank in ranks) / len(ranks)
        assert loss == pytest.approx(one[f"{prefix}loss"], rel=1e-5)
        wanted = one[f"{prefix}gradients"]
        assert len(wanted) == 4 and all(name in wanted for name in routers)
        for rank in ranks:
            for name in routers:
                found, expected = np.array(rank[f"{prefix}gradients"][name]), np.array(wanted[name])
                assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected), (prefix, name)


# -- exported ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_every_name_of_the_checkpoint_is_there_and_routers_are_never_rounded(one: dict[str, Any]) -> None:
    moe = deepseek.LAYERS - 1
    per_layer = 2 + 7  # norms; q and kv down, their norms, up, and the output projection
    assert len(one["digests"]) == 3 + per_layer * deepseek.LAYERS + 3 + moe * (2 + 3 + 3 * deepseek.EXPERTS)
    layers, parts = range(1, deepseek.LAYERS), ("e_score_correction_bias", "weight")
    assert one["float32"] == [f"model.layers.{layer}.mlp.gate.{part}" for layer in layers for part in parts]


@pytest.mark.long
@pytest.mark.usefixtures("one")
def test_transformers_loads_the_export_and_has_the_same_log_probs(out: Path) -> None:
    """A name that it misses leaves numbers of chance there."""
    expected = load_file((folder := out / "dp=1" / "hf") / "expected.st")
    lists = [[*tokens, 0] for tokens in expected["tokens"].tolist()]  # no row is given of the last one
    found = torch.stack([torch.from_numpy(one.logits_TV) for one in reference_ids(folder, lists)])
    assert float((found.log_softmax(-1) - expected["logprobs"]).abs().max()) < 1e-4


SHARDED = [
    pytest.param("tp=2,ep=2", marks=pytest.mark.long),
    *(pytest.param(text, marks=pytest.mark.full) for text in ("dp=2,ep=2", "tp=2,ep=2,pp=2")),
]


@pytest.mark.parametrize("layout", SHARDED)
def test_a_sharded_run_exports_what_one_rank_does(one: dict[str, Any], run: Run, layout: str) -> None:
    for rank in run(layout):
        assert rank["digests"] == one["digests"]


# -- newer releases ------------------------------------------------------------------------------------------------------

# 0.18.2's own MTP block does not run with full recompute: _checkpointed_forward(padding_mask=...)
LEFT_OUT = {"0.18.2": "mtp"}


def held(worker: str, folder: Path, version: str, **job: Any) -> list[str]:
    """The facts that hold."""
    overlay = [unpacked(f"megatron-core=={version}")]
    (result,) = run_ranks(worker, folder, job={"layout": "dp=1", **job}, overlay=overlay)
    return result["passed"]


@pytest.mark.full
def test_every_misuse_is_refused_by_the_newest_as_by_the_installed_release(tmp_path: Path) -> None:
    found = held(megatron_traps.__name__, tmp_path, READ_AGAINST[-1])
    assert found == list(facts_of(megatron_traps.__name__))


@pytest.mark.full
@pytest.mark.parametrize("version", READ_AGAINST[1:])
def test_every_feature_works_as_on_the_installed_release(version: str, tmp_path: Path) -> None:
    left_out = LEFT_OUT.get(version, "nothing")
    found = held(megatron_features.__name__, tmp_path, version, left_out=left_out)
    assert found == [name for name in facts_of(megatron_features.__name__) if left_out not in name]
