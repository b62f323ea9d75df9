"""The manager's process: a Ray actor that holds the sending half of every path, and is the relay's control channel."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import ray
import torch

from r3channel.bench.relay.paths import DIRECT, OURS
from r3channel.bench.relay.paths.base import Sending
from r3channel.bench.relay.paths.channel import ChannelSending
from r3channel.bench.relay.paths.raw import RawSending
from r3channel.bench.relay.paths.store import StoreSending
from r3channel.bench.relay.stages import Stages
from r3channel.bench.relay.workload import Case, Workload
from r3channel.relay.actor import RelayHost

ROUND_S = 120.0


class Manager(RelayHost):
    """EMPTY -> load -> (open | prepare | ready | deliver | settle)* -> unload -> EMPTY. One call at a time.

    Control calls of the ranks come beside, on other threads.
    """

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._work: Workload | None = None
        self._sending: dict[str, Any] = {}
        self._ranks: list[Any] = []

    def pid(self) -> int:
        return os.getpid()

    def load(self, case: Case, ranks: list[Any]) -> None:
        """The step's data, and the ranks that all paths deliver to. Loading what is loaded changes nothing."""
        if self._work is None or self._work.case != case:
            self._work = Workload(case)
            gc.freeze()  # modules and the step's data need no collecting
        self._ranks = ranks

    @property
    def work(self) -> Workload:
        assert self._work is not None, "load() comes first"
        return self._work

    def open(self, path: str) -> None:
        self._sending[path] = self._new(path)
        self._use(path)

    def _use(self, path: str) -> None:
        """Control calls reach the relay of the path that runs."""
        if path in OURS:
            self.relay = self._sending[path].relay

    def _new(self, path: str) -> Sending:
        if path in OURS:
            return ChannelSending(self.work, path)
        if path == "raw_gloo":
            return RawSending(self.work, path)
        return StoreSending(self.work, path)

    def rendezvous(self, path: str, rank: int) -> dict[str, Any]:
        """Where a rank joins a path's own group."""
        return self._sending[path].rendezvous(rank, 1).to_dict()

    def join(self, path: str) -> None:
        self._sending[path].join()

    def prepare(self, path: str, *, whole: bool) -> dict[str, dict[str, float]]:
        stages = Stages()
        self._sending[path].prepare(stages, whole=whole)
        return stages.to_dict()

    def ready(self, path: str) -> dict[str, Any]:
        """Ours only: bodies in memory -> ready to be sent, apart from sending (`ready`: CPU); the step is then delivered."""
        stages, sending = Stages(), self._sending[path]
        sending.prepare(stages, whole=True)
        ticket = sending.seal(stages)
        return self._deliver(path, ticket=ticket) | {"ready": stages.to_dict()["cpu_s"]}

    def deliver(self, path: str) -> dict[str, Any]:
        return self._deliver(path)

    def _deliver(self, path: str, **options: Any) -> dict[str, Any]:
        sending = self._sending[path]
        self._use(path)
        answers: list[Any] = []
        begin_s = time.process_time()
        delivery = sending.deliver(
            lambda rank, payload: answers.append(self._ranks[rank].take.remote(path, payload)), **options
        )
        cpu_s = time.process_time() - begin_s
        ranks = ray.get(answers, timeout=ROUND_S)
        stages = delivery.stages.to_dict()
        return {"start_s": delivery.start_s, "ranks": ranks, "stages": stages, "cpu_s": cpu_s}

    def settle(self, path: str) -> dict[str, float]:
        """Free what the step held; ours: seconds of the relay's own stages."""
        self._sending[path].settle()
        gc.collect()
        return self._sending[path].stages() if path in OURS else {}

    @ray.method(tensor_transport="gloo")
    def tensors_of(self, dp: int) -> list[torch.Tensor]:
        """A DP rank's samples, kept here; Ray Direct Transport sends them."""
        return [torch.from_numpy(self.work.narrow[name]) for name in self.work.of_rank(dp)]

    def bytes_sent(self, path: str) -> int:
        """Per step, over all ranks."""
        if path in DIRECT:
            return sum(ids.nbytes for ids in self.work.narrow.values())
        return self._sending[path].bytes_sent

    def reply_bytes(self, path: str) -> int:
        """Of one step: what an engine returns. A peer's is estimated from the ids' sizes (base64: 4 for 3)."""
        if path in OURS:
            return sum(map(len, self.work.bodies.values()))
        return sum(self.work.lengths.values()) * self.work.spec.num_layers * self.work.spec.top_k * 16 // 3

    def peak_staging_bytes(self, path: str) -> int:
        return self._sending[path].peak_staging_bytes

    def unload(self) -> None:
        for sending in self._sending.values():
            sending.close()
        self._sending.clear()
        self._work = None
        gc.unfreeze()
        gc.collect()
