"""Memory of the buckets in which rows arrive: a host's, or a GPU's, with what places rows from there.

Rows are placed where the routers are, whatever the transport. Over NCCL they arrive there; over TCP they come to a GPU by pinned
memory, bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from r3channel.plan.placement import Placement
from r3channel.plan.stream import Stream
from r3channel.trainer.device_placement import DevicePlacement


def buckets_for(device: torch.device) -> HostBuckets:
    """Return the buckets of a receiver whose routers are on this device."""
    return HostBuckets() if device.type == "cpu" else DeviceBuckets(device)


class HostBuckets:
    """One bucket, two over a process group. One thread at a time."""

    held: tuple[torch.Tensor, ...] = ()
    """Those in which rows arrive, uint8."""

    def reserve(self, nbytes: int, *, transport: str) -> None:
        """Make what is too small for buckets of so many bytes over this transport."""
        self.held = _made(self.held, 1 if transport == "tcp" else 2, nbytes)

    def mark(self) -> None:
        """Let rows wait for what this thread gave to the device so far: it may read the memory that they are to fill."""

    def placing(self) -> Any:
        """Return a block for the work of one receive."""
        return nullcontext()

    def placement(self, stream: Stream, rows_N: torch.Tensor) -> Any:
        """Return a `Placement` that fills a shard from these buckets."""
        return Placement(stream, rows_N.numpy())

    def free(self, number: int) -> torch.Tensor:
        """Return the bucket of this number, counted in a receive, once it may be received into."""
        return self.held[number % len(self.held)]

    def arrived(self, number: int, nbytes: int, stream: Stream) -> Any:
        """Return the rows of a bucket that is filled, [rows, columns, K], as `rows` of the placement takes them."""
        spec, ids_N = stream.shard.spec, self.free(number)[:nbytes].numpy()
        return ids_N.view(spec.id_dtype).reshape(-1, len(stream.columns), spec.top_k)


class DeviceBuckets(HostBuckets):
    """Two buckets on the device, two pinned ones where rows come through the host, and a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._there = device, tuple[torch.Tensor, ...]()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._read: Any = None
        self._copies: list[Any] = [None, None]
        """The copy from each pinned bucket, as an event."""

    def reserve(self, nbytes: int, *, transport: str) -> None:
        self._there = _made(self._there, 2, nbytes, device=self._device)
        host = transport == "tcp" or (transport == "gloo" and self._stream is not None)
        known = () if self.held is self._there else self.held
        self.held = _made(known, 2, nbytes, pin_memory=self._stream is not None) if host else self._there

    def mark(self) -> None:
        if self._stream is not None:
            self._read = torch.cuda.current_stream(self._device).record_event()

    @contextmanager
    def placing(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._read)
            try:
                yield
            finally:
                self._stream.synchronize()  # a receive that failed left copies behind, into memory that may be given up

    def placement(self, stream: Stream, rows_N: torch.Tensor) -> Any:
        return DevicePlacement(stream, rows_N)

    def free(self, number: int) -> torch.Tensor:
        if self._copies[number % 2] is not None:
            self._copies[number % 2].synchronize()
        return self.held[number % 2]

    def arrived(self, number: int, nbytes: int, stream: Stream) -> Any:
        spec, here_N = stream.shard.spec, self._there[number % 2][:nbytes]
        if self.held is not self._there:
            here_N.copy_(self.held[number % 2][:nbytes], non_blocking=True)
            if self._stream is not None:
                self._copies[number % 2] = self._stream.record_event()
        dtype = torch.uint8 if spec.id_dtype.itemsize == 1 else torch.int16
        return here_N.view(dtype).view(-1, len(stream.columns), spec.top_k)


def _made(held: tuple[torch.Tensor, ...], count: int, nbytes: int, **where: Any) -> tuple[torch.Tensor, ...]:
    """Return buckets that are large enough: those that are held, or new ones."""
    if len(held) >= count and len(held[0]) >= nbytes:
        return held
    return tuple(torch.empty(nbytes, dtype=torch.uint8, **where) for _ in range(count))
