"""Programs that a test runs in a process of their own, from the repository's root, and waits for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_S = 150.0


def run(
    *command: str, cwd: Path = ROOT, input: str | None = None, limit_s: float = LIMIT_S, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`python *command`, with these variables on top of ours; whatever its status."""
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, input=input, env=os.environ | environment, capture_output=True, text=True,
        timeout=limit_s, check=False,
    )  # fmt: skip


def said_by(program: str, *arguments: str, **environment: str) -> str:
    """What `python -c program` prints; it must end well."""
    done = run("-c", program, *arguments, cwd=ROOT, input=None, limit_s=LIMIT_S, **environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
