"""Routing over r3channel: what a user's own loop adds on its two sides, plus the demo's taps at both ends.

Imported only with --use-r3-channel. The channel itself is `relay.add`, `relay.seal`, `TrainerChannel.attach`, `step` and
`microbatch`; everything else here records what went in and what came out, so that it can be compared.
"""

from __future__ import annotations

import argparse
import base64
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from examples.async_grpo.batch import MicrobatchData, lengths_of
from examples.async_grpo.grpo import Request
from r3channel.config import ChannelConfig
from r3channel.model.spec import RoutingSpec
from r3channel.observe.metric_table import LABELS
from r3channel.observe.stage_clock import StageClock
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import RankCoords, TrainerLayout
from r3channel.plan.shards import Shard
from r3channel.plan.ticket import Ticket
from r3channel.recordings.options import recorder_of
from r3channel.relay.actor import RayRelay, RelayHost
from r3channel.relay.relay import Relay
from r3channel.trainer.adapters.megatron import parallel_coords
from r3channel.trainer.audit import Consumed, DigestLedger, RouterTap
from r3channel.trainer.channel import TrainerChannel
from r3channel.trainer.replay import ReplayStep
from r3channel.wire.frame import parse_frame


class ChannelRouting(RelayHost):
    """The rollout manager's side; see rollout.ManagerRouting."""

    def __init__(
        self, args: argparse.Namespace, spec: RoutingSpec, layout: TrainerLayout, clock: StageClock
    ) -> None:
        config = ChannelConfig.from_args(args)
        self.spec, self.layout, self.clock = spec, layout, clock
        self.relay = Relay(spec, layout, config, clock=clock, recorder=recorder_of(args))
        self.metrics = self.relay.metrics
        self.metrics.measure("r3channel_bytes_total", leg="engine_http")
        self._replied: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}
        self._sealed: dict[int, dict[str, tuple[np.ndarray, np.ndarray | None]]] = {}
        self._rows = 0
        self._versions: dict[str, Counter[int]] = {}
        self._rows_by_version: dict[int, Counter[int]] = {}
        """Step -> weight version -> rows."""

    def check_engine(self, url: str, reply: Mapping[str, Any], tokens: int) -> None:
        self.relay.check_engine(reply, engine=url, tokens=tokens)

    def join_previous(self) -> None:
        self.relay.join_previous()

    def add(self, request: Request, body: bytes, *, engine: str) -> dict[str, Any]:
        name, prompt = request.sample_id, request.prompt
        reply = self.relay.add_body(name, body, lambda reply: prompt + reply["output_ids"], engine=engine)
        self.metrics.inc("r3channel_bytes_total", len(body), leg="engine_http")
        self._rows += len(prompt) + len(reply["output_ids"]) - 1
        # The tap at the engine's end: the reply's own bytes, before anything of the relay has touched them.
        with self.clock.span("audit"):
            text = json.loads(body)["meta_info"]["routed_experts"]
            frame = parse_frame(base64.b64decode(text), spec=self.spec)
            self._replied[name] = (frame.decode(), frame.digests_L)
            self._versions[name] = Counter()
            for span in frame.provenance:
                self._versions[name][span.weight_version] += span.end - span.start
        return reply

    def discard(self, sample_ids: list[str]) -> None:
        self.relay.discard(sample_ids)
        for sample_id in sample_ids:
            self._replied.pop(sample_id, None)
            self._versions.pop(sample_id, None)

    def seal(self, step: int, assignment: Assignment, lengths: dict[str, int]) -> list[dict[str, Any]]:
        ticket = self.relay.seal(step, assignment)
        with self.clock.span("audit", step=step):
            names = assignment.sample_ids
            self._rows_by_version[step] = sum((self._versions.pop(n) for n in names), Counter[int]())
            self._sealed[step] = {name: self._replied.pop(name) for name in names}
        return [{"ticket": ticket.to_bytes()} for _ in range(self.layout.dp)]

    def control(self, call: str, arguments: dict[str, Any]) -> Any:
        if call == "replied":
            return self._sealed.pop(arguments["step"])
        return self.r3channel_control(call, arguments)

    def report(self) -> dict[str, Any]:
        legs = ("engine_frame", "engine_http", "wire_sent")
        return {
            "metrics_url": self.metrics.url,
            "rows": self._rows,
            "bytes": {leg: self.metrics.value("r3channel_bytes_total", leg=leg) for leg in legs},
            "status": self.relay.status(),
            "rows_by_version": self._rows_by_version,
            "outcomes": {
                one: self.metrics.value("r3channel_samples_total", outcome=one) for one in LABELS["outcome"]
            },
            "rejected": {
                one: self.metrics.value("r3channel_rejected_total", reason=one) for one in LABELS["reason"]
            },
        }

    def close(self) -> None:
        self.relay.close()


