"""The rollout manager's side: frames in, exact shards out.

from r3channel.relay import Relay

A name is imported when it is asked for, so that a place loads only what it uses.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from r3channel.relay.actor import RayRelay, RelayHost
    from r3channel.relay.arrival.splice import merged_frame
    from r3channel.relay.relay import Relay

__all__ = ["RayRelay", "Relay", "RelayHost", "merged_frame"]

_PLACES = {
    "RayRelay": "actor",
    "Relay": "relay",
    "RelayHost": "actor",
    "merged_frame": "arrival.splice",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
