"""Manager and trainer of measure.py: the demo's, timed, and with the routing sides that a user's own loop would have."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from examples.async_grpo.default_side import DefaultReplay, DefaultRouting
from examples.async_grpo.grpo import Request
from examples.async_grpo.rollout import ManagerRouting, RolloutManager
from examples.async_grpo.trainer import Trainer, TrainerRouting
from examples.embedded.sglang import EngineOptions
from r3channel.plan.assignment import Assignment

WAITS = ("assemble", "wait_relay", "wait_wire", "recv", "rebroadcast")
"""A trainer's time from the call to its first forward pass: fetching its data, and standing still for its routing."""


def engine_options(args: argparse.Namespace, model: Path) -> EngineOptions:
    return EngineOptions(
        model=model, r3channel=args.mode == "channel", capture=args.mode != "off", random_seed=args.seed
    )


class MeasuredManager(RolloutManager):
    """Knows how long each rollout took, and what it gave."""

    def __init__(self, args: argparse.Namespace, spec: dict[str, Any]) -> None:
        super().__init__(args, spec)
        self._rollouts: list[tuple[float, int]] = []

    def _make_routing(self) -> ManagerRouting:
        if self.args.mode == "channel":
            return _channel_routing(self)
        side = OffRouting if self.args.mode == "off" else DefaultRouting
        return side(self.args, self.spec, self.layout, self.clock)

    def generate(self, step: int) -> list[Any]:
        begin_s, tokens = time.monotonic(), self.tokens
        found = super().generate(step)
        self._rollouts.append((time.monotonic() - begin_s, self.tokens - tokens))
        return found

    def rollouts(self) -> list[tuple[float, int]]:
        """(seconds, tokens) of each rollout, routing handed over."""
        return self._rollouts


class MeasuredTrainer(Trainer):
    """Its steps are timed."""

    def _make_routing(self, manager: Any) -> TrainerRouting:
        if self.args.mode == "channel":
            return _channel_replay(self, manager)
        side = OffReplay if self.args.mode == "off" else DefaultReplay
        return side(self.args, self.model.chunks, manager, self.layout, self.clock)

    def timed_train(self, step: int, box: list[Any]) -> dict[str, float]:
        wall_s, cpu_s, wait_s = time.monotonic(), time.process_time(), self._waits_s()
        self.train(step, box)
        return {
            "train_s": time.monotonic() - wall_s,
            "cpu_s": time.process_time() - cpu_s,
            "wait_s": self._waits_s() - wait_s,
        }

    def _waits_s(self) -> float:
        totals = self.clock.totals()
        return sum(totals.get(stage, 0.0) for stage in WAITS)


def _channel_routing(manager: RolloutManager) -> ManagerRouting:
    """The demo's, without its tap: the relay is all that sees a reply."""
    from examples.async_grpo.channel_side import ChannelRouting

    class Routing(ChannelRouting):
        def add(self, request: Request, body: bytes, *, engine: str) -> dict[str, Any]:
            prompt = request.prompt
            return self.relay.add_body(
                request.sample_id, body, lambda reply: prompt + reply["output_ids"], engine=engine
            )

        def discard(self, sample_ids: list[str]) -> None:
            self.relay.discard(sample_ids)

        def seal(self, step: int, assignment: Assignment, lengths: dict[str, int]) -> list[dict[str, Any]]:
            ticket = self.relay.seal(step, assignment).to_bytes()
            return [{"ticket": ticket} for _ in range(self.layout.dp)]

    return Routing(manager.args, manager.spec, manager.layout, manager.clock)


def _channel_replay(trainer: Trainer, manager: Any) -> TrainerRouting:
    """The demo's, without its tap: what a step does is receive and replay."""
    from examples.async_grpo.channel_side import ChannelReplay
    from r3channel.plan.ticket import Ticket

    class Replay(ChannelReplay):
        @contextmanager
        def step(self, data: dict[str, Any], **version: Any) -> Iterator[None]:
            with self.channel.step(Ticket.from_bytes(data["ticket"]), **version) as self._step:
                yield
            self._step = None

    return Replay(trainer.args, trainer.model.chunks, manager, trainer.layout, trainer.clock)


class OffRouting(DefaultRouting):
    """No routing at all."""

    def check_engine(self, url: str, reply: Mapping[str, Any], tokens: int) -> None:
        if reply["meta_info"].get("routed_experts") is not None:
            raise RuntimeError(f"{url} sends routing although capture is off")

    def add(self, request: Request, body: bytes, *, engine: str) -> dict[str, Any]:
        self._ids[request.sample_id] = torch.empty(0)
        return json.loads(body)


class OffReplay(DefaultReplay):
    """The routers choose for themselves."""

    def microbatch(self, index: int, mode: str, chunk: torch.nn.Module) -> AbstractContextManager[None]:
        return nullcontext()
