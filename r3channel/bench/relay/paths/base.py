"""The two halves of a path. A path carries one step's samples from the manager's memory to every rank's routers.

The manager's half starts from the bodies of engines' replies (`prepare`), then from what a sealed step starts from (`deliver`);
the rank's half ends where `held` says. Both live in processes that all paths share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from r3channel.bench.relay.stages import Stages

Start = Callable[[int, Any], None]
"""(rank, payload): lets a rank take its payload, without waiting for it."""


@dataclass
class Delivery:
    """What the manager knows of one delivery."""

    start_s: float
    """time.monotonic at which the timed section began."""
    stages: Stages = field(default_factory=Stages)


class Sending(Protocol):
    """The manager's half."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that leave the manager per step, over all ranks."""
        ...

    def prepare(self, stages: Stages, *, whole: bool) -> None:
        """From the bodies of replies in memory. `whole=False` may skip work whose result is at hand."""
        ...

    def deliver(self, start: Start) -> Delivery:
        """Start every rank and return as soon as the manager's part is done."""
        ...

    def settle(self) -> None:
        """After all ranks have ended: free what the step held."""
        ...

    def close(self) -> None: ...


class Taking(Protocol):
    """A rank's half."""

    def take(self, payload: Any, stages: Stages) -> float | None:
        """Until the routers have taken all rows; the time.monotonic at which the rows were held, where that is earlier."""
        ...

    def blank(self) -> None:
        """Make sure that the next `take` cannot end right by what an earlier path has left."""
        ...

    def tensors(self) -> Sequence[torch.Tensor]:
        """What the routers took, before widening."""
        ...

    def close(self) -> None: ...
