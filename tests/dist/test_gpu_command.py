"""`make gpu`, which is run once where a GPU is at hand and must not be broken then: in small on a CPU, and its own way as far as
no kernel is needed, where only the packages of an image with CUDA can be imported."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import wheels
from tests.gpu.run import CHECKS, engine_environment
from tests.support.children import ROOT, run
from tests.support.waits import JOB_S

pytestmark = [pytest.mark.dist, pytest.mark.full, pytest.mark.timeout(2 * JOB_S)]
ON_A_CPU: dict[str, str] = dict.fromkeys(("imports", "staging", "device_digests", "device_cost"), "not run")
EMULATED = f"{ROOT}/tests/gpu/emulated:{ROOT}"
CAPTURES = ("capture", "capture_weights", "capture_cost")
ENDS = {
    **dict.fromkeys(("replay", "device"), "NeedsKernel: only a GPU has a profile of its own"),
    **dict.fromkeys(CAPTURES, "NeedsKernel: only a GPU has Triton's kernels"),
    **dict.fromkeys(("peers", "pair"), "only a GPU has NCCL"),
    "device_digests": "only a GPU has waits",
    "staging": "only a GPU has work that is under way",
}
"""What the checks ask for that nothing stands in for; the others pass."""


def command(out: Path, *options: str, path: str = str(ROOT)) -> subprocess.CompletedProcess[str]:
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return run("-m", "tests.gpu.run", "--out", str(out), *options, limit_s=JOB_S, **own)  # pyright: ignore


def walked(site: Path, *, without: str = "") -> subprocess.CompletedProcess[str]:
    """The check of a server's imports, as far as its first kernel, where only the image's packages and the wheels are."""
    path = engine_environment("cuda", {"PYTHONPATH": EMULATED}, server=site)["PYTHONPATH"]
    lost = f"sys.modules['sitecustomize'].Machine.missing |= set({without.split()})"
    walk = f"import sys; {lost}; from tests.gpu.facts import main; main('imports', 'cuda', 'small')"
    return run("-c", walk, limit_s=JOB_S, PYTHONPATH=f"{ROOT}/tests/gpu/emulated:{path}")


COSTS = [check.name for check in CHECKS if check.name.endswith("_cost")]
ROWS = [check.name for check in CHECKS if check.name not in COSTS]


@pytest.mark.long
@pytest.mark.parametrize("names", [ROWS, COSTS], ids=["rows", "costs"])
def test_every_check_runs_in_small_without_a_gpu_or_says_why_not(names: list[str], tmp_path: Path) -> None:
    child = command(out := tmp_path / "gpu.json", "--device", "cpu", *names)
    assert child.returncode == 0, child.stdout + child.stderr
    found = json.loads(out.read_text())["checks"]
    assert {one["name"]: one["status"] for one in found} == {
        name: ON_A_CPU.get(name, "passed") for name in names
    }
    assert all(one["why"] for one in found if one["status"] == "not run")
    assert all(one["figures"] for one in found if one["status"] == "passed")
    assert len(child.stdout.splitlines()) == 1 + len(found), "a line each, after the machine's"


def test_on_an_image_with_cuda_each_check_goes_on_until_it_needs_a_kernel(tmp_path: Path) -> None:
    child = command(out := tmp_path / "gpu.json", "--device", "cuda", "--small", path=EMULATED)
    assert child.returncode == 1, child.stdout + child.stderr
    found = json.loads(out.read_text())
    assert found["machine"]["CUDA"] == "13.0" and found["machine"]["missing"] == []
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in found["checks"]}
    for name, row in rows.items():
        if name in ENDS:
            assert row["status"] == "failed" and row["traceback"].strip().endswith(ENDS[name]), row
    assert rows.keys() == {check.name for check in CHECKS if not check.apart}
    others = rows.keys() - ENDS.keys()
    assert {name: rows[name]["why"] for name in others if rows[name]["status"] != "passed"} == {}
    gradients = [name for name in rows["replay"]["figures"] if name.endswith("gradients, relative")]
    assert len(gradients) == 12, "all models, before the audit asks for a profile"


def test_wheels_and_image_have_what_a_server_imports_and_one_package_less_is_named(tmp_path: Path) -> None:
    assert wheels.main(str(tmp_path)) == 0, "no batch is larger than what can be carried at once"
    site = tmp_path / "site"
    for name in ("sglang-", "sglang_kernel-", "transformers-", "tokenizers-"):  # the others are here
        (wheel,) = (tmp_path / "2").glob(f"{name}*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    assert (site / wheels.KERNELS[0]).stat().st_size > 20_000_000
    said = walked(site).stdout.splitlines()[-1]
    assert "'_OpNamespace' 'sgl_kernel' object has no attribute 'rmsnorm'" in said, "its first kernel"
    assert '"our plug-in is found and applied": true' in said and '"sglang": "0.5.15.post1"' in said
    for package in ("openai", "sgl_kernel", "uvicorn"):
        assert f"No module named '{package}'" in walked(site, without=package).stdout.splitlines()[-1]
