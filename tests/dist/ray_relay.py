"""A relay in a Ray actor, whose group can be made to fail; see test_object_store.py."""

from __future__ import annotations

from typing import Any

import torch

from r3channel.config import ChannelConfig
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.actor import RelayHost
from r3channel.relay.relay import Relay
from r3channel.transport.base import Pending
from r3channel.transport.process_group import ProcessGroupTransport
from r3channel.wire.bucket import BUCKET_HEADER_BYTES
from tests.delivery import assignment, fill
from tests.samples import SPEC


class RelayActor(RelayHost):
    """Holds the relay as a rollout manager does."""

    def __init__(self, **config: Any) -> None:
        self.relay = Relay(SPEC, TrainerLayout(dp=1), ChannelConfig(**config))

    def seal(self, step: int) -> bytes:
        fill(self.relay, prefix=f"{step}-")
        return self.relay.seal(step, assignment(prefix=f"{step}-", dp=1)).to_bytes()

    def cut(self, lives: int) -> None:
        """The next `lives` lives of the group die in the middle of their first payload."""
        start_send, died = ProcessGroupTransport.start_send, []

        def cut_or_send(transport: ProcessGroupTransport, dst: int, data_N: torch.Tensor) -> Pending:
            if len(data_N) != BUCKET_HEADER_BYTES and len(died) < lives and transport not in died:
                died.append(transport)
                transport.abort()
            return start_send(transport, dst, data_N)

        ProcessGroupTransport.start_send = cut_or_send  # type: ignore[method-assign]

    def status(self) -> dict[str, Any]:
        return self.relay.status()

    def fallback_shards(self) -> float:
        return self.relay.metrics.value("r3channel_fallback_shards_total")
