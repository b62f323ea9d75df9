"""The trainer's side of a recorded step: every rank's shard is placed, and read as its routers would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from r3channel.errors import RecordingInvalid
from r3channel.plan.layout import RankCoords, TrainerLayout
from r3channel.recordings.consumed import ConsumedRows
from r3channel.recordings.step import RecordedStep
from r3channel.wire.routing import Ids


def fitted(step: RecordedStep, layout: TrainerLayout | None) -> RecordedStep:
    """The step as it was recorded, or cut anew for another layout in micro-batches of the recorded size: as many samples as fill
    its DP ranks alike. `untested` says what that leaves out. Raises RecordingInvalid where too few samples are whole."""
    layout, names = layout or step.ticket.layout, [sample.sample_id for sample in step.samples]
    if layout == step.ticket.layout and not step.cut:
        return step
    if len(names) < layout.dp:
        raise RecordingInvalid(
            f"step {step.number} has {len(names)} whole samples and {len(step.cut)} others; expected one for each of {layout.dp} "
            "DP ranks at least. Was the recording cut off?"
        )
    sizes = sorted({len(batch) for rank in step.ticket.assignment.ranks for batch in rank})
    size = min(sizes[-1], len(names) // layout.dp)
    count = len(names) // (layout.dp * size) * layout.dp * size
    left_out = {f"do not fill {layout.dp} DP ranks": names[count:], "are not whole": step.cut}
    untested = [f"{len(ids)} samples {why}: {', '.join(ids[:5])}" for why, ids in left_out.items() if ids]
    if sizes != [size]:
        untested.append(f"order and padding in micro-batches of {sizes} samples, as recorded; here of {size}")
    kept = replace(step, cut=(*step.cut, *names[count:]), untested=tuple(untested))
    return kept.replan(layout, microbatch_size=size)


def consumed(step: RecordedStep) -> ConsumedRows:
    """What the routers of all ranks would be handed, added up over ranks."""
    rows, layout = ConsumedRows(step.ticket, step.ticket.spec), step.ticket.layout
    for dp in range(layout.dp):
        shards = step.shards(dp=dp)
        for (_, pp, cp), data_N in shards.items():
            _add_shard(rows, RankCoords(dp=dp, pp=pp, cp=cp, tp=0), data_N)
    return rows


def _add_shard(rows: ConsumedRows, at: RankCoords, data_N: Ids) -> None:
    shard = rows.ticket.plan.shard(dp=at.dp, pp=at.pp, cp=at.cp)
    for microbatch, ids_SLRK in enumerate(shard.views(data_N)):
        for slot in range(shard.tp_slots):
            for place, layer in enumerate(shard.layers):
                if layer in rows.spec.moe_layers:
                    rows.add_call(shard, ids_SLRK[slot, place], microbatch=microbatch, layer=layer, tp=slot)


def described(step: RecordedStep, rows: ConsumedRows) -> dict[str, Any]:
    """The counts that `r3channel replay --json` prints."""
    count = sum(int(there.sum()) for there in rows.there.values())
    expected = sum(sample.tokens - 1 for sample in step.samples) * step.ticket.spec.num_moe_layers
    return {
        "step": step.number, "layout": str(step.ticket.layout), "ranks": step.ticket.layout.world_size,
        "samples": len(step.samples), "untested": list(step.untested), "rows_of_layers": count,
        "expected_rows_of_layers": expected,
    }  # fmt: skip
