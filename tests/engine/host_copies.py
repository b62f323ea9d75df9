"""Finds operations that make a thread wait for the device: copies to the host that block, and reads of a value.

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
        if name in WAITS or self._copies_to_host(name, args, kwargs):
            self.blocking.append(name)
        return func(*args, **kwargs)

    def _copies_to_host(self, name: str, args: Any, kwargs: Any) -> bool:
        if name == "_to_copy":
            to_host = torch.device(kwargs.get("device") or args[0].device).type == "cpu"
            return to_host and args[0].device.type != "cpu" and not kwargs.get("non_blocking", False)
        if name == "copy_":
            blocks = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            return args[0].device.type == "cpu" and args[1].device.type != "cpu" and blocks
        return False
