"""NaN and Inf in weights: found with few synchronisations, whatever the number of tensors. No network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal

import torch

from r3channel.errors import NonFiniteWeights
from r3channel.weights.manifest import Bucket, TensorMeta

OnNonfinite = Literal["error", "allow"]
"""What to do with a tensor that holds NaN or Inf."""

_WIDENED = {torch.float8_e4m3fn: torch.float16, torch.float8_e5m2: torch.float32}
"""Types without `aminmax`, and one that holds all their values."""


def check_finite(named: Sequence[tuple[str, torch.Tensor]], *, where: str) -> None:
    """Raises NonFiniteWeights, naming the first tensor with NaN or Inf, its dtype and `where` (a bucket).

    Integers pass. The flags stay on the device until all are set.
    """
    floats = [(name, tensor) for name, tensor in named if tensor.is_floating_point() and tensor.numel()]
    if not floats:
        return
    flags = torch.stack([_finite(tensor) for _, tensor in floats]).tolist()
    bad = [(name, tensor.dtype) for (name, tensor), fine in zip(floats, flags, strict=True) if not fine]
    if bad:
        raise NonFiniteWeights(
            f"{where}: tensor {bad[0][0]} ({bad[0][1]}) holds NaN or Inf, as do {len(bad) - 1} more; the old weights stay. "
            "Did the optimizer step diverge?"
        )


def first_nonfinite(bucket: Bucket, payload: torch.Tensor) -> TensorMeta | None:
    """The first tensor of the packed bucket that holds NaN or Inf; None if all numbers are finite. Any device.

    On a GPU this waits for the device once per dtype in the bucket; tensors are looked at one by one only to name one.
    """
    for dtype, run in _runs(bucket):
        start, end = run[0][1], run[-1][1] + run[-1][0].nbytes
        if _finite(payload[start:end].view(dtype)):
            continue
        for meta, offset in run:
            if not _finite(payload[offset : offset + meta.nbytes].view(dtype)):
                return meta
    return None


def _runs(bucket: Bucket) -> Iterator[tuple[torch.dtype, list[tuple[TensorMeta, int]]]]:
    """Neighbours of equal floating dtype with their offsets; equal dtypes lie without a gap."""
    for dtype, run in groupby(
        zip(bucket.tensors, bucket.offsets, strict=True), key=lambda pair: pair[0].dtype
    ):
        if dtype.is_floating_point:
            yield dtype, list(run)


def _finite(values: torch.Tensor) -> torch.Tensor:
    """A bool on the tensor's device. NaN survives both minimum and maximum, so two numbers tell."""
    if values.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=values.device)
    low, high = torch.aminmax(values.to(_WIDENED.get(values.dtype, values.dtype)))
    return torch.isfinite(low) & torch.isfinite(high)
