"""Actors of test_ray_relays.py: the rollout manager with relay 0 and the coordinator, and a node with an engine on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

from r3channel.config import ChannelConfig
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.actor import RelayHost
from r3channel.relay.placement import PlacedRelays
from r3channel.relay.relay import Relay
from r3channel.relay.several import Coordinator
from tests.direct import Engine, hello_of
from tests.samples import SPEC


class Manager(RelayHost):
    """What a rollout manager does with several relays."""

    def __init__(self, layout: dict[str, Any], placed: PlacedRelays, token: str) -> None:
        self.relay = Relay(SPEC, TrainerLayout.from_dict(layout), placed.config)
        self.url = self.relay.serve(token_file=token)
        self.relays = Coordinator(self.relay, placed.peers(timeout_s=30))

    def address(self) -> str:
        return self.url

    def expect(self, engines: list[str]) -> None:
        self.relays.expect_engines(engines, timeout_s=30)

    def add(self, name: str, reply: dict[str, Any], tokens: int, engine: str) -> None:
        self.relays.add(name, reply, range(tokens), engine=engine)

    def seal(self, step: int, ranks: list[list[list[str]]]) -> bytes:
        return self.relays.seal(step, Assignment.given(ranks)).to_bytes()

    def join_previous(self, timeout_s: float) -> None:
        self.relays.join_previous(timeout_s=timeout_s)

    def status(self) -> dict[str, Any]:
        return self.relays.status()

    def close(self) -> None:
        self.relays.close()


class Node:
    """An engine bound to the relay of its node."""

    def __init__(self, number: int) -> None:
        self.number = number

    def node_id(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def start(self, url: str, token: str) -> str:
        name = f"http://e{self.number}:1"
        self.engine = Engine(url, Path(token), hello=hello_of(name, boot_id=100 + self.number))
        return name

    def finish(self, request: str, tokens: int, seed: int) -> dict[str, Any]:
        return self.engine.finish(request, tokens, seed=seed)


def config_of(**changes: Any) -> ChannelConfig:
    return ChannelConfig(**{"bucket_bytes": 4096, "frame_timeout_s": 20.0, **changes})
