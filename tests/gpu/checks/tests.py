"""The tests of this folder: none fails, none is skipped. Without a GPU they are collected only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.facts import Facts


class Counted:
    """A plug-in of pytest's."""

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        self.collected = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected = len(session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failed[report.nodeid.rpartition("::")[2]] = str(crash and crash.message).partition("\n")[0]


def check(device: str, facts: Facts) -> None:
    counted, folder = Counted(), str(Path(__file__).parents[1])
    only = [] if device == "cuda" else ["--collect-only"]
    status = pytest.main(["-q", "-p", "no:cacheprovider", *only, folder], plugins=[counted])
    facts.note("failed", counted.failed)
    facts.expect("pytest ended with", int(status), status == 0, "0")
    facts.expect("tests", counted.collected, counted.collected > 0, "some")
    if device == "cpu":
        facts.not_run = "collected only, they need a CUDA device"
        return
    passed = counted.outcomes == {"passed": counted.collected}
    facts.expect("outcomes", counted.outcomes, passed, "all passed")
