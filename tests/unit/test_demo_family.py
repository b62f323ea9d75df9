"""The demo's processes end as one: on a signal, when the run ends, and when their owner is killed. Real processes, no engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from r3channel.embedded.sglang import unlink_segments
from tests.foreground import foreground

RUN = r"""
import os, signal, subprocess, sys, tempfile, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
for _ in range(3):
    if (between := os.fork()) == 0:  # a daemon: no parent, no group, no signal but one
        os.setsid()
        if os.fork() == 0:
            open(f"/dev/shm/sgl_shm_mq_{os.getpid()}_test", "w").close()  # as SGLang names its own
            os.write(1, b"%d\n" % os.getpid())
            time.sleep(600)
        os._exit(0)
    os.waitpid(between, 0)
open(tempfile.mkstemp()[1], "w").write("left")
os.write(1, b"%d\n" % os.getpid())
time.sleep(float(sys.argv[2]))
sys.exit(7)
"""


def start(folder: Path, *, seconds: float) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """`r3channel demo` with another script; the processes that its run is made of, the daemons first."""
    (script := folder / "run.py").write_text(RUN)
    program = (
        f"import pathlib, sys; from r3channel import demo; demo.SCRIPT = pathlib.Path({str(script)!r})\n"
    )
    program += f"sys.exit(demo.run([{str(seconds)!r}]))"
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=foreground,
    )
    assert child.stdout is not None
    parts = [psutil.Process(int(child.stdout.readline())) for _ in range(4)]
    return child, sorted(parts, key=lambda part: os.getsid(part.pid) == part.pid)  # the run leads its session


def scratch_of(folder: Path) -> list[Path]:
    return list(folder.glob("r3demo-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_with_one_line(tmp_path: Path, number: signal.Signals) -> None:
    child, parts = start(tmp_path, seconds=600)
    (folder,) = scratch_of(tmp_path)
    child.send_signal(number)
    _, said = child.communicate(timeout=10)
    assert child.returncode == 128 + number
    assert (
        said
        == f"r3channel demo: stopped by {number.name}: the run, its engines, Ray and trainers, 4 processes\n"
    )
    assert not any(part.is_running() for part in parts) and not folder.exists()
    assert not any(Path(f"/dev/shm/sgl_shm_mq_{part.pid}_test").exists() for part in parts)


def test_a_run_that_ends_leaves_nothing_and_its_status_is_the_commands(tmp_path: Path) -> None:
    child, parts = start(tmp_path, seconds=0.2)
    child.communicate(timeout=10)
    assert child.returncode == 7
    assert not any(part.is_running() for part in parts) and not scratch_of(tmp_path)


def test_after_kill_9_the_run_ends_and_the_next_one_removes_what_was_left(tmp_path: Path) -> None:
    child, parts = start(tmp_path, seconds=600)
    (folder,) = scratch_of(tmp_path)
    child.kill()
    child.wait(10)
    parts[-1].wait(2)  # SGLang's and Ray's own processes follow it; these daemons do not
    for daemon in parts[:-1]:
        daemon.kill()
    unlink_segments(daemon.pid for daemon in parts[:-1])
    assert folder.exists()
    again, _ = start(tmp_path, seconds=0.2)
    _, said = again.communicate(timeout=10)
    assert said == f"r3channel demo: removed {folder}, which a run that was killed had left\n"
    assert not scratch_of(tmp_path)
