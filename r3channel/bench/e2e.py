"""What the channel costs a training loop, beside the default path and no routing at all.

`loop`: the demo's loop with each (real SGLang, Ray and Megatron-core on this machine), a process tree of its own each, in turn.
`pairs`: a trainer's CPU per step, in interleaved pairs of the same step with and without the channel. The relay and the trainer
are two processes, Ray actors on two raylets; rows go over TCP, hellos over Ray. Only the trainer's process is timed. Its step is
small (1,024 tokens, four layers), so what the channel costs per step weighs more than it would in a real one.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from r3channel.bench.harness import Effort, Parts, interleaved, ratio
from r3channel.bench.relay import MANAGER_NODE, RANK_NODE, call, start_actor, two_nodes
from r3channel.bench.relay_paths import spent
from r3channel.bench.replay import LENGTH, SAMPLES, natural_ids, train_step, two_models
from r3channel.config import ChannelConfig
from r3channel.errors import EngineUnavailable
from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.actor import RayRelay, RelayHost
from r3channel.relay.relay import Relay
from r3channel.trainer.adapters import megatron
from r3channel.trainer.channel import TrainerChannel
from r3channel.trainer.replay import ReplayDriver
from r3channel.wire.frame import encode_frame

SCRIPT = Path(__file__).parents[2] / "examples" / "async_grpo" / "variants" / "measure.py"
MODES = ("channel", "default", "off")
TARGET = 1.03
WAITS = ("wait_relay", "wait_wire", "recv", "rebroadcast")
"""Stages in which a step stands still for its routing."""
_STORE_BYTES = 128 << 20
_RUN_S = 600.0


class StepRelay(RelayHost):
    """A relay in a process of its own: a Ray actor."""

    def __init__(self, spec: dict[str, Any], frames: dict[str, bytes], microbatches: list[list[str]]) -> None:
        self._frames, self._assignment = frames, Assignment.given([microbatches])
        self.relay = Relay(RoutingSpec.from_dict(spec), TrainerLayout(), ChannelConfig())

    def seal(self, step: int) -> bytes:
        """The ticket of a step."""
        for name, frame in self._frames.items():
            self.relay.add_frame(name, frame, range(LENGTH))
        return self.relay.seal(step, self._assignment).to_bytes()

    def close(self) -> None:
        self.relay.close()


class StepTrainer:
    """A trainer's process, a Ray actor: the same Megatron step without routing and through the real channel.

    BUILT -> attach -> run* -> close.
    """

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="r3channel-bench-")))
        self._plain, self._model, self._layout = self._stack.enter_context(two_models(folder))
        self._spec = megatron.spec_from_config(self._model.chunks)

    def routing(self) -> tuple[dict[str, Any], dict[str, bytes], list[list[str]]]:
        """(Spec, a frame by sample, samples by micro-batch). The ids are those that the model chooses by itself, so that the
        experts' work is equal."""
        driver = ReplayDriver.attach(self._model.chunks, spec=self._spec, layout=self._layout)
        with contextlib.closing(driver):
            ids = natural_ids(self._model, driver)
        frames, names = {}, []
        for number in range(1 + max(microbatch for microbatch, _ in ids)):
            names.append([f"{number}-{sample}" for sample in range(SAMPLES)])
            frames |= zip(names[-1], _frames(self._spec, ids, number), strict=True)
        return self._spec.to_dict(), frames, names

    def attach(self, relay: Any) -> None:
        config = ChannelConfig(step_timeout_s=60, join_timeout_s=60)
        self._channel = self._stack.enter_context(
            contextlib.closing(
                TrainerChannel.attach(self._model.chunks, RayRelay(relay), layout=self._layout, config=config)
            )
        )

    def run(self, ticket: bytes | None) -> tuple[float, float, float]:
        """One step, through the channel if there is a ticket: wall and CPU of this process, and the wait for routing. Seconds."""
        if ticket is None:
            return *spent(lambda: train_step(self._plain)), 0.0
        before_s = self._waited_s()
        return *spent(lambda: self._replay(ticket)), self._waited_s() - before_s

    def _replay(self, ticket: bytes) -> None:
        with self._channel.step(ticket) as step:
            train_step(self._model, step)

    def _waited_s(self) -> float:
        totals = self._channel.receiver.clock.totals()
        return sum(totals.get(stage, 0.0) for stage in WAITS)

    def close(self) -> None:
        self._stack.close()


