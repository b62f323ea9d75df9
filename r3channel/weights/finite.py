"""NaN and Inf in weights: found with few synchronisations, whatever the number of tensors. No network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal

import numpy as np
import torch

from r3channel.errors import NonFiniteWeights
from r3channel.weights.manifest import TensorMeta

OnNonfinite = Literal["error", "allow"]
"""What to do with a tensor that holds NaN or Inf."""

_WIDENED = {torch.float8_e4m3fn: torch.float16, torch.float8_e5m2: torch.float32}
"""Types without `aminmax`, and one that holds all their values."""

_FIRST_NOT_FINITE: Mapping[torch.dtype, int] = {
    torch.float64: 0x7FF0_0000_0000_0000,
    torch.float32: 0x7F80_0000,
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float8_e5m2: 0x7C,
    torch.float8_e4m3fn: 0x7F,  # has no Inf; NaN is all ones below the sign (OCP 8-bit floating point)
}
"""The smallest bit pattern, without sign, that is NaN or Inf; all patterns above are, too."""

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


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


def first_nonfinite(placed: Iterable[tuple[TensorMeta, int]], payload: torch.Tensor) -> TensorMeta | None:
    """The first of some tensors that holds NaN or Inf; None if all numbers are finite. Any device.

    `placed`: neighbours in a packed bucket with their offsets in its `payload`. On a GPU this waits for the device once per
    dtype; tensors are looked at one by one only to name one.
    """
    for dtype, run in _runs(placed):
        start, end = run[0][1], run[-1][1] + run[-1][0].nbytes
        if _finite(payload[start:end].view(dtype)):
            continue
        for meta, offset in run:
            if not _finite(payload[offset : offset + meta.nbytes].view(dtype)):
                return meta
    return None


def _runs(
    placed: Iterable[tuple[TensorMeta, int]],
) -> Iterator[tuple[torch.dtype, list[tuple[TensorMeta, int]]]]:
    """Neighbours of equal floating dtype with their offsets; equal dtypes lie without a gap."""
    for dtype, run in groupby(placed, key=lambda pair: pair[0].dtype):
        if dtype.is_floating_point:
            yield dtype, list(run)


def _finite(values: torch.Tensor) -> torch.Tensor:
    """A bool on the tensor's device."""
    if values.numel() == 0 or values.device.type == "cpu":
        return torch.tensor(_finite_on_host(values))
    return _finite_on_device(values)


def _finite_on_device(values: torch.Tensor) -> torch.Tensor:
    """NaN survives both minimum and maximum, so two numbers tell. Not run on a GPU; on a CPU it is slow and right."""
    low, high = torch.aminmax(values.to(_WIDENED.get(values.dtype, values.dtype)))
    return torch.isfinite(low) & torch.isfinite(high)


def _finite_on_host(values: torch.Tensor) -> bool:
    """Two maxima over the bits and no temporary: torch's isfinite is some 20 times slower for bfloat16 on a CPU.

    Read as signed integers the largest positive pattern wins, read as unsigned the largest negative one.
    """
    if values.numel() == 0:
        return True
    first, size = _FIRST_NOT_FINITE[values.dtype], values.dtype.itemsize
    signed = values.detach().view(_SIGNED[size]).numpy()
    unsigned_limit = first + (1 << (8 * size - 1))
    return int(signed.max()) < first and int(signed.view(_UNSIGNED[size]).max()) < unsigned_limit
