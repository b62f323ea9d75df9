"""Transport between threads of one process: for examples, offline replay and tests.

A send copies the bytes into a queue of depth one per pair, so that, as on gloo and NCCL, a sender does not run
ahead of a receiver that never comes: it waits until the message was taken, or until its deadline.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from r3channel.errors import DeadlineExceeded, TransportError
from r3channel.transport.base import Deferred, Pending, Rendezvous, Transport

if TYPE_CHECKING:
    import torch


class _Group:
    """State shared by the ranks of one rendezvous name."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.joined: set[int] = set()
        self.left: set[int] = set()
        self.slots: dict[tuple[int, int], torch.Tensor] = {}
        self.aborted = False


_groups: dict[str, _Group] = defaultdict(_Group)
_groups_lock = threading.Lock()


class LoopbackTransport(Transport):
    """See `transport.base.Transport`."""

    def __init__(self, rendezvous: Rendezvous, *, timeout_s: float) -> None:
        self.epoch, self.rank, self.world_size = rendezvous.epoch, rendezvous.rank, rendezvous.world_size
        self._name = rendezvous.name
        with _groups_lock:
            self._group = _groups[rendezvous.name]
        with self._group.changed:
            self._group.joined.add(self.rank)
            self._group.changed.notify_all()
        self._wait(lambda: len(self._group.joined) == self.world_size, timeout_s, "the other ranks to join")

    def start_send(self, dst: int, data_N: torch.Tensor) -> Pending:
        return Deferred(lambda timeout_s: self._send(dst, data_N, timeout_s))

    def start_recv(self, src: int, out_N: torch.Tensor) -> Pending:
        return Deferred(lambda timeout_s: self._recv(src, out_N, timeout_s))

    def _send(self, dst: int, data_N: torch.Tensor, timeout_s: float) -> None:
        begin, key = time.monotonic(), (self.rank, dst)
        self._wait(
            lambda: key not in self._group.slots, timeout_s, f"rank {dst} to take the previous message"
        )
        with self._group.changed:
            self._group.slots[key] = data_N.clone()
            self._group.changed.notify_all()
        self._wait(lambda: key not in self._group.slots, timeout_s, f"rank {dst} to receive", begin)

    def _recv(self, src: int, out_N: torch.Tensor, timeout_s: float) -> None:
        key = (src, self.rank)
        self._wait(lambda: key in self._group.slots, timeout_s, f"rank {src} to send")
        with self._group.changed:
            data_N = self._group.slots.pop(key)
            self._group.changed.notify_all()
        if len(data_N) != len(out_N):
            self.abort()
            raise TransportError(
                f"{self._name}: rank {src} sent {len(data_N)} bytes, rank {self.rank} expected {len(out_N)}"
            )
        out_N.copy_(data_N)

    def abort(self) -> None:
        with self._group.changed:
            self._group.aborted = True
            self._group.changed.notify_all()
        self.close()

    def close(self) -> None:
        with self._group.changed:
            self._group.left.add(self.rank)
            done = len(self._group.left) == self.world_size
        if done:
            with _groups_lock:
                _groups.pop(self._name, None)

    def _wait(
        self, ready: Callable[[], bool], timeout_s: float, what: str, begin: float | None = None
    ) -> None:
        """`timeout_s` counts from `begin` (time.monotonic), or from now."""
        left_s = timeout_s if begin is None else begin + timeout_s - time.monotonic()
        with self._group.changed:
            done = self._group.changed.wait_for(
                lambda: self._group.aborted or ready(), timeout=max(0.0, left_s)
            )
            if self._group.aborted:
                raise TransportError(f"{self._name}: aborted while rank {self.rank} waited for {what}")
            if not done:
                self._group.aborted = True
                self._group.changed.notify_all()
                raise DeadlineExceeded(
                    f"{self._name} epoch {self.epoch}: rank {self.rank} waited {timeout_s:.1f} s for {what}; "
                    "the group is abandoned"
                )
