"""Routing over r3channel: what a user's own loop adds on its two sides.

Imported only with --use-r3-channel. The channel itself is `relay.add_body`, `relay.seal`, `TrainerChannel.attach`, `step` and
`microbatch`. The demo's audit of both ends is in variants/audited.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from examples.async_grpo.batch import MicrobatchData, tokens_of
from examples.async_grpo.grpo import Request
from r3channel.config import ChannelConfig
from r3channel.model.spec import RoutingSpec
from r3channel.observe.stage_clock import StageClock
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import RankCoords, TrainerLayout
from r3channel.plan.shards import Shard
from r3channel.plan.ticket import Ticket
from r3channel.recordings.recorder import recorder_of
from r3channel.relay.ray_host import RayRelay, RelayHost
from r3channel.relay.relay import Relay
from r3channel.trainer.adapters.megatron import parallel_coords
from r3channel.trainer.channel import TrainerChannel
from r3channel.trainer.replay import ReplayStep


class ChannelRouting(RelayHost):
    """The rollout manager's side; see rollout.ManagerRouting."""

    def __init__(
        self, args: argparse.Namespace, spec: RoutingSpec, layout: TrainerLayout, clock: StageClock
    ) -> None:
        config = ChannelConfig.from_args(args)
        self.args, self.spec, self.layout, self.clock = args, spec, layout, clock
        self.relay = Relay(spec, layout, config, clock=clock, recorder=recorder_of(args))
        if args.delivery == "direct":
            self.relay.serve()

    def check_engine(self, url: str, reply: Mapping[str, Any], tokens: int) -> None:
        self.relay.check_engine(reply, engine=url, tokens=tokens)

    def join_previous(self) -> None:
        self.relay.join_previous()

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

    def control(self, call: str, arguments: dict[str, Any]) -> Any:
        return self.r3channel_control(call, arguments)

    def report(self) -> dict[str, Any]:
        rows = self.relay.hello(dp=0, pp=0)
        return {"metrics_url": self.relay.metrics.url, "rows_at": f"{rows['host']}:{rows['port']}"}

    def close(self) -> None:
        self.relay.close()


class ChannelReplay:
    """A trainer's side; see trainer.TrainerRouting."""

    def __init__(
        self, args: argparse.Namespace, chunks: Sequence[torch.nn.Module], manager: Any, layout: TrainerLayout,
        clock: StageClock,
    ) -> None:  # fmt: skip
        config = ChannelConfig.from_args(args)
        self._dp = parallel_coords().dp
        self.channel = TrainerChannel.attach(
            chunks, RayRelay(manager), layout=layout, config=config, clock=clock
        )
        self.channel.recording = args.record
        self.metrics = self.channel.metrics
        self._step: ReplayStep | None = None

    def shard(self, data: dict[str, Any], coords: RankCoords) -> Shard:
        return data["ticket"].plan.shard(dp=coords.dp, pp=coords.pp, cp=coords.cp)

    def prefetch(self, data: dict[str, Any]) -> None:
        data["ticket"] = Ticket.from_bytes(data["ticket"])
        self.channel.prefetch(data["ticket"])

    @contextmanager
    def step(self, data: dict[str, Any], *, version: int) -> Iterator[None]:
        """Receive the step's rows and replay them inside the block."""
        ticket: Ticket = data["ticket"]
        tokens = tokens_of(data, samples := ticket.assignment.ranks[self._dp])
        with self.channel.step(ticket, tokens=tokens, samples=samples, version=version) as self._step:
            yield
        self._step = None

    def microbatch(self, index: int, mode: str, chunk: torch.nn.Module) -> AbstractContextManager[None]:
        if mode == "natural" or self._step is None:
            return self.channel.driver.disable(microbatch=index if self._step is None else -1)
        return self._step.microbatch(index, mode="logprob" if mode == "logprob" else "train", chunk=chunk)

    def loss_mask(self, index: int) -> torch.Tensor | None:
        return None if self.channel.shard is None else self.channel.shard.loss_mask(index)

    def compare_logprobs(
        self, ours: list[torch.Tensor], off: list[torch.Tensor], batches: list[MicrobatchData]
    ) -> None:
        if self._step is not None:
            for index, (found, batch) in enumerate(zip(ours, batches, strict=False)):
                natural = off[index] if off else None
                self._step.compare_logprobs(index, found, batch.rollout_logprobs, batch.mask, natural=natural)

    def weight_version(self, version: int) -> None:
        self.metrics.set("r3channel_weight_version", version)

    def report(self) -> dict[str, Any]:
        digests = {
            f"digests_{what}": int(self.metrics.value(f"r3channel_digests_{what}_total"))
            for what in ("checked", "different")
        }
        return {"metrics_url": self.metrics.url} | digests

    def close(self) -> None:
        self.channel.close()
