"""The demo's manager and trainer as a framework runs them: the relay takes over what a killed one left, and notes outlive a process."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from examples.async_grpo import channel_side
from examples.async_grpo.batch import Sample
from examples.async_grpo.grpo import Request
from examples.async_grpo.variants.audited import AuditedManager, AuditedTrainer
from r3channel.config import ChannelConfig
from r3channel.model.spec import RoutingSpec
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from tests.chaos import shim

NOTES = "notes.jsonl"


def note(**what: Any) -> None:
    with Path(os.environ["R3CHAOS_FOLDER"], NOTES).open("a") as file:
        file.write(json.dumps(what) + "\n")


def _relay(spec: RoutingSpec, layout: TrainerLayout, config: ChannelConfig, **options: Any) -> Relay:
    """A new one, or the next life of one that was killed: sealed steps go on, samples that no step has are given up by name."""
    if not [*Path(config.journal).glob("relay-*")]:
        return Relay(spec, layout, config, **options)
    relay, found = Relay.recover(spec, layout, config, **options)
    relay.resume(found)
    relay.discard([*found.pending])
    return relay


class Manager(AuditedManager):
    def __init__(self, args: argparse.Namespace, spec: dict[str, Any]) -> None:
        shim.apply("relay")
        channel_side.Relay = _relay  # pyright: ignore[reportAttributeAccessIssue]
        super().__init__(args, spec)

    def life(self) -> int:
        return os.getpid()

    def links(self) -> tuple[int, list[Any]]:
        """How many engines are connected to the relay, and which receivers."""
        relay: Relay = self.routing.relay  # pyright: ignore[reportAttributeAccessIssue]
        assert relay._door is not None
        return len(relay._door._open), relay.status()["receivers"]["connected"]

    def forget(self, step: int, names: list[str]) -> None:
        """A step that is given up."""
        relay: Relay = self.routing.relay  # pyright: ignore[reportAttributeAccessIssue]
        relay.abandon(step)
        relay.discard(names)

    def undelivered(self) -> dict[int, Any]:
        relay: Relay = self.routing.relay  # pyright: ignore[reportAttributeAccessIssue]
        return relay.undelivered(wait_s=10.0)

    def generate(self, step: int) -> list[Any]:
        boxes = super().generate(step)
        note(sealed=self._kept)
        return boxes

    def _ask(
        self, requests: list[Request], times: dict[str, tuple[float, float]]
    ) -> dict[str, tuple[str, bytes | BaseException]]:
        named = [replace(request, rid=f"{request.sample_id}~{time.time_ns()}") for request in requests]
        note(asked={request.sample_id: (request.rid, len(request.prompt)) for request in named})
        answers = super()._ask(named, times)
        lost = {name: type(why).__name__ for name, (_, why) in answers.items() if not isinstance(why, bytes)}
        note(named=lost)
        return answers

    def _add(self, request: Request, url: str, body: bytes) -> Sample:
        try:
            sample = super()._add(request, url, body)
        except Exception as error:
            note(named={request.sample_id: type(error).__name__})
            raise
        note(received={request.sample_id: len(sample.tokens) - 1})
        return sample

    def _usable(self, requests: list[Request], samples: dict[str, Sample]) -> dict[str, Sample]:
        kept = super()._usable(requests, samples)
        self._kept = [*kept]
        reasons = {name: "evaluated" if "/eval/" in name else "group not whole" for name in samples}
        note(named={name: why for name, why in reasons.items() if name not in kept})
        return kept


class Trainer(AuditedTrainer):
    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        shim.apply("trainer")
        super().__init__(args, rank)

    def life(self) -> int:
        return os.getpid()
