"""Buckets for rows that are copied before they are sent: a fixed number, whatever the tokens and the receivers.

This module knows no receiver and no step.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from r3channel.errors import ConfigError

BUCKETS_ALIVE = 2
MOST_BUCKETS = 16
"""Most buckets in host memory, of all receivers together: more than eight senders do not make two cores or one link faster."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class HostStaging:
    """Two buckets for one sender. The filled buffer itself is sent."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []

    def buffers(self, nbytes: int) -> Sequence[Bytes]:
        """Return buffers to be filled in turn.

        A buffer may be filled again once what `stage` gave for it was sent.

        Args:
            nbytes: Bytes of each buffer.
        """
        if not self._tensors or len(self._tensors[0]) < nbytes:
            self._tensors = [self._memory(nbytes) for _ in range(BUCKETS_ALIVE)]
        return [tensor[:nbytes].numpy() for tensor in self._tensors]

    def stage(self, slot: int, nbytes: int) -> torch.Tensor:
        """Return the tensor that the group sends.

        Args:
            slot: The filled buffer's index.
            nbytes: The bytes in it.
        """
        return self._tensors[slot][:nbytes]

    def _memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


@contextmanager
def _hold(lock: threading.Semaphore, wait: Callable[[], None], every_s: float) -> Generator[None]:
    while not lock.acquire(timeout=every_s):
        wait()
    try:
        yield
    finally:
        lock.release()


class HostPool:
    """Buckets in host memory for several senders. Any thread may call.

    TCP uses it, and so does gloo, which stands in for NCCL in tests.
    """

    def __init__(self, senders: int = MOST_BUCKETS // BUCKETS_ALIVE) -> None:
        self._idle = [HostStaging() for _ in range(senders)]
        self._free = threading.Semaphore(len(self._idle))

    on_device = nullcontext[None]
    """Enters the device that rows are sent from: a process group makes its communicator there."""

    @contextmanager
    def turn(self, wait: Callable[[], None], *, every_s: float) -> Generator[HostStaging]:
        """Hold buckets while one receiver's rows are sent.

        Args:
            wait: Is called while all buckets are in use. What it raises ends the wait.
            every_s: Seconds between two calls of `wait`.
        """
        with _hold(self._free, wait, every_s):
            staging = self._idle.pop()  # the one used last: memory that nobody needs is never made
            try:
                yield staging
            finally:
                self._idle.append(staging)


class DeviceStaging(HostStaging):
    """Pinned and device buffers for NCCL.

    There are two pinned and two device buffers of one bucket each, for all receivers of this process.

    One receiver's rows are sent at a time (`turn`), because two communicators at once on one GPU can deadlock. Copies run on a
    stream of their own, which NCCL's send waits for; the host goes on.
    """

    def __init__(self, device: int) -> None:
        """Check that the device is there.

        Args:
            device: The device's number within CUDA_VISIBLE_DEVICES, which Ray sets to the actor's own GPUs.

        Raises:
            ConfigError: This process sees no such device.
        """
        super().__init__()
        found = torch.cuda.device_count()
        if not 0 <= device < found:
            raise ConfigError(
                f"device {device} for transport nccl: this process sees {found} CUDA devices (CUDA_VISIBLE_DEVICES is "
                f"{os.environ.get('CUDA_VISIBLE_DEVICES')!r}). A relay in a Ray actor gets its own by num_gpus; count within "
                "those"
            )
        self._device = torch.device("cuda", device)
        self._turn = threading.Semaphore()
        self._stream: torch.cuda.Stream | None = None
        self._on_device = deque[torch.Tensor](maxlen=BUCKETS_ALIVE)

    @contextmanager
    def on_device(self) -> Generator[None]:
        with torch.cuda.device(self._device):
            yield

    @contextmanager
    def turn(self, wait: Callable[[], None], *, every_s: float) -> Generator[HostStaging]:
        with _hold(self._turn, wait, every_s), self.on_device():
            self._stream = self._stream or torch.cuda.Stream(self._device)
            with torch.cuda.stream(self._stream):
                yield self

    def stage(self, slot: int, nbytes: int) -> torch.Tensor:
        return self._on_device[slot][:nbytes].copy_(self._tensors[slot][:nbytes], non_blocking=True)

    def _memory(self, nbytes: int) -> torch.Tensor:
        self._on_device.append(torch.empty(nbytes, dtype=torch.uint8, device=self._device))
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
