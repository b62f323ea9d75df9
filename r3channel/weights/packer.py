"""Makes a bucket's bytes: packed, looked through for NaN, hashed, and put where the group sends from. Knows no engine."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from r3channel.errors import ConfigError, NonFiniteWeights
from r3channel.weights.buckets import Bucket, Filled, StagingPair, pack
from r3channel.weights.digests import EngineChecksums, payload_digest
from r3channel.weights.finite import OnNonfinite, first_nonfinite
from r3channel.weights.kept import HostCopy
from r3channel.weights.progress import Run


class Packer:
    """One session's buffers: a staging pair on `device`, and the host copy where one is kept. One thread."""

    def __init__(self, device: torch.device, copy: HostCopy | None, on_nonfinite: OnNonfinite) -> None:
        if on_nonfinite not in ("error", "allow"):
            raise ConfigError(f"on_nonfinite {on_nonfinite!r}: expected error or allow")
        self._copy, self._on_nonfinite = copy, on_nonfinite
        self._staging = StagingPair(device)
        self._direct = copy is None or device.type == "cpu"

    def pack(
        self, bucket: Bucket, filled: Filled[torch.Tensor], run: Run, checksums: EngineChecksums | None
    ) -> torch.Tensor:
        """The bucket's bytes, flat uint8. The memory is written again by the second call after this one.

        Raises NonFiniteWeights, naming bucket and tensor, and ManifestMismatch for another dtype or shape.
        """
        with run.stage("pack"):
            payload = pack(bucket, filled.items, self._room(len(run.buckets), bucket.payload_bytes))
        with run.stage("digest"):
            self._check_finite(bucket, payload, index=len(run.buckets))
            if self._copy is not None:
                run.digests.append(payload_digest(payload))
            if checksums is not None:
                for name, tensor in zip(bucket.names, filled.items, strict=True):
                    checksums.add(name, tensor)
        return self._on_device(payload)

    def committed(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """The host copy's buckets, each where the group sends from."""
        if self._copy is not None:
            for bucket, payload in self._copy.read():
                yield bucket, self._on_device(payload)

    def _room(self, index: int, payload_bytes: int) -> torch.Tensor:
        if self._copy is not None:
            return self._copy.take(index, payload_bytes)
        return self._staging.take(payload_bytes)

    def _on_device(self, payload: torch.Tensor) -> torch.Tensor:
        if self._direct:
            return payload
        return self._staging.take(len(payload))[: len(payload)].copy_(payload)

    def _check_finite(self, bucket: Bucket, payload: torch.Tensor, *, index: int) -> None:
        bad = None if self._on_nonfinite == "allow" else first_nonfinite(bucket, payload)
        if bad is not None:
            raise NonFiniteWeights(
                f"bucket {index}: tensor {bad} holds NaN or Inf. Did the last train step diverge? "
                "on_nonfinite='allow' sends them"
            )
