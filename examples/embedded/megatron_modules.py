"""The two modules that Megatron-core's local layer spec (no Transformer Engine) lacks, and how to put them in.

`Norm` is allowed under sequence parallelism, `CoreAttention` takes context parallelism (zigzag chunks, keys and values
gathered) and packed sequences. Import after the CPU shim is installed. Nothing here knows about routing.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.torch_norm import WrappedTorchNorm


class Norm:
    """A torch norm with the call signature of Megatron's own, marked for sequence-parallel gradient reduction."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_kwargs: Any) -> Any:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps)
        for weight in norm.parameters():
            setattr(weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010  read by Megatron
        return norm


class _GatherShards(torch.autograd.Function):
    """All-gather with a gradient: torch.distributed.nn's takes group ranks for global ranks on gloo subgroups."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        shards = [torch.empty_like(shard) for _ in range(group.size())]
        dist.all_gather(shards, shard, group=group)
        return tuple(shards)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        stacked = torch.stack(grads)
        dist.all_reduce(stacked, group=ctx.group)
        return stacked[ctx.group.rank()], None


def zigzag_positions(length: int, *, rank: int, size: int) -> torch.Tensor:
    """Positions in a sequence of `length` that context-parallel rank `rank` holds, in its order."""
    if size == 1:
        return torch.arange(length)
    chunk = torch.arange(length // (2 * size))
    return torch.cat([chunk + rank * len(chunk), chunk + (2 * size - 1 - rank) * len(chunk)])


class CoreAttention(MegatronModule):
    """Plain causal attention in float32: [s, b, heads, dim] in, [s, b, heads * dim] out; any mask passed is ignored."""

    def __init__(
        self,
        config: Any,
        *_args: Any,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_kwargs: Any,
    ) -> None:
        super().__init__(config=config)
        group = getattr(pg_collection, "cp", None)
        self.group: Any = group if group is not None else parallel_state.get_context_parallel_group()
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        del attention_mask, attn_mask_type, attention_bias
        if packed_seq_params is not None:  # [tokens, heads, dim] -> [tokens, 1, heads, dim]
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        bounds = _sequence_bounds(packed_seq_params, query.shape[0] * self.group.size())
        keys, values = self._gather(key), self._gather(value)
        parts = [self._attend(query, keys, values, span) for span in itertools.pairwise(bounds)]
        joined = torch.cat(parts).flatten(2)
        return joined.squeeze(1) if packed_seq_params is not None else joined

    def _gather(self, shard: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.group.size() == 1:
            return (shard,)
        return _GatherShards.apply(shard.contiguous(), self.group)  # type: ignore[return-value]

    def _attend(
        self,
        query: torch.Tensor,
        keys: tuple[torch.Tensor, ...],
        values: tuple[torch.Tensor, ...],
        span: tuple[int, int],
    ) -> torch.Tensor:
        """One sequence: rows [first, last) of the whole, of which this rank holds 1/size."""
        size, (first, last) = len(keys), span
        here = slice(first // size, last // size)
        ranks = [*range(size), self.group.rank()]
        *key_at, query_at = (
            zigzag_positions(last - first, rank=rank, size=size).to(query.device) for rank in ranks
        )
        repeat = query.shape[2] // keys[0].shape[2]
        key, value = (
            torch.cat([tensor[here] for tensor in shards]).repeat_interleave(repeat, 2).float()
            for shards in (keys, values)
        )
        score = torch.einsum("qbhd,kbhd->bhqk", query[here].float(), key) * self.scale
        score = score.masked_fill(torch.cat(key_at)[None, :] > query_at[:, None], float("-inf"))
        return torch.einsum("bhqk,kbhd->qbhd", score.softmax(-1), value).to(query.dtype)


def _sequence_bounds(packed_seq_params: Any, length: int) -> list[int]:
    if packed_seq_params is None:
        return [0, length]
    padded = packed_seq_params.cu_seqlens_q_padded
    return (packed_seq_params.cu_seqlens_q if padded is None else padded).tolist()


_REPLACEMENTS: dict[type, type] = {WrappedTorchNorm: Norm, DotProductAttention: CoreAttention}


def use_local_modules(spec: Any) -> Any:
    """Swap the two modules everywhere in a layer-spec tree, in place; returns the tree."""
    _swap(spec, set())
    return spec


def _swap(node: Any, seen: set[int]) -> None:
    if id(node) in seen or isinstance(node, type):
        return
    seen.add(id(node))
    if isinstance(node, list | tuple):
        for item in node:
            _swap(item, seen)
        return
    for name, value in list(getattr(node, "__dict__", {}).items()):
        if isinstance(value, type) and value in _REPLACEMENTS:
            setattr(node, name, _REPLACEMENTS[value])
        else:
            _swap(value, seen)
