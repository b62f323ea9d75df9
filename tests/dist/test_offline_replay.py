"""A recorded step goes through the trainer side alone; the examples of the README run as they stand.

The recording is the third step of `make demo ARGS="--steps 3 --record DIR"`; a new format of ticket or frame needs a new one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.dist
EXAMPLES = Path(__file__).parents[2] / "examples"
GOLDEN = Path(__file__).parents[1] / "golden" / "recording"
NOTHING_BUT_MEGATRON = (
    "import runpy, sys; sys.argv = sys.argv[1:]\n"
    "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    "finally:\n"
    "    loaded = {m.split('.')[0] for m in sys.modules} | {'.'.join(m.split('.')[:2]) for m in sys.modules}\n"
    "    assert not loaded & {'ray', 'sglang', 'r3channel.relay', 'r3channel.engine'}, loaded"
)


def example(name: str, *arguments: str, wrapper: str | None = None) -> subprocess.CompletedProcess[str]:
    start = ["-c", wrapper] if wrapper else []
    command = [sys.executable, *start, str(EXAMPLES / name), *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)


def test_a_recorded_step_is_replayed_exactly_by_real_megatron_alone() -> None:
    done = example("03_offline_replay.py", wrapper=NOTHING_BUT_MEGATRON)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "0 different" in done.stdout and " 0 ids" not in done.stdout


@pytest.mark.parametrize(
    ("name", "ranks"), [("01_one_process.py", 1), ("02_processes.py", 4), ("06_plain_torch.py", 1)]
)
def test_the_examples_run_and_show_no_difference(name: str, ranks: int) -> None:
    done = example(name)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(" 0 different") == ranks


def test_the_first_example_fits_one_screen() -> None:
    assert len((EXAMPLES / "01_one_process.py").read_text().splitlines()) < 60


@pytest.mark.parametrize("layout", ["dp=2,cp=2,packing=thd", "tp=2"])
def test_real_ranks_of_other_layouts_use_every_row(layout: str) -> None:
    told = command("replay", str(GOLDEN), "--layout", layout, "--gloo", "--json")
    (step,) = told["steps"]
    assert told["findings"] == [] and step["rows_of_layers"] == step["expected_rows_of_layers"] > 0


def command(*arguments: str) -> dict[str, Any]:
    """What `r3channel` printed."""
    whole = [sys.executable, "-m", "r3channel.cli", *arguments]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout)
