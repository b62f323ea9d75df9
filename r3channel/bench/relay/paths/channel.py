"""Our own path: frames into a real relay, a sealed step, real receivers over gloo. Control calls go over Ray."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from r3channel.bench.relay.held import Router
from r3channel.bench.relay.paths.base import Delivery, Start
from r3channel.bench.relay.stages import Stages
from r3channel.bench.relay.workload import Case, Workload
from r3channel.config import ChannelConfig
from r3channel.plan.layout import RankCoords
from r3channel.plan.ticket import Ticket
from r3channel.relay.ingest import frame_bytes_of
from r3channel.relay.relay import Relay
from r3channel.trainer.receiver import Control, Receiver
from r3channel.trainer.shard import RankShard
from r3channel.trainer.step import index_dtype
from r3channel.transport.tensor_parallel import TensorParallelFanout

_PLACED_S = 60.0
_POLL_S = 0.002
_RELAY_STAGES = ("plan", "decode", "place", "send")
_RANK_STAGES = ("wait_relay", "wait_wire", "recv", "verify", "rebroadcast")


def config_of(path: str) -> ChannelConfig:
    """The defaults; coalesced: each shard is one bucket."""
    staging = "coalesced" if path.endswith("coalesced") else "bucketed"
    return ChannelConfig(step_timeout_s=60, send_timeout_s=30, join_timeout_s=60, staging=staging)


class ChannelSending:
    """The manager's half; `relay` is what the ranks' control calls reach."""

    def __init__(self, work: Workload, path: str) -> None:
        self._work = work
        self._tokens = {name: np.arange(length) for name, length in work.lengths.items()}
        self.relay = Relay(work.spec, work.case.trainer, config_of(path))
        self._steps = itertools.count()
        self.bytes_sent = sum(shard.nbytes for shard in work.plan.shards)

    def prepare(self, stages: Stages, *, whole: bool) -> None:
        """Frames in memory -> verified (hash, spec, every id, distinctness) and in the store."""
        with stages.span("ingest"):
            for name, frame in self._work.frames.items():
                self.relay.add_frame(name, frame, self._tokens[name])

    def unwrap(self, stages: Stages) -> None:
        """What in-band delivery does before: a reply's JSON and base64. On top of `prepare`."""
        for name, frame in self._work.frames.items():
            reply = self._work.reply(name, frame)
            with stages.span("unwrap"):
                import json

                frame_bytes_of(json.loads(reply), sample_id=name, engine="bench")

    def place(self, stages: Stages) -> Ticket:
        """Seal and wait until every shard is in host memory, with nobody receiving yet."""
        step = next(self._steps)
        with stages.span("place"):
            ticket = self.relay.seal(step, self._work.assignment)
            deadline_s = time.monotonic() + _PLACED_S
            while self.relay.status()["steps"][step]["state"] == "SEALED":
                assert time.monotonic() < deadline_s, "the relay did not place the step"
                time.sleep(_POLL_S)
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
        self.relay.join_previous(timeout_s=_PLACED_S)

    def stages(self) -> dict[str, float]:
        """Seconds of the relay's threads in the last step; decode and place run beside send."""
        totals = self.relay.clock.totals(step=self._step)
        return {stage: totals[stage] for stage in _RELAY_STAGES if stage in totals}

    @property
    def peak_staging_bytes(self) -> int:
        """Most bytes that one DP rank's group had staged, or given to gloo in place, at once."""
        return self.relay.peak_staging_bytes

    def close(self) -> None:
        self.relay.close()


class ChannelTaking:
    """A rank's half."""

    def __init__(self, case: Case, coords: RankCoords, control: Control, *, path: str, group: Any) -> None:
        fanout = TensorParallelFanout(group, device=torch.device("cpu"))
        self._receiver = Receiver(
            control, spec=case.spec, layout=case.trainer, coords=coords, config=config_of(path), fanout=fanout
        )
        self._router = Router(index_dtype(torch.device("cpu")))
        self._shard: RankShard | None = None
        self._receiver.join()

    def take(self, payload: Any, stages: Stages) -> float | None:
        self._shard = None
        ticket = Ticket.from_bytes(payload)
        self._shard = self._receiver.receive(ticket)
        held_s = time.monotonic()
        with stages.span("widen"):
            self._router.take_all(self.tensors())
        totals = self._receiver.clock.totals(step=ticket.step)
        stages.wall_s |= {stage: totals[stage] for stage in _RANK_STAGES if stage in totals}
        return held_s

    def blank(self) -> None:
        if self._shard is not None:
            self._shard.data_N.zero_()

    def tensors(self) -> Sequence[torch.Tensor]:
        shard = self._shard
        assert shard is not None, "nothing was received"
        return [
            shard.layer_ids(number, layer)
            for number in range(shard.num_microbatches)
            for layer in shard.shard.layers
        ]

    def close(self) -> None:
        self._receiver.close()
