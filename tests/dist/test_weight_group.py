"""The group that carries weight buckets, and an engine's end of it. SGLang's own joins it in tests/engine/test_weight_sync.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from r3channel.errors import ConfigError, DeadlineExceeded, UsageError
from r3channel.transport.process_group import in_background
from r3channel.weights.groups import WeightGroup
from tests.support.fake_engine import UPDATE, FakeEngine
from tests.support.waits import SOON_S, until

pytestmark = [pytest.mark.dist, pytest.mark.long]


@pytest.fixture
def pair() -> Iterator[tuple[WeightGroup, FakeEngine]]:
    group, engine = WeightGroup("test-weights-1", world_size=2), FakeEngine()
    body = group.where | {"rank_offset": 1}
    joined = in_background(lambda: engine.answer("/init_weights_update_group", body), name="test-engine")
    try:
        group.join(timeout_s=SOON_S)
        assert joined.result(SOON_S) == {"success": True}
        yield group, engine
    finally:
        group.close()
        engine.die()
        FakeEngine.started.remove(engine)


def receiving(group: WeightGroup, engine: FakeEngine, size: int) -> Future[Any]:
    """The engine's answer to an update of so many bytes."""
    told = {"names": ["w"], "dtypes": ["uint8"], "shapes": [[size]], "flush_cache": False}
    body = told | {"group_name": group.name}
    return in_background(lambda: engine.answer(UPDATE, body), name="test-engine")


def test_bytes_arrive_and_a_close_frees_a_waiting_peer(pair: tuple[WeightGroup, FakeEngine]) -> None:
    group, engine = pair
    payload = torch.arange(1000).to(torch.uint8)
    answer = receiving(group, engine, 1000)
    group.broadcast(payload, timeout_s=SOON_S)
    assert answer.result(SOON_S) == {"success": True} and torch.equal(engine.tensors["w"], payload)

    answer = receiving(group, engine, 10)
    until(lambda: engine.calls.count(UPDATE) == 2)
    group.close()
    group.close()
    # whether the kernel calls it closed or reset depends on whether the peer had begun to read
    assert re.search("(closed|reset) by peer", answer.result(SOON_S)["message"])
    with pytest.raises(UsageError, match="closed"):
        group.broadcast(payload, timeout_s=SOON_S)


def test_who_stands_in_for_a_member_stays_until_all_have_met_it() -> None:
    group = WeightGroup("test-weights-5", world_size=2)
    joining = in_background(lambda: group.join(timeout_s=SOON_S), name="test-join")
    group.join(1, timeout_s=SOON_S)
    joining.result(SOON_S)
    (stand_in,) = group._stand_ins
    assert not stand_in._dead
    group.close()
    until(lambda: stand_in._dead)


def test_a_join_without_the_other_member_ends_at_the_deadline_and_a_wildcard_host_is_refused() -> None:
    group = WeightGroup("test-weights-2", world_size=2)
    with pytest.raises(DeadlineExceeded, match=r"rank 0 of 2 could not join within 0\.5 s"):
        group.join(timeout_s=0.5)
    group.close()
    with pytest.raises(ConfigError, match="every interface"):
        WeightGroup("test-weights-3", world_size=1, host="0.0.0.0")
