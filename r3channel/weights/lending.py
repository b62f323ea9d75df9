"""A trainer rank's shards inside one arena, for the engine rank of the same device to read in place. No copy per update.

The trainer keeps its parameters in the arena (`Lent.shards` are views of it); the engine rank maps it once and gives the
views to its `Resharder` as the source. So a group of the engine ranks alone moves weights between devices: trainer and
engine of one device need not, and over NCCL cannot, be two members of one group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from r3channel.weights.colocated import Arena, create_arena, open_arena
from r3channel.weights.geometry import Box
from r3channel.weights.manifest import Bucket, TensorMeta
from r3channel.weights.resharder import Shards


@dataclass(frozen=True, slots=True)
class Lent:
    """Shards that live in an arena."""

    arena: Arena
    shards: Shards
    """Views of the arena: what the trainer writes here, the borrower sees."""
    card: dict[str, Any]
    """Plain values for `borrow`: handle, names, dtypes and boxes. Does not change from update to update."""

    def close(self) -> None:
        """Free the memory once the borrower has let go, too."""
        self.arena.close()


def lend(shards: Shards, *, device: torch.device) -> Lent:
    """Move shards into an arena on `device`: copied once, and on return another process may read them.

    What the trainer writes later on a CUDA device the borrower may read once the trainer has waited for that.
    """
    rows = [(name, box, tensor) for name, parts in shards.items() for box, tensor in parts]
    metas = [TensorMeta(name=name, dtype=t.dtype, shape=box.shape) for name, box, t in rows]
    bucket = Bucket.aligned(metas)
    arena = create_arena(bucket.payload_bytes, device)
    boxes = [box for _, box, _ in rows]
    views = bucket.views(arena.buffer_N[: bucket.payload_bytes])
    try:
        for view, (_, _, tensor) in zip(views, rows, strict=True):
            view.copy_(tensor.detach())
        if arena.buffer_N.is_cuda:
            torch.cuda.current_stream(arena.buffer_N.device).synchronize()
    except BaseException:
        arena.close()
        raise
    told = [[*m.row(), list(b.start), list(b.stop)] for m, b in zip(metas, boxes, strict=True)]
    return Lent(arena, _by_name(bucket, boxes, views), {"handle": arena.handle, "shards": told})


def borrow(card: Mapping[str, Any]) -> Lent:
    """Map what another process has lent. Raises as `open_arena`, and ManifestMismatch for a damaged card."""
    metas = [TensorMeta.from_row(row[:3]) for row in card["shards"]]
    boxes = [Box(tuple(start), tuple(stop)) for *_, start, stop in card["shards"]]
    bucket = Bucket.aligned(metas)
    arena = open_arena(card["handle"])
    views = bucket.views(arena.buffer_N[: bucket.payload_bytes])
    return Lent(arena, _by_name(bucket, boxes, views), dict(card))


def _by_name(bucket: Bucket, boxes: list[Box], views: list[torch.Tensor]) -> Shards:
    shards: dict[str, list[tuple[Box, torch.Tensor]]] = {}
    for name, box, view in zip(bucket.names, boxes, views, strict=True):
        shards.setdefault(name, []).append((box, view))
    return shards
