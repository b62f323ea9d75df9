"""The command that checks the GPU paths: it names what it cannot run, and what fails. The checks run in tests/dist."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

from tests.gpu import run as command
from tests.gpu.facts import ANSWER, Facts

STAGED = next(check for check in command.CHECKS if check.name == "staged")
MACHINE: dict[str, Any] = {"missing": [], "GPUs": 1}


def outcome_of(check: command.Check, device: str, **machine: Any) -> command.Outcome:
    return command.run(check, device, {}, {**MACHINE, **machine}, time.monotonic() + 60)


def told(stdout: str, *, returncode: int = 0, stderr: str = "") -> command.Outcome:
    outcome = command.Outcome(name="x", about="y", status="not run")
    command.told(outcome, subprocess.CompletedProcess([], returncode, stdout, stderr))
    return outcome


def test_what_is_not_installed_is_named_in_the_line_and_is_no_success() -> None:
    outcome = outcome_of(STAGED, "cuda", missing=["lz4", "sglang"])
    assert outcome.status == "not run" and "lz4 not installed" in outcome.line() and outcome.unfit
    assert "sglang" not in outcome.line(), "which this check does not need"


def test_a_machine_without_a_gpu_is_no_success_and_one_gpu_too_few_is() -> None:
    none = outcome_of(STAGED, "cuda", GPUs=0)
    assert "torch sees 0" in none.line() and none.unfit
    two = command.Check(name="staged", about="", gpus=2)
    few = outcome_of(two, "cuda", GPUs=1)
    assert few.status == "not run" and "needs 2 GPU(s), torch sees 1" in few.line() and not few.unfit


def test_no_check_begins_after_the_time_is_over() -> None:
    outcome = command.run(STAGED, "cpu", {}, MACHINE, time.monotonic() - 1)
    assert outcome.status == "not run" and "540 s were over" in outcome.line()


def test_a_check_that_dies_says_nothing_or_finds_something_wrong_has_failed() -> None:
    facts = Facts()
    facts.expect("ids that differ", 3, False, "0")
    wrong = told(f"noise\n{ANSWER}{json.dumps(vars(facts))}\n")
    assert wrong.status == "failed" and "ids that differ is 3, expected 0" in wrong.line()
    assert told("all is well").status == "failed"
    died = told(f"{ANSWER}{json.dumps(vars(Facts()))}", returncode=-6, stderr="terminate called\n")
    assert died.status == "failed" and "ended with -6: terminate called" in died.line()
    assert told(f"{ANSWER}{json.dumps(vars(Facts()))}").status == "passed"
