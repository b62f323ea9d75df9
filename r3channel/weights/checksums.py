"""Digests of tensors: ours, and SGLang's own checksum; the names under which an engine keeps what it fuses."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

import torch
import xxhash

from r3channel.weights.manifest import FUSED_INTO, UNIT_NAME

_CHARS = 16
_ROW_BYTES = 16 << 10
_EXPERT = re.compile(r"^(?P<head>.*\.experts)\.\d+\.(?P<module>gate|up|down)_proj\.weight$")


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in C order; a copy only if it is not contiguous on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def hashed_bytes(flat: torch.Tensor) -> memoryview:
    """What is hashed of a contiguous tensor that is staged: its bytes; in a GPU's memory those of its sums, which are few."""
    return host_bytes(cross_sums(flat) if flat.is_cuda else flat)


def tensor_digest(tensor: torch.Tensor) -> str:
    """xxh3 of a tensor's bytes: 64 bits, some 10 GB/s."""
    return xxhash.xxh3_64_hexdigest(host_bytes(tensor))


def tensor_checksum(tensor: torch.Tensor) -> str:
    """What a CPU engine's `/weights_checker` reports for a parameter with these bytes: 16 hex digits of SHA-256."""
    return hashlib.sha256(host_bytes(tensor)).hexdigest()[:_CHARS]


def cross_sums(tensor: torch.Tensor) -> torch.Tensor:
    """int64 on the tensor's device, for which it does not wait: sums modulo 2**64 that a GPU and a host find alike, so that a
    parameter need not come back to be compared. Of a contiguous tensor.

    The tensor's bytes are a matrix of words of 8, 2,048 in a row (zeros after the last); the sums are those of its columns,
    then of its rows: Huang and Abraham's checksums (1984). Additions only, no temporary. A change of up to three words always
    shows; one of more is missed only if it cancels out in every row and in every column, as at the corners of a rectangle: it
    stops accidents, not an attacker. A core of a host does 5.7 GB/s (AMD EPYC, torch 2.13; xxh3: 15).
    """
    data_N = tensor.detach().view(-1).view(torch.uint8)
    if data_N.storage_offset() % 8:  # words must be aligned
        data_N = data_N.clone()
    end_N, whole = data_N.new_zeros(_ROW_BYTES), len(data_N) // _ROW_BYTES * _ROW_BYTES
    end_N[: len(data_N) - whole] = data_N[whole:]
    parts = [part.view(torch.int64).view(-1, _ROW_BYTES // 8) for part in (data_N[:whole], end_N)]
    return torch.cat([parts[0].sum(0) + parts[1].sum(0), parts[0].sum(1), parts[1].sum(1)])


def fused_name(name: str) -> str:
    """The engine's parameter into which it fuses a tensor with others; the tensor's own name where it keeps it as it is.

    >>> fused_name("model.layers.3.mlp.experts.7.up_proj.weight")
    'model.layers.3.mlp.experts.w13_weight'
    >>> fused_name("model.layers.3.self_attn.k_proj.weight")
    'model.layers.3.self_attn.qkv_proj.weight'
    """
    if expert := _EXPERT.match(name):
        return f"{expert['head']}.{'w2' if expert['module'] == 'down' else 'w13'}_weight"
    if member := UNIT_NAME.match(name):
        return f"{member['head']}{FUSED_INTO[member['member']]}.{member['tail']}"
    return name


def engine_names(names: Iterable[str]) -> frozenset[str]:
    """The engine's own parameters that tensors of these names fill.

    >>> sorted(engine_names(["a.q_proj.weight", "a.k_proj.weight", "b.q_proj.weight", "norm.weight"]))
    ['a.qkv_proj.weight', 'b.q_proj.weight', 'norm.weight']
    """
    fused: dict[str, list[str]] = {}
    for name in names:
        fused.setdefault(fused_name(name), []).append(name)
    stacked = "w13_weight", "w2_weight"
    alone = {key for key, parts in fused.items() if len(parts) == 1 and not key.endswith(stacked)}
    # a part without its fellows keeps its own name
    return frozenset(parts[0] if key in alone else key for key, parts in fused.items())
