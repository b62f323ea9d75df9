"""The contract of every transport, and the record from which both sides join one group.

    lifecycle:  joined -> closed            (`close`: everything sent has been received)
                       -> aborted           (`abort`, or any failed call: the group is dead, open the next epoch)

A transport belongs to one epoch of one group: the relay is rank 0, the members follow. Calls of one transport come from
one thread; `abort` may come from any thread. Messages between two ranks keep their order. Both ends know the exact
size beforehand; a receive of another size than was sent is an error of the caller that no transport can detect.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from r3channel.transport.process_group import RendezvousStore

RELAY_RANK = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where and as whom to join one epoch of a group. Plain values, so it can cross any control channel."""

    backend: str
    """`gloo`, `nccl`, `shm` (one machine), `nixl` (one-sided) or `loopback`."""
    name: str
    """Unique per run, group and epoch; prefixes every key in the store."""
    epoch: int
    rank: int
    world_size: int
    host: str = ""
    port: int = 0
    """Of the relay's store; unused by loopback."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Transport(Protocol):
    """Point-to-point bytes within one epoch."""

    epoch: int
    rank: int
    world_size: int

    def send(self, dst: int, data_N: torch.Tensor, *, timeout_s: float) -> None:
        """Send a contiguous uint8 tensor; return when its memory may be reused.

        Raises `DeadlineExceeded` after `timeout_s`, `TransportError` when the peer is gone. Either way the group is dead.
        """
        ...

    def recv(self, src: int, out_N: torch.Tensor, *, timeout_s: float) -> None:
        """Fill a contiguous uint8 tensor with exactly the bytes of the next message from `src`.

        `out_N` may be read when this returns. Errors as in `send`; `out_N` is then undefined.
        """
        ...

    def abort(self) -> None:
        """Give the group up; idempotent. A peer that waits with nothing of ours pending learns it at once; a call that is
        under way here, and its peer, end by their own deadline (gloo has no way to wake them, measured on torch 2.13.0)."""
        ...

    def close(self) -> None:
        """Leave in good order; idempotent."""
        ...


class Collective(Transport, Protocol):
    """A transport whose ranks can also all do one thing at once. Every rank calls with the same arguments, in one order."""

    def broadcast(self, root: int, data_N: torch.Tensor, *, timeout_s: float) -> None:
        """All ranks end with the contiguous uint8 bytes of `root`, of the same size everywhere. Errors as in `send`."""
        ...

    def largest(self, value: int, *, timeout_s: float) -> int:
        """The largest `value` that any rank gave. Errors as in `send`."""
        ...


def open_store(interface: str) -> RendezvousStore:
    """The store of a relay whose groups use gloo or NCCL; listens on `interface` only until it is closed."""
    from r3channel.transport.process_group import RendezvousStore

    return RendezvousStore(interface)


def join(rendezvous: Rendezvous, *, timeout_s: float) -> Transport:
    """Join a group; returns when all ranks of the epoch have joined, or raises `DeadlineExceeded`."""
    if rendezvous.backend == "loopback":
        from r3channel.transport.loopback import LoopbackTransport

        return LoopbackTransport(rendezvous, timeout_s=timeout_s)
    if rendezvous.backend == "shm":
        from r3channel.transport.shared_memory import SharedMemoryTransport

        return SharedMemoryTransport(rendezvous, timeout_s=timeout_s)
    if rendezvous.backend == "nixl":
        from r3channel.transport.one_sided import OneSidedTransport

        return OneSidedTransport(rendezvous, timeout_s=timeout_s)
    from r3channel.transport.process_group import ProcessGroupTransport

    return ProcessGroupTransport(rendezvous, timeout_s=timeout_s)
