"""Train steps with and without the channel, interleaved: what receiving and replaying cost a trainer.

The relay and the trainer are two processes, Ray actors on two raylets; rows go over TCP, hellos over Ray. Only the
trainer's process is timed. Its step is small (1,024 tokens, four layers), so what the channel costs per step weighs more than
it would in a real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from r3channel.bench.e2e.trainer import StepTrainer
from r3channel.bench.relay.cluster import MANAGER_NODE, RANK_NODE, call, start_actor, stop_actors, two_nodes
from r3channel.bench.replay import LENGTH, overhead
from r3channel.config import ChannelConfig
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.actor import RelayHost
from r3channel.relay.relay import Relay
from r3channel.spec import RoutingSpec

TARGET = 1.03
_STORE_BYTES = 128 << 20
_WARM_UP = 2


class StepRelay(RelayHost):
    """A relay in a process of its own."""

    def __init__(self, spec: dict[str, Any], frames: list[list[bytes]]) -> None:
        self._frames = {f"{m}-{s}": frame for m, batch in enumerate(frames) for s, frame in enumerate(batch)}
        names = [[f"{m}-{s}" for s in range(len(batch))] for m, batch in enumerate(frames)]
        self._assignment = Assignment.given([names])
        self.relay = Relay(RoutingSpec.from_dict(spec), TrainerLayout(), ChannelConfig())

    def seal(self, step: int) -> bytes:
        """The ticket of a step."""
        for name, frame in self._frames.items():
            self.relay.add_frame(name, frame, range(LENGTH))
        return self.relay.seal(step, self._assignment).to_bytes()

    def close(self) -> None:
        self.relay.close()


def measure(*, rounds: int) -> dict[str, Any]:
    """Ratios of CPU and wall, on over off: median of the pairs and the 95 % interval of that median."""
    with two_nodes(store_bytes=_STORE_BYTES):
        trainer = start_actor(StepTrainer, node=RANK_NODE)
        spec, frames = call([trainer.spec.remote(), trainer.frames.remote()])
        relay = start_actor(StepRelay, spec, frames, node=MANAGER_NODE, threads=8)
        call(trainer.attach.remote(relay))
        rows = [_round(relay, trainer, number) for number in range(rounds + _WARM_UP)][_WARM_UP:]
        call([trainer.close.remote(), relay.close.remote()])
        stop_actors([trainer, relay])
    return _result(rows)


def _round(relay: Any, trainer: Any, number: int) -> dict[str, Any]:
    return call(trainer.run.remote(call(relay.seal.remote(number)), number))


def _result(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def of(name: str, what: str) -> list[float]:
        return [row[name][what] for row in rows]

    def off(what: str) -> list[float]:
        """The mean of a round's two steps without the channel, which lie on both sides of the one with it, or next to it."""
        return [(a + b) / 2 for a, b in zip(of("off", what), of("off_again", what), strict=True)]

    return {
        "pairs": len(rows),
        "trainer_cpu_ratio": _ratio(of("on", "cpu_s"), off("cpu_s")),
        "trainer_wall_ratio": _ratio(of("on", "wall_s"), off("wall_s")),
        "noise_ratio": _ratio(of("off_again", "cpu_s"), of("off", "cpu_s")),
        "step_cpu_ms": {name: median(of(name, "cpu_s")) * 1e3 for name in ("off", "on")},
        "exposed_wait_ms": median(row["exposed_s"] for row in rows) * 1e3,
        "target": TARGET,
    }


def _ratio(ours: Sequence[float], plain: Sequence[float]) -> dict[str, float]:
    return {name: 1 + percent / 100 for name, percent in overhead(ours, plain).items()}
