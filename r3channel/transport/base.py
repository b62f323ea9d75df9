"""The contract of a transport, and the record from which both sides join one group (`transport.select`).

    lifecycle:  joined -> closed            (`close`: everything sent has been received)
                       -> aborted           (`abort`, or any failed call: the group is dead, open the next connection)

A transport belongs to one connection of one group: the relay is rank 0, the members follow. Calls of one transport come from
one thread; `abort` may come from any thread. Messages between two ranks keep their order, and several may be under way.
Both ends know the exact size beforehand; a receive of another size than was sent is an error of the caller that no
transport can detect.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

RELAY_RANK = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where and as whom to join one connection of a group. Plain values, so it can cross any control channel."""

    backend: str
    """`gloo` or `nccl`."""
    name: str
    """Unique per run, group and connection; prefixes every key in the store."""
    connection: int
    rank: int
    world_size: int
    host: str
    port: int
    """Where rank 0's store listens."""


class Pending(Protocol):
    """One send or receive under way. Operations of one pair of ranks are waited for in the order in which they were started."""

    def wait(self, *, timeout_s: float) -> None:
        """Wait until the operation is done.

        Afterwards the memory sent may be reused, and the memory received may be read. If an error is raised, the group is dead,
        and what was received is undefined.

        Args:
            timeout_s: seconds from now.

        Raises:
            DeadlineExceeded: it is not done within `timeout_s`.
            TransportError: the peer is gone or the group was aborted.
        """
        ...


class Transport(ABC):
    """Point-to-point bytes within one connection."""

    alive: Callable[[], bool] = staticmethod(lambda: True)
    """Whether the peer is there; asked while NCCL is waited for, which between GPUs of one node is not told of a peer's end."""

    @abstractmethod
    def start_send(self, dst: int, data_N: torch.Tensor) -> Pending:
        """Begin to send a tensor; `wait` may be where it starts.

        Args:
            dst: the rank that receives.
            data_N: contiguous uint8. It must not change before `wait` has returned.
        """

    @abstractmethod
    def start_recv(self, src: int, out_N: torch.Tensor) -> Pending:
        """Begin to fill a tensor with the next message from `src`.

        Args:
            src: the rank that sends.
            out_N: contiguous uint8, of exactly the message's bytes.
        """

    def send(self, dst: int, data_N: torch.Tensor, *, timeout_s: float) -> None:
        """Send a tensor and wait until its memory may be reused.

        Raises:
            DeadlineExceeded: as in `Pending.wait`.
            TransportError: as in `Pending.wait`.
        """
        self.start_send(dst, data_N).wait(timeout_s=timeout_s)

    def recv(self, src: int, out_N: torch.Tensor, *, timeout_s: float) -> None:
        """Receive a message and wait until `out_N` may be read.

        Raises:
            DeadlineExceeded: as in `Pending.wait`.
            TransportError: as in `Pending.wait`.
        """
        self.start_recv(src, out_N).wait(timeout_s=timeout_s)

    @abstractmethod
    def abort(self) -> None:
        """Give the group up; idempotent.

        Operations that were started and are not being waited for are dropped: their memory is not written to any more, and the
        peer learns it at once. A wait of gloo that is under way on another thread ends with its peer, or by its own deadline:
        torch 2.13.0 has no call that ends it (measured).
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the group in good order; idempotent.

        Everything that was started must have been waited for.
        """
