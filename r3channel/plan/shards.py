"""The exact shards: which rows and layers each (DP, PP, CP) receives, in the order its routers consume them.

A shard's bytes are `[micro-batch][tp slot][layer][row][k]`, so one layer of one TP rank is contiguous and sequence
parallelism only hands on equal parts. `rows.py` says which row is which token, `place.py` writes the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import xxhash

from r3channel.errors import ConfigError, SampleUnknown
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.rows import Ints, Microbatch, RowTable, pad_batch
from r3channel.routing import Ids
from r3channel.spec import RoutingSpec

__all__ = ["Microbatch", "Plan", "Shard", "ShardKey", "plan_shards"]

ShardKey = tuple[int, int, int]
"""(DP, PP, CP)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What the processes of one (DP, PP, CP) receive together; TP0 receives it and hands on the parts."""

    spec: RoutingSpec
    dp: int
    pp: int
    cp: int
    layers: tuple[int, ...]
    """Global layers of the stage's routers, ascending, chunk by chunk; may be empty. A mapped MTP layer i is num_layers + i."""
    sources: tuple[int, ...]
    """Position on the MoE axis whose ids each of `layers` replays."""
    tp_slots: int
    cp_size: int
    microbatches: tuple[Microbatch, ...]
    table: RowTable = field(compare=False, repr=False)
    """Rows of all ranks of this DP rank."""

    @property
    def key(self) -> ShardKey:
        return self.dp, self.pp, self.cp

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over this shard's layers."""
        return len(self.layers) * self.spec.top_k * self.spec.id_dtype.itemsize

    def slot_rows(self, microbatch: int) -> int:
        """Rows of one TP slot of a micro-batch."""
        return self.microbatches[microbatch].rows // (self.cp_size * self.tp_slots)

    def microbatch_bytes(self, microbatch: int) -> int:
        """Bytes over all TP slots."""
        return self.microbatches[microbatch].rows // self.cp_size * self.row_bytes

    @property
    def nbytes(self) -> int:
        return sum(batch.rows for batch in self.microbatches) // self.cp_size * self.row_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes that one TP rank keeps."""
        return self.nbytes // self.tp_slots

    def views(self, buffer: np.ndarray[Any, np.dtype[np.uint8]]) -> list[Ids]:
        """Per micro-batch a view [tp slot, L, rows, K] of `id_dtype` into a uint8 buffer of `nbytes`."""
        views, at = [], 0
        for index in range(len(self.microbatches)):
            size = self.microbatch_bytes(index)
            shape = (self.tp_slots, len(self.layers), self.slot_rows(index), self.spec.top_k)
            views.append(buffer[at : at + size].view(self.spec.id_dtype).reshape(shape))
            at += size
        return views

    def row_map(self, microbatch: int, *, tp: int) -> tuple[Ints, Ints]:
        """(sample index in the micro-batch, token position) of each row of a TP rank; -1, -1 where no engine row is."""
        sample_SR, position_SR = self.table.row_map(cp=self.cp, microbatch=microbatch)
        slot = tp if self.tp_slots > 1 else 0
        sample, position = sample_SR[slot], position_SR[slot]
        tokens = np.asarray([*self.microbatches[microbatch].tokens, 0])  # the last: a tail's sample -1
        real = position < tokens[sample] - 1
        return np.where(real, sample, -1), np.where(real, position, -1)

    def token_map(self, microbatch: int) -> tuple[Ints, Ints]:
        """(sample, position), each [b, s / cp] ([1, t / cp] for a pack), of the model input of this CP rank.

        Sample is -1 in the tail of a pack; positions of padding run on past the sample's tokens.
        """
        sample_SR, position_SR = self.table.row_map(cp=self.cp, microbatch=microbatch)
        width = self.microbatches[microbatch].width
        return sample_SR.reshape(-1, width).T, position_SR.reshape(-1, width).T

    def lay_out(self, microbatch: int, values: Sequence[Ids], *, fill: float = 0) -> Ids:
        """[b, s / cp] ([1, t / cp] for a pack): a value per token, where this CP rank's model input has that token.

        `values[i]` holds one value per position of sample i, from its first token on; what is not named becomes `fill`.
        """
        sample, position = self.token_map(microbatch)
        out = np.full(sample.shape, fill, dtype=values[0].dtype)
        for index, own in enumerate(values):
            here = (sample == index) & (position < len(own))
            out[here] = own[position[here]]
        return out


