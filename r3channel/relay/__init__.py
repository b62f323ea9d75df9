"""The rollout manager's side: frames in, exact shards out.

from r3channel.relay import Relay

A name is imported when it is asked for, so that a place loads only what it uses.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from r3channel.relay.pd_merge import merged_frame
    from r3channel.relay.ray_host import RayRelay, RelayHost
    from r3channel.relay.relay import Relay

__all__ = ["RayRelay", "Relay", "RelayHost", "merged_frame"]

_PLACES = {"RayRelay": "ray_host", "Relay": "relay", "RelayHost": "ray_host", "merged_frame": "pd_merge"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
