"""What travels: names, dtypes and shapes of tensors, their places in flat buckets, and one digest of it all.

Built once. Both ends compute offsets from it by the same rule, so no offset ever travels. Two rules exist, because the
layout belongs to the receiver: SGLang's flattened bucket (0.5.23, `srt/weight_sync/tensor_bucket.py`) knows no gaps, our
own receivers want every tensor on a 256-byte border. Nothing here knows a tensor's values, a rank or an engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from r3channel.errors import ManifestMismatch

ALIGNMENT = 256
"""Bytes. What checkpoint-engine uses; a multiple of every vector width and of CUDA's own coalescing unit."""

PACKED = 1
"""No gaps: tensors sorted by item size instead."""

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
    """First byte of each tensor; a multiple of its item size and of `alignment`."""
    payload_bytes: int
    """From the first byte to the end of the last tensor, gaps included."""
    alignment: int = PACKED

    @classmethod
    def of(cls, tensors: Sequence[TensorMeta]) -> Bucket:
        """Lay the tensors out for the receiver; equal item sizes keep the order in which they came."""
        ordered = tuple(sorted(tensors, key=wire_order))
        offsets, end = [], 0
        for meta in ordered:
            offsets.append(end)
            end += meta.nbytes
        return cls(ordered, tuple(offsets), end)

    @classmethod
    def aligned(cls, tensors: Sequence[TensorMeta], *, alignment: int = ALIGNMENT) -> Bucket:
        """Lay the tensors out in the order given, each on a multiple of `alignment` bytes."""
        offsets, end = [], 0
        for meta in tensors:
            offsets.append(-(-end // alignment) * alignment)
            end = offsets[-1] + meta.nbytes
        return cls(tuple(tensors), tuple(offsets), end, alignment)

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
    """xxh3 over alignment, names, dtypes, shapes and bucket borders in canonical JSON."""

    @classmethod
    def of(cls, buckets: Sequence[Bucket]) -> Manifest:
        rows = [[bucket.alignment, [meta.row() for meta in bucket.tensors]] for bucket in buckets]
        return cls(tuple(buckets), xxhash.xxh3_64_intdigest(json.dumps(rows, separators=(",", ":")).encode()))

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Manifest:
        """From `to_dict` of the sender: offsets are computed here. ManifestMismatch when the digest is not the sender's."""
        buckets = []
        for alignment, rows in value["buckets"]:
            metas = [TensorMeta.from_row(row) for row in rows]
            buckets.append(
                Bucket.of(metas) if alignment == PACKED else Bucket.aligned(metas, alignment=alignment)
            )
        manifest = cls.of(buckets)
        if manifest.id != value["id"]:
            raise ManifestMismatch(
                f"manifest {value['id']} arrived as {manifest.id}; other versions, or damaged?"
            )
        return manifest

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: sent once per receiver. Without offsets."""
        rows = [[bucket.alignment, [meta.row() for meta in bucket.tensors]] for bucket in self.buckets]
        return {"id": self.id, "buckets": rows}

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

    def check(self, index: int, bucket: Bucket) -> Bucket:
        """Return our bucket number `index`, which equals `bucket`; ManifestMismatch names the first difference."""
        if index >= len(self.buckets):
            raise ManifestMismatch(
                f"bucket {index} ({bucket}): the manifest has only {len(self.buckets)} buckets, "
                "so this update gives more tensors than the first one did"
            )
        known = self.buckets[index]
        if known != bucket:
            raise ManifestMismatch(f"bucket {index}: {_first_difference(known, bucket)}")
        return known

    def check_complete(self, count: int) -> None:
        """ManifestMismatch unless `count` buckets are all of them."""
        if count != len(self.buckets):
            raise ManifestMismatch(
                f"the update ended after {count} of {len(self.buckets)} buckets; "
                f"the next tensor expected is {self.buckets[count].tensors[0]}"
            )


def _first_difference(known: Bucket, seen: Bucket) -> str:
    for expected, got in zip(known.tensors, seen.tensors, strict=False):
        if expected != got:
            return f"expected {expected}, got {got}; did the model, its layout or the cast change between updates?"
    return (
        f"expected {len(known.tensors)} tensors, got {len(seen.tensors)}; the first update gave other tensors"
    )
