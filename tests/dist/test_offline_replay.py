"""A recorded step goes through the trainer side alone; the examples of the README run as they stand.

The recording is the third step of `r3channel demo --steps 3 --record DIR`; a new format of ticket or frame needs a new one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from r3channel.errors import FrameError, TicketMismatch
from r3channel.recording import Recording

pytestmark = pytest.mark.dist
EXAMPLES = Path(__file__).parents[2] / "examples"
RECORDING = Path(__file__).parents[1] / "golden" / "recording" / "step-000002"
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


def test_a_damaged_frame_of_a_recording_is_refused_and_its_sample_named(tmp_path: Path) -> None:
    damage(tmp_path / "r", "frames.bin")
    recording = Recording.load(tmp_path / "r")
    with pytest.raises(FrameError, match="step2/sample"):
        for dp in (0, 1):
            recording.shards(dp=dp)


def test_a_damaged_ticket_of_a_recording_is_refused(tmp_path: Path) -> None:
    damage(tmp_path / "r", "ticket.bin")
    with pytest.raises(TicketMismatch, match="damaged"):
        Recording.load(tmp_path / "r")


def test_two_samples_that_were_exchanged_in_a_recording_are_noticed(tmp_path: Path) -> None:
    recording = Recording.load(RECORDING)
    first, second = recording.ticket.assignment.sample_ids[:2]
    recording.frames[first], recording.frames[second] = recording.frames[second], recording.frames[first]
    with pytest.raises((FrameError, TicketMismatch), match="step2/sample"):
        recording.rows(first)


def damage(folder: Path, name: str) -> None:
    shutil.copytree(RECORDING, folder)
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["ticket.bin", "frames.bin", "frames.json", "tokens.npz"])
def test_a_recording_that_lacks_a_file_names_it(tmp_path: Path, name: str) -> None:
    shutil.copytree(RECORDING, tmp_path / "r")
    (tmp_path / "r" / name).unlink()
    with pytest.raises(FrameError, match=name):
        Recording.load(tmp_path / "r")


@pytest.mark.parametrize(("name", "ranks"), [("01_one_process.py", 1), ("02_processes.py", 4)])
def test_the_examples_run_and_show_no_difference(name: str, ranks: int) -> None:
    done = example(name)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(" 0 different") == ranks


def test_the_first_example_fits_one_screen() -> None:
    assert len((EXAMPLES / "01_one_process.py").read_text().splitlines()) < 60
