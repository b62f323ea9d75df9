"""What the channel, and what replay alone, costs a train step of real Megatron-core on this CPU.

`bench e2e`: a trainer's CPU per step, in interleaved pairs of the same step with and without the channel. The relay and the
trainer are two processes, Ray actors on two raylets. Rows go over TCP, hellos over Ray. Only the trainer's process is timed. Its
step is small (1,024 tokens, four layers), so the channel's cost per step weighs more than it would in a real one.
`bench replay`: two equal models, one without replay and one that replays the very ids that the first one chooses, so that the
experts' work is the same. Their steps are interleaved, and nothing travels or is checked. A step is forward, full recompute,
backward and optimizer over four micro-batches.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from examples.embedded.bench.operations import Operations
from r3channel.bench.harness import Effort, Parts, interleave, medians_s, ratio, time_call
from r3channel.bench.relay import MANAGER_NODE, RANK_NODE, call, start_actor, two_nodes
from r3channel.bench.relay_paths import receive
from r3channel.config import ChannelConfig
from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket
from r3channel.relay.ray_host import RayRelay, RelayHost
from r3channel.relay.relay import Relay
from r3channel.trainer.adapters import megatron
from r3channel.trainer.audit import RouterTap
from r3channel.trainer.channel import TrainerChannel
from r3channel.trainer.model_tokens import ModelTokens
from r3channel.trainer.rank_shard import RankShard
from r3channel.trainer.replay import ReplayDriver, ReplayStep
from r3channel.wire.frame import encode_frame, parse_frame

if TYPE_CHECKING:
    from examples.embedded.megatron import TrainerModel

MICROBATCHES, SAMPLES, LENGTH = 4, 4, 64
_STORE_BYTES = 128 << 20
_MIN_S = 0.02


class StepRelay(RelayHost):
    """A relay in a process of its own: a Ray actor."""

    def __init__(self, spec: dict[str, Any], frames: dict[str, bytes], microbatches: list[list[str]]) -> None:
        self._frames, self._assignment = frames, Assignment.given([microbatches])
        self.relay = Relay(RoutingSpec.from_dict(spec), TrainerLayout(), ChannelConfig())

    def seal(self, step: int) -> bytes:
        """Add a step's frames, seal the step and return its ticket."""
        for name, frame in self._frames.items():
            microbatch, sample = map(int, name.split("-"))
            self.relay.add_frame(name, frame, _tokens_SP(microbatch)[sample].tolist())
        return self.relay.seal(step, self._assignment).to_bytes()

    def close(self) -> None:
        self.relay.close()


class StepTrainer:
    """A trainer; for the pairs it is in a process of its own. It runs the same Megatron step without routing, through the real
    channel, and replaying rows at hand. BUILT -> attach -> step* -> close.
    """

    def __init__(self, *, layers: int = 4) -> None:
        from examples.embedded import megatron as embedded
        from examples.embedded.model import write_model

        torch.set_num_threads(1)
        self._stack, self._layout = ExitStack(), TrainerLayout()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="r3channel-bench-")))
        meet = f"file://{folder}/rendezvous"
        embedded.init_distributed(rank=0, world_size=1, init_method=meet, layout=self._layout, timeout_s=60)
        self._stack.callback(embedded.close_distributed)
        model = write_model(folder / "model", layers=layers, experts=16, top_k=4, hidden=64)
        build = partial(embedded.build, model, self._layout, dtype="float32", lr=0.0)
        # Equal weights that never learn, so both keep choosing alike.
        self._plain, self.model = build(config_changes={"moe_enable_routing_replay": False}), build()
        self._spec = megatron.spec_from_config(self.model.chunks)

    def driver(self) -> ReplayDriver:
        """Return a driver of the model that replays; close it."""
        return ReplayDriver.attach(self.model.chunks, spec=self._spec, layout=self._layout)

    def routing(self) -> tuple[dict[str, Any], dict[str, bytes], list[list[str]]]:
        """Return the routing that the model chooses by itself.

        With these ids the experts' work is equal with and without replay.

        Returns:
            (the spec, a frame by sample, samples by micro-batch).
        """
        with closing(self.driver()) as driver:
            ids = _natural_ids(self.model, driver)
        frames, names = {}, []
        for number in range(MICROBATCHES):
            names.append([f"{number}-{sample}" for sample in range(SAMPLES)])
            frames |= zip(names[-1], _frames(self._spec, ids, number), strict=True)
        return self._spec.to_dict(), frames, names

    def attach(self, relay: Any) -> None:
        config = ChannelConfig(step_timeout_s=60, join_timeout_s=60)
        channel = TrainerChannel.attach(
            self.model.chunks, RayRelay(relay), layout=self._layout, config=config
        )
        self._channel = self._stack.enter_context(closing(channel))

    def plain(self) -> None:
        _train_step(self._plain)

    def through_channel(self, ticket: bytes) -> None:
        with self._channel.step(ticket) as step:
            _train_step(self.model, step)

    def replay(self, driver: ReplayDriver, shard: RankShard) -> None:
        with driver.step(shard, step=0) as step:
            step.tokens = ModelTokens(shard)
            _train_step(self.model, step)

    def cpu_s(self, ticket: bytes | None = None) -> float:
        """Return this process's CPU seconds for one step.

        Args:
            ticket: The ticket of a step through the channel, or None for a step without routing.
        """
        return time_call(self.plain if ticket is None else partial(self.through_channel, ticket))()

    def close(self) -> None:
        self._stack.close()


