"""On one GPU: buckets go through two pinned and two device buffers at any size, and arrive as they were.

NCCL between relay and trainer needs a GPU per rank; here a stream of the same GPU stands in for its kernels, ordered after
the staging stream as ProcessGroupNCCL orders its own. Not collected without CUDA.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from r3channel.metrics import Metrics, StageClock
from r3channel.relay.staging import BucketSender, DeviceStaging, InPlace
from r3channel.trainer.inflow import Awaited, Inflow
from r3channel.transport.base import Deferred, Pending, Rendezvous, Transport
from r3channel.transport.joining import join
from r3channel.wire.bucket import BUCKET_HEADER_BYTES, BucketHeader, bucket_headers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none")

BUCKET_BYTES = 1 << 20
SLOW_CYCLES = 20_000_000
"""About 10 ms of a GPU's clock per message."""


class OneDevice(Transport):
    """Keeps what it is given to send, late and on a stream of its own."""

    epoch, rank, world_size = 1, 0, 2

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.sent: list[torch.Tensor] = []

    def start_send(self, dst: int, data_N: torch.Tensor) -> Pending:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(SLOW_CYCLES)
            self.sent.append(data_N.clone())
            done = self.stream.record_event()
        return Deferred(lambda timeout_s: done.synchronize())

    def start_recv(self, src: int, out_N: torch.Tensor) -> Pending:
        raise AssertionError("only sends")

    def abort(self) -> None: ...

    def close(self) -> None: ...


def shard_of(buckets: int) -> np.ndarray:
    return np.random.default_rng(buckets).integers(0, 256, buckets * BUCKET_BYTES + 777, dtype=np.uint8)


def sender(staging: DeviceStaging | InPlace) -> BucketSender:
    clock = StageClock("relay")
    return BucketSender(staging, clock=clock, metrics=Metrics("relay", clock=clock), timeout_s=30)


def headers(shard_N: np.ndarray) -> list[BucketHeader]:
    return list(bucket_headers(shard_N, bucket_bytes=BUCKET_BYTES, epoch=1, step=0, dp=0, pp=0))


def test_staging_is_two_buckets_at_any_size_and_bytes_arrive_as_they_were() -> None:
    staging, transport = DeviceStaging(device=0), OneDevice()
    outbox = sender(staging)
    for buckets in (2, 7):
        transport.sent.clear()
        shard_N = shard_of(buckets)
        outbox.send(transport, shard_N, headers(shard_N), dst=1)
        torch.cuda.synchronize()
        payloads = [sent for sent in transport.sent if len(sent) != BUCKET_HEADER_BYTES]
        assert np.array_equal(torch.cat(payloads).cpu().numpy(), shard_N)
        assert staging.nbytes == outbox.peak_bytes == 2 * BUCKET_BYTES


def test_the_host_stages_the_next_bucket_while_one_is_being_sent() -> None:
    staging, transport = DeviceStaging(device=0), OneDevice()
    shard_N = shard_of(1)
    staging.stage(0, shard_N[:BUCKET_BYTES])
    torch.cuda.synchronize()
    with staging.turn():
        pending = transport.start_send(1, staging.stage(0, shard_N[:BUCKET_BYTES]))
        staging.stage(1, shard_N[BUCKET_BYTES:])
        assert not transport.stream.query(), "the host waited for the send"
        pending.wait(timeout_s=30)


def test_a_shard_that_arrives_on_the_device_is_verified_there() -> None:
    shard_N, ranks, name = shard_of(3), [], f"gpu{time.time_ns()}"
    with ThreadPoolExecutor(2) as pool:
        for rank in range(2):
            record = Rendezvous(backend="loopback", name=name, epoch=1, rank=rank, world_size=2)
            ranks.append(pool.submit(join, record, timeout_s=10))
        relay, member = (future.result(20) for future in ranks)
        sending = pool.submit(sender(InPlace()).send, relay, shard_N, headers(shard_N), dst=1)
        out_N = torch.zeros(len(shard_N), dtype=torch.uint8, device="cuda")
        clock = StageClock("trainer")
        inflow = Inflow(clock=clock, metrics=Metrics("trainer", clock=clock), timeout_s=30)
        awaited = Awaited(step=0, dp=0, member=0, nbytes=len(shard_N), bucket_bytes=BUCKET_BYTES)
        inflow.receive(member, awaited, out_N, deadline_s=time.monotonic() + 30)
        sending.result(20)
    assert np.array_equal(out_N.cpu().numpy(), shard_N) and clock.totals().get("verify", 0) > 0
