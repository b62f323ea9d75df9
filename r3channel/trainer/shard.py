"""A received shard as one rank's routers consume it: views, no copies. Knows no transport and no Megatron."""

from __future__ import annotations

import numpy as np
import torch

from r3channel.errors import UsageError
from r3channel.plan.shards import Shard
from r3channel.plan.ticket import Ticket

_TORCH_DTYPES = {np.dtype(np.uint8): torch.uint8, np.dtype(np.int16): torch.int16}


class RankShard:
    """The ids of one process for one step; implements `trainer.replay.StepRouting`.

    `data_N` is uint8 with `shard.slot_bytes` bytes: this TP rank's part, `[micro-batch][layer][row][k]`. It may be reused
    once the step is over.
    """

    def __init__(self, ticket: Ticket, shard: Shard, data_N: torch.Tensor, *, tp: int) -> None:
        if len(data_N) != shard.slot_bytes:
            raise UsageError(
                f"step {ticket.step}: {len(data_N)} bytes for a shard part of {shard.slot_bytes}"
            )
        self.ticket, self.shard, self.data_N, self.tp = ticket, shard, data_N, tp
        self._views = list(self._cut())

    @classmethod
    def from_whole(cls, ticket: Ticket, shard: Shard, data_N: torch.Tensor, *, tp: int) -> RankShard:
        """From the bytes of all TP slots (a recording, or a shard that was not scattered)."""
        slot = tp if shard.tp_slots > 1 else 0
        parts = [parts[slot] for parts in slot_parts(shard, data_N)]
        return cls(ticket, shard, torch.cat(parts) if parts else data_N[:0], tp=tp)

    @property
    def num_microbatches(self) -> int:
        return len(self.shard.microbatches)

    def layer_ids(self, microbatch: int, layer: int) -> torch.Tensor:
        """[rows, K] in `id_dtype`: a contiguous view, in the order in which the router of that global layer sees tokens."""
        return self._views[microbatch][self.shard.layers.index(layer)]

    def _cut(self):
        at, spec = 0, self.shard.spec
        dtype = _TORCH_DTYPES[spec.id_dtype]
        for index in range(self.num_microbatches):
            size = self.shard.microbatch_bytes(index) // self.shard.tp_slots
            part = self.data_N[at : at + size].view(dtype)
            yield part.view(len(self.shard.layers), self.shard.slot_rows(index), spec.top_k)
            at += size


def slot_parts(shard: Shard, data_N: torch.Tensor) -> list[list[torch.Tensor]]:
    """Per micro-batch, the uint8 part of each TP slot: contiguous views into a whole shard."""
    parts, at = [], 0
    for index in range(len(shard.microbatches)):
        size = shard.microbatch_bytes(index)
        parts.append(
            list(data_N[at : at + size].chunk(shard.tp_slots)) if size else [data_N[:0]] * shard.tp_slots
        )
        at += size
    return parts
