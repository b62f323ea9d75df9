"""Real Megatron-core trainers over gloo: replay reaches exactly the planned tokens, weights come back bit for bit.

Each layout is trained once, by `megatron_train.py` on its own processes; the facts are read from what the ranks wrote.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from r3channel.plan.layout import TrainerLayout
from tests.dist.ranks import ROOT, run_ranks

pytestmark = pytest.mark.dist

LAYOUTS = ("dp=1", "tp=2", "pp=2")
MORE_LAYOUTS = ("dp=2,tp=2", "dp=2,ep=2", "tp=2,ep=2", "dp=2,pp=2", "tp=2,pp=2")
ROWS, MOE_LAYERS, TOP_K = 4 * 2 * 12, 3, 4  # micro-batches x samples x tokens, as in megatron_train.py

Results = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a dense layer 0; made in its own process, free of the CPU shim and of this one's state."""
    folder = tmp_path_factory.mktemp("model")
    shape = ["--experts", "32", "--top-k", str(TOP_K)]
    command = [sys.executable, "-m", "examples.embedded.model", str(folder), *shape]
    subprocess.run(command, check=True, cwd=ROOT, timeout=120, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def results(model_dir: Path, out: Path) -> Results:
    """Trains a layout on its first use; gives each rank's result."""

    @cache
    def train(layout: str) -> list[dict[str, Any]]:
        size = TrainerLayout.parse(layout).world_size
        job = {"model": str(model_dir), "layout": layout}
        return run_ranks(
            ROOT / "tests/dist/megatron_train.py", out / layout, world_size=size, job=job, timeout_s=150
        )

    return train


def gradients(out: Path, layout: str) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return load_file(out / layout / "gradients.safetensors")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_router_uses_the_ids_of_its_own_tokens_in_forward_and_recompute(
    layout: str, results: Results
) -> None:
    ranks = results(layout)  # each rank compared its ids with the oracle; here: nothing was left out
    assert sum(rank["ids"] for rank in ranks) == 2 * ROWS * MOE_LAYERS * TOP_K


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_prob_passes_use_the_ids_and_leave_nothing_behind(layout: str, results: Results) -> None:
    assert sum(rank["logprob_ids"] for rank in results(layout)) == ROWS * MOE_LAYERS * TOP_K


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exported_weights_equal_the_checkpoint_bit_for_bit(layout: str, results: Results) -> None:
    assert {rank["tensors"] for rank in results(layout)} == {
        329
    }  # 2 + 1 dense and 3 MoE layers of 32 experts


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_gradients_of_every_parameter_equal_those_of_one_rank(
    layout: str, results: Results, out: Path
) -> None:
    import numpy as np

    (one,), ranks = results("dp=1"), results(layout)
    assert all(abs(rank["norm"] - one["norm"]) < 1e-6 * one["norm"] for rank in ranks)
    wanted, found = gradients(out, "dp=1"), gradients(out, layout)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert np.linalg.norm(found[name] - gradient) < 1e-4 * np.linalg.norm(gradient), name


def test_pipeline_stages_own_the_routers_of_their_layers(results: Results) -> None:
    assert [rank["layers"] for rank in results("pp=2")] == [[1], [2, 3]]  # layer 0 is dense


def test_leaving_the_action_on_under_1f1b_is_wrong_and_the_driver_prevents_it(results: Results) -> None:
    (one,), last = results("dp=1"), results("pp=2")[-1]
    assert last["trap_losses"] == pytest.approx(one["losses"], rel=1e-5)  # the loss does not show it
    assert abs(last["trap_norm"] - one["norm"]) > 1e-4 * one["norm"]
    assert abs(last["norm"] - one["norm"]) < 1e-6 * one["norm"]


def test_without_sequence_parallelism_every_tp_rank_replays_all_rows_in_eval(results: Results) -> None:
    ranks = results("tp=2")
    assert [rank["plain"]["logprob_ids"] for rank in ranks] == [ROWS * MOE_LAYERS * TOP_K] * 2


def test_bfloat16_trainer_exports_exactly_and_learns_under_replay(results: Results) -> None:
    (one,) = results("dp=1")
    assert one["bf16_tensors"] == 329 and one["bf16_norm"] == pytest.approx(one["norm"], rel=0.05)


@pytest.mark.full
@pytest.mark.parametrize("layout", MORE_LAYOUTS)
def test_more_layouts_replay_export_and_train_as_one_rank(layout: str, results: Results, out: Path) -> None:
    import numpy as np

    ranks = results(layout)
    assert sum(rank["ids"] for rank in ranks) == 2 * ROWS * MOE_LAYERS * TOP_K
    results("dp=1")
    wanted, found = gradients(out, "dp=1"), gradients(out, layout)
    for name, gradient in wanted.items():
        assert np.linalg.norm(found[name] - gradient) < 1e-4 * np.linalg.norm(gradient), name


def test_every_known_misuse_of_the_driver_raises_its_typed_error(model_dir: Path, out: Path) -> None:
    script = ROOT / "tests/dist/megatron_traps.py"
    (result,) = run_ranks(script, out / "traps", world_size=1, job={"model": str(model_dir)}, timeout_s=150)
    assert len(result["passed"]) == script.read_text().count("\ndef test_")
