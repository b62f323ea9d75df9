"""Newer releases of megatron-core, each laid over the installed one: every fact of the replay driver on one rank.

The layouts run on the newest of them in tests/dist/test_layouts.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from r3channel.trainer.adapters.megatron import READ_AGAINST
from tests.dist.ranks import ROOT, run_ranks
from tests.upstream.wheels import unpacked

pytestmark = [pytest.mark.dist, pytest.mark.full]

LEFT_OUT = {
    "0.18.2": "mtp"
}  # its own MTP block does not run with full recompute: _checkpointed_forward(padding_mask=...)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    command = [
        sys.executable,
        "-m",
        "examples.embedded.model",
        str(folder),
        "--experts",
        "32",
        "--top-k",
        "4",
    ]
    subprocess.run(command, check=True, cwd=ROOT, timeout=120, capture_output=True)
    return folder


def facts(worker: str, folder: Path, version: str, job: dict[str, Any]) -> tuple[set[str], set[str]]:
    """(those that hold, all that the worker has)."""
    script = ROOT / f"tests/dist/{worker}.py"
    overlay = [unpacked(f"megatron-core=={version}")]
    (result,) = run_ranks(script, folder, world_size=1, job=job, timeout_s=150, overlay=overlay)
    lines = [line for line in script.read_text().splitlines() if line.startswith("def test_")]
    return set(result["passed"]), {line.removeprefix("def ").partition("(")[0] for line in lines}


def test_every_misuse_is_refused_by_the_newest_as_by_the_installed_release(
    model_dir: Path, tmp_path: Path
) -> None:
    held, all_of_them = facts("megatron_traps", tmp_path, READ_AGAINST[-1], {"model": str(model_dir)})
    assert held == all_of_them


@pytest.mark.parametrize("version", READ_AGAINST[1:])
def test_every_feature_works_as_on_the_installed_release(version: str, tmp_path: Path) -> None:
    left_out = LEFT_OUT.get(version, "nothing")
    held, all_of_them = facts(
        "megatron_features", tmp_path, version, {"layout": "dp=1", "left_out": left_out}
    )
    assert held == {name for name in all_of_them if left_out not in name}
