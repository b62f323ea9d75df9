"""Runs one worker script as several processes: rendezvous by file, a deadline, and the failing rank named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_ranks(
    script: Path,
    folder: Path,
    *,
    world_size: int,
    job: dict[str, Any],
    timeout_s: float,
    overlay: Sequence[Path] = (),
) -> list[dict[str, Any]]:
    """Run `script` on `world_size` processes and return what each wrote with `write_result`, by rank.

    Each gets one JSON argument: `job` with rank, world_size, init_method and out. Ends every process on leaving. Packages in
    the folders of `overlay` win over the installed ones.

    Raises:
        AssertionError: a rank failed or the deadline passed; holds the failing rank's last output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(map(str, [*overlay, ROOT]))
    processes = [_start(script, folder, rank, world_size, job, path) for rank in range(world_size)]
    try:
        _wait(processes, folder, deadline=time.monotonic() + timeout_s, timeout_s=timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((folder / f"result.{rank}.json").read_text()) for rank in range(world_size)]


def write_result(job: dict[str, Any], result: dict[str, Any]) -> None:
    """Called by a worker once, at its end."""
    (Path(job["out"]) / f"result.{job['rank']}.json").write_text(json.dumps(result))


def _start(
    script: Path, folder: Path, rank: int, world_size: int, job: dict[str, Any], path: str
) -> subprocess.Popen[bytes]:
    where = {
        "rank": rank,
        "world_size": world_size,
        "init_method": f"file://{folder / 'rendezvous'}",
        "out": str(folder),
    }
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with (folder / f"log.{rank}").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, str(script), json.dumps({**job, **where})],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def _wait(
    processes: list[subprocess.Popen[bytes]], folder: Path, *, deadline: float, timeout_s: float
) -> None:
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        assert not failed, _report(folder, failed[0], f"exit status {processes[failed[0]].returncode}")
        running = [rank for rank, process in enumerate(processes) if process.poll() is None]
        assert time.monotonic() < deadline, _report(folder, running[0], f"still running after {timeout_s} s")
        time.sleep(0.05)
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    assert not failed, _report(folder, failed[0], f"exit status {processes[failed[0]].returncode}")


def _report(folder: Path, rank: int, what: str) -> str:
    return f"rank {rank}: {what}\n{(folder / f'log.{rank}').read_text()[-4000:]}"
