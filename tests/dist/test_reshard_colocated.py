"""Colocated mode: three engine processes map the shards of three trainer ranks and reshard among themselves."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
import torch

from r3channel.weights.lending import lend
from tests.dist.colocated_rank import maps
from tests.dist.ranks import run_ranks
from tests.reshard_cases import held

pytestmark = pytest.mark.dist
WORLD_SIZE = 3


def test_awex_colocated_engines_map_the_trainers_memory_and_reshard_among_themselves(tmp_path: Path) -> None:
    source, _ = maps(WORLD_SIZE)
    lent = [lend(held(source, rank, seed=5), device=torch.device("cpu")) for rank in range(WORLD_SIZE)]
    cards = [one.card for one in lent]
    payload_bytes = sum(one.arena.buffer_N.numel() for one in lent)
    job = {"cards": cards, "name": uuid.uuid4().hex}
    results = run_ranks(
        Path(__file__).with_name("colocated_rank.py"), tmp_path, world_size=WORLD_SIZE, job=job, timeout_s=120
    )
    assert all(result["equal"] for result in results)
    assert all(result["copied"] > 0 and result["sent"] > 0 for result in results)
    # zero copy: names and boxes travelled, no values; and what the engines wrote is in the trainers' memory
    assert len(json.dumps(cards)) < payload_bytes / 10
    assert [one.arena.buffer_N[0].tolist() for one in lent] == [100, 101, 102]
    for one in lent:
        one.close()
