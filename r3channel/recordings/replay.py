"""The trainer's side of a recorded step: every rank's shard is placed, and read as its routers would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from r3channel.plan.layout import RankCoords, TrainerLayout
from r3channel.recordings.consumed import ConsumedRows
from r3channel.recordings.step import RecordedStep
from r3channel.wire.routing import Ids


def fitted(step: RecordedStep, layout: TrainerLayout | None) -> RecordedStep:
    """The step as it was recorded, or cut anew for another layout: as many samples as fill its DP ranks alike."""
    if layout is None or (layout == step.ticket.layout and not step.cut):
        return step
    samples = step.samples
    count = len(samples) // layout.dp * layout.dp
    kept = {sample.sample_id for sample in samples[:count]}
    cut = tuple(s.sample_id for s in step.ticket.samples if s.sample_id not in kept)
    return replace(step, cut=cut).replan(layout, microbatch_size=1)


def consumed(step: RecordedStep) -> ConsumedRows:
    """What the routers of all ranks would be handed, added up over ranks."""
    found, layout = ConsumedRows(step.ticket, step.ticket.spec), step.ticket.layout
    for dp in range(layout.dp):
        shards = step.shards(dp=dp)
        for (_, pp, cp), data_N in shards.items():
            _add_shard(found, RankCoords(dp=dp, pp=pp, cp=cp, tp=0), data_N)
    return found


def _add_shard(found: ConsumedRows, at: RankCoords, data_N: Ids) -> None:
    shard = found.ticket.plan.shard(dp=at.dp, pp=at.pp, cp=at.cp)
    for microbatch, ids_SLRK in enumerate(shard.views(data_N)):
        for slot in range(shard.tp_slots):
            for place, layer in enumerate(shard.layers):
                if layer in found.spec.moe_layers:
                    found.add_call(shard, ids_SLRK[slot, place], microbatch=microbatch, layer=layer, tp=slot)


def described(step: RecordedStep, found: ConsumedRows) -> dict[str, Any]:
    """The counts that `r3channel replay --json` prints."""
    rows = sum(int(there.sum()) for there in found.there.values())
    return {
        "step": step.number,
        "layout": str(step.ticket.layout),
        "ranks": step.ticket.layout.world_size,
        "samples": len(step.samples),
        "rows_of_layers": rows,
        "expected_rows_of_layers": sum(s.tokens - 1 for s in step.samples) * step.ticket.spec.num_moe_layers,
    }
