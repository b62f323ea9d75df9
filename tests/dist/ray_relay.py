"""A relay in a Ray actor, whose group can be made to fail or which dies as it acknowledges; one Ray node for it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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


ROOT = Path(__file__).parents[2]


@contextmanager
def ray_node() -> Iterator[None]:
    """A Ray of its own on loopback, without a dashboard."""
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
        yield
    finally:
        ray.shutdown()


class Notary:
    """Answers as a relay's actor does and keeps on disk what was acknowledged. Its first life ends at its first `ack`."""

    def __init__(self, folder: str) -> None:
        self._acks = Path(folder) / "acks"
        self._lived = Path(folder) / "lived"

    def r3channel_control(self, call: str, arguments: dict[str, Any]) -> Any:
        if call != "ack":
            return self._acks.read_text().split() if self._acks.exists() else []
        if not self._lived.exists():
            self._lived.touch()
            os._exit(1)
        with self._acks.open("a") as file:
            file.write(f"{arguments['step']}\n")
        return None


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
