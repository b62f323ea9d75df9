"""Where every path must end: one rank's rows, contiguous and writable per layer, as its routers take them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash

from r3channel.plan.layout import RankCoords
from r3channel.plan.place import place_samples
from r3channel.plan.shards import Plan
from r3channel.routing import Ids

_BLOCK_ROWS = {1: 256, 2: 256, 4: 1024}
"""Rows that are transposed at once, by bytes per id: the fastest of 16 to 1,024 rows at 48 x top-8 (CPU time, AMD EPYC)."""


class HeldRows:
    """A rank's rows in memory that is reused: per micro-batch [L, rows, K]. Pads are written once and stay.

    The same code serves every peer that hands over per-sample arrays; it is the fastest placement in numpy that was found
    (int32: 0.26 us per token of 48 x top-8; torch, layer by layer as slime does it: 0.69).
    """

    def __init__(self, plan: Plan, coords: RankCoords, dtype: Any) -> None:
        self.shard = plan.shard(dp=coords.dp, pp=coords.pp, cp=coords.cp)
        self.slot = coords.tp if self.shard.tp_slots > 1 else 0
        first, last = self.shard.sources[0], self.shard.sources[-1] + 1
        assert self.shard.sources == tuple(range(first, last)), "a benchmark's stage holds consecutive layers"
        self.layers = slice(first, last)
        self._plan = plan
        self.views = [np.empty(self._shape(index), dtype) for index in range(len(self.shard.microbatches))]
        self.blank()

    def blank(self) -> None:
        """Real rows become zeros, which no router chooses; pads are what the plan says."""
        spec, key = self.shard.spec, self.shard.key
        shape = (0, spec.num_moe_layers, spec.top_k)
        lengths = {
            name: tokens
            for batch in self.shard.microbatches
            for name, tokens in zip(batch.sample_ids, batch.tokens, strict=True)
        }
        zeros = np.zeros((max(lengths.values(), default=1) - 1, *shape[1:]), spec.id_dtype)
        placed = place_samples(self._plan, dp=key[0], ids_of=lambda name: zeros[: lengths[name] - 1])
        for view, whole in zip(self.views, self.shard.views(placed[key]), strict=True):
            view[:] = whole[self.slot]

    def place(self, samples: Iterable[Ids]) -> None:
        """Write the samples of this DP rank, in the plan's order, each [tokens - 1, all MoE layers, K]."""
        arrays = iter(samples)
        for number, batch in enumerate(self.shard.microbatches):
            for index in range(len(batch.sample_ids)):
                ids_TLK = next(arrays)
                for start, local, real in self.runs(number, index):
                    self._copy(
                        ids_TLK[start : start + real, self.layers],
                        self.views[number][:, local : local + real],
                    )

    def runs(self, microbatch: int, sample: int) -> Iterator[tuple[int, int, int]]:
        """(first row of the sample, first row here, rows) of each stretch of real rows on this rank."""
        for start, slot, local, _, real in self.shard.table.of_sample(
            cp=self.shard.cp, microbatch=microbatch, sample=sample
        ):
            if slot == self.slot and real:
                yield start, local, real

    def tensors(self) -> Iterator[torch.Tensor]:
        """[rows, K] of each layer of each micro-batch, contiguous."""
        for view in self.views:
            yield from torch.from_numpy(view)

    def _shape(self, microbatch: int) -> tuple[int, int, int]:
        return len(self.shard.layers), self.shard.slot_rows(microbatch), self.shard.spec.top_k

    def _copy(self, source_TLK: Ids, target_LTK: Ids) -> None:
        source_TL, target_LT = _as_items(source_TLK), _as_items(target_LTK)
        rows = _BLOCK_ROWS[source_TLK.itemsize]
        for at in range(0, len(source_TL), rows):
            target_LT[:, at : at + rows] = source_TL[at : at + rows].T


class Router:
    """Takes rows as Megatron's gather does: int32 as they are, narrower ids widened into one reused buffer."""

    def __init__(self) -> None:
        self._wide = torch.empty((0, 0), dtype=torch.int32)

    def take_all(self, tensors: Iterable[torch.Tensor]) -> None:
        for ids_RK in tensors:
            self.take(ids_RK)

    def take(self, ids_RK: torch.Tensor) -> torch.Tensor:
        if ids_RK.dtype == torch.int32:
            return ids_RK
        if len(self._wide) < len(ids_RK):
            self._wide = torch.empty(ids_RK.shape, dtype=torch.int32)
        return self._wide[: len(ids_RK)].copy_(ids_RK)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Of all ids in order, whatever their dtype. Refuses rows that a router could not use in place."""
    state = xxhash.xxh3_128()
    for ids_RK in tensors:
        assert ids_RK.is_contiguous(), f"rows of stride {ids_RK.stride()}, expected contiguous ones"
        state.update(ids_RK.to(torch.int32).numpy().data)
    return state.hexdigest()


def _as_items(ids: Ids) -> Any:
    """One item per row of K ids: numpy then copies rows and not single ids."""
    row_bytes = ids.shape[-1] * ids.itemsize
    return ids.view("u8" if row_bytes == 8 else f"V{row_bytes}")[..., 0]
