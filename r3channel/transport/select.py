"""Every transport by its name. `join` loads only the transport that a rendezvous names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from r3channel.errors import ConfigError
from r3channel.transport.base import Rendezvous, Transport

if TYPE_CHECKING:
    from r3channel.transport.process_group import RendezvousStore


def open_store(interface: str) -> RendezvousStore:
    """Open the store where members of a gloo or NCCL group meet.

    It listens on `interface` only, until it is closed.
    """
    from r3channel.transport.process_group import RendezvousStore

    return RendezvousStore(interface)


def gpu_of(device: int | None = None) -> str:
    """Return the uuid of a CUDA device of this process.

    NCCL refuses two ranks on one device, and device numbers count differently in each process.

    Args:
        device: the device's number; None for the current device.

    Returns:
        The uuid; empty without CUDA.
    """
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if torch.cuda.is_available() else ""


def _process_group(rendezvous: Rendezvous, timeout_s: float) -> Transport:
    from r3channel.transport.process_group import ProcessGroupTransport

    return ProcessGroupTransport(rendezvous, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class Kind:
    """What both ends of a channel know of a transport before they load it."""

    join: Callable[[Rendezvous, float], Transport] | None = None
    """Joins a group of the relay and one receiver; None where rows come over the connection itself."""
    needs_gpu: bool = False
    """Each end moves rows on a GPU of its own, where a receive that is pending can deadlock with others' communicators."""


TRANSPORTS = {"tcp": Kind(), "nccl": Kind(_process_group, needs_gpu=True), "gloo": Kind(_process_group)}


def join(rendezvous: Rendezvous, *, timeout_s: float) -> Transport:
    """Join a group and wait for all ranks of the connection.

    Raises:
        DeadlineExceeded: not all ranks joined within `timeout_s`.
        ConfigError: no transport has the rendezvous's name.
    """
    kind = TRANSPORTS.get(rendezvous.backend)
    if kind is None or kind.join is None:
        raise ConfigError(f"{rendezvous.name}: no transport is called {rendezvous.backend!r}")
    return kind.join(rendezvous, timeout_s)
