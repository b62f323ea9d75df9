"""Actors of test_ray_relay.py: the rollout manager with its relay, and an engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from r3channel.config import ChannelConfig
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.ray_host import RelayHost
from r3channel.relay.relay import Relay
from tests.support.direct import Engine, hello_of
from tests.support.samples import SPEC


class Manager(RelayHost):
    """What a rollout manager does with its relay."""

    def __init__(self, layout: dict[str, Any], token: str) -> None:
        self.relay = Relay(SPEC, TrainerLayout.from_dict(layout), config_of())
        self.url = self.relay.serve(token_file=token)

    def address(self) -> str:
        return self.url

    def pid(self) -> int:
        return os.getpid()

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The relay's."""
        return getattr(self.relay, method)(*arguments, **options)


class Node:
    """An engine that delivers directly."""

    def start(self, url: str, token: str) -> str:
        name = "http://e:1"
        self.engine = Engine(url, Path(token), hello=hello_of(name, boot_id=100))
        return name

    def finish(self, request: str, tokens: int, seed: int) -> dict[str, Any]:
        return self.engine.finish(request, tokens, seed=seed)


def config_of(**changes: Any) -> ChannelConfig:
    return ChannelConfig(**{"bucket_bytes": 4096, "frame_timeout_s": 20.0, **changes})
