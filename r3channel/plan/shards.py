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
        """Return the bytes of one row over this shard's layers."""
        return len(self.layers) * self.spec.top_k * self.spec.id_dtype.itemsize

    def slot_rows(self, microbatch: int) -> int:
        """Return the rows of one TP slot of a micro-batch."""
        return self.microbatches[microbatch].rows // (self.cp_size * self.tp_slots)

    def microbatch_bytes(self, microbatch: int) -> int:
        """Return the bytes of a micro-batch over all TP slots."""
        return self.microbatches[microbatch].rows // self.cp_size * self.row_bytes

    @property
    def nbytes(self) -> int:
        return sum(batch.rows for batch in self.microbatches) // self.cp_size * self.row_bytes

    @property
    def slot_bytes(self) -> int:
        """Return the bytes that one TP rank keeps."""
        return self.nbytes // self.tp_slots

    def views(self, buffer: Ids) -> list[Ids]:
        """Return a view of each micro-batch in a shard's buffer.

        Args:
            buffer: uint8, `nbytes` long.

        Returns:
            For each micro-batch a view [tp slot, L, rows, K] of `id_dtype`.
        """
        views, at = list[Ids](), 0
        for index in range(len(self.microbatches)):
            size = self.microbatch_bytes(index)
            shape = (self.tp_slots, len(self.layers), self.slot_rows(index), self.spec.top_k)
            views.append(buffer[at : at + size].view(self.spec.id_dtype).reshape(shape))
            at += size
        return views

    def row_map(self, microbatch: int, *, tp: int) -> tuple[Ints, Ints]:
        """Return the sample and the token position of each row.

        Args:
            microbatch: Number of the micro-batch.
            tp: The TP rank whose rows these are.

        Returns:
            (sample index in the micro-batch, token position) of each row; -1, -1 where no engine row is.

        Raises:
            ConfigError: There are several TP slots, and `tp` is none of them.
        """
        sample_SR, position_SR = self.table.row_map(cp=self.cp, microbatch=microbatch)
        slot = inside("tp", tp, self.tp_slots) if self.tp_slots > 1 else 0
        sample, position = sample_SR[slot], position_SR[slot]
        tokens = np.asarray([*self.microbatches[microbatch].tokens, 0])  # the last one is sample -1, a tail's
        real = position < tokens[sample] - 1
        return np.where(real, sample, -1), np.where(real, position, -1)

    def token_map(self, microbatch: int) -> tuple[Ints, Ints]:
        """Return the sample and position of each input token.

        The tokens are those of the model input of this CP rank.

        Args:
            microbatch: Number of the micro-batch.

        Returns:
            (sample, position), each [b, s / cp], or [1, t / cp] for a pack. Sample is -1 in the tail of a pack; positions of
            padding run on past the sample's tokens.
        """
        sample_SR, position_SR = self.table.row_map(cp=self.cp, microbatch=microbatch)
        width = self.microbatches[microbatch].width
        return sample_SR.reshape(-1, width).T, position_SR.reshape(-1, width).T

    def lay_out(self, microbatch: int, values: Sequence[Ids], *, fill: int = 0) -> Ids:
        """Return values per token, laid out as the model input.

        Args:
            microbatch: Number of the micro-batch.
            values: `values[i]` holds one value per position of sample i, from its first token on.
            fill: The value of tokens that `values` does not name.

        Returns:
            [b, s / cp], or [1, t / cp] for a pack: each value where this CP rank's model input has its token.
        """
        sample, position = self.token_map(microbatch)
        out = np.full(sample.shape, fill, values[0].dtype)
        for index, own in enumerate(values):
            here = (sample == index) & (position < len(own))
            out[here] = own[position[here]]
        return out


