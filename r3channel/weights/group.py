"""A group that broadcasts to SGLang's own ranks: the way that needs no half of ours in the engine."""

from __future__ import annotations

import threading

import torch

from r3channel.errors import ConfigError, UsageError
from r3channel.transport.base import Rendezvous
from r3channel.transport.process_group import ProcessGroupTransport, RendezvousStore, device_of, in_background

BACKENDS = ("gloo", "nccl")


class WeightGroup:
    """Rank 0 of a group that broadcasts to SGLang's own ranks. LISTENING -> JOINED (`join`) -> CLOSED (`close`, often).

    >>> group = WeightGroup("doc-1", world_size=1)
    >>> group.join(timeout_s=20.0)
    >>> group.broadcast(torch.zeros(4, dtype=torch.uint8), timeout_s=5.0)
    >>> group.close()

    One thread at a time calls `join` and `broadcast`; any thread may close.
    """

    def __init__(self, name: str, *, world_size: int, host: str = "127.0.0.1", backend: str = "gloo") -> None:
        """Listen on `host` (an address of this machine that the engines reach) at a port given by the system.

        ConfigError for a wildcard host: store and gloo have no authentication, so only the configured interface may see them.
        """
        self.name, self.host, self.world_size, self.backend = name, host, world_size, backend
        self._store = RendezvousStore(host)
        self.where = {"master_address": host, "master_port": self._store.port, "group_name": name}
        self.where |= {"backend": backend, "world_size": world_size}
        """What another member must be told to join."""
        self._sending = threading.Lock()
        self.wire: ProcessGroupTransport | None = None
        self._closed = False

    def join(self, rank: int = 0, *, timeout_s: float) -> None:
        """Wait until all members have joined. Raises DeadlineExceeded. With another `rank`: in that one's place, and leave."""
        where = Rendezvous(
            backend=self.backend, name=self.name, connection=0, rank=rank, world_size=self.world_size, host=self.host,
            port=self._store.port,
        )  # fmt: skip
        wire = ProcessGroupTransport(where, timeout_s=timeout_s, foreign=True)
        if rank:
            wire.abort()
            return
        self.wire = wire
        if self._closed:  # meanwhile
            self.close()

    def broadcast(self, payload: torch.Tensor, *, timeout_s: float) -> None:
        """Send `payload` (uint8, contiguous) to every member; its memory may be reused on return.

        The members must expect exactly as many bytes: gloo aborts the process of a smaller receiver. After an error the
        group is dead on every side. Raises DeadlineExceeded after `timeout_s`, TransportError if a member is gone.
        """
        if self.wire is None:
            raise UsageError(f"weight group {self.name} is not joined, or is closed")
        with self._sending:
            self.wire.broadcast(0, payload, timeout_s=timeout_s)

    def close(self) -> None:
        """Leave the group: members that wait in a broadcast fail at once. Never blocks on a broadcast under way."""
        self._closed = True
        wire, self.wire = self.wire, None
        self._store.close()
        if wire is None:
            return
        if self.backend == "gloo" and not self._sending.locked():
            wire.abort()
        else:  # gloo's group ends with the operation under way, by its deadline; NCCL's kernel waits on the device
            in_background(wire.abort, name="weights-bury")


def group_device(backend: str) -> torch.device:
    """Where a payload is best: the current CUDA device for NCCL. ConfigError for an unknown backend."""
    if backend not in BACKENDS:
        raise ConfigError(f"weight group backend {backend!r}: expected one of {BACKENDS}")
    return device_of(backend)
