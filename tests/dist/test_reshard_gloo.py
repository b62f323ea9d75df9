"""Trainer ranks to engine ranks over real gloo processes: scalar, empty, fp8, bf16, int8, cast and oversized tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from r3channel.transport.process_group import RendezvousStore
from tests.dist.ranks import run_ranks
from tests.dist.reshard_rank import MESSAGE_BYTES, TENSORS

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module", params=[(2, 2), (3, 3), (4, 2)], ids=lambda sides: f"{sides[0]}+{sides[1]}")
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, list[dict[str, Any]]]:
    """(trainers, results by rank)."""
    trainers, engines = request.param
    store = RendezvousStore("127.0.0.1")
    job = {"trainers": trainers, "host": store.host, "port": store.port}
    results = run_ranks(
        Path(__file__).with_name("reshard_rank.py"),
        tmp_path_factory.mktemp("reshard"),
        world_size=trainers + engines,
        job=job,
        timeout_s=150,
    )
    store.close()
    return trainers, results


def test_awex_exact_reshard_over_a_joint_group_brings_every_byte(
    run: tuple[int, list[dict[str, Any]]],
) -> None:
    trainers, results = run
    assert all(result["equal"] == [True, True] for result in results)
    assert all(result["tensors"] == len(TENSORS) for result in results[trainers:])
    assert all(result["sent"] > 0 for result in results[:trainers])


def test_uccl_the_controller_gathers_the_metadata_over_gloo(run: tuple[int, list[dict[str, Any]]]) -> None:
    """Each rank told only what it holds itself; all have planned from the same two maps."""
    _, results = run
    assert all(result["surveyed"] for result in results)
    assert len({result["hashes"][0] for result in results}) == 1


def test_an_oversized_tensor_travels_in_several_buckets(run: tuple[int, list[dict[str, Any]]]) -> None:
    trainers, results = run
    assert 4 * MESSAGE_BYTES < 1501 * 1024 * 4
    assert sum(result["messages"] for result in results[trainers:]) >= 6


def test_ranks_with_another_plan_are_refused_with_both_hashes(run: tuple[int, list[dict[str, Any]]]) -> None:
    _, results = run
    for result in results:
        mine, other = result["hashes"]
        assert mine != other and mine in result["mismatch"] and other in result["mismatch"]


def test_a_trainer_rank_that_dies_ends_the_update_of_all(run: tuple[int, list[dict[str, Any]]]) -> None:
    """Rank 0 exits after the agreement; every other rank raises by its deadline of 2 s."""
    _, results = run
    assert all(result["died"] in ("TransportError", "DeadlineExceeded") for result in results[1:])
    assert all(result["after_s"] < 30 for result in results[1:])
