"""The rollout manager: a Ray actor that asks the engines, scores, assigns, and hands the step to the trainers.

Routing goes one of two ways, chosen by the flag: `channel_side.ChannelRouting` (a relay in this actor) or
`variants.stock.DefaultRouting` (int32 through Ray). The rest of the file does not know which.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import pickle
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any, Protocol

import ray

from examples.async_grpo.batch import Sample, pack
from examples.async_grpo.client import ask
from examples.async_grpo.grpo import GROUP, Request, group_advantages, make_requests, reward
from examples.async_grpo.modules import channel_modules
from examples.async_grpo.stages import in_slots
from r3channel.errors import EngineUnavailable, R3Error
from r3channel.model.spec import RoutingSpec
from r3channel.observe.stage_clock import StageClock
from r3channel.observe.trace import TraceFile
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.wire.hello import PROBE_PREFIX


class ManagerRouting(Protocol):
    """How routing leaves the rollout manager."""

    def check_engine(self, url: str, reply: Mapping[str, Any], tokens: int) -> None: ...

    def join_previous(self) -> None: ...

    def add(self, request: Request, body: bytes, *, engine: str) -> dict[str, Any]:
        """Take the routing out of a reply's body; returns what else it says."""
        ...

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
        self.routable: tuple[str, ...] = ()
        self.routed: list[tuple[int, int]] = []
        self.layout = TrainerLayout.parse(args.layout)
        self.clock = StageClock("relay")
        self.routing = self._make_routing()
        self.put_bytes, self.tokens, self.samples = 0, 0, 0
        self.lost: list[str] = []
        self._calls: list[tuple[float, float, str]] = []
        """Begin, end and thread of each `generate`."""
        self._lanes: dict[str, TraceFile] = {}
        """Engine -> where its requests are drawn, as they are seen from here."""

    def _make_routing(self) -> ManagerRouting:
        if self.args.use_r3_channel:
            from examples.async_grpo.channel_side import ChannelRouting

            return ChannelRouting(self.args, self.spec, self.layout, self.clock)
        from examples.async_grpo.variants.stock import DefaultRouting

        return DefaultRouting(self.args, self.spec, self.layout, self.clock)

    def start(self, engines: list[str]) -> dict[str, Any]:
        """Ask each engine for one token, so that a plug-in that did not apply is noticed now."""
        request = Request("probe", [5, 6], 1, rid=f"{PROBE_PREFIX}demo")
        for url in engines:
            (answer,) = asyncio.run(ask([request], [url]))
            if isinstance(answer, BaseException):
                raise answer
            self.routing.check_engine(url, json.loads(answer), tokens=3)
        return self.routing.report()

    def route_to(self, version: int, engines: tuple[str, ...]) -> None:
        """The gate: from now on only these get requests, for only they hold the committed `version`."""
        if not engines:
            raise RuntimeError(f"no engine may get requests: none holds weight version {version}")
        self.routable = engines
        self.routed.append((version, len(engines)))

    def generate(self, step: int) -> list[Any]:
        """One rollout. Returns one object reference per DP rank; routing is still on its way when it does."""
        begin_s = time.monotonic()
        try:
            return self._generate(step)
        finally:
            self._calls.append((begin_s, time.monotonic(), threading.current_thread().name))

    def _generate(self, step: int) -> list[Any]:
        with self.clock.span("assemble", step=step):  # which stands still in the stages of what it calls
            requests = make_requests(
                step, samples=self.args.samples, seed=self.args.seed, vocab=self.args.vocab
            )
            extra = make_requests(
                step, samples=4, seed=self.args.seed, vocab=self.args.vocab, evaluation=True
            )
            samples = self._collect(step, requests + extra)
            chosen = self._usable(requests, samples)
            lengths = {name: len(sample.tokens) for name, sample in chosen.items()}
            gains = group_advantages([sample.reward for sample in chosen.values()])
            advantages = dict(zip(chosen, gains, strict=True))
            assignment = Assignment.balanced(
                lengths, dp=self.layout.dp, microbatch_size=self.args.micro_batch_size
            )
            # Evaluation is never trained on, nor is a sample whose group lost a member.
            self.routing.discard([name for name in samples if name not in chosen])
        self.routing.join_previous()
        travelling = self.routing.seal(step, assignment, lengths)
        with self.clock.span("serialize", step=step):
            data = [
                pack(chosen, advantages, assignment, dp=dp) | travelling[dp] for dp in range(self.layout.dp)
            ]
            self.put_bytes += sum(len(pickle.dumps(part, protocol=5)) for part in data)
            self.tokens += sum(lengths.values())
            self.samples += len(lengths)
            return [ray.put(part) for part in data]

    def r3channel_control(self, call: str, arguments: dict[str, Any]) -> Any:
        """The trainers' calls to the relay (see r3channel.relay.ray_host)."""
        return self.routing.control(call, arguments)

    def report(self) -> dict[str, Any]:
        """Everything that the summary needs from this side."""
        return self.routing.report() | {
            "coverage": self._coverage(),
            "put_bytes": self.put_bytes,
            "tokens": self.tokens,
            "samples": self.samples,
            "lost": self.lost,
            "routed": self.routed,
            "modules": channel_modules(),
        }

    def _coverage(self) -> float:
        """The share of `generate` that its threads' spans explain. Between two calls nobody works here."""
        wall_s = sum(end - begin for begin, end, _ in self._calls)
        explained = (
            (end - begin) * self.clock.coverage(begin, end, thread=name) for begin, end, name in self._calls
        )
        return sum(explained) / wall_s if wall_s else 0.0

    def close(self) -> None:
        self.routing.join_previous()
        self.routing.close()

    # -- HTTP --------------------------------------------------------------------------------------------------------

    def _collect(self, step: int, requests: list[Request]) -> dict[str, Sample]:
        """Ask for all; what fails is named, counted and left out: it is never trained on guessed ids."""
        times: dict[str, tuple[float, float]] = {}
        with self.clock.span("http", step=step):
            answers = self._ask(requests, times)
        self._generated(step, {name: url for name, (url, _) in answers.items()}, times)
        samples = {}
        for request in requests:
            url, answer = answers[request.sample_id]
            try:
                if isinstance(answer, BaseException):
                    raise answer
                samples[request.sample_id] = self._add(request, url, answer)
            except (R3Error, RuntimeError, OSError) as error:
                self.lost.append(request.sample_id)
                print(f"step {step}: {request.sample_id} is left out: {error!r}", file=sys.stderr, flush=True)
        return samples

    def _ask(
        self, requests: list[Request], times: dict[str, tuple[float, float]]
    ) -> dict[str, tuple[str, bytes | BaseException]]:
        """Sample -> who answered, and what. An engine that cannot be reached gets no more requests until a weight update brings
        it back; those that it had go to the others."""
        answers: dict[str, tuple[str, bytes | BaseException]] = {}
        while requests:
            urls = [self.routable[index % len(self.routable)] for index in range(len(requests))]
            found = asyncio.run(ask(requests, urls, times))
            by_request = zip(requests, zip(urls, found, strict=True), strict=True)
            answers |= {request.sample_id: answer for request, answer in by_request}
            gone = {url: why for url, why in answers.values() if isinstance(why, EngineUnavailable)}
            for why in gone.values():
                print(f"an engine is out, its requests go to the others: {why}", file=sys.stderr, flush=True)
            left = tuple(url for url in self.routable if url not in gone)
            if not gone or not left:
                break
            self.routable = left
            requests = [request for request in requests if answers[request.sample_id][0] in gone]
        return answers

    def _add(self, request: Request, url: str, body: bytes) -> Sample:
        reply = self.routing.add(request, body, engine=url)
        tokens = request.prompt + reply["output_ids"]
        logprobs = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
        return Sample(request.sample_id, tokens, len(request.prompt), logprobs, reward(reply["output_ids"]))

    def _generated(self, step: int, urls: dict[str, str], times: dict[str, tuple[float, float]]) -> None:
        """An engine's lane: the requests that it answered, side by side."""
        for url in dict.fromkeys(urls.values()) if self.args.r3_trace else ():
            names = [name for name in times if urls[name] == url]
            lane = self._lanes.get(url) or TraceFile(self.args.r3_trace, f"engine {url}")
            self._lanes[url] = lane
            spans = in_slots([times[name] for name in names], stage="generation", step=step)
            for name, span in zip(names, spans, strict=True):
                lane.span(*astuple(span))
                lane.sample(name, thread=span.thread, at_s=span.end_s)

    def _usable(self, requests: list[Request], samples: dict[str, Sample]) -> dict[str, Sample]:
        """Whole groups only, and as many as fill the micro-batches of all DP ranks."""
        groups = [requests[index : index + GROUP] for index in range(0, len(requests), GROUP)]
        whole = [r.sample_id for group in groups for r in group if all(m.sample_id in samples for m in group)]
        unit = math.lcm(GROUP, self.layout.dp * self.args.micro_batch_size)
        kept = whole[: len(whole) // unit * unit]
        if not kept:
            raise RuntimeError(
                f"{len(whole)} usable samples of {len(requests)}; {unit} are needed for one step"
            )
        return {name: samples[name] for name in kept}
