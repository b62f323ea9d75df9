"""What travels: names, dtypes and shapes of tensors, their places in flat buckets, and one digest of it all.

Built once. Both ends compute offsets from it by the same rule, so no offset ever travels: SGLang's flattened bucket
(0.5.23, `srt/weight_sync/tensor_bucket.py`) knows no gaps. Nothing here knows a tensor's values, a rank or an engine.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from r3channel.errors import ConfigError, ManifestMismatch

ALIGNMENT = 256
"""Bytes, of a parameter in a staged copy. What checkpoint-engine uses; a multiple of every vector width."""

_DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(
            torch.float64,
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.float8_e4m3fnuz,
            torch.float8_e5m2fnuz,
        ),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
"""What may be named on the wire; nothing is looked up in torch by a name that came from outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """Name, dtype and shape of one tensor, as the receiver is told them."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorMeta:
        return cls(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> TensorMeta:
        """From `row()` of another process; ManifestMismatch for anything that no `row()` gives."""
        try:
            name, dtype_name, shape = row
            dtype = _DTYPES[dtype_name]
            if not isinstance(name, str) or not all(type(n) is int and n >= 0 for n in shape):
                raise TypeError
        except (KeyError, TypeError, ValueError) as error:
            shown = str(row)[:200]
            raise ManifestMismatch(f"manifest row {shown}: expected [name, dtype, [sizes]]") from error
        return cls(name=name, dtype=dtype, shape=tuple(shape))

    def row(self) -> list[Any]:
        """Plain values for JSON."""
        return [self.name, self.dtype_name, list(self.shape)]

    @property
    def dtype_name(self) -> str:
        """`bfloat16`, not `torch.bfloat16`."""
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        return f"{self.name} {self.dtype_name}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel as one flat run of bytes, in wire order.

    >>> norm = TensorMeta(name="norm.weight", dtype=torch.bfloat16, shape=(3,))
    >>> gate = TensorMeta(name="gate.weight", dtype=torch.float32, shape=(2, 2))
    >>> bucket = Bucket.of([norm, gate])
    >>> bucket.names, bucket.offsets, bucket.payload_bytes
    (('gate.weight', 'norm.weight'), (0, 16), 22)
    """

    tensors: tuple[TensorMeta, ...]
    offsets: tuple[int, ...]
    """First byte of each tensor; a multiple of its item size."""
    payload_bytes: int

    @classmethod
    def of(cls, tensors: Sequence[TensorMeta]) -> Bucket:
        """Lay the tensors out for the receiver; equal item sizes keep the order in which they came."""
        ordered = tuple(sorted(tensors, key=wire_order))
        offsets, end = [], 0
        for meta in ordered:
            offsets.append(end)
            end += meta.nbytes
        return cls(ordered, tuple(offsets), end)

    @property
    def placed(self) -> Iterator[tuple[TensorMeta, int]]:
        """Each tensor with its first byte."""
        return zip(self.tensors, self.offsets, strict=True)

    def views(self, buffer_N: torch.Tensor) -> list[torch.Tensor]:
        """The tensors inside a flat uint8 buffer that holds this bucket, in wire order. No copy."""
        return [
            buffer_N[offset : offset + meta.nbytes].view(meta.dtype).view(meta.shape)
            for meta, offset in zip(self.tensors, self.offsets, strict=True)
        ]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(meta.name for meta in self.tensors)

    def __str__(self) -> str:
        return f"{len(self.tensors)} tensors, {self.payload_bytes} bytes, first {self.tensors[0].name}"


