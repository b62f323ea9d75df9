"""Rows to a trainer's device, placed there (decision 87): ids, memory, what the host reads; a late replay keeps its ids.

On a CPU, which stands for the device, rows go the same way.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path as File
from typing import Any

import numpy as np
import torch

from r3channel.config import ChannelConfig
from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.stream import Stream
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.relay.relay import Relay
from r3channel.trainer import receiver as receiver_module
from r3channel.trainer.buckets import DeviceBuckets, DevicePlacement
from r3channel.trainer.receiver import Receiver
from r3channel.wire.digest import HostRuns, TorchRuns, column_digests, column_digests_torch
from r3channel.wire.frame import encode_frame
from tests.gpu.facts import Facts, silence, words_of
from tests.support import samples

SPEC = RoutingSpec(num_layers=48, moe_layers=tuple(range(48)), num_experts=128, top_k=8)
MIB, STEPS, SAMPLE_ROWS = 1 << 20, 8, 60_000
LATE_CYCLES = 200_000_000
"""About 0.1 s of a GPU's clock."""


def ids_of(rows: int, *, shift: int) -> np.ndarray[Any, Any]:
    """[rows, L, K], distinct within a row."""
    first_TL = np.arange(rows)[:, None] * 7 + np.arange(SPEC.num_moe_layers) * 3 + shift
    return ((first_TL[..., None] + np.arange(SPEC.top_k)) % SPEC.num_experts).astype(SPEC.id_dtype)


