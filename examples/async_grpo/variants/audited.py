"""The demo's manager and trainer: those of the loop with the channel, and taps that record what went in and what came out."""

from __future__ import annotations

import argparse
import base64
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from examples.async_grpo.channel_side import ChannelReplay, ChannelRouting
from examples.async_grpo.grpo import Request
from examples.async_grpo.rollout import RolloutManager
from examples.async_grpo.trainer import Trainer
from r3channel.observe.metric_table import LABELS
from r3channel.plan.assignment import Assignment
from r3channel.trainer.audit import Consumed, RouterTap
from r3channel.wire.frame import parse_frame


class AuditedManager(RolloutManager):
    def _make_routing(self) -> AuditedRouting:
        return AuditedRouting(self.args, self.spec, self.layout, self.clock)


class AuditedTrainer(Trainer):
    routing: AuditedReplay

    def _make_routing(self, manager: Any) -> AuditedReplay:
        return AuditedReplay(self.args, self.model.chunks, manager, self.layout, self.clock)

    def consumed(self, step: int) -> dict[str, Any]:
        """What this rank's routers used in a step: flat arrays over real rows."""
        return self.routing.consumed.pop(step)


class AuditedRouting(ChannelRouting):
    """The tap at the engine's end holds the reply's own bytes, before anything of the relay has touched them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.metrics = self.relay.metrics
        self.metrics.measure("r3channel_bytes_total", leg="engine_http")
        self._replied: dict[str, np.ndarray] = {}
        self._sealed: dict[int, dict[str, np.ndarray]] = {}
        self._rows = 0
        self._versions: dict[str, Counter[int]] = {}
        self._rows_by_version: dict[int, Counter[int]] = {}
        """Step -> weight version -> rows."""

    def add(self, request: Request, body: bytes, *, engine: str) -> dict[str, Any]:
        reply, name = super().add(request, body, engine=engine), request.sample_id
        self.metrics.inc("r3channel_bytes_total", len(body), leg="engine_http")
        self._rows += len(request.prompt) + len(reply["output_ids"]) - 1
        if self.args.delivery == "direct":  # the reply has a reference, and the rows are the relay's alone
            return reply
        with self.clock.span("audit"):
            text = json.loads(body)["meta_info"]["routed_experts"]
            frame = parse_frame(base64.b64decode(text), spec=self.spec)
            self._replied[name] = frame.ids()
            self._versions[name] = Counter()
            for span in frame.provenance:
                self._versions[name][span.weight_version] += span.end - span.start
        return reply

    def discard(self, sample_ids: list[str]) -> None:
        super().discard(sample_ids)
        for sample_id in sample_ids:
            self._replied.pop(sample_id, None)
            self._versions.pop(sample_id, None)

    def seal(self, step: int, assignment: Assignment, lengths: dict[str, int]) -> list[dict[str, Any]]:
        travelling = super().seal(step, assignment, lengths)
        with self.clock.span("audit", step=step):
            names = assignment.sample_ids
            self._rows_by_version[step] = sum(
                (self._versions.pop(n, Counter[int]()) for n in names), Counter[int]()
            )
            self._sealed[step] = {name: self._replied.pop(name) for name in names if name in self._replied}
        return travelling

    def control(self, call: str, arguments: dict[str, Any]) -> Any:
        if call == "replied":
            return self._sealed.pop(arguments["step"])
        return super().control(call, arguments)

    def report(self) -> dict[str, Any]:
        legs = ("engine_frame", "engine_http", "wire_sent")
        return super().report() | {
            "rows": self._rows,
            "bytes": {leg: self.metrics.value("r3channel_bytes_total", leg=leg) for leg in legs},
            "rows_by_version": self._rows_by_version,
            "outcomes": {
                one: self.metrics.value("r3channel_samples_total", outcome=one) for one in LABELS["outcome"]
            },
            "rejected": {
                one: self.metrics.value("r3channel_rejected_total", reason=one) for one in LABELS["reason"]
            },
        }


class AuditedReplay(ChannelReplay):
    """The tap at the routers' end holds what Megatron handed to each of them."""

    def __init__(self, args: argparse.Namespace, *arguments: Any) -> None:
        super().__init__(args, *arguments)
        self.args, self.clock = args, self.channel.receiver.clock
        self.consumed: dict[int, dict[str, Any]] = {}
        """Step -> flat arrays over real rows, and the report on mismatch."""
        self._tap = RouterTap(self.channel.driver, on_call=self._keep)
        self._calls: list[Consumed] = []

    @contextmanager
    def step(self, data: dict[str, Any], *, version: int) -> Iterator[None]:
        """The step's audit is made when the block ends."""
        with self._tap:
            if self.args.no_replay:
                shard = self.channel.receiver.receive(data["ticket"])
                yield
            else:
                with super().step(data, version=version):
                    shard = self.channel.shard
                    assert shard is not None
                    if self.args.fault == "corrupt-id" and shard.shard.layers:
                        _corrupt(shard.layer_ids(0, shard.shard.layers[0]))
                    yield
        with self.clock.span("audit", step=shard.ticket.step):
            self._audit(shard)

    def report(self) -> dict[str, Any]:
        lags = {
            lag: self.metrics.value("r3channel_rows_by_staleness_total", lag=lag) for lag in LABELS["lag"]
        }
        legs = ("landed", "wire_received")
        moved = {leg: self.metrics.value("r3channel_bytes_total", leg=leg) for leg in legs}
        return super().report() | moved | {"rows_by_staleness": lags}

    def _keep(self, call: Consumed) -> None:
        if call.microbatch >= 0:  # the comparison pass with replay off is not part of the audit
            self._calls.append(call)

    def _audit(self, shard: Any) -> None:
        columns: dict[str, list[np.ndarray]] = {
            name: [] for name in ("sample", "position", "layer", "ids", "pass")
        }
        for call in self._calls:
            names = shard.shard.microbatches[call.microbatch].sample_ids
            samples_R, positions_R = shard.shard.row_map(call.microbatch, tp=shard.tp)
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
        self.consumed[shard.ticket.step] = {"arrays": arrays, "mismatch": mismatch}


def _corrupt(ids_RK: torch.Tensor) -> None:
    """One wrong but valid id in the first row of the placed shard; the router that is handed it refuses it."""
    unused = set(range(ids_RK.shape[1] + 1)) - set(ids_RK[0].tolist())
    ids_RK[0, 0] = min(unused)