def _frames(spec: RoutingSpec, ids: dict[tuple[int, int], torch.Tensor], microbatch: int) -> list[bytes]:
    """Return the frames of a micro-batch's samples.

    Rows are sequence-major; a sample's last token has no row.
    """
    layers_LPSK = np.stack(
        [ids[microbatch, layer].numpy().reshape(LENGTH, SAMPLES, spec.top_k) for layer in spec.moe_layers]
    )
    rows_SPLK = layers_LPSK.transpose(2, 1, 0, 3)[:, : LENGTH - 1].astype(spec.id_dtype)
    return [encode_frame(spec, expert_ids_TLK=np.ascontiguousarray(rows)) for rows in rows_SPLK]


def pairs(effort: Effort) -> dict[str, Any]:
    """Measure the trainer's CPU with the channel over CPU without it.

    Returns:
        Ratios: the median of the pairs and the 95 % interval of that median.
    """
    with two_nodes(store_bytes=_STORE_BYTES):
        trainer = start_actor(StepTrainer, node=RANK_NODE)
        relay = start_actor(StepRelay, *call(trainer.routing.remote()), node=MANAGER_NODE, threads=8)
        call(trainer.attach.remote(relay))
        tickets = (call(relay.seal.remote(step)) for step in range(1 << 20))
        steps: dict[str, Any] = {"on": lambda: call(trainer.cpu_s.remote(next(tickets)))}
        steps |= dict.fromkeys(("off", "off_again"), lambda: call(trainer.cpu_s.remote()))
        seen = interleave(steps, rounds=effort.rounds_of(60, 8), warm_up=2)
        call([trainer.close.remote(), relay.close.remote()])
    without = [sum(pair) / 2 for pair in zip(seen["off"], seen["off_again"], strict=True)]
    ratios = {
        "trainer_cpu_ratio": ratio(seen["on"], without),
        "noise_ratio": ratio(seen["off_again"], seen["off"]),
    }
    cpu_ms = {name: median(seconds) * 1e3 for name, seconds in seen.items()}
    return {"pairs": {"pairs": len(without), **ratios, "step_cpu_ms": cpu_ms}}


# -- replay alone ----------------------------------------------------------------------------------------------------------


def _natural_ids(model: TrainerModel, driver: ReplayDriver) -> dict[tuple[int, int], torch.Tensor]:
    """Return the ids that the model chooses by itself.

    They are (micro-batch, layer) -> [rows, K], sequence-major.
    """
    with torch.no_grad(), RouterTap(driver) as tap:
        for index in range(MICROBATCHES):
            with driver.disable(microbatch=index):
                _forward(model, index)
    return {(r.microbatch, r.layer): torch.from_numpy(r.ids_RK) for r in tap.records}


def _train_step(model: TrainerModel, step: ReplayStep | None = None) -> None:
    """Run forward, full recompute, backward and optimizer.

    Ids are replayed if a step is given.
    """

    def forward_step(numbers: Iterator[int], chunk: torch.nn.Module) -> Any:
        index = next(numbers)
        with nullcontext() if step is None else step.microbatch(index, chunk=chunk):
            output = _forward(model, index)
        return output, lambda output: (output.mean(), {"loss": output.mean().item()})

    model.zero_grad()
    model.run(
        forward_step, num_microbatches=MICROBATCHES, seq_length=LENGTH, micro_batch_size=SAMPLES, data=range(MICROBATCHES)
    )  # fmt: skip
    model.optimizer.step()


def _tokens_SP(microbatch: int) -> torch.Tensor:
    return torch.randint(0, 512, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(microbatch))


def _forward(model: TrainerModel, index: int) -> torch.Tensor:
    tokens = _tokens_SP(index)
    positions = torch.arange(LENGTH).expand_as(tokens)
    return model.chunks[0](tokens, positions, None, labels=torch.roll(tokens, -1, 1))


