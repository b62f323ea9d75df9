"""One rank of `r3channel replay --gloo`: the shard placed at TP0, handed on over gloo, and read layer by layer as routers do."""

from __future__ import annotations

import torch

from r3channel.recordings.run_ranks import Rank
from r3channel.trainer.rank_shard import RankShard, slot_parts
from r3channel.transport.tp_fanout import TensorParallelFanout


def consume(rank: Rank) -> None:
    shard, fanout = rank.shard, TensorParallelFanout(rank.tp_group, device=torch.device("cpu"))
    own = RankShard(rank.step.ticket, shard, _handed_on(rank, fanout), tp=rank.coords.tp, invalid_rows="live")
    for microbatch in rank.microbatches:
        for layer in rank.layers:
            if layer in rank.consumed.spec.moe_layers:
                rank.used(microbatch, layer, own.layer_ids(microbatch, layer))


def _handed_on(rank: Rank, fanout: TensorParallelFanout) -> torch.Tensor:
    """This rank's part, `[micro-batch][layer][row][k]`: all slots at once where each holds the same rows."""
    shard = rank.shard
    whole_N = torch.from_numpy(rank.data_N) if rank.coords.tp == 0 else None
    if shard.tp_slots == 1:
        part_N = torch.empty(shard.slot_bytes, dtype=torch.uint8) if whole_N is None else whole_N
        fanout.rebroadcast(part_N)
        return part_N
    slots = slot_parts(shard, whole_N) if whole_N is not None else None
    parts = None if slots is None else [torch.cat(own) for own in zip(*slots, strict=True)]
    part_N = torch.empty(shard.slot_bytes, dtype=torch.uint8)
    fanout.scatter(parts, part_N)
    return part_N