@dataclass(frozen=True)
class Plan:
    """All shards of one rollout step, made by `plan_shards`; the shards of a DP rank are cut when first asked for."""

    spec: RoutingSpec
    layout: TrainerLayout
    assignment: Assignment
    lengths: tuple[int, ...]
    """Tokens of each sample, in the order of `assignment.sample_ids`."""

    @cached_property
    def microbatches(self) -> RankBatches:
        """Return the micro-batches of each DP rank."""
        return RankBatches(self.assignment, self.lengths, self.layout)

    @property
    def optimizer_steps(self) -> tuple[range, ...]:
        """Return the indices of the micro-batches of each optimizer step.

        They are the same on every DP rank.
        """
        return self.assignment.optimizer_steps

    def table(self, dp: int) -> RowTable:
        """Return the rows of one DP rank's processes."""
        if dp not in self._tables:
            self._tables[dp] = RowTable(self.microbatches[inside("dp", dp, self.layout.dp)], self.layout)
        return self._tables[dp]

    @cached_property
    def _tables(self) -> dict[int, RowTable]:
        return {}

    def shard(self, *, dp: int, pp: int, cp: int = 0) -> Shard:
        """Return the shard of one (DP, PP, CP).

        Raises:
            ConfigError: The layout has no such rank.
        """
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
        spec, layout = self.spec, self.layout
        place = {layer: position for position, layer in enumerate(spec.moe_layers)}
        # an MTP layer replays the position of the layer that it is mapped to
        place |= {spec.num_layers + index: place[layer] for index, layer in enumerate(layout.mtp)}
        stages = [layout.stage_layers(spec, pp=pp) for pp in range(layout.pp)]
        return [(layers, tuple(place[layer] for layer in layers)) for layers in stages]

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """Return one shard per (DP, PP, CP), DP first."""
        layout = self.layout
        ranks = product(range(layout.dp), range(layout.pp), range(layout.cp))
        return tuple(self.shard(dp=dp, pp=pp, cp=cp) for dp, pp, cp in ranks)

    @cached_property
    def digest(self) -> int:
        """Return the 64-bit identity of the plan.

        It covers spec, layout, order, lengths and padding. Equal inputs give an equal digest on every process.
        """
        batches = [[[m.sample_ids, m.tokens, m.padded, m.tail] for m in rank] for rank in self.microbatches]
        values = {
            "spec": self.spec.to_dict(),
            "layout": self.layout.to_dict(),
            "steps": self.assignment.steps,
            "microbatches": batches,
        }
        return xxhash.xxh3_64_intdigest(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


class RankBatches(Sequence[tuple[Microbatch, ...]]):
    """The padded micro-batches of each DP rank.

    The micro-batches of a rank are made when first asked for, as a trainer needs only its own.
    """

    def __init__(self, assignment: Assignment, lengths: Sequence[int], layout: TrainerLayout) -> None:
        self._assignment, self._lengths, self._layout = assignment, lengths, layout
        self._made: dict[int, tuple[Microbatch, ...]] = {}

    def __len__(self) -> int:
        return self._assignment.dp

    def __getitem__(self, dp: Any) -> Any:
        """Return the micro-batches of one DP rank; slices are not supported."""
        number: int = dp
        rank = range(len(self))[number]
        if rank not in self._made:
            self._made[rank] = tuple(self._pad(rank))
        return self._made[rank]

    def _pad(self, rank: int) -> Iterator[Microbatch]:
        batches, layout = self._assignment.ranks[rank], self._layout
        edges = list(accumulate(map(len, batches), initial=self.begin[rank]))
        for step in self._assignment.optimizer_steps:
            lengths = [(batches[index], self._lengths[edges[index] : edges[index + 1]]) for index in step]
            found = [pad_batch(names, tuple(counts), layout=layout) for names, counts in lengths]
            # a pipeline may ask for one length within an optimizer step
            longest = max(batch.seq_len for batch in found)
            if layout.one_length and any(batch.seq_len != longest for batch in found):
                found = [pad_batch(b.sample_ids, b.tokens, layout=layout, floor=longest) for b in found]
            yield from found

    @cached_property
    def begin(self) -> list[int]:
        """Return the samples of the ranks before each, and of all."""
        return list(accumulate((sum(map(len, rank)) for rank in self._assignment.ranks), initial=0))


def plan_shards(
    assignment: Assignment, *, tokens: Mapping[str, int], spec: RoutingSpec, layout: TrainerLayout
) -> Plan:
    """Cut an assignment into shards.

    Args:
        assignment: Which samples go where.
        tokens: Number of tokens (rows + 1) of each sample id.
        spec: The model's spec.
        layout: How the trainer is cut.

    Raises:
        SampleUnknown: The assignment names a sample without a length.
        ConfigError: The assignment has another number of DP ranks, a sample has one token, an MTP layer is mapped to a dense
            layer, micro-batches have several widths where a pipeline exchanges one shape, or the layers do not divide over the
            stages.
    """
    names = assignment.sample_ids
    missing = [name for name in names if name not in tokens]
    if missing:
        raise SampleUnknown(f"{len(missing)} assigned samples are unknown: {missing[:5]}", samples=missing)
    plan = Plan(spec, layout, assignment, tuple(int(tokens[name]) for name in names))
    check_plan(plan)
    return plan


def check_plan(plan: Plan) -> None:
    """Refuse a plan that could not be cut.

    The error then comes here, and not where a DP rank's shards are first asked for. It is what `plan_shards` raises.
    """
    check_cut(plan.assignment, plan.spec, plan.layout)
    if min(plan.lengths) < 2:
        names = plan.assignment.sample_ids
        short = [name for name, tokens in zip(names, plan.lengths, strict=True) if tokens < 2]
        raise ConfigError(
            f"{len(short)} samples have fewer than the 2 tokens that are needed: {short[:5]}", samples=short
        )


def check_cut(assignment: Assignment, spec: RoutingSpec, layout: TrainerLayout) -> None:
    """Refuse an assignment that cannot be cut, whatever its samples' lengths.

    Raises:
        ConfigError: The assignment does not fit the spec or the layout.
    """
    if assignment.dp != layout.dp:
        raise ConfigError(f"the assignment is for {assignment.dp} DP ranks, the layout has {layout.dp}")
    layout.stage_sizes(spec.num_layers)
    dense = sorted(set(layout.mtp) - set(spec.moe_layers))
    if dense:
        raise ConfigError(f"layout: mtp maps to decoder layers {dense}; MoE layers are {spec.moe_layers}")
    if layout.pp > 1 and layout.one_length and layout.packing == "padded":
        _check_widths(assignment)


def _check_widths(assignment: Assignment) -> None:
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
