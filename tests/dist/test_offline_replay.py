"""A recorded step goes through the trainer side alone; the examples of the README run as they stand.

The recording is the third step of `r3channel demo --steps 3 --record DIR`; a new format of ticket or frame needs a new one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist
EXAMPLES = Path(__file__).parents[2] / "examples"
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


@pytest.mark.parametrize(("name", "ranks"), [("01_one_process.py", 1), ("02_processes.py", 4)])
def test_the_examples_run_and_show_no_difference(name: str, ranks: int) -> None:
    done = example(name)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(" 0 different") == ranks


def test_the_first_example_fits_one_screen() -> None:
    assert len((EXAMPLES / "01_one_process.py").read_text().splitlines()) < 60
