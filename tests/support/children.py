"""Programs that a test runs in a process of their own, from the repository's root; and a file system of a process's own."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.waits import PROGRAM_S

ROOT = Path(__file__).parents[2]
_NEW_NAMESPACE = 0x20000


def run(
    *command: str, cwd: Path = ROOT, input: str | None = None, limit_s: float = PROGRAM_S, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`python *command`, with these variables on top of ours; whatever its status."""
    try:
        return subprocess.run(
            [sys.executable, *command], cwd=cwd, input=input, env=os.environ | environment, capture_output=True,
            text=True, timeout=limit_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"")[-4000:] + (late.stderr or b"")[-4000:]
        raise AssertionError(f"{command[:3]} still runs after {limit_s:g} s\n{said.decode()}") from None


def printed(*command: str, cwd: Path = ROOT, limit_s: float = PROGRAM_S, **environment: str) -> str:
    """What `python *command` prints; it must end well."""
    done = run(*command, cwd=cwd, input=None, limit_s=limit_s, **environment)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def said_by(program: str, *arguments: str, **environment: str) -> str:
    """What `python -c program` prints; it must end well."""
    return printed("-c", program, *arguments, cwd=ROOT, limit_s=PROGRAM_S, **environment)


def facts_of(program: str, *arguments: str, **environment: str) -> Any:
    """The JSON in the line that begins with FACTS, of all that `python -c program` prints."""
    lines = said_by(program, *arguments, **environment).splitlines()
    return json.loads(next(line.removeprefix("FACTS ") for line in lines if line.startswith("FACTS ")))


def foreground() -> None:
    """Before a child that a test interrupts begins: what a shell starts in the background, as tests may be, ignores Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def mounted(folder: str | Path, size: str) -> bool:
    """Mount a small file system there that no other process sees, to be filled; return whether this process may."""
    mounts = (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", f"size={size}", "none", str(folder)])
    allowed = not ctypes.CDLL(None).unshare(_NEW_NAMESPACE)
    return allowed and not any(subprocess.call(["mount", *mount]) for mount in mounts)
