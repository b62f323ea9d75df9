"""What one update gives: tensors cut into buckets, held against what is expected, packed. Where they go is the caller's.

Knows no engine, no group and no transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from r3channel.errors import ManifestMismatch
from r3channel.weights.buckets import Bucket, Manifest, fill_buckets, is_scale
from r3channel.weights.digests import EngineChecksums
from r3channel.weights.expected import Expected
from r3channel.weights.packer import Packer
from r3channel.weights.progress import Run, Stream


class Push(Protocol):
    """Takes a bucket and its bytes, which may be overwritten once the next call has returned."""

    def __call__(self, bucket: Bucket, payload: torch.Tensor, /, *, last: bool) -> None: ...


class Contents:
    """Packs updates of one model. One thread."""

    def __init__(
        self,
        packer: Packer,
        *,
        bucket_bytes: int,
        expected: Mapping[str, tuple[int, ...]] | str | None,
        checksums: bool,
    ) -> None:
        """`checksums`: also compute what an engine must report of its parameters (digests.py)."""
        self.checksums: dict[str, str] = {}
        """Of the last update that was packed whole."""
        self.manifest: Manifest | None = None
        """What every update must give from now on; set by the caller once an update counts."""
        self.packer, self._bucket_bytes, self._checksums = packer, bucket_bytes, checksums
        self._expected = Expected(expected) if isinstance(expected, Mapping) else None
        self._named = expected is not None
        """Whether a name that an engine does not have is noticed by somebody."""

    def pack(self, stream: Stream, push: Push, run: Run) -> Manifest:
        """Cut, check and pack the stream bucket by bucket; return what it was.

        Raises ManifestMismatch (also for a scale that neither `expected` nor checksums would miss at an engine),
        NonFiniteWeights, and whatever `push` and the stream raise.
        """
        checksums = EngineChecksums() if self._checksums else None
        given = stream if self._expected is None else self._expected.checked(stream, run)
        filling = fill_buckets(given, cap_bytes=self._bucket_bytes)
        while (filled := run.timed_next("fill", filling)) is not None:
            self._check_scales(filled.bucket)
            bucket = self._agreed(filled.bucket, len(run.buckets))
            payload = self.packer.pack(bucket, filled, run, checksums)
            push(bucket, payload, last=filled.last)
            run.buckets.append(bucket)
        with run.stage("plan"):
            manifest = self._complete(run.buckets)
            self.checksums = {} if checksums is None else checksums.result()
            return manifest

    def _complete(self, buckets: Sequence[Bucket]) -> Manifest:
        if not buckets:
            raise ManifestMismatch("the update gives no tensors at all")
        if self._expected is not None:
            self._expected.check_complete()
        if self.manifest is None:
            return Manifest.of(buckets)
        self.manifest.check_complete(len(buckets))
        return self.manifest

    def _check_scales(self, bucket: Bucket) -> None:
        """SGLang skips a name that it does not have, so an engine of plain weights would serve float8 ones without scales."""
        scale = next((name for name in bucket.names if is_scale(name)), None)
        if scale is not None and not self._named and not self._checksums:
            raise ManifestMismatch(
                f"tensor {scale} is the scale of a float8 weight; expected `expected` or `verify`, which notice an engine that "
                "has no such parameter"
            )

    def _agreed(self, bucket: Bucket, index: int) -> Bucket:
        return bucket if self.manifest is None else self.manifest.check(index, bucket)
