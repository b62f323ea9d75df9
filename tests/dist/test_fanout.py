"""From TP0 to its group, in two real processes: scatter under sequence parallelism, rebroadcast without, failure to all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r3channel.plan.layout import TrainerLayout
from r3channel.recording import Recording
from tests.dist.ranks import run_ranks

pytestmark = pytest.mark.dist
RECORDING = Path(__file__).parents[1] / "golden" / "recording" / "step-000002"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fanout")
    return run_ranks(Path(__file__).with_name("fanout_ranks.py"), folder, world_size=2, job={}, timeout_s=120)


def expected(*, sp: bool) -> tuple[np.ndarray, list[np.ndarray]]:
    """(whole shard, views [tp slot, L, rows, K] per micro-batch) straight from the recording."""
    recording = Recording.load(RECORDING).replan(TrainerLayout(tp=2, sp=sp), microbatch_size=4)
    whole = recording.shards(dp=0)[0, 0, 0]
    return whole, recording.ticket.plan.shard(dp=0, pp=0).views(whole)


def test_under_sequence_parallelism_each_tp_rank_keeps_only_its_slots(results: list[dict[str, Any]]) -> None:
    whole, views = expected(sp=True)
    for rank, result in enumerate(results):
        mine = b"".join(view[rank].tobytes() for view in views)
        assert bytes.fromhex(result["scatter"]) == mine and 2 * len(mine) == len(whole)


def test_without_it_every_tp_rank_holds_all_rows(results: list[dict[str, Any]]) -> None:
    whole, _ = expected(sp=False)
    assert {result["rebroadcast"] for result in results} == {whole.tobytes().hex()}


def test_a_failure_of_tp0_reaches_the_other_rank_as_its_own_error(results: list[dict[str, Any]]) -> None:
    assert results[0]["error"][0] == "TicketMismatch"
    assert results[1]["error"][0] == "PeerFailed" and "TP rank 0" in results[1]["error"][1]
