"""Hostile input of every kind, from a seed: twenty thousand here, a million in `make chaos`."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec

import pytest

from tests.support.children import run
from tests.support.waits import RUN_S


def test_changed_inputs_of_every_kind_are_read_as_an_oracle_reads_them_or_refused_by_name() -> None:
    count = 20_000
    done = run("-m", "tests.chaos.hostile", "--seed", "1", "--count", str(count), "--json", limit_s=RUN_S)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    told = json.loads(done.stdout)
    assert told["signed"] >= 0.8 * count and not told["failures"]
    assert all(outcomes.get("read") for outcomes in told["outcomes"].values()), told["outcomes"]
    greeted = {"greeted": 1, "greeted with a wrong proof": 0}
    assert told["crowd"] == {"taken 200": 100, "wrong token 401": 100} | greeted


@pytest.mark.full
@pytest.mark.skipif(find_spec("atheris") is None, reason="no Atheris for this machine (make setup says so)")
def test_coverage_guides_inputs_to_branches_that_the_corpus_does_not_reach() -> None:
    done = run("-m", "tests.chaos.guided", "ticket", "--seconds", "5", limit_s=RUN_S)
    assert done.returncode == 0, done.stderr[-4000:]
    begin, end = (int(re.findall(rf"{word} *cov: (\d+)", done.stderr)[0]) for word in ("INITED", "DONE"))
    assert end > begin > 100
