"""From a rendezvous to its transport. Knows every implementation, and loads only the one that is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from r3channel.errors import ConfigError
from r3channel.transport.base import Rendezvous, Transport

if TYPE_CHECKING:
    from r3channel.transport.process_group import RendezvousStore


def open_store(interface: str) -> RendezvousStore:
    """The store of a relay whose groups use gloo or NCCL; listens on `interface` only until it is closed."""
    from r3channel.transport.process_group import RendezvousStore

    return RendezvousStore(interface)


def gpu_of(device: int | None = None) -> str:
    """The uuid of a CUDA device of this process, the current one unless said; empty without CUDA. Two ranks on one are refused by
    NCCL, and numbers count differently in each process."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if torch.cuda.is_available() else ""


def join(rendezvous: Rendezvous, *, timeout_s: float) -> Transport:
    """Join a group; returns when all ranks of the epoch have joined, or raises `DeadlineExceeded`."""
    match rendezvous.backend:
        case "gloo" | "nccl":
            from r3channel.transport.process_group import ProcessGroupTransport as Joined
        case other:
            raise ConfigError(f"{rendezvous.name}: no transport is called {other!r}")
    return Joined(rendezvous, timeout_s=timeout_s)
