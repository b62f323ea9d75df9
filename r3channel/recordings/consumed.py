"""The ids that routers used, sample by sample: gathered call by call on each rank, added up over ranks, written as a recording.

`consume_step` reads a recorded step as the routers of all ranks would. `fit` cuts a step for another trainer first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from r3channel.errors import RecordingInvalid
from r3channel.model.spec import RoutingSpec
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.shards import Shard
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.recordings.recorder import write_step
from r3channel.recordings.step import PASSES, RecordedStep, SampleKey
from r3channel.wire.frame import encode_frame
from r3channel.wire.routing import Ids


@dataclass
class ConsumedRows:
    """The ids that routers used. `add_call` adds one router call, `merge` adds the rows of another rank."""

    ticket: Ticket
    spec: RoutingSpec
    """The routing shape of the ids: the engines', or one with the routers' further layers or columns."""
    ids: dict[SampleKey, Ids] = field(default_factory=dict)
    """[tokens - 1, L, K]."""
    there: dict[SampleKey, Ids] = field(default_factory=dict)
    """[tokens - 1, L] bool: True for ids that a router used."""

    def add_call(
        self, shard: Shard, ids_RK: Ids, *, microbatch: int, layer: int, tp: int = 0, of_pass: str = "forward"
    ) -> None:
        """Add the ids that one router call used.

        Args:
            shard: the rank's shard.
            ids_RK: [rows, K], in the router's row order.
            microbatch: number of the micro-batch on its DP rank.
            layer: global number of the router's layer.
            tp: the router's TP rank.
            of_pass: the pass in which the router ran.

        Raises:
            RecordingInvalid: the layout expects another number of rows, or the spec other ids.
        """
        sample_R, position_R = shard.row_map(microbatch, tp=tp)
        wide_RK, shape = np.asarray(ids_RK), (len(sample_R), self.spec.top_k)
        narrow_RK = wide_RK.astype(self.spec.id_dtype)
        # an id that wraps around would pass for another one
        if wide_RK.shape != shape or (narrow_RK != wide_RK).any():
            raise RecordingInvalid(
                f"layer {layer}, micro-batch {microbatch}: the router used {len(wide_RK)} rows, the layout says {shape[0]}; its "
                f"ids are {wide_RK.min(initial=0)}..{wide_RK.max(initial=0)} in {wide_RK.shape[1:]} columns, expected those of "
                f"{self.spec}. Is the model run with the layout, packing and padding of the recording?"
            )
        place = self.spec.moe_index(layer)
        for index, name in enumerate(shard.microbatches[microbatch].sample_ids):
            rows, (ids_TLK, there_TL) = np.flatnonzero(sample_R == index), self._ids_of((of_pass, name))
            ids_TLK[position_R[rows], place] = narrow_RK[rows]
            there_TL[position_R[rows], place] = True

    def _ids_of(self, key: SampleKey) -> tuple[Ids, Ids]:
        if key not in self.ids:
            shape = (self.ticket.sample(key[1]).tokens - 1, self.spec.num_moe_layers)
            self.ids[key] = np.zeros((*shape, self.spec.top_k), self.spec.id_dtype)
            self.there[key] = np.zeros(shape, bool)
        return self.ids[key], self.there[key]

    def merge(self, other: ConsumedRows) -> None:
        """Add the rows and layers of another rank."""
        for key, there_TL in other.there.items():
            ids_TLK, own_TL = self._ids_of(key)
            ids_TLK[there_TL] = other.ids[key][there_TL]
            own_TL |= there_TL

    def step(self, tokens: Mapping[str, Ids] | None = None) -> RecordedStep:
        """Return the step as if it had been written and read again."""
        passes, names = {key: [self._frame(key)] for key in self.ids}, self.ticket.assignment.sample_ids
        frames = {name: passes.get(("forward", name), []) for name in names}
        return RecordedStep(self.ticket, frames, tokens or {}, self.spec, side="router", passes=passes)

    def write(self, folder: Path) -> Path:
        """Write the rows as a routers' side into their own folder.

        Raises:
            RecordingInvalid: the folder holds another recording.
            OSError: the folder cannot be written.
        """
        return write_step(folder, self.step())

    def _frame(self, key: SampleKey) -> bytes:
        sample = self.ticket.sample(key[1])
        there_T, spans = np.all(self.there[key], axis=1), sample.provenance if _covers(sample) else None
        options: dict[str, Any] = {"valid_T": there_T, "provenance": spans, "codec": "stored"}
        return encode_frame(self.spec, expert_ids_TLK=self.ids[key], **options)


def _covers(sample: TicketSample) -> bool:
    """Return whether the ticket's spans cover every row of the sample."""
    ends = [0, *(span.end for span in sample.provenance)]
    return [span.start for span in sample.provenance] == ends[:-1] and ends[-1] == sample.tokens - 1


def consumed_by(tap_records: Iterable[Any], shard: Shard, *, ticket: Ticket, tp: int) -> ConsumedRows:
    """Return the rows of one rank's `trainer.audit.RouterTap.records`."""
    rows = ConsumedRows(ticket, ticket.spec)
    for call in tap_records:
        if call.pass_name in PASSES and call.microbatch >= 0 and call.layer in ticket.spec.moe_layers:
            place = {"microbatch": call.microbatch, "layer": call.layer, "tp": tp}
            rows.add_call(shard, call.ids_RK, of_pass=call.pass_name, **place)
    return rows


# -- a recorded step, as routers would read it ------------------------------------------------------------------------------


def fit(step: RecordedStep, layout: TrainerLayout | None) -> RecordedStep:
    """Return the step, cut anew for `layout` where needed.

    A step of that layout whose samples are all whole stays as it was recorded. Any other is cut anew in micro-batches of the
    recorded size, with as many samples as fill all DP ranks alike; `untested` says what is left out.

    Args:
        step: the recorded step.
        layout: the trainer's layout; None: the recorded one.

    Raises:
        RecordingInvalid: the step has fewer whole samples than the layout has DP ranks.
    """
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


def consume_step(step: RecordedStep) -> ConsumedRows:
    """Return the ids that all ranks' routers would get, added up."""
    rows, layout = ConsumedRows(step.ticket, step.ticket.spec), step.ticket.layout
    for dp in range(layout.dp):
        for (_, pp, cp), data_N in step.shards(dp=dp).items():
            _add_shard(rows, step.ticket.plan.shard(dp=dp, pp=pp, cp=cp), data_N)
    return rows


def _add_shard(rows: ConsumedRows, shard: Shard, data_N: Ids) -> None:
    for microbatch, ids_SLRK in enumerate(shard.views(data_N)):
        for slot in range(shard.tp_slots):
            for place, layer in enumerate(shard.layers):
                if layer in rows.spec.moe_layers:
                    rows.add_call(shard, ids_SLRK[slot, place], microbatch=microbatch, layer=layer, tp=slot)


def describe(step: RecordedStep, rows: ConsumedRows) -> dict[str, Any]:
    """Return the counts that `r3channel replay --json` prints."""
    return {
        "step": step.number, "layout": str(step.ticket.layout), "ranks": step.ticket.layout.world_size,
        "samples": len(step.samples), "untested": list(step.untested),
        "rows_of_layers": sum(int(there_TL.sum()) for there_TL in rows.there.values()),
        "expected_rows_of_layers": sum(sample.tokens - 1 for sample in step.samples) * step.ticket.spec.num_moe_layers,
    }  # fmt: skip
