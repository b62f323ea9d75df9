"""Finds operations that make a thread wait for the device: copies that block, uploads from pageable memory, reads of a value.

On `meta` tensors there is nothing to read, so what is not recorded here fails there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique_consecutive", "_unique2"}


class HostCopies(TorchDispatchMode):
    """Inside the block: `blocking` lists what waited, `seen` every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.blocking: list[str] = []
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        self.seen.append(name)
        if name in WAITS or self._indexes_by_flags(name, args) or self._copies_and_waits(name, args, kwargs):
            self.blocking.append(name)
        return func(*args, **kwargs)

    def _indexes_by_flags(self, name: str, args: Any) -> bool:
        """`x[flags]` asks the device how many are set; the `nonzero` in it is not dispatched again."""
        indices = args[1] if name in ("index", "index_put_") else ()
        return any(index is not None and index.dtype == torch.bool for index in indices)

    def _copies_and_waits(self, name: str, args: Any, kwargs: Any) -> bool:
        """Between host and device in either direction: torch waits for both, unless it is told not to. CUDA waits for the stream
        whatever it is told where the host's memory is pageable."""
        if name == "_to_copy":
            other = torch.device(kwargs.get("device") or args[0].device).type != args[0].device.type
            return other and (not kwargs.get("non_blocking", False) or _is_pageable(args[0]))
        if name == "copy_":
            blocks = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            return args[0].device.type != args[1].device.type and (blocks or _is_pageable(args[1]))
        return False


def _is_pageable(source: torch.Tensor) -> bool:
    """Copies to the host are not judged: what they are written into is made by torch."""
    return source.device.type == "cpu" and not source.is_pinned()
