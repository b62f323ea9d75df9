"""The limit: the bytes of our shards, already cut, sent by plain gloo from the manager to every rank. Nothing is verified."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from r3channel.bench.relay.held import HeldRows
from r3channel.bench.relay.paths.base import Delivery, Start
from r3channel.bench.relay.stages import Stages
from r3channel.bench.relay.workload import Workload
from r3channel.plan.place import place_samples
from r3channel.transport.base import Rendezvous, Transport
from r3channel.transport.joining import join, open_store

_WIRE_S = 60.0


class RawSending:
    """The manager's half: one group and one thread per rank, as our own relay has them, and one message."""

    def __init__(self, work: Workload, path: str) -> None:
        layout = work.case.trainer
        placed = {}
        for dp in range(layout.dp):
            placed |= place_samples(work.plan, dp=dp, ids_of=work.ids)
        self._parts = [_part(work, placed, rank) for rank in range(layout.world_size)]
        self.bytes_sent = sum(len(part) for part in self._parts)
        self._store = open_store("127.0.0.1")
        self._groups: list[Transport] = []
        self._pool = ThreadPoolExecutor(len(self._parts))

    def rendezvous(self, rank: int, member: int) -> Rendezvous:
        return Rendezvous(
            backend="gloo",
            name=f"raw{rank}",
            epoch=1,
            rank=member,
            world_size=2,
            host=self._store.host,
            port=self._store.port,
        )

    def join(self) -> None:
        ranks = range(len(self._parts))
        self._groups = list(
            self._pool.map(lambda rank: join(self.rendezvous(rank, 0), timeout_s=_WIRE_S), ranks)
        )

    def prepare(self, stages: Stages, *, whole: bool) -> None:
        pass

    def deliver(self, start: Start) -> Delivery:
        """The clock starts when every rank has said that it is about to receive."""
        for rank in range(len(self._parts)):
            start(rank, None)
        word = torch.zeros(1, dtype=torch.uint8)
        for group in self._groups:
            group.recv(1, word, timeout_s=_WIRE_S)
        delivery = Delivery(time.monotonic())
        with delivery.stages.span("send"):
            list(self._pool.map(self._send, self._groups, self._parts))
        return delivery

    def _send(self, group: Transport, part_N: torch.Tensor) -> None:
        group.send(1, part_N, timeout_s=_WIRE_S)

    def settle(self) -> None:
        pass

    def close(self) -> None:
        self._pool.shutdown()
        for group in self._groups:
            group.close()
        self._store.close()


class RawTaking:
    """A rank's half: one buffer, no widening."""

    def __init__(self, held: HeldRows, rendezvous: Rendezvous) -> None:
        self._held = held
        self._views = [torch.from_numpy(view).view(torch.uint8).view(-1) for view in held.views]
        self._data_N = torch.zeros(sum(map(len, self._views)), dtype=torch.uint8)
        self._word = torch.zeros(1, dtype=torch.uint8)
        self._group = join(rendezvous, timeout_s=_WIRE_S)

    def take(self, payload: Any, stages: Stages) -> float | None:
        self._group.send(0, self._word, timeout_s=_WIRE_S)
        with stages.span("recv"):
            self._group.recv(0, self._data_N, timeout_s=_WIRE_S)
        return None

    def blank(self) -> None:
        self._data_N.zero_()

    def tensors(self) -> Sequence[torch.Tensor]:
        at = 0
        for view in self._views:
            view.copy_(self._data_N[at : at + len(view)])
            at += len(view)
        return list(self._held.tensors())

    def close(self) -> None:
        self._group.close()


def _part(work: Workload, placed: dict[Any, Any], rank: int) -> torch.Tensor:
    """The bytes that one rank must end with, in its order."""
    coords = work.case.trainer.coords(rank)
    shard = work.plan.shard(dp=coords.dp, pp=coords.pp, cp=coords.cp)
    slot = coords.tp if shard.tp_slots > 1 else 0
    views = [view[slot].reshape(-1).view(np.uint8) for view in shard.views(placed[shard.key])]
    return torch.from_numpy(np.concatenate(views))