def wire_order(meta: TensorMeta) -> int:
    return -meta.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Manifest:
    """All buckets of a model, in sending order. Built once; later updates must match it."""

    buckets: tuple[Bucket, ...]
    digest: int
    """xxh3 over names, dtypes, shapes and bucket borders in canonical JSON."""
    arrivals: tuple[tuple[TensorMeta, int, int], ...]
    """In the caller's order: each tensor, its bucket, its place in there."""

    @classmethod
    def of(cls, buckets: Sequence[Bucket], arrivals: Sequence[int] = ()) -> Manifest:
        """`arrivals`: the number of each tensor, bucket by bucket, in the caller's order; as they lie in the buckets without."""
        rows = [[meta.row() for meta in bucket.tensors] for bucket in buckets]
        digest = xxhash.xxh3_64_intdigest(json.dumps(rows, separators=(",", ":")).encode())
        placed = [(meta, b, at) for b, bucket in enumerate(buckets) for at, meta in enumerate(bucket.tensors)]
        if arrivals:
            placed = [placed[at] for at in np.argsort(arrivals).tolist()]
        return cls(tuple(buckets), digest, tuple(placed))

    @property
    def id(self) -> str:
        """The digest as 16 hex digits: all that later updates say about their tensors."""
        return f"{self.digest:016x}"

    @property
    def payload_bytes(self) -> int:
        return sum(bucket.payload_bytes for bucket in self.buckets)

    @property
    def tensor_count(self) -> int:
        return sum(len(bucket.tensors) for bucket in self.buckets)


_FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""What a receiver fuses into one parameter, in its order: all members go into one bucket."""

FUSED_INTO = {member: (fused, at) for fused, members in _FUSED.items() for at, member in enumerate(members)}
UNIT_NAME = re.compile(rf"^(?P<head>(?:.*\.)?)(?P<member>{'|'.join(FUSED_INTO)})\.(?P<tail>[^.]+)$")
_SCALE_NAMES = (".weight_scale", ".weight_scale_inv")
"""Of a float8 weight: a number, a column or blocks (`weight_scale_inv` of DeepSeek-V3)."""
_PACKED_NAME = re.compile(r"\.(input_scale|qweight|qzeros|scales|weight_packed)$")
_SCALED = frozenset({torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz})
"""A weight of such a dtype is held for its scale as long as there is room; it may have none."""


@dataclass(slots=True)
class _Unit:
    """Tensors that stay together."""

    missing: int
    """Weights that it still needs."""
    members: list[tuple[TensorMeta, int]] = field(default_factory=list)
    """With their numbers in the caller's order."""
    nbytes: int = 0
    unscaled: int = 0
    """Float8 weights less scales."""

    def add(self, meta: TensorMeta, number: int) -> None:
        self.members.append((meta, number))
        self.nbytes += meta.nbytes
        if is_scale(meta.name):
            self.unscaled -= 1
        else:
            self.missing -= 1
            self.unscaled += meta.dtype in _SCALED

    @property
    def complete(self) -> bool:
        return self.missing == 0 and self.unscaled <= 0


def fill_buckets(metas: Iterable[TensorMeta], *, cap_bytes: int) -> Manifest:
    """Group tensors, in the order in which they come, into buckets of at most `cap_bytes`.

    A unit larger than the cap gets a bucket of its own. Members of a unit may come apart: whoever fills buckets from a stream in
    this order holds at most two caps of tensors, and one unit, at a time.

    Raises ConfigError for a cap < 1, and ManifestMismatch for no tensors, for a name given twice, for a tensor of a packed format
    (GPTQ, AWQ), and for a unit whose members lie further apart than the cap allows.
    """
    if cap_bytes < 1:
        raise ConfigError(f"bucket size of {cap_bytes} bytes: expected at least 1")
    filled: list[list[tuple[TensorMeta, int]]] = []
    room = 0
    for unit in _units(metas, hold_bytes=cap_bytes):
        if not filled or unit.nbytes > room:
            filled.append([])
            room = cap_bytes
        filled[-1] += unit.members
        room -= unit.nbytes
    if not filled:
        raise ManifestMismatch("the update gives no tensors at all")
    ordered = [sorted(members, key=lambda member: wire_order(member[0])) for members in filled]
    return Manifest.of(
        [Bucket.of([meta for meta, _ in members]) for members in ordered],
        [number for members in ordered for _, number in members],
    )


