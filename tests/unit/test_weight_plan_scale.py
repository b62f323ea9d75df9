"""The plan of a DeepSeek-V3-like model over 256 -> 256 ranks: balanced, small, and the same on both sides."""

from __future__ import annotations

import pytest

from r3channel.weights.geometry import ShardMap
from r3channel.weights.plan import plan_reshard
from tests.reshard_model import figures, side


@pytest.fixture(scope="module")
def sides() -> tuple[ShardMap, ShardMap]:
    return side(ranks=256, tp=8, ep=64), side(ranks=256, tp=32, ep=32, first=256)


def test_the_busiest_of_256_senders_stays_within_two_percent_and_one_unit(
    sides: tuple[ShardMap, ShardMap],
) -> None:
    plan = plan_reshard(*sides, rank=0, world_size=512)
    found, senders = figures(plan), {rank for holders, _, _ in plan.shares for rank in holders}
    assert found["tensors"] > 45_000 and len(senders) == 256
    assert found["floor_gb"] <= found["busiest_gb"] <= found["bound_gb"]


def test_a_trainer_keeps_its_part_of_the_plan_only(sides: tuple[ShardMap, ShardMap]) -> None:
    """It sends 1/256 of what the eight engines of 32 ranks receive; another rank comes to the same hash."""
    trainer, engine = (plan_reshard(*sides, rank=rank, world_size=512) for rank in (7, 300))
    assert trainer.hash == engine.hash and not engine.ops
    assert len(trainer.ops) < 3000
    assert (
        sum(op.box.numel * trainer.tensors[op.tensor].dtype.itemsize for op in trainer.ops)
        == trainer.sent_bytes_R[7]
    )