def replay(effort: Effort) -> dict[str, Any]:
    """Measure what replay adds to a train step, in percent.

    Returns:
        Overheads over the step without replay: the median of the pairs, with a 95 % interval of that median. `operations` counts
        what replay gives a GPU for each router and each micro-batch beside the model's own operations. `router_call_cpu_us` is a
        router's call, in the way of a GPU, on this CPU; `router_calls_percent` is what all such calls take of a step without
        replay.
    """
    with closing(StepTrainer(layers=2)) as small:
        few, few_added = _added_operations(small)
    with closing(StepTrainer()) as trainer:
        shard, (routers, added) = _place_rows(trainer), _added_operations(trainer)
        per_router = (added - few_added) / (routers - few)
        call_us = _call_cpu_us(trainer, _place_rows(trainer, noted=True), effort.rounds_of(9, 3))
        with closing(trainer.driver()) as driver:
            replayed = partial(trainer.replay, driver, shard)
            steps = {"plain": trainer.plain, "plain_again": trainer.plain, "replay": replayed}
            calls = {name: time_call(step) for name, step in steps.items()}
            seen = interleave(calls, rounds=effort.rounds_of(40, 4), warm_up=2)

    def percent(name: str) -> dict[str, float]:
        return {what: 100 * (value - 1) for what, value in ratio(seen[name], seen["plain"]).items()}

    step_ms = {name: median(seconds) * 1e3 for name, seconds in seen.items()}
    calls = 2 * MICROBATCHES * routers  # forward and recompute
    return {
        "rounds": len(seen["plain"]), "step_cpu_ms": step_ms,
        "replay_percent": percent("replay"), "noise_percent": percent("plain_again"),
        "operations": {"per_router": per_router, "per_microbatch": added - routers * per_router},
        "router_call_cpu_us": call_us, "router_calls_percent": calls * call_us["replayed"] / step_ms["plain"] / 10,
    }  # fmt: skip


def _place_rows(trainer: StepTrainer, *, noted: bool = False) -> RankShard:
    """Return a step's rows, placed without a connection and not checked.

    With `noted` they are handled as on a GPU: all layers of a micro-batch are widened at once, and differences from the engines'
    digests are read at the end.
    """
    spec, frames, names = trainer.routing()
    with closing(StepRelay(spec, frames, names)) as relay:
        ticket = Ticket.from_bytes(relay.seal(0))
        rows_N = torch.from_numpy(receive(relay.relay, ticket))
    digests = [parse_frame(frames[n], spec=ticket.spec).digests_L for batch in names for n in batch]
    digests_SL = torch.from_numpy(np.stack(digests).view(np.int64)) if noted else None
    shard = ticket.plan.shard(dp=0, pp=0)
    rank = RankShard.from_whole(ticket, shard, rows_N, tp=0, digests_SL=digests_SL)
    rank.digests._host_SL = None  # on a CPU each router's rows are checked by themselves
    return rank


def _added_operations(trainer: StepTrainer) -> tuple[int, float]:
    """Return the number of routers, and the operations that replay adds.

    These are the operations of one micro-batch's forward pass, recompute and backward.
    """
    ranks, added = [_place_rows(trainer, noted=True) for _ in range(2)], 0
    with closing(trainer.driver()) as driver:
        for rank in ranks:  # a model's first step allocates what it keeps
            with Operations() as plain:
                trainer.plain()
            with driver.step(rank, step=0) as step, Operations() as replayed:
                _train_step(trainer.model, step)
            added = len(replayed.names) - len(plain.names)
    return len(ranks[0].shard.layers), added / MICROBATCHES


def _call_cpu_us(trainer: StepTrainer, rank: RankShard, rounds: int) -> dict[str, float]:
    """Return CPU us of a router's replaying and choosing call.

    The call that replays includes its share of the pass and of the step.
    """
    with torch.no_grad(), closing(trainer.driver()) as driver:
        handles = driver.handles.values()
        scores_RE = torch.rand(SAMPLES * LENGTH, rank.shard.spec.num_experts)

        def passes(step: ReplayStep | None = None) -> None:
            for index in range(MICROBATCHES):
                with nullcontext() if step is None else step.microbatch(index, mode="logprob"):
                    for handle in handles:
                        handle.replay.get_replay_topk(scores_RE, handle.top_k, None, None, _live_topk)

        def replay() -> None:
            with driver.step(rank, step=0) as step:
                passes(step)

        seconds = medians_s({"replayed": replay, "chosen": passes}, rounds=rounds, min_s=_MIN_S)
    return {name: 1e6 * passes_s / MICROBATCHES / len(handles) for name, passes_s in seconds.items()}


def _live_topk(scores_RE: torch.Tensor, top_k: int, *_groups: Any) -> Any:
    return scores_RE.topk(top_k, dim=1)


PARTS: Parts = {"pairs": pairs}
REPLAY: Parts = {"steps": replay}
