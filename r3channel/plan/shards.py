"""The exact shards: which rows and layers each (DP, PP) receives, in the order its routers consume them.

A micro-batch is padded `[b, s]`; Megatron's routers see it sequence-major, row = position * b + sample, and with sequence
parallelism TP rank t sees the t-th contiguous part (measured on Megatron-core 0.16.1). A shard's bytes are
`[micro-batch][tp slot][layer][row][k]`, so one layer of one TP rank is contiguous. Rows that no engine computed (each
sample's last token, and padding) are filled by the pad policy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from r3channel.errors import ConfigError, SampleUnknown
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.routing import Ids
from r3channel.spec import RoutingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One padded micro-batch."""

    sample_ids: tuple[str, ...]
    tokens: tuple[int, ...]
    """Tokens of each sample, before padding."""
    seq_len: int
    """Padded length, a multiple of the TP slots."""

    @property
    def rows(self) -> int:
        """Rows over all TP slots, padding included."""
        return self.seq_len * len(self.sample_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What the processes of one (DP, PP) receive together; TP0 receives it and hands on the parts."""

    spec: RoutingSpec
    dp: int
    pp: int
    layers: tuple[int, ...]
    """Global MoE layers of the pipeline stage, ascending; may be empty."""
    tp_slots: int
    microbatches: tuple[Microbatch, ...]

    def slot_rows(self, microbatch: int) -> int:
        """Rows of one TP slot of a micro-batch."""
        return self.microbatches[microbatch].rows // self.tp_slots

    def microbatch_bytes(self, microbatch: int) -> int:
        """Bytes over all TP slots."""
        rows = self.microbatches[microbatch].rows
        return rows * len(self.layers) * self.spec.top_k * self.spec.id_dtype.itemsize

    @property
    def nbytes(self) -> int:
        return sum(self.microbatch_bytes(index) for index in range(len(self.microbatches)))

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

    def place(self, view_SLRK: Ids, *, microbatch: int, sample: int, expert_ids_TLK: Ids) -> None:
        """Write one sample's rows, and the pad policy's ids after them, into a micro-batch's view.

        `expert_ids_TLK` [tokens - 1, all MoE layers, K]; any thread, each sample once.
        """
        plan = self.microbatches[microbatch]
        width, per_slot = len(plan.sample_ids), plan.seq_len // self.tp_slots
        target = view_SLRK.reshape(self.tp_slots, len(self.layers), per_slot, width, self.spec.top_k)
        wanted = [self.spec.moe_index(layer) for layer in self.layers]
        layers = slice(wanted[0], wanted[-1] + 1) if wanted else slice(0)
        rows = len(expert_ids_TLK)
        for slot in range(self.tp_slots):
            start, stop = slot * per_slot, (slot + 1) * per_slot
            filled = max(0, min(rows, stop) - start)
            _copy_layer_major(
                expert_ids_TLK[start : start + filled, layers], target[slot, :, :filled, sample]
            )
            if filled < per_slot:
                positions = np.arange(start + filled, stop)
                target[slot, :, filled:, sample] = spread_ids(self.spec, positions_T=positions)

    def row_map(self, microbatch: int, *, tp: int) -> tuple[Ids, Ids]:
        """(sample index in the micro-batch, token position) of each row of a TP rank, int64; -1, -1 where no engine row is."""
        plan = self.microbatches[microbatch]
        width, per_slot = len(plan.sample_ids), plan.seq_len // self.tp_slots
        slot = tp if self.tp_slots > 1 else 0
        position = np.repeat(np.arange(slot * per_slot, (slot + 1) * per_slot), width)
        sample = np.tile(np.arange(width), per_slot)
        real = position < np.asarray(plan.tokens)[sample] - 1
        return np.where(real, sample, -1), np.where(real, position, -1)


_PLACE_ROWS = 1024
"""Rows transposed at a time: what is read for one layer is still cached for the next (measured, 48 layers x top-8)."""


def _copy_layer_major(source_TLK: Ids, target_LTK: Ids) -> None:
    """Copy [T, L, K] into [L, T, K], moving the K ids of a row and layer as one element."""
    source_TL, target_LT = _wide(source_TLK), _wide(target_LTK)
    for at in range(0, len(source_TL), _PLACE_ROWS):
        target_LT[:, at : at + _PLACE_ROWS] = source_TL[at : at + _PLACE_ROWS].T


def _wide(ids: Ids) -> Ids:
    """The last axis as one element of as many bytes; numpy copies 16 bytes fastest as a complex number."""
    nbytes = ids.shape[-1] * ids.itemsize
    element = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}.get(nbytes, f"V{nbytes}")
    return ids.view(element)[..., 0]


def spread_ids(spec: RoutingSpec, *, positions_T: Ids) -> Ids:
    """[T, K] pad ids: consecutive experts, moving on by K each position, so padding loads no single expert."""
    start = (np.asarray(positions_T, dtype=np.int64) * spec.top_k)[:, None]
    return ((start + np.arange(spec.top_k)) % spec.num_experts).astype(spec.id_dtype)


@dataclass(frozen=True)
class Plan:
    """All shards of one step. Equal inputs give an equal digest on every process."""

    spec: RoutingSpec
    layout: TrainerLayout
    microbatches: tuple[tuple[Microbatch, ...], ...]
    """By DP rank."""

    def shard(self, *, dp: int, pp: int) -> Shard:
        return Shard(
            spec=self.spec,
            dp=dp,
            pp=pp,
            layers=self.layout.stage_layers(self.spec, pp=pp),
            tp_slots=self.layout.tp_slots,
            microbatches=self.microbatches[dp],
        )

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """One per (DP, PP), DP first."""
        return tuple(self.shard(dp=dp, pp=pp) for dp in range(self.layout.dp) for pp in range(self.layout.pp))

    @cached_property
    def digest(self) -> int:
        """64-bit identity of spec, layout, order and lengths."""
        batches = [
            [[list(m.sample_ids), list(m.tokens), m.seq_len] for m in rank] for rank in self.microbatches
        ]
        values = {"spec": self.spec.to_dict(), "layout": self.layout.to_dict(), "microbatches": batches}
        return xxhash.xxh3_64_intdigest(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


def plan_shards(
    assignment: Assignment, *, tokens: Mapping[str, int], spec: RoutingSpec, layout: TrainerLayout
) -> Plan:
    """Cut an assignment into shards. `tokens` maps sample id to its number of tokens (rows + 1).

    With pipeline stages all micro-batches of a DP rank share one padded length, because Megatron's schedules exchange
    activations of one fixed shape.
    """
    if assignment.dp != layout.dp:
        raise ConfigError(f"the assignment is for {assignment.dp} DP ranks, the layout has {layout.dp}")
    missing = [sample for sample in assignment.sample_ids if sample not in tokens]
    if missing:
        raise SampleUnknown(f"{len(missing)} assigned samples are unknown: {missing[:5]}")
    ranks = []
    for batches in assignment.ranks:
        longest = max(tokens[sample] for batch in batches for sample in batch)
        floor = longest if layout.pp > 1 else 0
        ranks.append(
            tuple(_microbatch(batch, tokens=tokens, floor=floor, slots=layout.tp_slots) for batch in batches)
        )
    plan = Plan(spec, layout, tuple(ranks))
    layout.stage_layers(spec, pp=0)  # refuses an uneven pipeline here, not in a background thread
    return plan


def _microbatch(batch: tuple[str, ...], *, tokens: Mapping[str, int], floor: int, slots: int) -> Microbatch:
    lengths = tuple(tokens[sample] for sample in batch)
    if min(lengths) < 2:
        raise ConfigError(
            f"sample {batch[lengths.index(min(lengths))]} has {min(lengths)} token(s); at least 2 are needed"
        )
    seq_len = -(-max(*lengths, floor) // slots) * slots
    return Microbatch(sample_ids=batch, tokens=lengths, seq_len=seq_len)


def place_samples(
    plan: Plan, *, dp: int, ids_of: Callable[[str], Ids]
) -> dict[tuple[int, int], np.ndarray[Any, np.dtype[np.uint8]]]:
    """The uint8 shards of all pipeline stages of one DP rank, by (dp, pp).

    `ids_of(sample_id)` gives [tokens - 1, all MoE layers, K]; it is asked once per sample, in the plan's order.
    """
    shards = [plan.shard(dp=dp, pp=pp) for pp in range(plan.layout.pp)]
    buffers = [np.empty(shard.nbytes, np.uint8) for shard in shards]
    views = [shard.views(buffer) for shard, buffer in zip(shards, buffers, strict=True)]
    for number, microbatch in enumerate(plan.microbatches[dp]):
        for index, sample_id in enumerate(microbatch.sample_ids):
            ids_TLK = ids_of(sample_id)
            for shard, view in zip(shards, views, strict=True):
                shard.place(view[number], microbatch=number, sample=index, expert_ids_TLK=ids_TLK)
    return {(shard.dp, shard.pp): buffer for shard, buffer in zip(shards, buffers, strict=True)}
