"""A bucket's bytes: packed, searched for NaN and Inf with few synchronisations, hashed, its names checked. No network."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, Protocol

import numpy as np
import torch
import xxhash

from r3channel.errors import ConfigError, ManifestMismatch, NonFiniteWeights
from r3channel.weights.manifest import (
    FUSED_INTO,
    UNIT_NAME,
    Bucket,
    Filled,
    Manifest,
    TensorMeta,
    fill_buckets,
    is_scale,
    pack,
    pack_each,
)
from r3channel.weights.progress import Run, Stream
from r3channel.weights.store import Buffers

OnNonfinite = Literal["error", "allow"]
"""What to do with a tensor that holds NaN or Inf."""

_WIDENED = {
    torch.float8_e4m3fn: torch.float16,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}
"""Types without `aminmax`, and one that holds all their values."""

_FIRST_NOT_FINITE: Mapping[torch.dtype, int] = {
    torch.float64: 0x7FF0_0000_0000_0000,
    torch.float32: 0x7F80_0000,
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float8_e5m2: 0x7C,
    torch.float8_e4m3fn: 0x7F,  # has no Inf; NaN is all ones below the sign (OCP 8-bit floating point)
}
"""The smallest bit pattern, without sign, that is NaN or Inf; all patterns above are, too."""

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def check_finite(named: Sequence[tuple[str, torch.Tensor]], *, where: str) -> None:
    """Raises NonFiniteWeights, naming the first tensor with NaN or Inf, its dtype and `where` (a bucket).

    Integers pass. The flags stay on the device until all are set.
    """
    floats = [(name, tensor) for name, tensor in named if tensor.is_floating_point() and tensor.numel()]
    if not floats:
        return
    flags = torch.stack([_finite(tensor) for _, tensor in floats]).tolist()
    bad = [(name, tensor.dtype) for (name, tensor), fine in zip(floats, flags, strict=True) if not fine]
    if bad:
        raise NonFiniteWeights(
            f"{where}: tensor {bad[0][0]} ({bad[0][1]}) holds NaN or Inf, as do {len(bad) - 1} more; the old weights stay. "
            "Did the optimizer step diverge?"
        )


def first_nonfinite(placed: Iterable[tuple[TensorMeta, int]], payload: torch.Tensor) -> TensorMeta | None:
    """The first of some tensors that holds NaN or Inf; None if all numbers are finite. Any device.

    `placed`: neighbours in a packed bucket with their offsets in its `payload`. On a GPU this waits for the device once per
    dtype; tensors are looked at one by one only to name one.
    """
    for dtype, run in _runs(placed):
        start, end = run[0][1], run[-1][1] + run[-1][0].nbytes
        if _finite(payload[start:end].view(dtype)):
            continue
        for meta, offset in run:
            if not _finite(payload[offset : offset + meta.nbytes].view(dtype)):
                return meta
    return None


def _runs(
    placed: Iterable[tuple[TensorMeta, int]],
) -> Iterator[tuple[torch.dtype, list[tuple[TensorMeta, int]]]]:
    """Neighbours of equal floating dtype with their offsets; equal dtypes lie without a gap."""
    for dtype, run in groupby(placed, key=lambda pair: pair[0].dtype):
        if dtype.is_floating_point:
            yield dtype, list(run)


def _finite(values: torch.Tensor) -> torch.Tensor:
    """A bool on the tensor's device."""
    if values.numel() == 0 or values.device.type == "cpu":
        return torch.tensor(_finite_on_host(values))
    return _finite_on_device(values)


def _finite_on_device(values: torch.Tensor) -> torch.Tensor:
    """NaN survives both minimum and maximum, so two numbers tell. Not run on a GPU; on a CPU it is slow and right."""
    low, high = torch.aminmax(values.to(_WIDENED.get(values.dtype, values.dtype)))
    return torch.isfinite(low) & torch.isfinite(high)


def _finite_on_host(values: torch.Tensor) -> bool:
    """Two maxima over the bits and no temporary: torch's isfinite is some 20 times slower for bfloat16 on a CPU.

    Read as signed integers the largest positive pattern wins, read as unsigned the largest negative one.
    """
    if values.numel() == 0:
        return True
    if values.dtype not in _FIRST_NOT_FINITE:  # float8 of AMD's, whose only NaN is minus zero
        return bool(torch.isfinite(values.detach().float()).all())
    first, size = _FIRST_NOT_FINITE[values.dtype], values.dtype.itemsize
    signed = values.detach().view(_SIGNED[size]).numpy()
    unsigned_limit = first + (1 << (8 * size - 1))
    return int(signed.max()) < first and int(signed.view(_UNSIGNED[size]).max()) < unsigned_limit


