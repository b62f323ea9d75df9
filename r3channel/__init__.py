"""r3channel: the experts an inference engine chose, carried exactly to the routers of the trainers.

Importing this package imports none of torch, ray, sglang or megatron: each upstream is imported by the one
room that talks to it, when that room is entered. Its names are imported when they are asked for: engines, pytest and the
command line enter by other doors, and would wait for numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from r3channel.config import ChannelConfig, add_arguments
    from r3channel.errors import R3Error
    from r3channel.model.spec import RoutingSpec
    from r3channel.plan.assignment import Assignment
    from r3channel.plan.layout import TrainerLayout
    from r3channel.plan.ticket import Ticket
    from r3channel.wire.routing import ProvenanceSpan, RowKind, SampleRouting

__version__ = "0.1.0"

__all__ = [
    "Assignment",
    "ChannelConfig",
    "ProvenanceSpan",
    "R3Error",
    "RoutingSpec",
    "RowKind",
    "SampleRouting",
    "Ticket",
    "TrainerLayout",
    "__version__",
    "add_arguments",
]
_HOMES = {
    "Assignment": "plan.assignment",
    "ChannelConfig": "config",
    "ProvenanceSpan": "wire.routing",
    "R3Error": "errors",
    "RoutingSpec": "model.spec",
    "RowKind": "wire.routing",
    "SampleRouting": "wire.routing",
    "Ticket": "plan.ticket",
    "TrainerLayout": "plan.layout",
    "add_arguments": "config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'r3channel' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"r3channel.{_HOMES[name]}"), name)
    return value
