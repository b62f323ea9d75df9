"""The last committed weights, packed, in the trainer's host memory: what one engine is repaired from, alone.

Twice the model's bytes at most: what was committed, and the room into which the next version is packed. Nothing here
knows an engine.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from r3channel.errors import UsageError, WeightsDiffer
from r3channel.weights.buckets import Bucket, Manifest, new_buffer
from r3channel.weights.digests import payload_digest


class HostCopy:
    """Two sets of buffers that change places at each commit. One thread."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.manifest: Manifest | None = None
        self.digests: tuple[int, ...] = ()
        self._committed: list[torch.Tensor] = []
        self._coming: list[torch.Tensor] = []

    def take(self, index: int, payload_bytes: int) -> torch.Tensor:
        """Room for bucket `index` of the coming version: uint8, exactly that long, kept until the commit after the next."""
        if index < len(self._coming) and len(self._coming[index]) == payload_bytes:
            return self._coming[index]
        del self._coming[index:]
        self._coming.append(new_buffer(payload_bytes, torch.device("cpu")))
        return self._coming[index]

    def commit(self, version: int, manifest: Manifest, digests: tuple[int, ...]) -> None:
        """What was taken since the last commit is now the committed version."""
        self._committed, self._coming = self._coming, self._committed
        self.version, self.manifest, self.digests = version, manifest, digests

    def coming(self) -> list[torch.Tensor]:
        """The buckets of the coming version as far as they are packed."""
        return self._coming

    def read(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Every committed bucket with its bytes, in order.

        WeightsDiffer if bytes changed since they were packed; UsageError without a committed version.
        """
        if self.manifest is None:
            raise UsageError("nothing was committed yet, so there is no copy to repair an engine from")
        for index, (bucket, digest) in enumerate(zip(self.manifest.buckets, self.digests, strict=True)):
            payload = self._committed[index]
            if payload_digest(payload) != digest:
                raise WeightsDiffer(
                    f"bucket {index} ({bucket}) of the host copy of version {self.version} changed since it was packed; "
                    "send a whole update instead"
                )
            yield bucket, payload
