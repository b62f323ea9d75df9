"""Hostile input of every kind, from a seed: twenty thousand here, fifty in `make test-full`, a million in `make chaos`."""

from __future__ import annotations

import json

import pytest

from tests.chaos.mutations import KINDS, rows_told
from tests.children import run


def check(count: int, *, seed: int, limit_s: float) -> None:
    options = "--seed", str(seed), "--count", str(count), "--json"
    done = run("-m", "tests.chaos.hostile", *options, limit_s=limit_s)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    told = json.loads(done.stdout)
    assert told["signed"] >= 0.8 * count and not told["failures"]
    assert all(len(outcomes) > 0 for outcomes in told["outcomes"].values())
    greeted = {"greeted": 1, "greeted with a wrong proof": 0}
    assert told["crowd"] == {"taken 200": 100, "wrong token 401": 100} | greeted


def test_changed_inputs_of_every_kind_are_read_as_an_oracle_reads_them_or_refused_by_name() -> None:
    check(20_000, seed=1, limit_s=600)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_fifty_thousand_changed_inputs_are_too() -> None:
    check(50_000, seed=2, limit_s=1700)


def test_the_oracles_read_what_the_encoders_made() -> None:
    for name, kind in KINDS.items():
        for parts in kind.corpus:
            if kind.told is not None and name not in ("frame", "row message"):
                assert kind.read(parts) == kind.told(parts), name
    assert KINDS["frame"].told == rows_told