def is_scale(name: str) -> bool:
    """Does a float8 weight need this tensor to mean anything?"""
    return name.endswith(_SCALE_NAMES)


def unit_of(name: str) -> tuple[str, int]:
    """(key of the unit that this tensor belongs to, how many weights complete it).

    >>> unit_of("model.layers.3.self_attn.k_proj.weight")
    ('model.layers.3.self_attn.{qkv_proj}.weight', 3)
    >>> unit_of("model.norm.weight")
    ('model.norm.weight', 1)
    >>> unit_of("model.layers.3.mlp.down_proj.weight_scale_inv")
    ('model.layers.3.mlp.down_proj.weight', 1)
    """
    if is_scale(name):
        name = name[: name.rindex(".")] + ".weight"
    match = UNIT_NAME.match(name)
    if match is None:
        return name, 1
    fused, _ = FUSED_INTO[match["member"]]
    return f"{match['head']}{{{fused}}}.{match['tail']}", len(_FUSED[fused])


def _units(metas: Iterable[TensorMeta], *, hold_bytes: int) -> Iterator[_Unit]:
    """Complete units in the order of completion; at the end, and past `hold_bytes`, incomplete ones as they are.

    Some models have only a part of a family (DeepSeek-V2-Lite has q_proj without k_proj), so an incomplete unit is
    no error by itself; a member that arrives after its unit went out is.
    """
    held: dict[str, _Unit] = {}
    held_bytes = 0
    gone: set[str] = set()
    seen: set[str] = set()
    for number, meta in enumerate(metas):
        key, weights = _check_name(meta.name, seen, gone)
        unit = held.setdefault(key, _Unit(weights))
        unit.add(meta, number)
        held_bytes += meta.nbytes
        due = [key] if unit.complete else []
        while due or (held_bytes > hold_bytes and len(held) > 1):
            out = due.pop() if due else next(k for k in held if k != key)
            gone.add(out)
            held_bytes -= held[out].nbytes
            yield held.pop(out)
    yield from held.values()


def _check_name(name: str, seen: set[str], gone: set[str]) -> tuple[str, int]:
    if name in seen:
        raise ManifestMismatch(f"tensor {name} is given twice in one update")
    if _PACKED_NAME.search(name):
        raise ManifestMismatch(
            f"tensor {name} is of a packed format; this version sends plain weights, and float8 ones with their scales"
        )
    seen.add(name)
    key, weights = unit_of(name)
    if key in gone:
        raise ManifestMismatch(
            f"tensor {name} came after its unit {key} had to be sent; give the members of a unit close together"
        )
    return key, weights


def pack(bucket: Bucket, tensors: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Copy the tensors (in the bucket's order; any strides, any device) into the flat buffer `out`.

    Returns the view `out[:payload_bytes]`. `out` is uint8, contiguous and at least that long. Nothing is cast: another
    dtype or shape than the bucket's raises ManifestMismatch before a byte is written.
    """
    for meta, tensor in zip(bucket.tensors, tensors, strict=True):
        if tensor.dtype != meta.dtype or tensor.shape != meta.shape:
            raise ManifestMismatch(f"expected {meta}, got {TensorMeta.of(meta.name, tensor)}")
    for view, tensor in zip(bucket.views(out), tensors, strict=True):
        view.copy_(tensor.detach())
    return out[: bucket.payload_bytes]


def new_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Flat uint8 memory, not set. On the host through numpy, which asks Linux for huge pages and torch does not: packing
    and hashing 64 MB took 13 % less CPU time (AMD EPYC, numpy 2.4.6)."""
    if device.type == "cpu" and nbytes:  # an empty array's stride of 0 has no view of another dtype
        return torch.from_numpy(np.empty(nbytes, dtype=np.uint8))
    return torch.empty(nbytes, dtype=torch.uint8, device=device)
