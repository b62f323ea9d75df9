"""The rollout manager: a Ray actor that asks the engines, scores, assigns, and hands the step to the trainers.

Routing goes one of two ways, chosen by the flag: `channel_side.ChannelRouting` (a relay in this actor) or
`default_side.DefaultRouting` (int32 through Ray). The rest of the file does not know which.
"""

from __future__ import annotations

import argparse
import asyncio
import pickle
from collections.abc import Mapping
from typing import Any, Protocol

import ray

from examples.async_grpo.batch import Sample, pack
from examples.async_grpo.client import ask
from examples.async_grpo.grpo import Request, group_advantages, make_requests, reward
from examples.async_grpo.modules import channel_modules
from r3channel.metrics import StageClock
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.spec import RoutingSpec


class ManagerRouting(Protocol):
    """How routing leaves the rollout manager."""

    def check_engine(self, url: str, reply: Mapping[str, Any], tokens: int) -> None: ...

    def join_previous(self) -> None: ...

    def add(
        self, sample_id: str, reply: Mapping[str, Any], tokens: list[int], *, engine: str, http_bytes: int
    ) -> None: ...

    def discard(self, sample_ids: list[str]) -> None: ...

    def seal(self, step: int, assignment: Assignment, lengths: dict[str, int]) -> list[dict[str, Any]]:
        """What travels with each DP rank's ordinary data."""
        ...

    def control(self, call: str, arguments: dict[str, Any]) -> Any: ...

    def report(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class RolloutManager:
    """slime's role of the same name. Threads, no coroutine: trainers reach `r3channel_control` while `generate` runs."""

    def __init__(self, args: argparse.Namespace, spec: dict[str, Any]) -> None:
        self.args, self.spec = args, RoutingSpec.from_dict(spec)
        self.engines: list[str] = []
        self.layout = TrainerLayout.parse(args.layout)
        self.clock = StageClock("relay")
        self.routing = self._make_routing()
        self.put_bytes, self.tokens, self.samples = 0, 0, 0
        self.rewards: list[float] = []

    def _make_routing(self) -> ManagerRouting:
        if self.args.use_r3_channel:
            from examples.async_grpo.channel_side import ChannelRouting

            return ChannelRouting(self.args, self.spec, self.layout, self.clock)
        from examples.async_grpo.default_side import DefaultRouting

        return DefaultRouting(self.args, self.spec, self.layout, self.clock)

    def start(self, engines: list[str]) -> dict[str, Any]:
        """Ask each engine for one token, so that a plug-in that did not apply is noticed now."""
        self.engines = engines
        request = Request("probe", [5, 6], 1)
        for url in self.engines:
            ((reply, _),) = asyncio.run(ask([request], [url]))
            self.routing.check_engine(url, reply, tokens=3)
        return self.routing.report()

    def generate(self, step: int) -> list[Any]:
        """One rollout. Returns one object reference per DP rank; routing is still on its way when it does."""
        self.routing.join_previous()
        requests = make_requests(step, samples=self.args.samples, seed=self.args.seed, vocab=self.args.vocab)
        extra = make_requests(step, samples=4, seed=self.args.seed, vocab=self.args.vocab, evaluation=True)
        samples = self._collect(step, requests + extra)
        self.routing.discard([request.sample_id for request in extra])  # evaluation is never trained on
        with self.clock.span("assemble", step=step):
            chosen = {request.sample_id: samples[request.sample_id] for request in requests}
            lengths = {name: len(sample.tokens) for name, sample in chosen.items()}
            gains = group_advantages([chosen[request.sample_id].reward for request in requests])
            advantages = dict(zip(chosen, gains, strict=True))
            assignment = Assignment.balanced(
                lengths, dp=self.layout.dp, microbatch_size=self.args.micro_batch_size
            )
        travelling = self.routing.seal(step, assignment, lengths)
        with self.clock.span("serialize", step=step):
            data = [
                pack(chosen, advantages, assignment, dp=dp) | travelling[dp] for dp in range(self.layout.dp)
            ]
            self.put_bytes += sum(len(pickle.dumps(part, protocol=5)) for part in data)
            self.tokens += sum(lengths.values())
            self.samples += len(lengths)
            self.rewards.append(sum(sample.reward for sample in chosen.values()) / len(chosen))
            return [ray.put(part) for part in data]

    def r3channel_control(self, call: str, arguments: dict[str, Any]) -> Any:
        """The trainers' calls to the relay (see r3channel.relay.actor)."""
        return self.routing.control(call, arguments)

    def report(self) -> dict[str, Any]:
        """Everything that the summary needs from this side."""
        return self.routing.report() | {
            "spans": self.clock.spans(),
            "totals": self.clock.totals(),
            "put_bytes": self.put_bytes,
            "tokens": self.tokens,
            "samples": self.samples,
            "rewards": self.rewards,
            "modules": channel_modules(),
        }

    def close(self) -> None:
        self.routing.join_previous()
        self.routing.close()

    # -- HTTP --------------------------------------------------------------------------------------------------------

    def _collect(self, step: int, requests: list[Request]) -> dict[str, Sample]:
        urls = [self.engines[index % len(self.engines)] for index in range(len(requests))]
        with self.clock.span("http", step=step):
            answers = asyncio.run(ask(requests, urls))
        samples = {}
        for request, url, (reply, http_bytes) in zip(requests, urls, answers, strict=True):
            tokens = request.prompt + reply["output_ids"]
            self.routing.add(request.sample_id, reply, tokens, engine=url, http_bytes=http_bytes)
            logprobs = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
            score = reward(reply["output_ids"])
            samples[request.sample_id] = Sample(
                request.sample_id, tokens, len(request.prompt), logprobs, score
            )
        return samples
