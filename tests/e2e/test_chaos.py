"""Two minutes of seeded faults on the demo's real processes; the ledger is `tests.chaos`'s own."""

from __future__ import annotations

import json

import pytest

from tests import children


@pytest.mark.full
@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_under_faults_no_row_is_lost_without_a_name_doubled_or_changed_and_nothing_hangs() -> None:
    done = children.run("-m", "tests.chaos", "--seed", "7", "--minutes", "2", "--json", limit_s=840.0)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert not any(report[key] for key in ("lost", "duplicated", "wrong_rows", "hung"))
    assert report["rows_compared"] > 10_000 and len(report["faults_fired"]) >= 4, report
