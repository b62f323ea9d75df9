"""Finds NaN and Inf in a packed bucket: one pass over whole runs of equal dtype, tensor by tensor only to name one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch

from r3channel.weights.buckets import Bucket, TensorMeta

_NO_AMINMAX = (torch.float8_e4m3fn, torch.float8_e5m2)


def first_nonfinite(bucket: Bucket, payload: torch.Tensor) -> TensorMeta | None:
    """The first tensor of the packed bucket that holds NaN or Inf; None if all numbers are finite. Any device.

    On a GPU this waits for the device once per dtype in the bucket.
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


def _finite(values: torch.Tensor) -> bool:
    """NaN survives both minimum and maximum, so two numbers tell."""
    if values.numel() == 0:
        return True
    if values.dtype in _NO_AMINMAX:
        values = values.to(torch.float16 if values.dtype is torch.float8_e4m3fn else torch.float32)
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))
