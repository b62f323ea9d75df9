"""Counts the operations that a device is given: a step that is bound by launches pays for each, on any GPU."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Lists the operations that are given to a device inside the block. Views are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, call: Any, _types: Any, given: Any = (), named: Any = None) -> Any:
        views = [one.alias_info is not None and not one.alias_info.is_write for one in call._schema.returns]
        self.names += [call.name()] if not any(views) else []
        return call(*given, **(named or {}))
