"""From TP0 to its group, in two real processes: scatter under sequence parallelism, rebroadcast without, failure to all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.delivery import TOKENS
from tests.dist.ranks import run_ranks
from tests.samples import SPEC

pytestmark = pytest.mark.dist
ROWS = sum(tokens - 1 for tokens in TOKENS.values()) * SPEC.num_moe_layers
"""Each was compared with what was added, and its digest with the engine's, by the rank that holds it."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fanout")
    return run_ranks(Path(__file__).with_name("fanout_ranks.py"), folder, world_size=2, job={}, timeout_s=120)


def test_under_sequence_parallelism_each_tp_rank_keeps_only_its_slots(results: list[dict[str, Any]]) -> None:
    rows = [result["scatter"]["rows"] for result in results]
    assert sum(rows) == ROWS and all(rows)
    sizes = [result["scatter"]["bytes"] for result in results]
    assert sizes[0] == sizes[1] < results[0]["rebroadcast"]["bytes"]


def test_without_it_every_tp_rank_holds_all_rows(results: list[dict[str, Any]]) -> None:
    assert [result["rebroadcast"]["rows"] for result in results] == [ROWS, ROWS]


def test_a_failure_of_tp0_reaches_the_other_rank_as_its_own_error(results: list[dict[str, Any]]) -> None:
    assert results[0]["error"][0] == "TicketMismatch"
    assert results[1]["error"][0] == "PeerFailed" and "TP rank 0" in results[1]["error"][1]
