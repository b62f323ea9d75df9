"""A trainer rank's process: a Ray actor that holds the taking half of every path. It trains nothing."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

from r3channel.bench.relay.held import HeldRows, digest
from r3channel.bench.relay.paths import DIRECT, OURS
from r3channel.bench.relay.paths.base import Taking
from r3channel.bench.relay.paths.channel import ChannelTaking
from r3channel.bench.relay.paths.direct import DirectTaking
from r3channel.bench.relay.paths.raw import RawTaking
from r3channel.bench.relay.paths.store import StoreTaking, held_of, is_narrow
from r3channel.bench.relay.stages import Stages
from r3channel.bench.relay.workload import Case
from r3channel.relay.actor import RayRelay
from r3channel.transport.base import Rendezvous


class Rank:
    """EMPTY -> load -> (open | take | blank | digest)* -> unload -> EMPTY."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self._rank = rank
        self._taking: dict[str, Taking] = {}
        self._held: dict[bool, HeldRows] = {}

    def load(self, case: Case) -> None:
        self._case, self._coords = case, case.trainer.coords(self._rank)
        gc.freeze()  # modules need no collecting: it took 0.15 s a time

    def open(self, path: str, manager: Any, rendezvous: dict[str, Any] | None = None) -> None:
        self._taking[path] = self._new(path, manager, rendezvous)

    def _new(self, path: str, manager: Any, rendezvous: dict[str, Any] | None) -> Taking:
        if path in OURS:
            return ChannelTaking(self._case, self._coords, RayRelay(manager))
        if rendezvous is not None:
            return RawTaking(self._rows(narrow=True), Rendezvous(**rendezvous))
        held = self._rows(narrow=is_narrow(path))
        return DirectTaking(held, path) if path in DIRECT else StoreTaking(held, path)

    def _rows(self, *, narrow: bool) -> HeldRows:
        if narrow not in self._held:
            self._held[narrow] = held_of(self._case, self._coords, narrow=narrow)
        return self._held[narrow]

    def take(self, path: str, payload: Any) -> dict[str, Any]:
        """Until the routers have taken all rows. Times are time.monotonic, comparable on one machine."""
        stages = Stages()
        held_s = self._taking[path].take(payload, stages)
        end_s = time.monotonic()
        return {"end_s": end_s, "held_s": held_s or end_s, "stages": stages.wall_s}

    def blank(self, path: str) -> None:
        self._taking[path].blank()

    def digest(self, path: str) -> str:
        """Of what the last `take` left."""
        return digest(self._taking[path].tensors())

    def settle(self) -> None:
        gc.collect()

    def unload(self) -> None:
        for taking in self._taking.values():
            taking.close()
        self._taking.clear()
        self._held.clear()
        gc.collect()
