"""A shard's buckets on their way in: announced, received, verified. Knows no group, no attempts and no step's state.

The order on the wire is that of `relay.staging`: H0 H1 P0 H2 P1 H3 P2 ... A payload's receive is posted once its header was
checked, while the payload before is on the wire; that one is verified meanwhile. So nothing of unannounced size is
received: gloo ends the process when a message is larger than its buffer (measured on torch 2.13.0).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from r3channel.errors import BucketCorrupt
from r3channel.metrics import Metrics, StageClock
from r3channel.transport.base import RELAY_RANK, Pending, Transport
from r3channel.wire.bucket import BUCKET_HEADER_BYTES, BucketHeader, bucket_slices, hash_bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """The shard that a receiver awaits, as its ticket describes it."""

    step: int
    dp: int
    member: int
    nbytes: int
    bucket_bytes: int

    def headers(self, *, epoch: int) -> list[BucketHeader]:
        """What must be announced, in order, but for the hashes."""
        slices = bucket_slices(self.nbytes, bucket_bytes=self.bucket_bytes)
        return [
            BucketHeader(
                epoch=epoch, step=self.step, dp=self.dp, pp=self.member, index=index, count=len(slices),
                offset=part.start, nbytes=part.stop - part.start, payload_hash=0,
            )
            for index, part in enumerate(slices)
        ]  # fmt: skip


@dataclass(slots=True)
class _Bucket:
    """One bucket of the shard under way."""

    expected: BucketHeader
    data_N: torch.Tensor
    header_N: torch.Tensor
    header: BucketHeader | None = None
    announced: Pending | None = None
    arrived: Pending | None = None


class Inflow:
    """Receives one shard at a time; one thread."""

    def __init__(self, *, clock: StageClock, metrics: Metrics, timeout_s: float) -> None:
        """`timeout_s` bounds each bucket on the wire."""
        self._clock, self._metrics, self._timeout_s = clock, metrics, timeout_s
        self._host_N = torch.empty(0, dtype=torch.uint8)

    def receive(
        self, transport: Transport, awaited: Awaited, data_N: torch.Tensor, *, deadline_s: float
    ) -> None:
        """Fill `data_N` (uint8, `awaited.nbytes`, where the transport receives) with verified bytes.

        Ends by `deadline_s` (time.monotonic) plus one bucket. Raises `BucketCorrupt` for a bucket that is not the announced
        one or is damaged, and what `Pending.wait` raises; `data_N` is undefined then.
        """
        buckets = [
            _Bucket(expected, data_N[expected.offset : expected.offset + expected.nbytes], self._room(data_N))
            for expected in awaited.headers(epoch=transport.epoch)
        ]
        for bucket in buckets[:2]:
            bucket.announced = transport.start_recv(RELAY_RANK, bucket.header_N)
        for index, bucket in enumerate(buckets):
            if index == 0:
                with self._clock.span("wait_wire", step=awaited.step):
                    self._post(transport, buckets, 0, deadline_s)
            with self._clock.span("recv", step=awaited.step):
                if index + 1 < len(buckets):
                    self._post(transport, buckets, index + 1, deadline_s)
                self._wait(bucket.arrived, deadline_s)
            with self._clock.span("verify", step=awaited.step):
                self._check_bytes(bucket)
            self._metrics.inc("r3channel_buckets_total")
            self._metrics.inc("r3channel_bytes_total", bucket.expected.nbytes, leg="wire_received")

    def _post(self, transport: Transport, buckets: list[_Bucket], index: int, deadline_s: float) -> None:
        """Check a header; then post its payload's receive, and the header's after the next."""
        bucket = buckets[index]
        self._wait(bucket.announced, deadline_s)
        bucket.header = BucketHeader.from_bytes(bucket.header_N.cpu().numpy())
        if replace(bucket.header, payload_hash=0) != bucket.expected:
            raise BucketCorrupt(f"announced is {bucket.header}; the ticket says {bucket.expected}")
        bucket.arrived = transport.start_recv(RELAY_RANK, bucket.data_N)
        for later in buckets[index + 2 : index + 3]:
            later.announced = transport.start_recv(RELAY_RANK, later.header_N)

    def _wait(self, pending: Pending | None, deadline_s: float) -> None:
        assert pending is not None, "waited for before it was posted"
        pending.wait(timeout_s=min(self._timeout_s, max(0.1, deadline_s - time.monotonic())))

    def _check_bytes(self, bucket: _Bucket) -> None:
        assert bucket.header is not None
        data_N = bucket.data_N if bucket.data_N.device.type == "cpu" else self._on_host(bucket.data_N)
        found, expected = hash_bucket(data_N.numpy()), bucket.header.payload_hash
        if found != expected:
            raise BucketCorrupt(f"{bucket.header} arrived with hash {found:#x}; damaged on the way")

    def _room(self, data_N: torch.Tensor) -> torch.Tensor:
        return torch.empty(BUCKET_HEADER_BYTES, dtype=torch.uint8, device=data_N.device)

    def _on_host(self, data_N: torch.Tensor) -> torch.Tensor:
        """A copy in one reused pinned buffer: xxh3 runs on the host."""
        if len(self._host_N) < len(data_N):
            self._host_N = torch.empty(len(data_N), dtype=torch.uint8, pin_memory=True)
        return self._host_N[: len(data_N)].copy_(data_N)
