"""A shard's buckets on their way out: hashed, staged, sent, two alive. Knows no group, no epoch and no step's state.

On the wire, with H the headers and P the payloads:  H0 H1 P0 H2 P1 H3 P2 ...
A header runs one bucket ahead, so that the receiver has checked a payload's size before it posts the receive, and posts it
while the payload before is still on the wire. Hashing bucket i+1 falls into the time of bucket i-1.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch

from r3channel.errors import ConfigError
from r3channel.metrics import Metrics, StageClock
from r3channel.transport.base import Pending, Transport
from r3channel.wire.bucket import BucketHeader

BUCKETS_ALIVE = 2
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Staging(Protocol):
    """Where bytes lie while a transport sends them."""

    copies: bool
    """Whether a stage takes time worth counting (`h2d`)."""

    def turn(self) -> AbstractContextManager[None]:
        """Held around the sending of one shard."""
        ...

    def stage(self, slot: int, part_N: _Bytes) -> torch.Tensor:
        """A tensor that the transport can send; valid until the slot (0 or 1) is staged again."""
        ...

    def stage_header(self, header_N: _Bytes) -> torch.Tensor:
        """The same for a few bytes, in memory of their own."""
        ...


class InPlace:
    """For transports that send host memory: nothing is copied."""

    copies = False

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    def stage(self, slot: int, part_N: _Bytes) -> torch.Tensor:
        return torch.from_numpy(part_N)

    def stage_header(self, header_N: _Bytes) -> torch.Tensor:
        return torch.from_numpy(header_N)


class DeviceStaging:
    """For NCCL: two pinned and two device buffers of one bucket each, whatever the number of tokens or of groups.

    One shard of this process is sent at a time (`turn`), because two communicators at once on one GPU can deadlock. Copies run
    on a stream of their own, which NCCL's send waits for; the host goes on.
    """

    copies = True

    def __init__(self, *, device: int) -> None:
        """`device` counts within CUDA_VISIBLE_DEVICES, which Ray sets to the actor's own GPUs."""
        self._device = torch.device("cuda", device)
        self._turn = threading.Lock()
        self._stream = torch.cuda.Stream(self._device)
        none = torch.empty(0, dtype=torch.uint8)
        self._slots = [(none, none)] * BUCKETS_ALIVE

    @property
    def nbytes(self) -> int:
        """Of pinned memory, and of device memory the same again."""
        return sum(len(pinned) for pinned, _ in self._slots)

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self._turn, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def stage(self, slot: int, part_N: _Bytes) -> torch.Tensor:
        pinned, on_device = (buffer[: len(part_N)] for buffer in self._room(slot, len(part_N)))
        pinned.copy_(torch.from_numpy(part_N))
        return on_device.copy_(pinned, non_blocking=True)

    def stage_header(self, header_N: _Bytes) -> torch.Tensor:
        return torch.from_numpy(header_N).to(self._device)

    def _room(self, slot: int, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Grows to the first bucket's size, which is the largest."""
        if len(self._slots[slot][0]) < nbytes:
            pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            self._slots[slot] = (pinned, torch.empty_like(pinned, device=self._device))
        return self._slots[slot]


def check_device(device: int) -> None:
    """Raise `ConfigError` unless this process has that CUDA device. Starts nothing on it."""
    found = torch.cuda.device_count()
    if not 0 <= device < found:
        raise ConfigError(
            f"device {device} for backend nccl: this process sees {found} CUDA devices (CUDA_VISIBLE_DEVICES is "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES')!r}). A relay in a Ray actor gets its own by num_gpus; count within those"
        )


@cache
def device_staging(device: int) -> DeviceStaging:
    """The one staging of this process and device, made at its first send and kept."""
    return DeviceStaging(device=device)


class BucketSender:
    """Sends one shard at a time; one thread."""

    def __init__(self, staging: Staging, *, clock: StageClock, metrics: Metrics, timeout_s: float) -> None:
        """`timeout_s` bounds each bucket on the wire."""
        self._staging, self._clock, self._metrics, self._timeout_s = staging, clock, metrics, timeout_s
        self._window: deque[tuple[Pending, torch.Tensor, int]] = deque()
        self._alive_bytes = 0
        self.peak_bytes = 0
        """The most bytes of buckets that were staged, or given to the transport in place, and not yet sent."""

    def send(
        self, transport: Transport, shard_N: _Bytes, headers: Iterable[BucketHeader], *, dst: int
    ) -> None:
        """Send all buckets of a shard; returns when its memory may be reused.

        `headers` may hash as it is read. Raises what `Pending.wait` raises; the group is dead then, and nothing here refers to
        the shard any more: what the transport has not let go of it keeps alive itself.
        """
        self._alive_bytes = 0
        try:
            with self._staging.turn():
                self._send_all(transport, shard_N, headers, dst)
        finally:
            self._window.clear()

    def _send_all(
        self, transport: Transport, shard_N: _Bytes, headers: Iterable[BucketHeader], dst: int
    ) -> None:
        announced = None
        for header in headers:
            self._start(transport, self._staging.stage_header(header.to_bytes()), dst, nbytes=0)
            if announced is not None:
                self._send_bucket(transport, shard_N, announced, dst)
            announced = header
        if announced is not None:
            self._send_bucket(transport, shard_N, announced, dst)
        while self._window:
            self._finish_oldest()

    def _send_bucket(self, transport: Transport, shard_N: _Bytes, header: BucketHeader, dst: int) -> None:
        while sum(nbytes > 0 for *_, nbytes in self._window) >= BUCKETS_ALIVE:
            self._finish_oldest()
        part_N = shard_N[header.offset : header.offset + header.nbytes]
        with self._clock.span("h2d") if self._staging.copies else nullcontext():
            data_N = self._staging.stage(header.index % BUCKETS_ALIVE, part_N)
        self._alive_bytes += header.nbytes
        self.peak_bytes = max(self.peak_bytes, self._alive_bytes)
        self._start(transport, data_N, dst, nbytes=header.nbytes)

    def _start(self, transport: Transport, data_N: torch.Tensor, dst: int, *, nbytes: int) -> None:
        self._window.append((transport.start_send(dst, data_N), data_N, nbytes))

    def _finish_oldest(self) -> None:
        pending, _, nbytes = self._window.popleft()
        pending.wait(timeout_s=self._timeout_s)
        if nbytes:
            self._alive_bytes -= nbytes
            self._metrics.inc("r3channel_buckets_total")
            self._metrics.inc("r3channel_bytes_total", nbytes, leg="wire_sent")
