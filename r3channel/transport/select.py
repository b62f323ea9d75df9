"""Every transport by its name, and from a rendezvous to the one that is asked for: only that one is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from r3channel.errors import ConfigError
from r3channel.transport.base import Rendezvous, Transport

if TYPE_CHECKING:
    from r3channel.transport.process_group import RendezvousStore


def open_store(interface: str) -> RendezvousStore:
    """Return where the members of a gloo or NCCL group meet; listens on `interface` only until it is closed."""
    from r3channel.transport.process_group import RendezvousStore

    return RendezvousStore(interface)


def gpu_of(device: int | None = None) -> str:
    """The uuid of a CUDA device of this process, the current one unless said; empty without CUDA. Two ranks on one are refused by
    NCCL, and numbers count differently in each process."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if torch.cuda.is_available() else ""


def _process_group(rendezvous: Rendezvous, timeout_s: float) -> Transport:
    from r3channel.transport.process_group import ProcessGroupTransport

    return ProcessGroupTransport(rendezvous, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class Kind:
    """What both ends of a channel ask of a transport before they load it."""

    join: Callable[[Rendezvous, float], Transport] | None = None
    """Joins a group of the relay and one receiver; None where rows come over the connection itself."""
    needs_gpu: bool = False
    """Each end moves rows on a GPU of its own, where a receive that is pending can deadlock with others' communicators."""


TRANSPORTS = {"tcp": Kind(), "nccl": Kind(_process_group, needs_gpu=True), "gloo": Kind(_process_group)}


def join(rendezvous: Rendezvous, *, timeout_s: float) -> Transport:
    """Join a group; returns when all ranks of the connection have joined, or raises `DeadlineExceeded`."""
    kind = TRANSPORTS.get(rendezvous.backend)
    if kind is None or kind.join is None:
        raise ConfigError(f"{rendezvous.name}: no transport is called {rendezvous.backend!r}")
    return kind.join(rendezvous, timeout_s)
