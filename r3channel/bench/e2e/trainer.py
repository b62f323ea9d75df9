"""A trainer's process for the pairs of `bench e2e`: the same Megatron step without routing and through the real channel."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from r3channel.bench.replay import LENGTH, SAMPLES, natural_ids, train_step, two_models
from r3channel.config import ChannelConfig
from r3channel.relay.actor import RayRelay
from r3channel.spec import RoutingSpec
from r3channel.trainer import megatron
from r3channel.trainer.channel import TrainerChannel
from r3channel.trainer.replay import ReplayDriver
from r3channel.wire.frame import encode_frame

WAITS = ("wait_relay", "wait_wire", "recv", "rebroadcast")
"""Stages in which a step stands still for its routing."""


class StepTrainer:
    """A Ray actor. BUILT -> attach -> run* -> close."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="r3channel-bench-")))
        self._plain, self._model, self._layout = self._stack.enter_context(two_models(folder))
        self._channel: TrainerChannel | None = None

    def spec(self) -> dict[str, Any]:
        return megatron.spec_from_config(self._model.chunks).to_dict()

    def frames(self) -> list[list[bytes]]:
        """Per micro-batch the frames of its samples: the ids that the model chooses by itself, so the experts' work is equal."""
        spec = RoutingSpec.from_dict(self.spec())
        driver = ReplayDriver.attach(self._model.chunks, spec=spec, layout=self._layout)
        try:
            ids = natural_ids(self._model, driver)
        finally:
            driver.close()
        return [_frames(spec, ids, microbatch) for microbatch in range(1 + max(index for index, _ in ids))]

    def attach(self, relay: Any) -> None:
        config = ChannelConfig(step_timeout_s=60, join_timeout_s=60)
        self._channel = TrainerChannel.attach(
            self._model.chunks, RayRelay(relay), layout=self._layout, config=config
        )

    def run(self, ticket: bytes, order: int) -> dict[str, Any]:
        """One round: off twice, and on, beginning elsewhere each round. Seconds of CPU and wall of this process."""
        calls: dict[str, Callable[[], None]] = {
            "off": lambda: train_step(self._plain),
            "on": lambda: self._on(ticket),
            "off_again": lambda: train_step(self._plain),
        }
        names = list(calls)
        first = order % len(names)
        seen = {name: _seconds(calls[name]) for name in names[first:] + names[:first]}
        return seen | {"exposed_s": self._exposed_s}

    def _on(self, ticket: bytes) -> None:
        assert self._channel is not None, "attach() comes first"
        before = self._waited_s()
        with self._channel.step(ticket) as step:
            train_step(self._model, step)
        self._exposed_s = self._waited_s() - before

    def _waited_s(self) -> float:
        assert self._channel is not None
        totals = self._channel.receiver.clock.totals()
        return sum(totals.get(stage, 0.0) for stage in WAITS)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._stack.close()


def _frames(spec: RoutingSpec, ids: dict[tuple[int, int], torch.Tensor], microbatch: int) -> list[bytes]:
    """Rows are sequence-major; a sample's last token has no row."""
    layers_LPSK = np.stack(
        [ids[microbatch, layer].numpy().reshape(LENGTH, SAMPLES, spec.top_k) for layer in spec.moe_layers]
    )
    rows_SPLK = layers_LPSK.transpose(2, 1, 0, 3)[:, : LENGTH - 1].astype(spec.id_dtype)
    return [encode_frame(spec, expert_ids_TLK=np.ascontiguousarray(rows)) for rows in rows_SPLK]


def _seconds(call: Callable[[], None]) -> dict[str, float]:
    wall_s, cpu_s = time.monotonic(), time.process_time()
    call()
    return {"wall_s": time.monotonic() - wall_s, "cpu_s": time.process_time() - cpu_s}
