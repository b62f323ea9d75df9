"""Peer: Ray Direct Transport over gloo. The manager's actor keeps tensors; Ray sends them between the actors' processes.

Runs between two raylets, with Ray's control messages and its own gloo group. `nixl`, the other transport for host memory, needs
the `nixl` package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from r3channel.bench.relay.held import HeldRows
from r3channel.bench.relay.paths.store import StoreTaking
from r3channel.bench.relay.stages import Stages


class DirectTaking:
    """A rank's half: its tensors are there when the call begins, so the way is not a stage of its own."""

    def __init__(self, held: HeldRows, path: str) -> None:
        self._inner = StoreTaking(held, path)

    def take(self, payload: Any, stages: Stages) -> float | None:
        return self._inner.hold([np.asarray(ids) for ids in payload], stages)

    def blank(self) -> None:
        self._inner.blank()

    def tensors(self) -> Sequence[torch.Tensor]:
        return self._inner.tensors()

    def close(self) -> None:
        self._inner.close()
