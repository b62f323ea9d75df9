"""r3channel: the experts an inference engine chose, carried exactly to the routers of the trainers.

Importing this package imports none of torch, ray, sglang or megatron: each upstream is imported by the one
room that talks to it, when that room is entered.
"""

from __future__ import annotations

from r3channel.config import ChannelConfig, add_arguments
from r3channel.errors import R3Error
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket
from r3channel.routing import ProvenanceSpan, RowKind, SampleRouting
from r3channel.spec import RoutingSpec

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
