"""Manager and trainer of measure.py: those of the loop, timed, and the same without routing."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from examples.async_grpo.grpo import Request
from examples.async_grpo.rollout import ManagerRouting, RolloutManager
from examples.async_grpo.trainer import Trainer, TrainerRouting
from examples.async_grpo.variants.stock import DefaultReplay, DefaultRouting
from examples.embedded.sglang import EngineOptions

WAITS = ("assemble", "wait_relay", "wait_wire", "rebroadcast")
"""A trainer's time before its first forward pass: fetching its data, and standing still for its routing."""


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
        if self.args.mode != "off":
            return super()._make_routing()
        return OffRouting(self.args, self.spec, self.layout, self.clock)

    def generate(self, step: int) -> list[Any]:
        begin_s, tokens = time.monotonic(), self.tokens
        found = super().generate(step)
        self._rollouts.append((time.monotonic() - begin_s, self.tokens - tokens))
        return found

    def rollouts(self) -> list[tuple[float, int]]:
        """(seconds, tokens) of each rollout, routing handed over."""
        return self._rollouts


class MeasuredTrainer(Trainer):
    """Its steps are timed: CPU and waits from the end of one to the end of the next, with its data and the weights in between."""

    _cpu_s = _wait_s = 0.0

    def _make_routing(self, manager: Any) -> TrainerRouting:
        if self.args.mode != "off":
            return super()._make_routing(manager)
        return OffReplay(self.args, self.model.chunks, manager, self.layout, self.clock)

    def timed_train(self, step: int, box: list[Any]) -> dict[str, float]:
        wall_s, cpu_s, wait_s = time.monotonic(), self._cpu_s, self._wait_s
        self.train(step, box)
        self._cpu_s, self._wait_s = time.process_time(), self._waits_s()
        return {
            "train_s": time.monotonic() - wall_s, "cpu_s": self._cpu_s - cpu_s, "wait_s": self._wait_s - wait_s
        }  # fmt: skip

    def _waits_s(self) -> float:
        totals = self.clock.totals()
        return sum(totals.get(stage, 0.0) for stage in WAITS)


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
