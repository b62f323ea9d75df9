"""NaN and Inf in a bucket: found with one synchronisation per bucket, whatever the number of tensors. No network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from r3channel.errors import WeightsNotFinite

FinitePolicy = Literal["refuse", "allow"]

_NAN_BITS = {torch.float8_e4m3fn: 0x7F}
"""Types that torch cannot ask, and have no Inf: NaN is all ones below the sign (OCP 8-bit floating point, E4M3)."""


def check_finite(named: Sequence[tuple[str, torch.Tensor]], *, where: str) -> None:
    """Raises WeightsNotFinite, naming the first tensor with NaN or Inf, its dtype and `where` (a bucket).

    Integers pass. The flags stay on the device until all are set.
    """
    floats = [(name, tensor) for name, tensor in named if tensor.is_floating_point() and tensor.numel()]
    if not floats:
        return
    fine = torch.empty(len(floats), dtype=torch.bool, device=floats[0][1].device)
    for flag, (_, tensor) in zip(fine, floats, strict=True):
        torch.all(_finite(tensor).reshape(-1), dim=0, out=flag)
    bad = [name for (name, _), ok in zip(floats, fine.tolist(), strict=True) if not ok]
    if bad:
        kind = next(tensor.dtype for name, tensor in floats if name == bad[0])
        raise WeightsNotFinite(
            f"{where}: tensor {bad[0]} ({kind}) holds NaN or Inf, as do {len(bad) - 1} more; the old weights stay. "
            "Did the optimizer step diverge?"
        )


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    bits = _NAN_BITS.get(tensor.dtype)
    if bits is not None:
        return (tensor.view(torch.uint8) & 0x7F) != bits
    if tensor.dtype.itemsize == 1:
        return torch.isfinite(tensor.to(torch.float32))
    return torch.isfinite(tensor)
