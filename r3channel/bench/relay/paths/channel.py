"""Our own path: replies into a real relay, a sealed step, real receivers over TCP. They say hello over Ray."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch

from r3channel.bench.relay.held import Router
from r3channel.bench.relay.paths.base import Delivery, Start
from r3channel.bench.relay.stages import Stages
from r3channel.bench.relay.workload import Case, Workload
from r3channel.config import ChannelConfig
from r3channel.plan.layout import RankCoords
from r3channel.plan.ticket import Ticket
from r3channel.relay.relay import Relay
from r3channel.trainer.receiver import Control, Receiver
from r3channel.trainer.shard import RankShard

_SETTLE_S = 60.0
_CONFIG = ChannelConfig(step_timeout_s=60, send_timeout_s=30, join_timeout_s=60)
_RELAY_STAGES = {"plan": "plan", "place": "prepare", "send": "send"}
_RANK_STAGES = ("wait_relay", "wait_wire", "recv", "place", "verify", "rebroadcast")


class ChannelSending:
    """The manager's half; `relay` is what the ranks' control calls reach."""

    def __init__(self, work: Workload, path: str) -> None:
        self._work, self._steps = work, itertools.count()
        self.relay = Relay(work.spec, work.case.trainer, _CONFIG)

    def prepare(self, stages: Stages, *, whole: bool) -> None:
        """Bodies in memory -> verified rows in the store."""
        bodies = self._work.bodies
        with stages.span("ingest"):
            for name, body in bodies.items():
                self.relay.add_body(name, body, lambda reply: reply["output_ids"])

    def seal(self, stages: Stages) -> Ticket:
        """Until every receiver's rows are ready to be sent, with nobody receiving yet."""
        with stages.span("seal"):
            ticket = self.relay.seal(next(self._steps), self._work.assignment)
            for key in self.relay.status()["steps"][ticket.step]["missing"]:
                self.relay.steps.outgoing(ticket.step, key, ticket.run)
        return ticket

    def deliver(self, start: Start, *, ticket: Ticket | None = None) -> Delivery:
        delivery = Delivery(time.monotonic())
        if ticket is None:
            with delivery.stages.span("seal"):
                ticket = self.relay.seal(next(self._steps), self._work.assignment)
        blob = ticket.to_bytes()
        for rank in range(self._work.case.trainer.world_size):
            start(rank, blob)
        self._step = ticket.step
        return delivery

    def settle(self) -> None:
        self.relay.join_previous(timeout_s=_SETTLE_S)

    def stages(self) -> dict[str, float]:
        """Seconds of the relay's threads in the last step; they run beside each other."""
        totals = self.relay.clock.totals(step=self._step)
        return {name: totals[stage] for stage, name in _RELAY_STAGES.items() if stage in totals}

    @property
    def bytes_sent(self) -> int:
        sent = self.relay.metrics.value("r3channel_bytes_total", leg="wire_sent")
        return round(sent / (self._step + 1))

    @property
    def peak_staging_bytes(self) -> int:
        """See `Relay.peak_staging_bytes`."""
        return self.relay.peak_staging_bytes

    def close(self) -> None:
        self.relay.close()


class ChannelTaking:
    """A rank's half."""

    def __init__(self, case: Case, coords: RankCoords, control: Control) -> None:
        self._receiver = Receiver(control, spec=case.spec, layout=case.trainer, coords=coords, config=_CONFIG)
        self._router = Router()
        self._shard: RankShard | None = None
        self._receiver.join()

    def take(self, payload: Any, stages: Stages) -> float | None:
        """Layer by layer, what a router is about to take is held against the engines' digests, as `ReplayDriver` does it."""
        ticket = Ticket.from_bytes(payload)
        shard = self._shard = self._receiver.receive(ticket)
        held_s = time.monotonic()
        with stages.span("hand"):
            for number, layer in self._each(shard):
                ids_RK = shard.layer_ids(number, layer)
                shard.handed(number, layer, ids_RK)
                self._router.take(ids_RK)
        totals = self._receiver.clock.totals(step=ticket.step)
        stages.wall_s |= {stage: totals[stage] for stage in _RANK_STAGES if stage in totals}
        return held_s

    def blank(self) -> None:
        if self._shard is not None:
            self._shard.data_N.zero_()

    def tensors(self) -> Sequence[torch.Tensor]:
        shard = self._shard
        assert shard is not None, "nothing was received"
        return [shard.layer_ids(number, layer) for number, layer in self._each(shard)]

    def _each(self, shard: RankShard) -> list[tuple[int, int]]:
        return [(number, layer) for number in range(shard.num_microbatches) for layer in shard.shard.layers]

    def close(self) -> None:
        self._receiver.close()
