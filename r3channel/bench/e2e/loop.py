"""The demo's loop in three modes, each a process tree of its own, in turn. Knows where the script lies and what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from r3channel.embedded.sglang import kill_family
from r3channel.errors import ConfigError, EngineUnavailable

SCRIPT = Path(__file__).parents[3] / "examples" / "async_grpo" / "measure.py"
MODES = ("channel", "default", "off")
_RUN_S = 600.0


def measure(*, repeats: int, steps: int) -> dict[str, Any]:
    """Per mode the medians over its runs of step, train wait, trainer CPU and rollout speed; beside them every run."""
    if not SCRIPT.is_file():
        raise ConfigError(
            "bench e2e runs examples/async_grpo/measure.py, which is part of the repository and not of the wheel; clone it"
        )
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for repeat in range(repeats):
        for mode in MODES[repeat % len(MODES) :] + MODES[: repeat % len(MODES)]:
            print(f"bench e2e: {mode}, {steps} steps", file=sys.stderr, flush=True)
            runs[mode].append(_run(mode, steps))
    return {mode: _medians(found) for mode, found in runs.items()}


def _run(mode: str, steps: int) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), "--mode", mode, "--steps", str(steps)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        stdout, stderr = child.communicate(timeout=_RUN_S)
    except subprocess.TimeoutExpired as error:
        raise EngineUnavailable(f"the loop in mode {mode} did not end within {_RUN_S:.0f} s") from error
    finally:
        kill_family(child)
    if child.returncode:
        raise EngineUnavailable(
            f"the loop in mode {mode} ended with status {child.returncode}:\n{stderr[-4000:]}"
        )
    return json.loads(stdout.strip().splitlines()[-1])


def _medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = [name for name, value in runs[0].items() if isinstance(value, float)]
    return {name: median(run[name] for run in runs) for name in names} | {"runs": list(runs)}
