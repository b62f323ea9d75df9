"""CPU time that replay adds to a train step of real Megatron-core on this CPU.

Two equal models, one without replay and one that replays the very ids that the first one chooses, so that the experts' work
is the same; their steps are interleaved. A step is forward, full recompute, backward and optimizer over four micro-batches.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from r3channel.bench.harness import Effort, Parts, interleaved, ratio, timed
from r3channel.plan.layout import TrainerLayout
from r3channel.trainer.adapters import megatron
from r3channel.trainer.audit import RouterTap
from r3channel.trainer.mismatch import RoutingAudit
from r3channel.trainer.replay import ReplayDriver, ReplayStep

if TYPE_CHECKING:
    from examples.embedded.megatron import TrainerModel

MICROBATCHES, SAMPLES, LENGTH = 4, 4, 64
SHAPE: dict[str, Any] = {"layers": 4, "experts": 16, "top_k": 4, "hidden": 64}
TARGET_PERCENT = 2.0


def measure(effort: Effort) -> dict[str, Any]:
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
        "target_percent": TARGET_PERCENT,
        "shape": {**SHAPE, "microbatches": MICROBATCHES, "samples": SAMPLES, "length": LENGTH},
    }


PARTS: Parts = {"steps": measure}


@contextmanager
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


@contextmanager
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

    def check_digest(self, microbatch: int, layer: int, ids_RK: torch.Tensor) -> None:
        """Nothing to hold the ids against: they never travelled."""

    def verified(self) -> None:
        """As `handed`."""

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
