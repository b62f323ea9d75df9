"""The command that checks the GPU paths: what a row says, and what ends the run. The checks themselves run in tests/dist."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.gpu import run as command
from tests.gpu.facts import ANSWER, Facts
from tests.support.waits import PROGRAM_S, SOON_S, until

MACHINE: dict[str, Any] = {"missing": [], "GPUs": 1}


def options_of(device: str) -> argparse.Namespace:
    return argparse.Namespace(device=device, small=True)


def ended(facts: Facts, *, returncode: int = 0, stderr: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], returncode, f"noise\n{ANSWER}{json.dumps(vars(facts))}\n", stderr)


def told(process: subprocess.CompletedProcess[str]) -> command.Outcome:
    command.told(outcome := command.Outcome(name="x", about="y", status="not run"), process)
    return outcome


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """Runs a check of its own from its source, for so many seconds."""

    def run(source: str, *, limit_s: float = PROGRAM_S) -> command.Outcome:
        folder = tmp_path / "tests/gpu/checks"
        folder.mkdir(parents=True)
        (folder / "written.py").write_text(
            f"import subprocess, time\ndef check(device, facts):\n    {source}\n"
        )
        check = command.Check(name="written", about="", limit_s=limit_s)
        environment = {**os.environ, "PYTHONPATH": f"{command.ROOT}:{tmp_path}"}
        return command.run(check, options_of("cpu"), environment, MACHINE, time.monotonic() + limit_s)

    return run


@pytest.mark.parametrize(
    ("machine", "said"),
    [({"missing": ["lz4", "sglang"]}, "lz4 not installed"), ({"GPUs": 0}, "torch sees 0")],
)
def test_what_a_check_lacks_is_in_its_line_and_no_success(machine: dict[str, Any], said: str) -> None:
    check = next(check for check in command.CHECKS if check.name == "device")
    outcome = command.run(check, options_of("cuda"), {}, MACHINE | machine, time.monotonic() + PROGRAM_S)
    assert outcome.status == "not run" and said in outcome.line() and outcome.unfit
    assert "sglang" not in outcome.line(), "which this check does not need"


def test_what_proves_rows_right_comes_first_and_all_fit_into_the_limits() -> None:
    names = [check.name for check in command.CHECKS]
    costs = [name for name in names if name.endswith("_cost")]
    assert names[:5] == ["replay", "capture", "capture_weights", "device", "peers"]
    assert names[-len(costs) :] == costs
    sums = [sum(one.limit_s for one in command.CHECKS if one.apart == apart) for apart in (False, True)]
    assert sums[0] <= command.LIMIT_S[False] == 540 and sums[1] <= command.LIMIT_S[True] == 600


def test_a_missed_limit_fails_its_row_only_and_none_where_sizes_are_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts, out = Facts(small=False), tmp_path / "gpu.json"
    facts.limit("replay, percent of a step", 3.25, False, "at most 1")
    facts.limit("copy", 0.01, True, "at most 0.1")
    monkeypatch.setattr(command, "child", lambda *_, **__: ended(facts))
    monkeypatch.setattr(command, "look_at", lambda environment, server=False: MACHINE)
    assert command.main(["--out", str(out), "replay_cost"]) == 0
    (row,) = json.loads(out.read_text())["checks"]
    assert row["status"] == "missed" and row["why"] == "replay, percent of a step is 3.25, wanted at most 1"
    assert row["figures"] == {"replay, percent of a step": 3.25, "copy": 0.01}
    facts.expect("ids that differ", 3, False, "0")
    assert command.main(["--out", str(out), "replay_cost"]) == 1
    (row,) = json.loads(out.read_text())["checks"]
    assert row["status"] == "failed" and "ids that differ is 3, expected 0" in row["why"]
    assert row["figures"]["copy"] == 0.01
    small = Facts(small=True)
    small.limit("copy", 9.0, False, "at most 0.1")
    assert told(ended(small)).status == "passed" and small.figures == {"copy": 9.0}


def test_a_check_that_raises_leaves_its_figures_and_its_traceback_in_its_row(written: Any) -> None:
    outcome = written("facts.note('rows', 7); undefined")
    assert outcome.status == "failed" and outcome.figures == {"rows": 7}
    assert "NameError: name 'undefined' is not defined" in outcome.line()
    assert outcome.traceback.startswith("Traceback") and "in check" in outcome.traceback


def test_a_check_that_hangs_ends_at_its_limit_with_all_that_it_started(written: Any) -> None:
    hangs = "p = subprocess.Popen(['sleep', '600']); facts.note('pid', p.pid); p.wait()"
    outcome = written(hangs, limit_s=SOON_S)
    assert outcome.status == "failed" and "still running after " in outcome.line()
    assert "in check" in outcome.traceback, "where it hung"
    with suppress(psutil.NoSuchProcess):  # killed by then; a busy machine takes a moment to end it
        until(lambda: psutil.Process(outcome.figures["pid"]).status() == psutil.STATUS_ZOMBIE)


def test_a_check_that_dies_or_says_nothing_has_failed() -> None:
    facts = Facts()
    facts.note("rows", 7)
    died = told(ended(facts, returncode=-6, stderr="terminate called\n"))
    assert died.status == "failed" and "ended with -6: terminate called" in died.line()
    assert died.figures == {"rows": 7} and died.traceback == "terminate called\n"
    assert told(subprocess.CompletedProcess([], 0, "all is well", "")).status == "failed"
    assert told(ended(Facts())).status == "passed"