_CHARS = 16
_EXPERT = re.compile(r"^(?P<head>.*\.experts)\.(?P<number>\d+)\.(?P<module>gate|up|down)_proj\.weight$")


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in C order; a copy only if it is not contiguous on the CPU."""
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return flat.numpy().data


def tensor_checksum(tensor: torch.Tensor) -> str:
    """What a CPU engine's `/weights_checker` reports for a parameter with these bytes: 16 hex digits of SHA-256."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()[:_CHARS]


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


@dataclass(slots=True)
class _Fused:
    """One parameter that comes in parts; those that come before their turn are held."""

    digest: Any = field(default_factory=hashlib.sha256)
    next: int = 0
    first: str = ""
    waiting: dict[int, tuple[str, torch.Tensor]] = field(default_factory=dict)

    def add(self, position: int, name: str, tensor: torch.Tensor) -> None:
        self.first = name if position == 0 else self.first
        self.waiting[position] = (name, tensor)
        while self.next in self.waiting:
            self.digest.update(tensor_bytes(self.waiting.pop(self.next)[1]))
            self.next += 1


class EngineChecksums:
    """What an engine of one rank must report once it holds all tensors that were added. One thread.

    Parts that come out of order are held by reference until those before them have come: at most the experts of a layer.
    """

    def __init__(self) -> None:
        self._whole: dict[str, str] = {}
        self._fused: dict[str, _Fused] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        place = fused_place(name)
        if place is None:
            self._whole[name] = tensor_checksum(tensor)
        else:
            self._fused.setdefault(place[0], _Fused()).add(place[1], name, tensor)

    def result(self) -> dict[str, str]:
        """Engine's name -> checksum. A part without its fellows keeps its own name, as in models that do not fuse it."""
        found = dict(self._whole)
        for name, fused in self._fused.items():
            if fused.next:
                alone = fused.next == 1 and not name.endswith(("w13_weight", "w2_weight"))
                found[fused.first if alone else name] = fused.digest.hexdigest()[:_CHARS]
            found |= {part: tensor_checksum(tensor) for part, tensor in fused.waiting.values()}
        return found


_IN_CACHE_BYTES = 512 << 10
"""Half of a common level-2 cache. Small tensors are looked through together: one by one cost 16 us each."""


class Push(Protocol):
    """Takes a bucket and its bytes, which may be overwritten once the next call has returned."""

    def __call__(self, bucket: Bucket, payload: torch.Tensor, /, *, last: bool) -> None: ...


