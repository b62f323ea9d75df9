"""The exact shards: which rows and layers each (DP, PP, CP) receives, in the order its routers consume them.

A shard's bytes are `[micro-batch][tp slot][layer][row][k]`, so one layer of one TP rank is contiguous and sequence
parallelism only hands on equal parts. `row_order.py` says which row is which token, `placement.py` writes the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, product
from typing import Any

import numpy as np
import xxhash

from r3channel.errors import ConfigError, SampleUnknown
from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout, inside
from r3channel.plan.row_order import Ints, Microbatch, RowTable, pad_batch
from r3channel.wire.routing import Ids

__all__ = ["PLAN_VERSION", "Microbatch", "Plan", "Shard", "ShardKey", "plan_shards"]

PLAN_VERSION = 1
"""Version of the arithmetic here, in `layout.py` and in `row_order.py`: it rises where equal inputs give other shards."""

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
        slot = inside("tp", tp, self.tp_slots) if self.tp_slots > 1 else 0
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

    def lay_out(self, microbatch: int, values: Sequence[Ids], *, fill: int = 0) -> Ids:
        """[b, s / cp] ([1, t / cp] for a pack): a value per token, where this CP rank's model input has that token.

        `values[i]` holds one value per position of sample i, from its first token on; what is not named becomes `fill`.
        """
        sample, position = self.token_map(microbatch)
        out = np.full(sample.shape, fill, values[0].dtype)
        for index, own in enumerate(values):
            here = (sample == index) & (position < len(own))
            out[here] = own[position[here]]
        return out


@dataclass(frozen=True)
class Plan:
    """All shards of one rollout step; made by `plan_shards`. What belongs to one DP rank is computed when first asked for."""

    spec: RoutingSpec
    layout: TrainerLayout
    assignment: Assignment
    lengths: tuple[int, ...]
    """Tokens of each sample, in the order of `assignment.sample_ids`."""

    @cached_property
    def microbatches(self) -> RankBatches:
        """By DP rank."""
        return RankBatches(self.assignment, self.lengths, self.layout)

    @property
    def optimizer_steps(self) -> tuple[range, ...]:
        """Indices of the micro-batches of each optimizer step, the same on every DP rank."""
        return self.assignment.optimizer_steps

    def table(self, dp: int) -> RowTable:
        """The rows of one DP rank's processes."""
        if dp not in self._tables:
            self._tables[dp] = RowTable(self.microbatches[inside("dp", dp, self.layout.dp)], self.layout)
        return self._tables[dp]

    @cached_property
    def _tables(self) -> dict[int, RowTable]:
        return {}

    def shard(self, *, dp: int, pp: int, cp: int = 0) -> Shard:
        """Raises ConfigError for a rank that the layout does not have."""
        table = self.table(dp)
        layers, sources = self._stages[inside("pp", pp, self.layout.pp)]
        return Shard(
            spec=self.spec,
            dp=dp,
            pp=pp,
            cp=inside("cp", cp, self.layout.cp),
            layers=layers,
            sources=sources,
            tp_slots=self.layout.tp_slots,
            cp_size=self.layout.cp,
            microbatches=self.microbatches[dp],
            table=table,
        )

    @cached_property
    def _stages(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The layers of each stage and, for each, the position on the MoE axis that it replays; an MTP layer its layer's."""
        spec, layout = self.spec, self.layout
        place = {layer: position for position, layer in enumerate(spec.moe_layers)}
        place |= {spec.num_layers + index: place[layer] for index, layer in enumerate(layout.mtp)}
        stages = [layout.stage_layers(spec, pp=pp) for pp in range(layout.pp)]
        return [(layers, tuple(place[layer] for layer in layers)) for layers in stages]

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """One per (DP, PP, CP), DP first."""
        layout = self.layout
        ranks = product(range(layout.dp), range(layout.pp), range(layout.cp))
        return tuple(self.shard(dp=dp, pp=pp, cp=cp) for dp, pp, cp in ranks)

    @cached_property
    def digest(self) -> int:
        """64-bit identity of spec, layout, order, lengths and padding; equal inputs give an equal one on every process."""
        batches = [[[m.sample_ids, m.tokens, m.padded, m.tail] for m in rank] for rank in self.microbatches]
        values = {
            "spec": self.spec.to_dict(),
            "layout": self.layout.to_dict(),
            "steps": self.assignment.steps,
            "microbatches": batches,
        }
        return xxhash.xxh3_64_intdigest(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


class RankBatches(Sequence[tuple[Microbatch, ...]]):
    """The padded micro-batches of each DP rank; a rank's are made when first asked for, as a trainer needs only its own."""

    def __init__(self, assignment: Assignment, lengths: Sequence[int], layout: TrainerLayout) -> None:
        self._assignment, self._lengths, self._layout = assignment, lengths, layout
        self._made: dict[int, tuple[Microbatch, ...]] = {}

    def __len__(self) -> int:
        return self._assignment.dp

    def __getitem__(self, dp: Any) -> Any:
        """One rank's; no slices."""
        rank = range(len(self))[dp]
        if rank not in self._made:
            self._made[rank] = tuple(self._pad(rank))
        return self._made[rank]

    def _pad(self, rank: int) -> Iterator[Microbatch]:
        """The rank's micro-batches, padded to one length within an optimizer step where a pipeline asks for that."""
        batches, layout = self._assignment.ranks[rank], self._layout
        edges = list(accumulate(map(len, batches), initial=self.begin[rank]))
        for step in self._assignment.optimizer_steps:
            lengths = [(batches[index], self._lengths[edges[index] : edges[index + 1]]) for index in step]
            found = [pad_batch(names, tuple(counts), layout=layout) for names, counts in lengths]
            longest = max(batch.seq_len for batch in found)
            if layout.one_length and any(batch.seq_len != longest for batch in found):
                found = [pad_batch(b.sample_ids, b.tokens, layout=layout, floor=longest) for b in found]
            yield from found

    @cached_property
    def begin(self) -> list[int]:
        """Samples of the ranks before each, and those of all."""
        return list(accumulate((sum(map(len, rank)) for rank in self._assignment.ranks), initial=0))


def plan_shards(
    assignment: Assignment, *, tokens: Mapping[str, int], spec: RoutingSpec, layout: TrainerLayout
) -> Plan:
    """Cut an assignment into shards. `tokens` maps sample id to its number of tokens (rows + 1).

    Raises:
        SampleUnknown: the assignment names a sample without a length.
        ConfigError: another number of DP ranks, a sample of one token, an MTP layer mapped to a dense layer, or micro-batches
            of several widths where a pipeline exchanges one shape.
        ConfigError: the layers do not divide over the stages.
    """
    names = assignment.sample_ids
    missing = [name for name in names if name not in tokens]
    if missing:
        raise SampleUnknown(f"{len(missing)} assigned samples are unknown: {missing[:5]}", samples=missing)
    plan = Plan(spec, layout, assignment, tuple(int(tokens[name]) for name in names))
    check_plan(plan)
    return plan


def check_plan(plan: Plan) -> None:
    """Refuse what could not be cut here, not where a DP rank's shards are first asked for. Raises what `plan_shards` does."""
    check_cut(plan.assignment, plan.spec, plan.layout)
    if min(plan.lengths) < 2:
        names = plan.assignment.sample_ids
        short = [name for name, tokens in zip(names, plan.lengths, strict=True) if tokens < 2]
        raise ConfigError(
            f"{len(short)} samples have fewer than the 2 tokens that are needed: {short[:5]}", samples=short
        )


def check_cut(assignment: Assignment, spec: RoutingSpec, layout: TrainerLayout) -> None:
    """Refuse an assignment that cannot be cut, however long its samples are. Raises ConfigError."""
    if assignment.dp != layout.dp:
        raise ConfigError(f"the assignment is for {assignment.dp} DP ranks, the layout has {layout.dp}")
    layout.stage_sizes(spec.num_layers)
    dense = sorted(set(layout.mtp) - set(spec.moe_layers))
    if dense:
        raise ConfigError(f"layout: mtp maps to decoder layers {dense}; MoE layers are {spec.moe_layers}")
    if layout.pp > 1 and layout.one_length and layout.packing == "padded":
        _check_widths(assignment)


def _check_widths(assignment: Assignment) -> None:
    """One number of samples in all micro-batches of an optimizer step: a pipeline's stages exchange tensors of one shape."""
    for dp, rank in enumerate(assignment.ranks):
        for step, batches in enumerate(assignment.optimizer_steps):
            widths = sorted({len(rank[index]) for index in batches})
            if len(widths) > 1:
                raise ConfigError(
                    f"DP rank {dp}, optimizer step {step}: padded micro-batches of {widths} samples, expected one number: with "
                    "pp > 1 Megatron's stages exchange activations of one shape. Give packing=thd, micro-batches of equal "
                    "size, or uniform=0 where Megatron runs with variable_seq_lengths",
                    ranks=[(dp,)],
                )