def _frames(spec: RoutingSpec, ids: dict[tuple[int, int], torch.Tensor], microbatch: int) -> list[bytes]:
    """Rows are sequence-major; a sample's last token has no row."""
    layers_LPSK = np.stack(
        [ids[microbatch, layer].numpy().reshape(LENGTH, SAMPLES, spec.top_k) for layer in spec.moe_layers]
    )
    rows_SPLK = layers_LPSK.transpose(2, 1, 0, 3)[:, : LENGTH - 1].astype(spec.id_dtype)
    return [encode_frame(spec, expert_ids_TLK=np.ascontiguousarray(rows)) for rows in rows_SPLK]


def pairs(effort: Effort) -> dict[str, Any]:
    """Ratios of CPU and wall, on over off: median of the pairs and the 95 % interval of that median."""
    with two_nodes(store_bytes=_STORE_BYTES):
        trainer = start_actor(StepTrainer, node=RANK_NODE)
        relay = start_actor(StepRelay, *call(trainer.routing.remote()), node=MANAGER_NODE, threads=8)
        call(trainer.attach.remote(relay))
        tickets = (call(relay.seal.remote(step)) for step in range(1 << 20))
        steps = {
            "off": lambda: call(trainer.run.remote(None)),
            "on": lambda: call(trainer.run.remote(next(tickets))),
            "off_again": lambda: call(trainer.run.remote(None)),
        }
        seen = interleaved(steps, rounds=effort.rounds_of(60, 8), warm_up=2)
        call([trainer.close.remote(), relay.close.remote()])
    wall_s, cpu_s, wait_s = (
        {name: [row[at] for row in rows] for name, rows in seen.items()} for at in range(3)
    )

    def off(seconds: dict[str, list[float]]) -> list[float]:
        """The mean of a round's two steps without the channel."""
        return [(a + b) / 2 for a, b in zip(seconds["off"], seconds["off_again"], strict=True)]

    found = {
        "pairs": len(cpu_s["on"]),
        "trainer_cpu_ratio": ratio(cpu_s["on"], off(cpu_s)),
        "trainer_wall_ratio": ratio(wall_s["on"], off(wall_s)),
        "noise_ratio": ratio(cpu_s["off_again"], cpu_s["off"]),
        "step_cpu_ms": {name: median(cpu_s[name]) * 1e3 for name in ("off", "on")},
        "exposed_wait_ms": median(wait_s["on"]) * 1e3,
        "target": TARGET,
    }
    return {"pairs": found}


def loop(effort: Effort) -> dict[str, Any]:
    """Per mode the medians over its runs of step, train wait, trainer CPU and rollout speed."""
    calls = {mode: partial(_run, mode, steps=effort.of(6, 2)) for mode in MODES}
    seen = interleaved(calls, rounds=effort.rounds_of(2, 1), warm_up=0)
    return {"loop": {mode: _medians(runs) for mode, runs in seen.items()}}


def _run(mode: str, *, steps: int) -> dict[str, Any]:
    from examples.embedded.sglang import kill_family

    print(f"bench e2e: {mode}, {steps} steps", file=sys.stderr, flush=True)
    command = [sys.executable, str(SCRIPT), "--mode", mode, "--steps", str(steps)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        stdout, stderr = child.communicate(timeout=_RUN_S)
    except subprocess.TimeoutExpired as error:
        raise EngineUnavailable(f"the loop in mode {mode} did not end within {_RUN_S:.0f} s") from error
    finally:
        kill_family(child)
    if child.returncode:
        raise EngineUnavailable(
            f"the loop in mode {mode} ended with status {child.returncode}:\n{stderr[-4000:]}"
        )
    return json.loads(stdout.strip().splitlines()[-1])


def _medians(runs: list[dict[str, Any]]) -> dict[str, float]:
    names = [name for name, value in runs[0].items() if isinstance(value, float)]
    return {name: median(run[name] for run in runs) for name in names}


PARTS: Parts = {"pairs": pairs, "loop": loop}
