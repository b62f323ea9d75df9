"""A step that falls back to Ray's object store: a real relay actor, a real gloo group that is cut, real references."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from r3channel.config import ChannelConfig
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket
from r3channel.relay.actor import RayControl
from r3channel.trainer.receiver import Receiver
from tests.delivery import check_rows
from tests.dist.ray_relay import RelayActor
from tests.samples import SPEC

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = {"bucket_bytes": 1024, "max_group_failures": 2}
LIMIT_S = 60.0


class Watched(RayControl):
    """Keeps what passed through the mailbox."""

    def __init__(self, actor: Any) -> None:
        super().__init__(actor, timeout_s=LIMIT_S)
        self.taken: list[Any] = []

    def mail(self, *, call: str, name: str, **arguments: Any) -> Any:
        answer = super().mail(call=call, name=name, **arguments)
        if call == "take":
            self.taken += answer
        return answer


@pytest.fixture
def actor() -> Iterator[Any]:
    with patch.dict(os.environ, RAY_AUTH_MODE="disabled"):  # what Ray writes into it is taken back
        import ray

        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100 << 20,
            _node_ip_address="127.0.0.1",
            logging_level=logging.ERROR,
            runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
        )
        try:
            yield ray.remote(RelayActor).options(max_concurrency=8).remote(**CONFIG)
        finally:
            ray.shutdown()


def test_a_step_whose_group_fails_arrives_through_ray_and_the_next_by_the_group(actor: Any) -> None:
    import ray

    def ask(method: str, *arguments: Any) -> Any:
        return ray.get(getattr(actor, method).remote(*arguments), timeout=LIMIT_S)

    control, layout = Watched(actor), TrainerLayout(dp=1)
    receiver = Receiver(
        control, spec=SPEC, layout=layout, coords=layout.coords(0), config=ChannelConfig(**CONFIG)
    )
    ask("cut", 2)
    shard = receiver.receive(Ticket.from_bytes(ask("seal", 0)))
    assert check_rows(shard, prefix="0-") > 0
    buckets = -(-shard.shard.nbytes // CONFIG["bucket_bytes"])
    assert [type(message) for message in control.taken] == [ray.ObjectRef] * 2 * buckets  # header and payload
    assert ask("fallback_shards") == 1 and ask("status")["steps"] == {}

    check_rows(receiver.receive(Ticket.from_bytes(ask("seal", 1))), prefix="1-")
    group = ask("status")["groups"][0]
    assert (group["backend"], group["failed_lives"], ask("fallback_shards")) == ("gloo", {}, 1)
    receiver.close()
