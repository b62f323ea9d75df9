"""Which tensors an engine must be given: names and shapes, as of the checkpoint that it was started from (checkpoint.py).

SGLang skips a name that it does not know, with a line in its log, and goes on with the old bytes. So names are held
against the checkpoint before they leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from r3channel.errors import ManifestMismatch
from r3channel.weights.buckets import TensorMeta
from r3channel.weights.progress import Run


class Expected:
    """Names and shapes that one update must give, each once."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = dict(shapes)
        self._given: set[str] = set()

    def checked(
        self, stream: Iterable[tuple[TensorMeta, torch.Tensor]], run: Run
    ) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """The tensors of a new update as they come; ManifestMismatch, naming tensor and bucket, for one that is not expected."""
        self._given.clear()
        for meta, tensor in stream:
            self._check(meta, bucket=len(run.buckets))
            yield meta, tensor

    def _check(self, meta: TensorMeta, *, bucket: int) -> None:
        shape = self._shapes.get(meta.name)
        if shape is None:
            raise ManifestMismatch(
                f"bucket {bucket}: tensor {meta}: the engine's checkpoint has no such name, and it would skip it silently"
            )
        if shape != meta.shape:
            raise ManifestMismatch(
                f"bucket {bucket}: tensor {meta}: the engine's checkpoint has shape {list(shape)}"
            )
        self._given.add(meta.name)

    def check_complete(self) -> None:
        """ManifestMismatch if a tensor of the checkpoint was not given."""
        missing = sorted(self._shapes.keys() - self._given)
        if missing:
            raise ManifestMismatch(
                f"{len(missing)} tensors of the engine's checkpoint were not given, first {missing[0]}"
            )
