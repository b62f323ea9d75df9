"""`make gpu DEVICE=cpu`: the command that is run once where a GPU is at hand must not be broken then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.ranks import ROOT
from tests.gpu.run import CHECKS

pytestmark = [pytest.mark.dist, pytest.mark.full, pytest.mark.timeout(600)]
ON_A_CPU = {"tests": "not run", "staging": "not run"}


def test_every_check_runs_in_small_without_a_gpu_or_says_why_not(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "tests.gpu.run", "--device", "cpu", "--out", str(out)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=560)
    assert child.returncode == 0, child.stdout + child.stderr
    found = json.loads(out.read_text())["checks"]
    wanted = {check.name: ON_A_CPU.get(check.name, "passed") for check in CHECKS}
    assert {one["name"]: one["status"] for one in found} == wanted
    assert all(one["why"] for one in found if one["status"] == "not run")
    assert len(child.stdout.splitlines()) == 1 + len(found), "a line each, after the machine's"
