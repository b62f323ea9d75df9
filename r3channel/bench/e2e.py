"""What the channel, and what replay alone, costs a train step of real Megatron-core on this CPU.

`bench e2e`: a trainer's CPU per step, in interleaved pairs of the same step with and without the channel. The relay and the
trainer are two processes, Ray actors on two raylets; rows go over TCP, hellos over Ray. Only the trainer's process is timed. Its
step is small (1,024 tokens, four layers), so what the channel costs per step weighs more than it would in a real one.
Its part `loop` is the whole loop of examples/async_grpo with real engines: with the channel, the default way and without replay.
`bench replay`: two equal models, one without replay and one that replays the very ids that the first one chooses, so that the
experts' work is the same; their steps are interleaved. A step is forward, full recompute, backward and optimizer over four
micro-batches.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from r3channel.bench.harness import Effort, Parts, interleaved, ratio, timed
from r3channel.bench.relay import MANAGER_NODE, RANK_NODE, call, start_actor, two_nodes
from r3channel.bench.relay_paths import spent
from r3channel.config import ChannelConfig
from r3channel.errors import EngineUnavailable
from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.ray_host import RayRelay, RelayHost
from r3channel.relay.relay import Relay
from r3channel.trainer.adapters import megatron
from r3channel.trainer.audit import RouterTap
from r3channel.trainer.channel import TrainerChannel
from r3channel.trainer.mismatch import RoutingAudit
from r3channel.trainer.replay import ReplayDriver, ReplayStep
from r3channel.wire.frame import encode_frame

if TYPE_CHECKING:
    from examples.embedded.megatron import TrainerModel

SCRIPT = Path(__file__).parents[2] / "examples" / "async_grpo" / "variants" / "measure.py"
MODES = ("channel", "default", "off")
MICROBATCHES, SAMPLES, LENGTH = 4, 4, 64
SHAPE: dict[str, Any] = {"layers": 4, "experts": 16, "top_k": 4, "hidden": 64}
WAITS = ("wait_relay", "wait_wire", "rebroadcast")
"""Stages in which a step stands still for its routing."""
_STORE_BYTES, _RUN_S = 128 << 20, 600.0


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
        channel = TrainerChannel.attach(
            self._model.chunks, RayRelay(relay), layout=self._layout, config=config
        )
        self._channel = self._stack.enter_context(contextlib.closing(channel))

    def run(self, ticket: bytes | None) -> tuple[float, float, float]:
        """One step, through the channel if there is a ticket: wall and CPU of this process, and the wait for routing. Seconds."""
        if ticket is None:
            return *spent(lambda: train_step(self._plain)), 0.0
        before_s = self._waited_s()

        def replayed() -> None:
            with self._channel.step(ticket) as step:
                train_step(self._model, step)

        return *spent(replayed), self._waited_s() - before_s

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
            "on": lambda: call(trainer.run.remote(next(tickets))),
            "off": lambda: call(trainer.run.remote(None)),
            "off_again": lambda: call(trainer.run.remote(None)),
        }
        seen = interleaved(steps, rounds=effort.rounds_of(60, 8), warm_up=2)
        call([trainer.close.remote(), relay.close.remote()])
    wall_cpu_wait = {name: np.array(rows).T for name, rows in seen.items()}
    on, off, off_again = wall_cpu_wait.values()
    without = (off + off_again) / 2
    found = {
        "pairs": len(on[1]),
        "trainer_cpu_ratio": ratio(on[1], without[1]),
        "trainer_wall_ratio": ratio(on[0], without[0]),
        "noise_ratio": ratio(off_again[1], off[1]),
        "step_cpu_ms": {"off": float(np.median(off[1])) * 1e3, "on": float(np.median(on[1])) * 1e3},
        "exposed_wait_ms": float(np.median(on[2])) * 1e3,
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


# -- replay alone ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def two_models(folder: Path) -> Iterator[tuple[TrainerModel, TrainerModel, TrainerLayout]]:
    """(without replay, with it, their layout): equal weights that never learn, so both keep choosing alike."""
    from examples.embedded import megatron as embedded
    from examples.embedded.model import write_model

    torch.set_num_threads(1)
    layout = TrainerLayout()
    embedded.init_distributed(
        rank=0, world_size=1, init_method=f"file://{folder}/rendezvous", layout=layout, timeout_s=60
    )
    model_dir = write_model(folder / "model", **SHAPE)
    plain = embedded.build(
        model_dir, layout, dtype="float32", lr=0.0, config_changes={"moe_enable_routing_replay": False}
    )
    try:
        yield plain, embedded.build(model_dir, layout, dtype="float32", lr=0.0), layout
    finally:
        embedded.close_distributed()


@contextlib.contextmanager
def _steps(folder: Path) -> Iterator[dict[str, Callable[[], None]]]:
    """What is timed, by name."""
    with two_models(folder) as (plain, model, layout):
        spec = megatron.spec_from_config(model.chunks)
        driver = ReplayDriver.attach(model.chunks, spec=spec, layout=layout)
        routing = _Recorded(model, driver)
        try:
            yield {
                "plain": lambda: train_step(plain),
                "plain_again": lambda: train_step(plain),
                "replay": lambda: routing.step(audited=0),
                "replay_and_audit": lambda: routing.step(audited=1),
            }
        finally:
            driver.close()


def natural_ids(model: TrainerModel, driver: ReplayDriver) -> dict[tuple[int, int], torch.Tensor]:
    """(micro-batch, layer) -> [rows, K] that the model chooses by itself, sequence-major."""
    with torch.no_grad(), RouterTap(driver) as tap:
        for index in range(MICROBATCHES):
            with driver.off(microbatch=index):
                forward(model, index)
    return {(r.microbatch, r.layer): torch.from_numpy(r.ids_RK) for r in tap.records}


class _Recorded:
    """The ids that the model chooses by itself, as `trainer.router.StepRouting`."""

    num_microbatches = MICROBATCHES

    def __init__(self, model: TrainerModel, driver: ReplayDriver) -> None:
        self._model, self._driver = model, driver
        self._ids = natural_ids(model, driver)
        self._counted = torch.arange(SAMPLES * LENGTH) < SAMPLES * (LENGTH - 1)

    def layer_ids(self, microbatch: int, layer: int) -> torch.Tensor:
        return self._ids[microbatch, layer]

    def live_rows(self, microbatch: int) -> None:
        return None

    def padding_rows(self, microbatch: int) -> torch.Tensor:
        return ~self._counted

    def check_digest(self, microbatch: int, layer: int, ids_RK: torch.Tensor, wide_RK: torch.Tensor) -> None:
        """Nothing to hold the ids against: they never travelled."""
        wide_RK.copy_(ids_RK)

    def verified(self) -> None:
        """As `check_digest`."""

    def step(self, *, audited: int) -> None:
        audit = RoutingAudit(
            step=0, microbatches=MICROBATCHES, count=audited, counted_rows=lambda _: self._counted
        )
        with self._driver.step(self, step=0, audit=audit) as step:
            train_step(self._model, step)


def train_step(model: TrainerModel, step: ReplayStep | None = None) -> None:
    """Forward, full recompute, backward, optimizer; replaying where a step is given."""

    def forward_step(numbers: Iterator[int], chunk: torch.nn.Module) -> Any:
        index = next(numbers)
        if step is None:
            output = forward(model, index)
        else:
            with step.microbatch(index, chunk=chunk):
                output = forward(model, index)
        return output, lambda output: (output.mean(), {"loss": output.mean().item()})

    model.zero_grad()
    model.run(
        forward_step, num_microbatches=MICROBATCHES, seq_length=LENGTH, micro_batch_size=SAMPLES, data=range(MICROBATCHES)
    )  # fmt: skip
    model.optimizer.step()


def forward(model: TrainerModel, index: int) -> torch.Tensor:
    tokens = torch.randint(0, 512, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(index))
    positions = torch.arange(LENGTH).expand_as(tokens)
    return model.chunks[0](tokens, positions, None, labels=torch.roll(tokens, -1, 1))


def replay(effort: Effort) -> dict[str, Any]:
    """Overheads in percent of the step without replay: median of the pairs, with a 95 % interval of that median."""
    with tempfile.TemporaryDirectory(prefix="r3channel-bench-") as folder, _steps(Path(folder)) as steps:
        calls = {name: timed(step) for name, step in steps.items()}
        seen = interleaved(calls, rounds=effort.rounds_of(40, 4), warm_up=2)

    def percent(name: str) -> dict[str, float]:
        return {what: 100 * (value - 1) for what, value in ratio(seen[name], seen["plain"]).items()}

    return {
        "rounds": len(seen["plain"]),
        "step_cpu_ms": {name: median(times) * 1e3 for name, times in seen.items()},
        "replay_percent": percent("replay"),
        "replay_and_audit_percent": percent("replay_and_audit"),
        "noise_percent": percent("plain_again"),
    }


PARTS: Parts = {"pairs": pairs, "loop": loop}
REPLAY: Parts = {"steps": replay}
