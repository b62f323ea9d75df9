"""A trainer rank's end of broadcasts to SGLang's own ranks: its group, and the buckets that it packs. Gives no orders."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from itertools import groupby

import torch

from r3channel.errors import UsageError
from r3channel.transport.base import Rendezvous
from r3channel.transport.process_group import ProcessGroupTransport, RendezvousStore, device_of, in_background
from r3channel.weights.checksums import finite, nonfinite
from r3channel.weights.config import SyncConfig
from r3channel.weights.manifest import Bucket, Manifest, TensorMeta
from r3channel.weights.memory import new_memory
from r3channel.weights.progress import Run


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
        self._stand_ins = list[ProcessGroupTransport]()
        self._closed = False

    def join(self, rank: int = 0, *, timeout_s: float) -> None:
        """Wait until all members have joined. Raises DeadlineExceeded. Another `rank`: in its place, until `close`."""
        where = Rendezvous(
            backend=self.backend, name=self.name, connection=0, rank=rank, world_size=self.world_size, host=self.host,
            port=self._store.port,
        )  # fmt: skip
        wire = ProcessGroupTransport(where, timeout_s=timeout_s, members="foreign")
        if rank:  # one that left at once would fail a member that has not met it yet
            self._stand_ins.append(wire)
        else:
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
        while self._stand_ins:
            in_background(self._stand_ins.pop().abort, name="weights-bury")
        if wire is not None and self.backend == "gloo" and not self._sending.locked():
            wire.abort()
        elif wire is not None:
            # gloo's group ends with the operation under way, by its deadline; NCCL's kernel waits on the device
            in_background(wire.abort, name="weights-bury")


class Packer:
    """Packs buckets into two buffers in turn, one of which leaves meanwhile, and looks at what it packs. One thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rooms = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]

    def pack(self, number: int, bucket: Bucket, tensors: Sequence[torch.Tensor], run: Run) -> torch.Tensor:
        """Flat uint8, valid until bucket `number + 2` is packed. Raises NonFiniteWeights, naming bucket and tensor."""
        with run.stage("pack"):
            payload_N = self._room(number, bucket.payload_bytes)[: bucket.payload_bytes]
            for view, tensor in zip(bucket.views(payload_N), tensors, strict=True):
                view.copy_(tensor.detach())
            if payload_N.is_cuda:  # another thread sends it, whose current stream is the default one
                torch.cuda.current_stream(payload_N.device).synchronize()
        with run.stage("digest"):
            if bad := first_nonfinite(bucket.placed, payload_N):
                raise nonfinite(f"bucket {number}", bad)
        return payload_N

    def _room(self, number: int, nbytes: int) -> torch.Tensor:
        if len(self._rooms[number % 2]) < nbytes:
            self._rooms[number % 2] = new_memory(nbytes, self._device)
        return self._rooms[number % 2]


def first_nonfinite(placed: Iterable[tuple[TensorMeta, int]], payload: torch.Tensor) -> TensorMeta | None:
    """The first of some tensors that holds NaN or Inf; None if all numbers are finite. Any device.

    `placed`: neighbours in a packed bucket with their offsets in its `payload`; equal dtypes lie without a gap. Those are
    looked at together, for a look waits for a device and costs 16 us; one by one only to name one.
    """
    for dtype, run in groupby(placed, key=lambda pair: pair[0].dtype):
        metas = list(run)
        start, end = metas[0][1], metas[-1][1] + metas[-1][0].nbytes
        if not finite(payload[start:end].view(dtype)):
            views = ((meta, payload[at : at + meta.nbytes].view(dtype)) for meta, at in metas)
            return next(meta for meta, view in views if not finite(view))
    return None


class Source:
    """This trainer rank's end of broadcasts, for all updates of a session."""

    def __init__(self, config: SyncConfig) -> None:
        self.packer = Packer(device_of(config.backend))
        self.group: WeightGroup | None = None
        self.joining: Future[None] = Future()
        self.manifest: Manifest | None = None
        """What rank 0 was told of."""
        self.buckets: dict[int, list[Bucket]] = {}
        """By source."""
        self.formed: tuple[Sequence[tuple[str, str]], dict[int, str]] = (), {}
        """At rank 0: the engines' lives that are in the groups, and the groups' names by source."""

    def leave(self) -> None:
        """Engines that wait in its group fail at once. Any thread."""
        group, self.group = self.group, None
        if group is not None:
            group.close()
