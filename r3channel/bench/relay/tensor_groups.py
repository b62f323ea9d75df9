"""The tensor-parallel groups of the ranks' processes, as a training framework would have made them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from r3channel.plan.layout import TrainerLayout

_JOIN_S = 60.0


def tensor_group(rank: int, layout: TrainerLayout, *, file: str) -> Any:
    """This rank's group; every rank makes all of them, in one order."""
    limit = timedelta(seconds=_JOIN_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=layout.world_size, timeout=limit
    )
    mine = None
    for first in range(0, layout.world_size, layout.tp):
        members = list(range(first, first + layout.tp))
        group = dist.new_group(members, timeout=limit)
        mine = group if rank in members else mine
    return mine
