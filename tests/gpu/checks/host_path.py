"""Shards over TCP to the device: ids, pinned memory, what the copy costs; a replay late on its stream keeps its ids."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from r3channel.config import ChannelConfig
from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.trainer.receiver import Receiver
from r3channel.wire.frame import encode_frame
from tests.gpu.facts import Facts

SPEC = RoutingSpec(num_layers=48, moe_layers=tuple(range(48)), num_experts=128, top_k=8)
MIB, STEPS, SAMPLE_ROWS = 1 << 20, 8, 60_000
LATE_CYCLES = 200_000_000
"""About 0.1 s of a GPU's clock."""


def ids_of(rows: int, *, shift: int) -> np.ndarray[Any, Any]:
    """[rows, L, K], distinct within a row."""
    first_TL = np.arange(rows)[:, None] * 7 + np.arange(SPEC.num_moe_layers) * 3 + shift
    return ((first_TL[..., None] + np.arange(SPEC.top_k)) % SPEC.num_experts).astype(SPEC.id_dtype)


class Path:
    """A relay and a receiver whose routers run on the device; steps of one size with two alternating contents."""

    def __init__(self, device: torch.device, mebibytes: int) -> None:
        total = max(mebibytes * MIB // SPEC.bytes_per_token, 100)
        self.rows = {f"s{at}": min(SAMPLE_ROWS, total - at) for at in range(0, total, SAMPLE_ROWS)}
        self.ids = [[ids_of(rows, shift=shift) for rows in self.rows.values()] for shift in (0, 5)]
        self.frames = [[encode_frame(SPEC, expert_ids_TLK=one) for one in ids] for ids in self.ids]
        self.relay = Relay(SPEC, TrainerLayout(), ChannelConfig())
        at: dict[str, Any] = {"layout": self.relay.layout, "coords": self.relay.layout.coords(0)}
        self.receiver = Receiver(self.relay, spec=SPEC, config=self.relay.config, device=device, **at)
        self.receiver.join()

    def step(self, number: int) -> tuple[Any, float, float]:
        """(the shard, seconds in `receive`, those of them in the copy to the device)."""
        for (name, rows), frame in zip(self.rows.items(), self.frames[number % 2], strict=True):
            self.relay.add_frame(name, frame, range(rows + 1))
        ticket = self.relay.seal(number, Assignment.given([[[name] for name in self.rows]]))
        begin, copied_s = time.perf_counter(), self._copied_s()
        shard = self.receiver.receive(ticket)
        spent_s = time.perf_counter() - begin
        self.relay.join_previous()
        return shard, spent_s, self._copied_s() - copied_s

    def close(self) -> None:
        self.receiver.close()
        self.relay.close()

    def _copied_s(self) -> float:
        return self.receiver.clock.totals().get("h2d", 0.0)

    def different(self, number: int, used: list[torch.Tensor]) -> int:
        """Ids of the first and the last layer of each sample that are not what the step was sealed with."""
        wrong = 0
        for index, ids_TLK in enumerate(self.ids[number % 2]):
            for part, layer in enumerate((0, SPEC.num_layers - 1)):
                found = used[2 * index + part][: len(ids_TLK)].cpu().numpy()
                wrong += int((found != ids_TLK[:, layer]).sum())
        return wrong


def replay(shard: Any, *, late: bool) -> list[torch.Tensor]:
    """What a router reads, long after the host has gone on or at once."""
    if late:
        torch.cuda._sleep(LATE_CYCLES)
    return [
        shard.layer_ids(index, layer).clone()
        for index in range(shard.num_microbatches)
        for layer in (0, SPEC.num_layers - 1)
    ]


def pinned_bytes(device: str) -> int:
    """As torch has taken them from the system, in powers of two."""
    if device == "cpu":
        return 0
    torch.cuda.init()  # before it there are no figures at all
    return torch.cuda.host_memory_stats()["active_bytes.current"]


def check(device: str, facts: Facts) -> None:
    cuda = device == "cuda"
    for mebibytes in (1,) if facts.small else (16, 256):
        name, before = f"{mebibytes} MiB", pinned_bytes(device)
        path = Path(torch.device(device, 0) if cuda else torch.device("cpu"), mebibytes)
        different, waiting, nbytes = 0, None, 0
        for number in range(4 if facts.small else STEPS):
            shard = path.step(number)[0]
            nbytes = shard.shard.nbytes
            if waiting is not None:  # looked at only now: its memory has been received over meanwhile
                different += path.different(*waiting)
            waiting = number, replay(shard, late=cuda and number % 2 == 0)
        assert waiting is not None
        different += path.different(*waiting)
        facts.expect(f"{name}: ids that differ", different, different == 0, "0")
        sizes = nbytes, len(path.receiver._member._buckets[0])
        most = sum(1 << (size - 1).bit_length() for size in sizes) if cuda else 0
        pinned = pinned_bytes(device) - before
        facts.expect(f"{name}: pinned bytes", pinned, pinned <= most, f"{most}, of shard and bucket {sizes}")
        path.close()
    if not cuda:
        facts.left_out.append("pinned memory and late streams: nothing is copied to a device on a CPU")


def cost(device: str, facts: Facts) -> None:
    """The same copy alone takes turns with the steps."""
    path = Path(torch.device(device, 0), 1 if facts.small else 256)
    nbytes, steps, copies = 0, list[tuple[float, float]](), list[float]()
    for number in range(2 + STEPS):
        shard, whole_s, copied_s = path.step(number)
        nbytes = shard.shard.nbytes
        steps.append((whole_s, copied_s))
        host_N, device_N = (path.receiver._buffers[name][:nbytes] for name in ("whole0-cpu", "device-cuda"))
        torch.cuda.synchronize()
        begin = time.perf_counter()
        device_N.copy_(host_N, non_blocking=True)
        torch.cuda.synchronize()
        copies.append(time.perf_counter() - begin)
    path.close()
    steps, copy_s = steps[2:], statistics.median(copies[2:])
    whole_s = statistics.median(spent_s for spent_s, _ in steps)
    facts.note("the copy alone, GB/s", nbytes / copy_s / 1e9)
    facts.note("whole way, GB/s", nbytes / whole_s / 1e9)
    ours = statistics.median(own_s for _, own_s in steps) / copy_s
    facts.limit("our copy, of the copy alone", ours, ours <= 1.5, "at most 1.5")
    share = statistics.median(max(own_s, copy_s) / spent_s for spent_s, own_s in steps)
    facts.limit("the copy, of the whole way", share, share <= 0.1, "at most a tenth: decision 87")
