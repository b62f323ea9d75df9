"""Where an update's time went: each moment belongs to one stage."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from r3channel.weights import progress
from r3channel.weights.progress import Deadline, Run


def test_a_stage_counts_its_own_time_and_not_that_of_stages_inside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    run = Run(Deadline(20, "test"))

    def spend(seconds: float) -> None:
        now_s[0] += seconds

    def other_thread() -> None:
        spend(1)  # as long as it takes to start
        with run.stage("plan"):
            spend(2)
            for _ in range(2):
                with run.stage("convert"):
                    spend(4)
                with run.stage("pack"):
                    spend(8)

    with run.stage("join"):
        spend(16)
    with run.stage("wait_send"):
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        spend(32)
    assert run.report.seconds == {"join": 16, "convert": 8, "pack": 16, "plan": 2, "wait_send": 33}
    assert sum(run.report.seconds.values()) == now_s[0]
