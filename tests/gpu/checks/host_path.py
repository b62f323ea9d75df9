"""Shards over the host transport to the device: bytes, rates, pinned memory; a replay late on its stream keeps its ids."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from r3channel.config import ChannelConfig
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.spec import RoutingSpec
from r3channel.trainer.receiver import Receiver
from r3channel.wire.frame import encode_frame
from tests.gpu.facts import Facts, main

SPEC = RoutingSpec(num_layers=48, moe_layers=tuple(range(48)), num_experts=128, top_k=8)
MIB, STEPS, SAMPLE_ROWS = 1 << 20, 20, 60_000
LATE_CYCLES = 200_000_000
"""About 0.1 s of a GPU's clock."""


def ids_of(rows: int, *, shift: int) -> np.ndarray[Any, Any]:
    """[rows, L, K], distinct within a row."""
    first_TL = np.arange(rows)[:, None] * 7 + np.arange(SPEC.num_moe_layers) * 3 + shift
    return ((first_TL[..., None] + np.arange(SPEC.top_k)) % SPEC.num_experts).astype(SPEC.id_dtype)


class Path:
    """A relay and a receiver whose routers run on the device; steps of one size with two alternating contents."""

    def __init__(self, device: str, mebibytes: int) -> None:
        total = max(mebibytes * MIB // SPEC.bytes_per_token, 100)
        self.rows = [min(SAMPLE_ROWS, total - at) for at in range(0, total, SAMPLE_ROWS)]
        self.ids = [[ids_of(rows, shift=shift) for rows in self.rows] for shift in (0, 5)]
        self.frames = [[encode_frame(SPEC, expert_ids_TLK=one) for one in ids] for ids in self.ids]
        layout, config = TrainerLayout(), ChannelConfig()
        self.device = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
        self.relay = Relay(SPEC, layout, config)
        self.receiver = Receiver(
            self.relay, spec=SPEC, layout=layout, coords=layout.coords(0), config=config, device=self.device
        )
        self.receiver.join()

    def step(self, number: int) -> tuple[Any, float]:
        """(the shard, seconds in `receive`)."""
        for index, frame in enumerate(self.frames[number % 2]):
            self.relay.add_frame(f"s{index}", frame, range(self.rows[index] + 1))
        one_each = Assignment.given([[[f"s{index}"] for index in range(len(self.rows))]])
        ticket = self.relay.seal(number, one_each)
        begin = time.perf_counter()
        shard = self.receiver.receive(ticket)
        spent_s = time.perf_counter() - begin
        self.relay.join_previous()
        return shard, spent_s

    def different(self, number: int, used: list[torch.Tensor]) -> int:
        """Ids of the first and the last layer of each sample that are not what the step was sealed with."""
        wrong = 0
        for index, ids_TLK in enumerate(self.ids[number % 2]):
            for part, layer in enumerate((0, SPEC.num_layers - 1)):
                found = used[2 * index + part][: self.rows[index]].cpu().numpy()
                wrong += int((found != ids_TLK[:, layer]).sum())
        return wrong

    def close(self) -> None:
        self.receiver.close()
        self.relay.close()


def late_replay(shard: Any, device: torch.device) -> list[torch.Tensor]:
    """What a router reads long after the host has gone on."""
    if device.type == "cuda":
        torch.cuda._sleep(LATE_CYCLES)
    return [
        shard.layer_ids(index, layer).clone()
        for index in range(shard.num_microbatches)
        for layer in (0, SPEC.num_layers - 1)
    ]


def host_to_device_gb_s(path: Path) -> float:
    """The copy alone, from the receiver's own pinned memory."""
    host_N, device_N = (path.receiver._buffers[name] for name in ("whole0-cpu", "device-cuda"))
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        device_N.copy_(host_N, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return len(host_N) / statistics.median(times) / 1e9


def check(device: str, facts: Facts) -> None:
    for mebibytes in (16, 256, 1024) if device == "cuda" else (1,):
        path, name = Path(device, mebibytes), f"{mebibytes} MiB"
        different, seconds = 0, list[float]()
        waiting: tuple[int, list[torch.Tensor]] | None = None
        for number in range(STEPS if device == "cuda" else 4):
            shard, spent_s = path.step(number)
            seconds.append(spent_s)
            if waiting is not None:  # looked at only now: its memory has been received over meanwhile
                different += path.different(*waiting)
            waiting = (number, late_replay(shard, path.device))
        assert waiting is not None
        different += path.different(*waiting)
        facts.expect(f"{name}: ids that differ", different, different == 0, "0")
        if device == "cuda":
            rate = host_to_device_gb_s(path)
            facts.expect(f"{name}: host to device, GB/s", rate, rate >= 40, "at least 40")
            nbytes = len(path.receiver._buffers["whole0-cpu"])
            whole_s = statistics.median(seconds[1:])
            share = max(whole_s - nbytes / rate / 1e9, nbytes / rate / 1e9) / whole_s
            facts.expect(f"{name}: slower leg, of the whole path", share, share >= 0.9, "at least 0.9")
            facts.figures[f"{name}: whole path, GB/s"] = nbytes / whole_s / 1e9
            facts.figures[f"{name}: pinned bytes at the receiver"] = nbytes + len(
                path.receiver._members[0]._buckets[0]
            )
        path.close()
        del path
    facts.left_out.append(
        "pinned memory of two buckets: rows are placed into a whole shard on the host, which is pinned beside one bucket"
    )
    if device == "cpu":
        facts.left_out.append("rates and late streams: nothing is copied to a device on a CPU")


if __name__ == "__main__":
    main(check)
