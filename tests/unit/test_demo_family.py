"""The demo's processes end as one: on a signal, when the run ends, and when their owner is killed. Real processes, no engine.

What a killed run left in the temporary folder is found and removed; what is another's, or in use, stays. `make demo` is make's
own recipe, with a `python` that starts the demo with another script.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from examples.embedded.scratch import PREFIX, remove_leftovers, scratch
from examples.embedded.sglang import segments_of
from tests.support.children import ROOT, foreground
from tests.support.waits import PROGRAM_S, SOON_S

RUN = r"""
import mmap, os, signal, subprocess, sys, tempfile, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
for said, say in (os.pipe() for _ in range(3)):
    if (between := os.fork()) == 0:  # a daemon: no parent, no group, no signal but one
        os.setsid()
        if os.fork() == 0:
            open(f"/dev/shm/sgl_shm_mq_{os.getpid()}_test", "w").close()  # as SGLang names its own: by the process,
            loads = open(f"/dev/shm/sglang_loads_r3test_{os.getpid()}.shm", "w+b")  # or by chance
            loads.truncate(4096); mapped = mmap.mmap(loads.fileno(), 4096)
            os.write(1, b"%d\n" % os.getpid()); os.write(say, b".")
            time.sleep(600)
        os._exit(0)
    os.read(said, 1); os.waitpid(between, 0)  # the run does not end before its daemons have said who they are
open(tempfile.mkstemp()[1], "w").write("left")
os.write(1, b"%d\n" % os.getpid())
time.sleep(float(sys.argv[2]))
sys.exit(7)
"""


def start(
    folder: Path, *, seconds: float, make: bool = False
) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """The demo with another script; the processes that its run is made of, the daemons first. In a session of its own."""
    (script := folder / "run.py").write_text(RUN)
    program = f"import pathlib, sys; from examples import demo; demo.SCRIPT = pathlib.Path({str(script)!r})\n"
    (folder / "demo.py").write_text(f"{program}sys.exit(demo.run(sys.argv[1:]))\n")
    command = [sys.executable, str(folder / "demo.py"), str(seconds)]
    if make:
        (python := folder / "python").write_text(
            f'#!/bin/sh\n[ "$1 $2" = "-m examples.demo" ] && exec {command[0]} {command[1]} "$3"\n'
        )
        python.chmod(0o700)
        command = ["make", "-s", "-o", "setup", "demo", f"BIN={folder}", f"ARGS={seconds}"]
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    child = subprocess.Popen(
        command, cwd=ROOT, env=ours | {"TMPDIR": str(folder)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True, preexec_fn=foreground,
    )  # fmt: skip
    assert child.stdout is not None
    parts = [psutil.Process(int(child.stdout.readline())) for _ in range(4)]
    return child, sorted(parts, key=lambda part: os.getsid(part.pid) == part.pid)  # the run leads its session


def scratch_of(folder: Path) -> list[Path]:
    return list(folder.glob("r3demo-*"))


@pytest.mark.parametrize("make", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_with_one_line(tmp_path: Path, number: signal.Signals, make: bool) -> None:
    """A terminal sends its signal to all processes of the foreground; SIGTERM comes to the command alone."""
    child, parts = start(tmp_path, seconds=600, make=make)
    (folder,) = scratch_of(tmp_path)
    (os.killpg if number == signal.SIGINT else os.kill)(child.pid, number)
    _, text = child.communicate(timeout=PROGRAM_S)
    said, *more = text.splitlines()
    assert said == f"demo: stopped by {number.name}: the run, its engines, Ray and trainers, 4 processes"
    if make:  # a shell calls both 128 and the number
        assert child.returncode == -number and "".join(more).startswith("make: ***")
    else:
        assert child.returncode == 128 + number and not more
    assert not any(part.is_running() for part in parts) and not folder.exists()
    assert not any(True for part in parts for _ in Path("/dev/shm").glob(f"sgl*_{part.pid}[_.]*"))


@pytest.mark.parametrize(("make", "status"), [(False, 7), (True, 2)])
def test_a_run_leaves_nothing_and_its_status_is_the_commands(tmp_path: Path, make: bool, status: int) -> None:
    """make has one status for all failures, and says the command's own."""
    child, parts = start(tmp_path, seconds=0.2, make=make)
    _, said = child.communicate(timeout=PROGRAM_S)
    assert child.returncode == status and (said.endswith("Error 7\n") if make else not said)
    assert not any(part.is_running() for part in parts) and not scratch_of(tmp_path)


def test_after_kill_9_the_run_ends_and_the_next_one_removes_what_was_left(tmp_path: Path) -> None:
    child, parts = start(tmp_path, seconds=600)
    (folder,) = scratch_of(tmp_path)
    child.kill()
    child.wait(SOON_S)
    parts[-1].wait(SOON_S)  # SGLang's and Ray's own processes follow it; these daemons do not
    segments = segments_of(daemon.pid for daemon in parts[:-1])
    assert len(segments) == 2 * len(parts[:-1])
    for daemon in parts[:-1]:
        daemon.kill()
    for segment in segments:
        segment.unlink()
    assert folder.exists()
    again, _ = start(tmp_path, seconds=0.2)
    _, said = again.communicate(timeout=PROGRAM_S)
    assert said == f"demo: removed {folder}, which a run that was killed had left\n"
    assert not scratch_of(tmp_path)


# -- the temporary folder ----------------------------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left_by_a_killed_run(base: Path, name: str) -> Path:
    folder = base / f"{PREFIX}{name}"
    (folder / "ray").mkdir(parents=True)
    (folder / "ray" / "log").write_text("x")
    (folder / "lock").touch()
    return folder


def test_a_killed_runs_folder_goes_and_a_living_ones_stays(base: Path) -> None:
    dead = left_by_a_killed_run(base, "dead")
    with scratch() as living:
        assert remove_leftovers() == [dead]
        assert [path.name for path in base.iterdir()] == [living.name]


def test_what_is_not_ours_stays(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = base / "home"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (base / f"{PREFIX}link").symlink_to(elsewhere)
    (base / f"{PREFIX}new").mkdir()  # its run has not come to its lock yet
    left_by_a_killed_run(base, "x").rename(base / "r3other-x")
    before = sorted(os.listdir(base))
    assert remove_leftovers() == [] and sorted(os.listdir(base)) == before
    assert (elsewhere / "lock").exists()
    folder = left_by_a_killed_run(base, "theirs")
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)  # another user asks
    assert remove_leftovers() == [] and folder.exists()
