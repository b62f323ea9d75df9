"""Digests of tensors: ours, and SGLang's own checksum; the names under which an engine keeps what it fuses."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

import torch
import xxhash

from r3channel.weights.manifest import FUSED_INTO, UNIT_NAME

_CHARS = 16
_EXPERT = re.compile(r"^(?P<head>.*\.experts)\.(?P<number>\d+)\.(?P<module>gate|up|down)_proj\.weight$")


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in C order; a copy only if it is not contiguous on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def tensor_digest(tensor: torch.Tensor) -> str:
    """xxh3 of a tensor's bytes: 64 bits, some 10 GB/s."""
    return xxhash.xxh3_64_hexdigest(host_bytes(tensor))


def tensor_checksum(tensor: torch.Tensor) -> str:
    """What a CPU engine's `/weights_checker` reports for a parameter with these bytes: 16 hex digits of SHA-256."""
    return hashlib.sha256(host_bytes(tensor)).hexdigest()[:_CHARS]


def fused_place(name: str) -> tuple[str, int] | None:
    """(the engine's parameter, position in it) of a tensor that it fuses with others; None for one that it keeps as it is.

    >>> fused_place("model.layers.3.mlp.experts.7.up_proj.weight")
    ('model.layers.3.mlp.experts.w13_weight', 15)
    >>> fused_place("model.layers.3.self_attn.k_proj.weight")
    ('model.layers.3.self_attn.qkv_proj.weight', 1)
    """
    expert = _EXPERT.match(name)
    if expert is not None:
        number = int(expert["number"])
        if expert["module"] == "down":
            return f"{expert['head']}.w2_weight", number
        return f"{expert['head']}.w13_weight", 2 * number + (expert["module"] == "up")
    member = UNIT_NAME.match(name)
    if member is None:
        return None
    fused, position = FUSED_INTO[member["member"]]
    return f"{member['head']}{fused}.{member['tail']}", position


def engine_names(names: Iterable[str]) -> frozenset[str]:
    """The engine's own parameters that tensors of these names fill.

    >>> sorted(engine_names(["a.q_proj.weight", "a.k_proj.weight", "b.q_proj.weight", "norm.weight"]))
    ['a.qkv_proj.weight', 'b.q_proj.weight', 'norm.weight']
    """
    whole, fused = set[str](), dict[str, list[str]]()
    for name in names:
        place = fused_place(name)
        if place is None:
            whole.add(name)
        else:
            fused.setdefault(place[0], []).append(name)
    for parameter, parts in fused.items():  # a part without its fellows keeps its own name
        alone = len(parts) == 1 and not parameter.endswith(("w13_weight", "w2_weight"))
        whole.add(parts[0] if alone else parameter)
    return frozenset(whole)
