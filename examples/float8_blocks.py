"""Block-wise float8, as the checkpoint that an engine was started from has it: e4m3 weights, and a float32 scale for each block.

The format of DeepSeek-V3 and Qwen3-FP8 (`weight_block_size`, `*.weight_scale_inv`): weight = float8 * scale. Which tensors are
quantised says the checkpoint itself, so there is no list of names per model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, overload

import torch

from r3channel.errors import ConfigError
from r3channel.weights.convert import Shard
from r3channel.weights.geometry import Box
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.store import checkpoint_names

_SCALE = "_scale_inv"
_FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FLOAT8).max
Block = tuple[int, int]
_Pair = tuple[str, torch.Tensor]


@overload
def float8_blocks(tensors: Iterable[_Pair], *, like: str | os.PathLike[str]) -> Iterator[_Pair]: ...
@overload
def float8_blocks(tensors: Iterable[Shard], *, like: str | os.PathLike[str]) -> Iterator[Shard]: ...
def float8_blocks(tensors: Iterable[Any], *, like: str | os.PathLike[str]) -> Iterator[Any]:
    """`hf_weights` or `hf_shards` as `WeightSync.update` gives them to a float8 engine. Lazy, on the tensors' own device; only
    the folder is read now, because a rank that fails later leaves the others of a collective iterator waiting.

    Where the Hugging Face folder `like` has a scale: the tensor's float8 values, then its scales. Else the tensor as it is.

    Raises ConfigError for a folder of another float8 format, or a shard that cuts a block (TP over 128 rows).
    """
    block = _block_size(like)
    scaled = {name.removesuffix(_SCALE) for name in checkpoint_names(like) if name.endswith(_SCALE)}
    return _quantised(tensors, scaled, block)


def _quantised(tensors: Iterable[Any], scaled: set[str], block: Block) -> Iterator[Any]:
    for one in tensors:
        name = one.meta.name if isinstance(one, Shard) else one[0]
        if name not in scaled:
            yield one
        elif isinstance(one, Shard):
            yield from _shard(one, block)
        else:
            values, scales = quantise(one[1], block)
            yield from ((name, values), (name + _SCALE, scales))


def quantise(weight: torch.Tensor, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values of the shape of `weight` [rows, columns], and float32 scales [ceil(rows / block), ceil(columns / block)].

    A block's largest value becomes 448, e4m3's largest; a block of zeros has the scale 1.
    """
    if weight.dim() != 2:
        raise ConfigError(f"a tensor of shape {list(weight.shape)}: blocks have two dimensions")
    (rows, columns), (high, wide) = weight.shape, block
    down, across = -(-rows // high), -(-columns // wide)
    padded = torch.nn.functional.pad(
        weight.detach().float(), (0, across * wide - columns, 0, down * high - rows)
    )
    blocks = padded.view(down, high, across, wide)
    scales = blocks.abs().amax(dim=(1, 3)) / _LARGEST
    scales[scales == 0] = 1.0
    values = (blocks / scales[:, None, :, None]).clamp(-_LARGEST, _LARGEST).to(_FLOAT8)
    return values.view(padded.shape)[:rows, :columns].contiguous(), scales


def _shard(shard: Shard, block: Block) -> Iterator[Shard]:
    edges = zip(shard.box.start, shard.box.stop, shard.meta.shape, block, strict=True)
    if any(start % size or (stop % size and stop != whole) for start, stop, whole, size in edges):
        raise ConfigError(
            f"{shard.meta.name}: this rank has {shard.box} of {list(shard.meta.shape)}, which cuts blocks of {list(block)}; "
            "give whole tensors (hf_weights), or shards that end with a block"
        )
    values, scales = quantise(shard.tensor, block)
    whole = tuple(-(-length // size) for length, size in zip(shard.meta.shape, block, strict=True))
    start = tuple(at // size for at, size in zip(shard.box.start, block, strict=True))
    stop = tuple(at + length for at, length in zip(start, scales.shape, strict=True))
    name = shard.meta.name
    yield Shard(TensorMeta(name=name, dtype=_FLOAT8, shape=shard.meta.shape), shard.box, values)
    yield Shard(TensorMeta(name=name + _SCALE, dtype=torch.float32, shape=whole), Box(start, stop), scales)


def _block_size(folder: str | os.PathLike[str]) -> Block:
    config = json.loads((Path(folder) / "config.json").read_bytes()).get("quantization_config") or {}
    method, block = config.get("quant_method"), config.get("weight_block_size") or ()
    if method != "fp8" or len(block) != 2:
        raise ConfigError(
            f"{os.fspath(folder)}/config.json has quant_method {method!r} and weight_block_size {list(block)}; expected 'fp8' "
            "and two numbers: one scale for a whole tensor, or for a row, is not made here"
        )
    return int(block[0]), int(block[1])