class Steps:
    """What is sealed, step by step: steps of one size, whose contents take turns."""

    def __init__(self, mebibytes: int, *, shifts: tuple[int, ...] = (0, 5)) -> None:
        total = max(mebibytes * MIB // SPEC.bytes_per_token, 100)
        self.rows = {f"s{at}": min(SAMPLE_ROWS, total - at) for at in range(0, total, SAMPLE_ROWS)}
        self.ids = [[ids_of(rows, shift=shift) for rows in self.rows.values()] for shift in shifts]
        self.frames = [[encode_frame(SPEC, expert_ids_TLK=one) for one in ids] for ids in self.ids]

    def seal(self, relay: Relay, number: int) -> Ticket:
        frames = self.frames[number % len(self.frames)]
        for (name, rows), frame in zip(self.rows.items(), frames, strict=True):
            relay.add_frame(name, frame, range(rows + 1))
        return relay.seal(number, Assignment.given([[[name] for name in self.rows]]))

    def different(self, number: int, used: list[torch.Tensor]) -> int:
        """Ids of the first and the last layer of each sample that are not what the step was sealed with."""
        wrong = 0
        for index, ids_TLK in enumerate(self.ids[number % len(self.ids)]):
            for part, layer in enumerate((0, SPEC.num_layers - 1)):
                found = used[2 * index + part][: len(ids_TLK)].cpu().numpy()
                wrong += int((found != ids_TLK[:, layer]).sum())
        return wrong


class Path:
    """A relay and a receiver whose routers run on the device."""

    def __init__(self, device: torch.device, mebibytes: int) -> None:
        self.steps = Steps(mebibytes)
        self.relay = Relay(SPEC, TrainerLayout(), ChannelConfig())
        at: dict[str, Any] = {"layout": self.relay.layout, "coords": self.relay.layout.coords(0)}
        self.receiver = Receiver(self.relay, spec=SPEC, config=self.relay.config, device=device, **at)
        self.receiver.join()

    def step(self, number: int) -> tuple[Any, float, float]:
        """(the shard, seconds in `receive`, CPU seconds of this process in it, the relay's among them)."""
        ticket = self.steps.seal(self.relay, number)
        begin, cpu_s = time.perf_counter(), time.process_time()
        shard = self.receiver.receive(ticket)
        spent_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_s
        self.relay.join_previous()
        return shard, spent_s, cpu_s

    def close(self) -> None:
        self.receiver.close()
        self.relay.close()


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


def read_bytes(path: Path, number: int) -> list[int]:
    """Bytes of each copy from the device to the host while a step is received."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        path.step(number)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(file := f"{folder}/trace.json")
        events = json.loads(File(file).read_text())["traceEvents"]
    return [event["args"]["bytes"] for event in events if "Memcpy DtoH" in event.get("name", "")]


def check(device: str, facts: Facts) -> None:
    cuda = device == "cuda"
    setattr(receiver_module, "buckets_for", DeviceBuckets)  # noqa: B010 where a CPU stands for the device, too
    place(device, facts)
    for mebibytes in (1,) if facts.small else (16, 256):
        name, before = f"{mebibytes} MiB", pinned_bytes(device)
        path = Path(torch.device(device, 0) if cuda else torch.device("cpu"), mebibytes)
        different, waiting = 0, None
        for number in range(4 if facts.small else STEPS):
            shard = path.step(number)[0]
            if waiting is not None:  # looked at only now: its memory may have been received over meanwhile
                different += path.steps.different(*waiting)
            waiting = number, replay(shard, late=cuda and number % 2 == 0)
        assert waiting is not None
        different += path.steps.different(*waiting)
        facts.expect(f"{name}: ids that differ", different, different == 0, "0")
        pinned, buckets = pinned_bytes(device) - before, path.receiver._buckets.held
        most = sum(1 << (len(bucket) - 1).bit_length() for bucket in buckets) + MIB
        facts.expect(f"{name}: pinned bytes", pinned, pinned <= most, f"{most}: two buckets, and the plan")
        if cuda:
            read = read_bytes(path, 1 + waiting[0])
            facts.expect(f"{name}: bytes by read", read, sum(read) <= 64 and len(read) == 1, "one, of 64")
        path.close()
    if not cuda:
        facts.left_out.append("pinned memory, late streams, reads: nothing is copied to a device on a CPU")


def place(device: str, facts: Facts) -> None:
    """1 GB in buckets that are on the device, as NCCL leaves them."""
    where, nbytes = torch.device(device), MIB if facts.small else 1 << 30
    total, bucket_bytes = nbytes // SPEC.bytes_per_token, min(nbytes, ChannelConfig().bucket_bytes)
    tokens = {f"s{at}": min(SAMPLE_ROWS, total - at) + 1 for at in range(0, total, SAMPLE_ROWS)}
    samples = [TicketSample(name, count, 0, 0, ()) for name, count in tokens.items()]
    assignment = Assignment.given([[[name] for name in tokens]])
    ticket = Ticket("run", 1, SPEC, TrainerLayout(), assignment, samples, 1)
    stream, rows = Stream.of(ticket, ticket.plan.shard(dp=0, pp=0)), bucket_bytes // SPEC.bytes_per_token
    placement = DevicePlacement(stream, torch.empty(stream.shard.nbytes, dtype=torch.uint8, device=where))
    bucket = torch.from_numpy(ids_of(rows, shift=0)).to(where)
    wall, cpu_s = list[float](), 0.0
    for _ in range(3):  # the first makes its memory
        digests = placement.new_digests()
        wait_for(device)
        begin, cpu_s = time.perf_counter(), time.process_time()
        for first in range(0, total - rows + 1, rows):
            placement.rows(bucket, digests, begin=first)
        cpu_s = time.process_time() - cpu_s
        wait_for(device)
        wall.append(time.perf_counter() - begin)
    gigabytes = (total - total % rows) * SPEC.bytes_per_token / 1e9
    facts.limit("placed, GB/s", gigabytes / wall[-1], gigabytes / wall[-1] >= 200, "at least 200")
    facts.limit("CPU to place, s/GB", cpu_s / gigabytes, cpu_s / gigabytes < 0.02, "below 0.02")


def wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def cost(device: str, facts: Facts) -> None:
    """The whole way over TCP from a relay in this process; the copy alone takes turns with the steps."""
    path = Path(torch.device(device, 0), 1 if facts.small else 256)
    nbytes, steps, copies = 0, list[tuple[float, float]](), list[float]()
    for number in range(2 + STEPS):
        shard, whole_s, cpu_s = path.step(number)
        nbytes = shard.shard.nbytes
        steps.append((whole_s, cpu_s))
        bucket_N = path.receiver._buckets.held[0]
        there_N = torch.empty_like(bucket_N, device=device)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(8):
            there_N.copy_(bucket_N, non_blocking=True)
        torch.cuda.synchronize()
        copies.append((time.perf_counter() - begin) / 8 / len(bucket_N))
    path.close()
    whole_s, cpu_s = (statistics.median(column) for column in zip(*steps[2:], strict=True))
    facts.note("the copy alone, GB/s", 1e-9 / statistics.median(copies[2:]))
    facts.note("whole way, GB/s", nbytes / whole_s / 1e9)
    facts.note("CPU of relay and receiver, s/GB", cpu_s / nbytes * 1e9)


def digests(device: str, facts: Facts) -> None:
    """Digests on the device are those of the host, and wait for nothing; a wait would be noticed."""

    def on_device(values: Any) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    rows_RK = np.ascontiguousarray(samples.random_ids(40)[:, 0])
    runs_N5 = np.array([[0, 3, 0, 2, 10], [1, 0, 1, 2, 10], [2, 7, 20, 1, 15]], np.int64)
    runs = TorchRuns.of(runs_N5, rows=40, samples=3, spec=samples.SPEC, tensor=on_device)
    ids_RK = on_device(rows_RK)
    torch.cuda.synchronize()
    with silence():
        found_S = column_digests_torch(ids_RK, runs)
    wanted_S = column_digests(rows_RK, HostRuns.of(runs_N5, samples=3, spec=samples.SPEC))
    different = int((found_S.cpu().numpy().view(np.uint64) != wanted_S).sum())
    facts.expect("digests that differ", different, different == 0, "0")
    told = words_of(silence()(torch.ones(1, device=device).item), RuntimeError)
    facts.expect("of a wait", told, bool(told), "an error")
