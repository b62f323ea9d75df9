"""Reads the caller's tensors of one update, once and in the caller's thread: their iterator may be collective.

Between two tensors the update's deadline is looked at. How long the next one may take is the affair of who gives it: a gathering
has the timeout of its own group.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from r3channel.errors import ManifestMismatch
from r3channel.weights.manifest import Manifest, TensorMeta, fill_buckets
from r3channel.weights.pack import finite, nonfinite
from r3channel.weights.progress import Run
from r3channel.weights.stages import Push

Named = tuple[str, torch.Tensor]


def read_first(
    given: Iterator[Named], run: Run, *, cap_bytes: int
) -> tuple[Manifest, list[list[torch.Tensor]]]:
    """All that comes, copied to the host, by bucket. Raises ManifestMismatch, NonFiniteWeights, and what the iterator raises."""
    metas, held = list[TensorMeta](), dict[str, torch.Tensor]()
    for name, tensor in _in_time(given, run):
        meta = TensorMeta.of(name, tensor)
        with run.stage("pack"):
            kept = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        with run.stage("digest"):
            if not finite(kept):
                raise nonfinite(f"after {len(metas)} tensors", meta)
        metas.append(meta)
        held[name] = kept
    manifest = fill_buckets(metas, cap_bytes=cap_bytes)
    return manifest, [[held[name] for name in bucket.names] for bucket in manifest.buckets]


def read_again(given: Iterator[Named], manifest: Manifest, run: Run, push: Push) -> None:
    """Give `push` each bucket's tensors, in its order, once all have come. ManifestMismatch names what came otherwise."""
    rows: list[dict[int, torch.Tensor]] = [{} for _ in manifest.buckets]
    due, come = 0, 0
    for come, (name, tensor) in enumerate(_in_time(given, run), start=1):
        if come > len(manifest.arrivals):
            raise ManifestMismatch(f"the update gives more tensors than the first one did: {name}")
        meta, bucket, slot = manifest.arrivals[come - 1]
        if name != meta.name or tensor.dtype != meta.dtype or tensor.shape != meta.shape:
            raise ManifestMismatch(
                f"tensor {come}: expected {meta}, got {TensorMeta.of(name, tensor)}; did model, layout or cast change since?"
            )
        rows[bucket][slot] = tensor
        while due < len(rows) and len(rows[due]) == len(manifest.buckets[due].tensors):
            full, rows[due] = rows[due], {}
            due += 1
            push([full[slot] for slot in range(len(full))])
    if come < len(manifest.arrivals):
        missing = manifest.arrivals[come][0]
        raise ManifestMismatch(
            f"the update ended after {come} of {len(manifest.arrivals)} tensors; the next one expected is {missing}"
        )


def _in_time(given: Iterator[Named], run: Run) -> Iterator[Named]:
    while True:
        with run.stage("convert"):
            named = next(given, None)
        if named is None:
            return
        run.deadline.left_s()
        yield named