@dataclass(frozen=True)
class Plan:
    """All shards of one rollout step. Equal inputs give an equal digest on every process."""

    spec: RoutingSpec
    layout: TrainerLayout
    microbatches: tuple[tuple[Microbatch, ...], ...]
    """By DP rank."""
    steps: tuple[int, ...]
    """Micro-batches of each optimizer step."""

    def table(self, dp: int) -> RowTable:
        """The rows of one DP rank's processes; made when first asked for, as a trainer needs only its own."""
        if dp not in self._tables:
            self._tables[dp] = RowTable(self.microbatches[dp], self.layout)
        return self._tables[dp]

    @cached_property
    def _tables(self) -> dict[int, RowTable]:
        return {}

    @property
    def optimizer_steps(self) -> tuple[range, ...]:
        """Indices of the micro-batches of each optimizer step, the same on every DP rank."""
        ends = list(accumulate(self.steps))
        return tuple(range(end - count, end) for end, count in zip(ends, self.steps, strict=True))

    def shard(self, *, dp: int, pp: int, cp: int = 0) -> Shard:
        layers = self._layers[pp]
        return Shard(
            spec=self.spec,
            dp=dp,
            pp=pp,
            cp=cp,
            layers=layers,
            sources=self._sources[pp],
            tp_slots=self.layout.tp_slots,
            cp_size=self.layout.cp,
            microbatches=self.microbatches[dp],
            table=self.table(dp),
        )

    @cached_property
    def _layers(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self.layout.stage_layers(self.spec, pp=pp) for pp in range(self.layout.pp))

    @cached_property
    def _sources(self) -> tuple[tuple[int, ...], ...]:
        index = {layer: position for position, layer in enumerate(self.spec.moe_layers)}
        return tuple(
            tuple(index[self.layout.source_layer(self.spec, layer)] for layer in layers)
            for layers in self._layers
        )

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """One per (DP, PP, CP), DP first."""
        layout = self.layout
        return tuple(
            self.shard(dp=dp, pp=pp, cp=cp)
            for dp in range(layout.dp)
            for pp in range(layout.pp)
            for cp in range(layout.cp)
        )

    @cached_property
    def digest(self) -> int:
        """64-bit identity of spec, layout, order, lengths and padding."""
        batches = [[[m.sample_ids, m.tokens, m.padded, m.tail] for m in rank] for rank in self.microbatches]
        values = {
            "spec": self.spec.to_dict(),
            "layout": self.layout.to_dict(),
            "steps": self.steps,
            "microbatches": batches,
        }
        return xxhash.xxh3_64_intdigest(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


def plan_shards(
    assignment: Assignment, *, tokens: Mapping[str, int], spec: RoutingSpec, layout: TrainerLayout
) -> Plan:
    """Cut an assignment into shards. `tokens` maps sample id to its number of tokens (rows + 1).

    Raises:
        SampleUnknown: the assignment names a sample without a length.
        ConfigError: another number of DP ranks, a sample of one token, or an MTP layer mapped to a dense layer.
        UnsupportedLayout: the layers do not divide over the stages.
    """
    if assignment.dp != layout.dp:
        raise ConfigError(f"the assignment is for {assignment.dp} DP ranks, the layout has {layout.dp}")
    missing = [sample for sample in assignment.sample_ids if sample not in tokens]
    if missing:
        raise SampleUnknown(f"{len(missing)} assigned samples are unknown: {missing[:5]}")
    layout.stage_sizes(spec.num_layers)  # refuses an uneven pipeline here, not in a background thread
    dense = [layer for layer in layout.mtp if layer not in spec.moe_layers]
    if dense:
        raise ConfigError(f"layout: mtp maps to decoder layers {dense}; MoE layers are {spec.moe_layers}")
    ranks = tuple(
        tuple(
            batch
            for step in assignment.optimizer_steps
            for batch in _pad_step([batches[index] for index in step], tokens=tokens, layout=layout)
        )
        for batches in assignment.ranks
    )
    return Plan(spec, layout, ranks, assignment.steps)


def _pad_step(
    batches: list[tuple[str, ...]], *, tokens: Mapping[str, int], layout: TrainerLayout
) -> list[Microbatch]:
    """The micro-batches of one optimizer step of one DP rank; of one length where a pipeline asks for that."""
    lengths = [tuple(tokens[sample] for sample in batch) for batch in batches]
    for batch, counts in zip(batches, lengths, strict=True):
        if min(counts) < 2:
            short = batch[counts.index(min(counts))]
            raise ConfigError(f"sample {short} has {min(counts)} token(s); at least 2 are needed")
    found = [pad_batch(batch, counts, layout=layout) for batch, counts in zip(batches, lengths, strict=True)]
    if not layout.one_length:
        return found
    longest = max(batch.seq_len for batch in found)
    return [pad_batch(b.sample_ids, b.tokens, layout=layout, floor=longest) for b in found]
