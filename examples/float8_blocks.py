"""Block-wise float8, as the checkpoint that an engine was started from has it: e4m3 weights, and a float32 scale for each block.

The format of DeepSeek-V3 and Qwen3-FP8 (`weight_block_size`, `*.weight_scale_inv`): weight = float8 * scale. Which tensors are
quantised says the checkpoint itself, so there is no list of names per model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch

from r3channel.errors import ConfigError
from r3channel.weights.convert import Shard
from r3channel.weights.geometry import Box
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.store import checkpoint_names, dtype_of

_SCALE = "_scale_inv"
_FLOAT8, _LARGEST = torch.float8_e4m3fn, torch.finfo(torch.float8_e4m3fn).max
T = TypeVar("T")
"""A shard, or a name and its whole tensor."""


def float8_blocks(tensors: Iterable[T], *, like: str | os.PathLike[str]) -> Iterator[T]:
    """`hf_weights` or `hf_shards` as `WeightSync.update` gives them to a float8 engine. Lazy, on the tensors' own device; only
    the folder is read now, because a rank that fails later leaves the others of a collective iterator waiting.

    Where the Hugging Face folder `like` has a scale: the tensor's float8 values, then its scales. Else the tensor as it is.

    Raises ConfigError for a folder of another float8 format, or a shard that cuts a block (TP over 128 rows).
    """
    block = _block_size(like)
    scaled = {name.removesuffix(_SCALE) for name in checkpoint_names(like) if name.endswith(_SCALE)}
    if scaled and (dtype := dtype_of(like, (scale := min(scaled) + _SCALE))) != "F32":
        raise ConfigError(
            f"{scale} of {os.fspath(like)} is {dtype}; expected F32: packed and UE8M0 scales are not made here"
        )
    return chain.from_iterable(_quantised(one, scaled, block) for one in tensors)


def _quantised(one: Any, scaled: set[str], block: tuple[int, ...]) -> Iterable[Any]:
    name = one.meta.name if isinstance(one, Shard) else one[0]
    if name not in scaled:
        return (one,)
    if isinstance(one, Shard):
        return _shard(one, block)
    return zip((name, name + _SCALE), quantise(one[1], block), strict=True)


def quantise(weight: torch.Tensor, block: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values of the shape of `weight` [rows, columns], and float32 scales [ceil(rows / block), ceil(columns / block)].

    A block's largest value becomes 448, e4m3's largest; a block of zeros has the scale 1. A third number in `block` that is
    not 0 asks for powers of two, rounded up, as UE8M0 can hold them.
    """
    (rows, columns), (high, wide, *powers) = weight.shape, block
    down, across = -(-rows // high), -(-columns // wide)
    edges = (0, across * wide - columns, 0, down * high - rows)
    blocks = torch.nn.functional.pad(weight.detach().float(), edges).view(down, high, across, wide)
    scales = blocks.abs().amax(dim=(1, 3)) / _LARGEST
    scales[scales == 0] = 1.0
    scales = scales.log2().ceil().exp2() if any(powers) else scales
    values = (blocks / scales[:, None, :, None]).clamp(-_LARGEST, _LARGEST).to(_FLOAT8)
    return values.view(down * high, -1)[:rows, :columns].contiguous(), scales


def _shard(shard: Shard, block: tuple[int, ...]) -> tuple[Shard, Shard]:
    edges = zip(shard.box.start, shard.box.stop, shard.meta.shape, block[:2], strict=True)
    if any(start % size or (stop % size and stop != whole) for start, stop, whole, size in edges):
        raise ConfigError(
            f"{shard.meta.name}: this rank has {shard.box} of {list(shard.meta.shape)}, which cuts blocks of {list(block[:2])}; "
            "give whole tensors (hf_weights), or shards that end with a block"
        )
    values, scales = quantise(shard.tensor, block)
    corners = shard.meta.shape, shard.box.start, shard.box.stop
    whole, start, stop = (
        tuple(-(-n // size) for n, size in zip(one, block[:2], strict=True)) for one in corners
    )
    scale = TensorMeta(name=shard.meta.name + _SCALE, dtype=torch.float32, shape=whole)
    kept = replace(shard.meta, dtype=_FLOAT8)
    return Shard(kept, shard.box, values), Shard(scale, Box(start, stop), scales)


def _block_size(folder: str | os.PathLike[str]) -> tuple[int, ...]:
    config = json.loads((Path(folder) / "config.json").read_bytes()).get("quantization_config") or {}
    method, block = config.get("quant_method"), config.get("weight_block_size") or ()
    if method != "fp8" or len(block) != 2:
        raise ConfigError(
            f"{os.fspath(folder)}/config.json has quant_method {method!r} and weight_block_size {list(block)}; expected 'fp8' "
            "and two numbers: one scale for a whole tensor, or for a row, is not made here"
        )
    return int(block[0]), int(block[1]), int(config.get("scale_fmt") == "ue8m0")
