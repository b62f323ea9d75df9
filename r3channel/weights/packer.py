"""Makes a bucket's bytes: packed, looked through for NaN, hashed, and put where the group sends from. Knows no engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import xxhash

from r3channel.errors import ConfigError, NonFiniteWeights
from r3channel.weights.buckets import Bucket, Filled, StagingPair, TensorMeta, pack, pack_each
from r3channel.weights.digests import EngineChecksums
from r3channel.weights.finite import OnNonfinite, first_nonfinite
from r3channel.weights.kept import HostCopy
from r3channel.weights.progress import Run

_IN_CACHE_BYTES = 512 << 10
"""Half of a common level-2 cache. Small tensors are looked through together: one by one cost 16 us each."""


class Packer:
    """One session's buffers: a staging pair on `device`, and the host copy where one is kept. One thread."""

    def __init__(self, device: torch.device, copy: HostCopy | None, on_nonfinite: OnNonfinite) -> None:
        if on_nonfinite not in ("error", "allow"):
            raise ConfigError(f"on_nonfinite {on_nonfinite!r}: expected error or allow")
        self._copy, self._refuse = copy, on_nonfinite == "error"
        self._staging = StagingPair(device)
        self._direct = copy is None or device.type == "cpu"

    def pack(
        self, bucket: Bucket, filled: Filled[torch.Tensor], run: Run, checksums: EngineChecksums | None
    ) -> torch.Tensor:
        """The bucket's bytes, flat uint8. The memory is written again by the second call after this one.

        Raises NonFiniteWeights, naming bucket and tensor, and ManifestMismatch for another dtype or shape.
        """
        index = len(run.buckets)
        out_N = self._room(index, bucket.payload_bytes)
        if out_N.device.type == "cpu":
            self._pack_on_host(bucket, filled.items, out_N, run)
        else:
            self._pack_on_device(bucket, filled.items, out_N, run)
        if checksums is not None:
            with run.stage("digest"):
                for name, tensor in zip(bucket.names, filled.items, strict=True):
                    checksums.add(name, tensor)
        return self._on_device(out_N[: bucket.payload_bytes])

    def _pack_on_host(
        self, bucket: Bucket, tensors: Sequence[torch.Tensor], out_N: torch.Tensor, run: Run
    ) -> None:
        """What was just packed is looked through and hashed while it is still in cache: a third less time for all three."""
        digest, hashed_N, bytes_N = xxhash.xxh3_64(), 0, out_N.numpy()
        packed = _in_cache(pack_each(bucket, tensors, out_N))
        while (placed := run.timed_next("pack", packed)) is not None:
            with run.stage("digest"):
                bad = first_nonfinite(placed, out_N) if self._refuse else None
                if bad is not None:
                    raise self._nonfinite(bad, len(run.buckets))
                if self._copy is not None:
                    meta, offset = placed[-1]
                    end = offset + meta.nbytes
                    digest.update(bytes_N[hashed_N:end].data)
                    hashed_N = end
        if self._copy is not None:
            run.digests.append(digest.intdigest())

    def _pack_on_device(
        self, bucket: Bucket, tensors: Sequence[torch.Tensor], out_N: torch.Tensor, run: Run
    ) -> None:
        """Looked through once per dtype, because each look waits for the device. Without a host copy nothing is hashed."""
        with run.stage("pack"):
            payload_N = pack(bucket, tensors, out_N)
            if (
                payload_N.is_cuda
            ):  # another thread sends it, and that thread's current stream is the default one
                torch.cuda.current_stream(payload_N.device).synchronize()
        with run.stage("digest"):
            bad = first_nonfinite(bucket.placed, payload_N) if self._refuse else None
        if bad is not None:
            raise self._nonfinite(bad, len(run.buckets))

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

    @staticmethod
    def _nonfinite(meta: TensorMeta, index: int) -> NonFiniteWeights:
        return NonFiniteWeights(
            f"bucket {index}: tensor {meta} holds NaN or Inf. Did the last train step diverge? "
            "on_nonfinite='allow' sends them"
        )


def _in_cache(packed: Iterator[tuple[TensorMeta, int]]) -> Iterator[list[tuple[TensorMeta, int]]]:
    """Neighbours of together `_IN_CACHE_BYTES`, as soon as they are packed."""
    placed, nbytes = [], 0
    for one in packed:
        placed.append(one)
        nbytes += one[0].nbytes
        if nbytes >= _IN_CACHE_BYTES:
            yield placed
            placed, nbytes = [], 0
    if placed:
        yield placed
