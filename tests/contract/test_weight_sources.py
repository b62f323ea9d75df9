"""Several trainer ranks broadcast to all engines: each bucket once, in one order, and without an engine that is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.contract.test_weight_faults import UPDATE
from tests.dist.ranks import run_ranks
from tests.support.fake_engine import FakeEngine
from tests.support.waits import UPDATE_S, busy
from tests.support.weights import NAMES, holds, serving, weights

RANK = "tests.contract.source_rank"


def test_a_bucket_is_broadcast_once_and_no_rank_that_fails_leaves_a_mixture(tmp_path: Path) -> None:
    engines = [FakeEngine() for _ in range(3)]
    engines[1].settings |= {"tp_size": 2}
    hows = ["good", "slow", "nan", "raises", "again", "dies"]
    job: dict[str, Any] = {"engines": [engine.url for engine in engines], "hows": hows}
    # a source that is slow takes longer; an engine does not, on a machine with much to do either
    job["engine_timeout_s"] = 2 * busy()
    first, second, *_, silent = run_ranks(RANK, tmp_path, world_size=4, job=job)
    for how in ("good", "slow", "again"):
        assert first[how]["said"] == [] and first[how]["sent"] == [1024] * 3  # of its kilobytes
        assert silent[how]["said"] == silent[how]["sent"] == []
        assert len(first[how]["routable"]) == 3
    assert "holds NaN" in first["nan"]["said"][1] and "gather failed" in silent["raises"]["said"][1]
    assert "trainer rank 1 is gone" in first["dies"]["said"][1] and second == {}
    for engine in engines:
        assert engine.paused and engine.version == "3"
        assert all(one == other for one, other in zip(engine.received, engines[0].received, strict=False))


def test_an_engine_that_is_lost_on_the_way_ends_no_update_of_the_others(tmp_path: Path) -> None:
    good, bad, other = (FakeEngine() for _ in range(3))
    bad.script[UPDATE, 3] = "die"
    job = {"engines": [good.url, bad.url, other.url], "hows": ["lost", "next"], "engine_timeout_s": UPDATE_S}
    found = run_ranks(RANK, tmp_path, world_size=3, job=job)
    assert holds(good, 2) and holds(other, 2)
    assert all(told["lost"]["said"] == told["next"]["said"] == [] for told in found)
    assert found[0]["lost"]["routable"] == sorted([good.url, other.url])
    assert good.calls.count(UPDATE) == 2 * len(NAMES) + 1  # the bucket under way came again
    assert all(torch.equal(good.tensors[name], tensor) for name, tensor in weights(2).items())


def test_engines_with_our_half_get_the_ranks_tensors_staged(tmp_path: Path) -> None:
    engines = [serving(), serving()]
    job = {"engines": [engine.url for engine in engines], "hows": ["good", "again"], "staged": True}
    job["engine_timeout_s"] = UPDATE_S
    found = run_ranks(RANK, tmp_path, world_size=3, job=job)
    assert all(holds(engine, 2) and UPDATE not in engine.calls for engine in engines)
    assert [told["again"]["said"] for told in found] == [[]] * 3
