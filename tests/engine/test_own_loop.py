"""The example of a loop of one's own, as a user runs it, with a server that other tests share and one more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.client import serving

pytestmark = pytest.mark.engine
EXAMPLE = Path(__file__).parents[2] / "examples" / "05_own_loop.py"


def test_an_own_loop_of_two_engines_two_turns_and_a_discard_runs(model_dir: Path, engine_url: str) -> None:
    with serving(model_dir) as second:
        command = [sys.executable, str(EXAMPLE), str(model_dir), engine_url, second.url]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = re.findall(r"step (\d): 4 samples, 88 tokens, live router agrees (\d\.\d+)", done.stdout)
    assert [number for number, _ in steps] == ["0", "1"]
    # Engines and trainer hold the same float32 weights in step 0: rows of other tokens would agree by chance, 0.06.
    assert float(steps[0][1]) > 0.99 and float(steps[1][1]) > 0.9
