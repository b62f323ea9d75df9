"""From TP0 to the other ranks of its tensor-parallel group: rebroadcast, or scatter under sequence parallelism.

A status word goes first on every path, so that a failure of TP0 reaches the others at once instead of after their whole
deadline. Runs on the framework's own TP group and therefore only in the routing slot, on the trainer's main thread.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from r3channel.errors import PeerFailed, UsageError

_OK, _FAILED = 1, 2


class TensorParallelFanout:
    """Hands a received shard on. Every rank of the group calls the same methods in the same order."""

    def __init__(self, group: Any, *, device: torch.device) -> None:
        """`group`: the framework's TP process group, or None when tp = 1."""
        self._group, self._device = group, device
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self._source = 0 if group is None else dist.get_global_rank(group, 0)

    def status(self, *, failed: bool, what: str) -> None:
        """TP0 says whether it holds the bytes; the others raise `PeerFailed` if it does not."""
        if self.size == 1:
            return
        word = torch.tensor([_FAILED if failed else _OK], dtype=torch.int64, device=self._device)
        dist.broadcast(word, self._source, group=self._group)
        if self.rank and int(word) != _OK:
            raise PeerFailed(
                f"{what}: TP rank 0 of this group failed to receive; its own error names the cause"
            )

    def rebroadcast(self, data_N: torch.Tensor) -> None:
        """All ranks end with TP0's uint8 bytes in `data_N` (same size everywhere)."""
        if self.size > 1 and data_N.numel():
            dist.broadcast(data_N, self._source, group=self._group)

    def scatter(self, parts: list[torch.Tensor] | None, out_N: torch.Tensor) -> None:
        """Rank t ends with `parts[t]` of TP0 in `out_N`; uint8, equal sizes, contiguous. Others pass None."""
        if self.rank == 0 and (parts is None or len(parts) != self.size):
            raise UsageError(
                f"scatter over {self.size} TP ranks got {0 if parts is None else len(parts)} parts"
            )
        if self.size == 1:
            assert parts is not None
            out_N.copy_(parts[0])
        elif out_N.numel():
            # gloo delivers wrong data silently from non-contiguous chunks (measured on torch 2.13.0)
            chunks = [part.contiguous() for part in parts] if parts is not None else None
            dist.scatter(out_N, chunks, src=self._source, group=self._group)
