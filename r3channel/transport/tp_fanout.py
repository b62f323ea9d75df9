"""From TP0 to the other ranks of its tensor-parallel group: rebroadcast, or scatter under sequence parallelism.

A vote goes first on every path, so that a failure of one rank reaches the others at once instead of after their whole
deadline. Runs on the framework's own TP group and therefore only in the routing slot, on the trainer's main thread.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from r3channel.errors import PeerFailed, UsageError

_REASON_BYTES = 1024


class TensorParallelFanout:
    """Hands a received shard on. Every rank of the group calls the same methods in the same order."""

    def __init__(self, group: Any, *, device: torch.device) -> None:
        """Keep the group and the device.

        Args:
            group: the framework's TP process group, or None when tp = 1.
            device: where tensors of the group's collectives lie.
        """
        self._group, self._device = group, device
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self._source = 0 if group is None else dist.get_global_rank(group, 0)

    def vote(self, failure: BaseException | None, *, what: str) -> None:
        """Check that every rank of the group can go on.

        The call returns when all can.

        Args:
            failure: this rank's own error, or None if it can go on.
            what: names the step in `PeerFailed`.

        Raises:
            PeerFailed: another rank failed and this one did not; the text is the first failed rank's.
            BaseException: `failure` itself, where it was given.
        """
        if self.size > 1:
            word = torch.tensor([self.size if failure is None else self.rank], device=self._device)
            dist.all_reduce(word, op=dist.ReduceOp.MIN, group=self._group)
            first = int(word)
            if first < self.size:
                reason = self._share(str(failure), source=first)
                if failure is None:
                    raise PeerFailed(f"{what}: TP rank {first} of this group cannot go on: {reason}")
        if failure is not None:
            try:
                raise failure
            finally:
                # Its traceback holds this frame: the process group would live on until a collection.
                del failure

    def _share(self, text: str, *, source: int) -> str:
        raw = text.encode("utf-8", "replace")[:_REASON_BYTES].ljust(_REASON_BYTES)
        data_N = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(self._device)
        dist.broadcast(data_N, dist.get_global_rank(self._group, source), group=self._group)
        return bytes(data_N.tolist()).decode(errors="replace").strip()

    def rebroadcast(self, data_N: torch.Tensor) -> None:
        """Broadcast TP0's bytes to all ranks.

        Args:
            data_N: uint8, of the same size everywhere. All ranks end with TP0's bytes in it.
        """
        if self.size > 1 and data_N.numel():
            dist.broadcast(data_N, self._source, group=self._group)

    def scatter(self, parts: list[torch.Tensor] | None, out_N: torch.Tensor) -> None:
        """Send each rank its own part of TP0's bytes.

        Args:
            parts: on TP0 one tensor for each rank, uint8, contiguous and of equal sizes; None on other ranks.
            out_N: uint8; rank t ends with `parts[t]` of TP0 in it.
        """
        if self.rank == 0 and (parts is None or len(parts) != self.size):
            raise UsageError(f"scatter over {self.size} TP ranks got {len(parts or ())} parts")
        if self.size == 1:
            assert parts is not None
            out_N.copy_(parts[0])
        elif out_N.numel():
            # gloo delivers wrong data silently from non-contiguous chunks (measured on torch 2.13.0)
            chunks = [part.contiguous() for part in parts] if parts is not None else None
            dist.scatter(out_N, chunks, src=self._source, group=self._group)