class ChannelReplay:
    """A trainer's side; see trainer.TrainerRouting."""

    def __init__(
        self,
        args: argparse.Namespace,
        chunks: Sequence[torch.nn.Module],
        manager: Any,
        layout: TrainerLayout,
        clock: StageClock,
    ) -> None:
        self.args, self.clock = args, clock
        self._dp = parallel_coords().dp
        config = ChannelConfig.from_args(args)
        self.channel = TrainerChannel.attach(
            chunks, RayRelay(manager), layout=layout, config=config, clock=clock
        )
        self.channel.recording = args.record
        self.metrics = self.channel.metrics
        if layout.rank(parallel_coords()) == 0:  # the only one that is told of the comparison
            for name in ("r3channel_ids_compared_total", "r3channel_ids_different_total"):
                self.metrics.measure(name)
        self._tap = RouterTap(self.channel.driver, on_call=self._keep)
        self._calls: list[Consumed] = []
        self._consumed: dict[int, dict[str, Any]] = {}
        self._step: ReplayStep | None = None

    def shard(self, data: dict[str, Any], coords: RankCoords) -> Shard:
        plan = Ticket.from_bytes(data["ticket"]).plan
        return plan.shard(dp=coords.dp, pp=coords.pp, cp=coords.cp)

    @contextmanager
    def step(self, data: dict[str, Any], *, version: int) -> Iterator[None]:
        """Replay the step inside the block; its audit is made when the block ends."""
        with self._tap:
            if self.args.no_replay:
                shard = self.channel.receiver.receive(Ticket.from_bytes(data["ticket"]))
                yield
            else:
                ticket = Ticket.from_bytes(data["ticket"])
                lengths = lengths_of(data, ticket.assignment.ranks[self._dp])
                with self.channel.step(ticket, lengths=lengths, version=version) as self._step:
                    shard = self.channel.shard
                    assert shard is not None
                    if self.args.fault == "corrupt-id" and shard.shard.layers:
                        self._corrupt(shard.layer_ids(0, shard.shard.layers[0]))
                    yield
                self._step = None
        with self.clock.span("audit", step=shard.ticket.step):
            self._audit(shard)

    def microbatch(self, index: int, mode: str, chunk: torch.nn.Module) -> AbstractContextManager[None]:
        if mode == "natural" or self._step is None:
            return self.channel.driver.off(microbatch=index if self._step is None else -1)
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

    def report(self) -> dict[str, Any]:
        landed = self.metrics.value("r3channel_bytes_total", leg="landed")
        received = self.metrics.value("r3channel_bytes_total", leg="wire_received")
        lags = {
            lag: self.metrics.value("r3channel_rows_by_staleness_total", lag=lag) for lag in LABELS["lag"]
        }
        return {
            "metrics_url": self.metrics.url,
            "landed": landed,
            "wire_received": received,
            "rows_by_staleness": lags,
        }

    def audited(self, compared: int, different: int) -> None:
        self.metrics.inc("r3channel_ids_compared_total", compared)
        self.metrics.inc("r3channel_ids_different_total", different)

    def weight_version(self, version: int) -> None:
        self.metrics.set("r3channel_weight_version", version)

    def consumed(self, step: int) -> dict[str, Any]:
        """What this rank's routers used in a step: flat arrays over real rows, and the digests of each sample and layer."""
        return self._consumed.pop(step)

    def close(self) -> None:
        self.channel.close()

    def _keep(self, call: Consumed) -> None:
        if call.microbatch >= 0:  # the comparison pass with replay off is not part of the audit
            self._calls.append(call)

    def _audit(self, shard: Any) -> None:
        columns: dict[str, list[np.ndarray]] = {
            "sample": [],
            "position": [],
            "layer": [],
            "ids": [],
            "pass": [],
        }
        ledger = DigestLedger()
        for call in self._calls:
            names = shard.shard.microbatches[call.microbatch].sample_ids
            samples_R, positions_R = shard.shard.row_map(call.microbatch, tp=shard.tp)
            ledger.add(call, sample_ids=names, samples_R=samples_R, positions_R=positions_R)
            real = samples_R >= 0
            count = int(real.sum())
            columns["sample"].append(np.asarray(names)[samples_R[real]])
            columns["position"].append(positions_R[real])
            columns["layer"].append(np.full(count, call.layer))
            columns["ids"].append(call.ids_RK[real])
            columns["pass"].append(np.full(count, call.pass_name))
        self._calls = []
        arrays = {name: np.concatenate(parts) for name, parts in columns.items() if parts}
        mismatch = self.channel.report if not self.args.no_replay else None
        self._consumed[shard.ticket.step] = {"arrays": arrays, "digests": ledger.sums, "mismatch": mismatch}

    @staticmethod
    def _corrupt(ids_RK: torch.Tensor) -> None:
        """One wrong but valid id in the first row of the placed shard; the router that is handed it refuses it."""
        unused = set(range(ids_RK.shape[1] + 1)) - set(ids_RK[0].tolist())
        ids_RK[0, 0] = min(unused)
