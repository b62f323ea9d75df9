"""The trainer ranks that publish together, and the small values that they tell one another."""

from __future__ import annotations

import json
import time
from typing import Any

import torch
import torch.distributed as dist

from r3channel.errors import DeadlineExceeded, PeerFailed
from r3channel.weights.convert import gathered_bytes
from r3channel.weights.progress import Deadline


class TrainerRanks:
    """The ranks of one torch process group. Without a group this rank alone, which asks nobody."""

    def __init__(self, group: Any = None) -> None:
        self._group, self.rank, self.size = group, 0, 1
        if group is not None:
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            nccl = dist.get_backend(group) == "nccl"
            self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    @property
    def leads(self) -> bool:
        """Whether this rank speaks to engines."""
        return self.rank == 0

    def exchange(self, value: Any, deadline: Deadline) -> list[Any]:
        """Every rank's value (plain, as JSON), by rank. DeadlineExceeded, or PeerFailed when a rank has died."""
        if self._group is None:
            return [value]
        return [json.loads(raw) for raw in self.exchange_bytes(json.dumps(value).encode(), deadline)]

    def exchange_bytes(self, raw: bytes, deadline: Deadline) -> list[bytes]:
        if self._group is None:
            return [raw]
        left_s, begun_s = deadline.left_s(), time.monotonic()
        try:
            return gathered_bytes(raw, group=self._group, device=self._device, until_s=begun_s + left_s)
        except RuntimeError as error:
            if time.monotonic() - begun_s >= left_s:
                raise DeadlineExceeded(f"a trainer rank did not come along within {left_s:.1f} s") from error
            raise PeerFailed(f"a trainer rank is gone: {str(error).splitlines()[0]}") from error