class Packer:
    """Packs updates of one model, and looks at what it packs. One thread."""

    def __init__(self, *, bucket_bytes: int, on_nonfinite: OnNonfinite, named: bool, checksums: bool) -> None:
        """`named`: whether a name that an engine does not have is noticed by somebody. `checksums`: also compute what an engine
        of one rank must report of its parameters."""
        if on_nonfinite not in ("error", "allow"):
            raise ConfigError(f"on_nonfinite {on_nonfinite!r}: expected error or allow")
        self.checksums: dict[str, str] = {}
        """Of the last update that was packed whole."""
        self.manifest: Manifest | None = None
        """What every update must give from now on; set by the caller once an update counts."""
        self.buffers = Buffers(keep=False)
        """Where to; set by the caller."""
        self._bucket_bytes, self._refuse = bucket_bytes, on_nonfinite == "error"
        self._named, self._checksums = named, checksums

    def pack(self, stream: Stream, push: Push, run: Run) -> Manifest:
        """Cut, check and pack the stream bucket by bucket; return what it was.

        Raises ManifestMismatch (also for a scale that nobody would miss at an engine), NonFiniteWeights, naming bucket and
        tensor, and whatever `push` and the stream raise.
        """
        checksums = EngineChecksums() if self._checksums else None
        filling = fill_buckets(stream, cap_bytes=self._bucket_bytes)
        while (filled := run.timed_next("fill", filling)) is not None:
            self._check_scales(filled.bucket)
            known, bucket = self.manifest, filled.bucket
            bucket = bucket if known is None else known.check(len(run.buckets), bucket)
            payload = self._packed(bucket, filled, run, checksums)
            push(bucket, payload, last=filled.last)
            run.buckets.append(bucket)
        with run.stage("plan"):
            manifest = self._complete(run.buckets)
            self.checksums = {} if checksums is None else checksums.result()
            return manifest

    def _complete(self, buckets: Sequence[Bucket]) -> Manifest:
        if not buckets:
            raise ManifestMismatch("the update gives no tensors at all")
        if self.manifest is None:
            return Manifest.of(buckets)
        self.manifest.check_complete(len(buckets))
        return self.manifest

    def _check_scales(self, bucket: Bucket) -> None:
        """SGLang skips a name that it does not have, so an engine of plain weights would serve float8 ones without scales."""
        scale = next((name for name in bucket.names if is_scale(name)), None)
        if scale is not None and not self._named and not self._checksums:
            raise ManifestMismatch(
                f"tensor {scale} is the scale of a float8 weight; expected `expected` or `verify`, which notice an engine that "
                "has no such parameter"
            )

    def _packed(
        self, bucket: Bucket, filled: Filled[torch.Tensor], run: Run, checksums: EngineChecksums | None
    ) -> torch.Tensor:
        """The bucket's bytes, flat uint8, in the buffers' next memory."""
        with run.stage("pack"):
            out_N = self.buffers.take(len(run.buckets), bucket.payload_bytes)
        on_host = out_N.device.type == "cpu"
        (self._pack_on_host if on_host else self._pack_on_device)(bucket, filled.items, out_N, run)
        if checksums is not None:
            with run.stage("digest"):
                for name, tensor in zip(bucket.names, filled.items, strict=True):
                    checksums.add(name, tensor)
        return out_N[: bucket.payload_bytes]

    def _pack_on_host(
        self, bucket: Bucket, tensors: Sequence[torch.Tensor], out_N: torch.Tensor, run: Run
    ) -> None:
        """What was just packed is looked through and hashed while it is still in cache: a third less time for all three."""
        digest, hashed_N, bytes_N = xxhash.xxh3_64(), 0, out_N.numpy()
        packed = _in_cache(pack_each(bucket, tensors, out_N))
        while (placed := run.timed_next("pack", packed)) is not None:
            with run.stage("digest"):
                bad = first_nonfinite(placed, out_N) if self._refuse else None
                if bad is not None:
                    raise self._nonfinite(bad, len(run.buckets))
                if self.buffers.keep:
                    meta, offset = placed[-1]
                    end = offset + meta.nbytes
                    digest.update(bytes_N[hashed_N:end].data)
                    hashed_N = end
        if self.buffers.keep:
            run.digests.append(digest.intdigest())

    def _pack_on_device(
        self, bucket: Bucket, tensors: Sequence[torch.Tensor], out_N: torch.Tensor, run: Run
    ) -> None:
        """Looked through once per dtype, because each look waits for the device. Without a host copy nothing is hashed."""
        with run.stage("pack"):
            payload_N = pack(bucket, tensors, out_N)
            if payload_N.is_cuda:  # another thread sends it, whose current stream is the default one
                torch.cuda.current_stream(payload_N.device).synchronize()
        with run.stage("digest"):
            bad = first_nonfinite(bucket.placed, payload_N) if self._refuse else None
        if bad is not None:
            raise self._nonfinite(bad, len(run.buckets))

    @staticmethod
    def _nonfinite(meta: TensorMeta, index: int) -> NonFiniteWeights:
        return NonFiniteWeights(
            f"bucket {index}: tensor {meta} holds NaN or Inf. Did the last train step diverge? "
            "on_nonfinite='allow' sends them"
        )


def _in_cache(packed: Iterator[tuple[TensorMeta, int]]) -> Iterator[list[tuple[TensorMeta, int]]]:
    """Neighbours of together `_IN_CACHE_BYTES`, as soon as they are packed."""
    placed, nbytes = [], 0
    for one in packed:
        placed.append(one)
        nbytes += one[0].nbytes
        if nbytes >= _IN_CACHE_BYTES:
            yield placed
            placed, nbytes = [], 0
    if placed:
        yield placed
