"""How long a member waits: for the others' hello and for the group that they then form, one limit for both."""

from __future__ import annotations

import time
import uuid
from typing import Any

import pytest
import torch

from r3channel.clock import StageClock
from r3channel.config import ChannelConfig
from r3channel.errors import DeadlineExceeded
from r3channel.metrics import Metrics
from r3channel.plan.layout import TrainerLayout
from r3channel.trainer.member import Member
from r3channel.transport.base import Rendezvous


class LateControl:
    """Every member has said hello a little before the limit, and then nobody comes."""

    def __init__(self, *, hello_s: float) -> None:
        self._hello_s = time.monotonic() + hello_s

    def hello(self, **_: Any) -> dict[str, Any] | None:
        if time.monotonic() < self._hello_s:
            return None
        name = uuid.uuid4().hex
        return Rendezvous(backend="loopback", name=name, epoch=1, rank=1, world_size=2).to_dict()


def test_a_join_ends_within_its_limit_however_late_the_others_say_hello() -> None:
    layout, clock = TrainerLayout(), StageClock("trainer")
    member = Member(
        LateControl(hello_s=1.5),  # type: ignore[arg-type]
        layout=layout,
        coords=layout.coords(0),
        config=ChannelConfig(backend="loopback"),
        device=torch.device("cpu"),
        clock=clock,
        metrics=Metrics("trainer", clock=clock),
    )
    begin_s = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        member.join(timeout_s=2.0)
    assert time.monotonic() - begin_s < 3.0
