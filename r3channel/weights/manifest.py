"""What travels: names, dtypes and shapes of the caller's tensors, their places in flat buckets, and how buckets are filled.

A manifest is built once. Both ends compute offsets from it by the same rule, so no offset ever travels: SGLang's flattened bucket
(0.5.23, `srt/weight_sync/tensor_bucket.py`) knows no gaps. Nothing here knows a rank or an engine.

The caller's tensors are read once and in the caller's thread: their iterator may be collective. Between two tensors the update's
deadline is looked at. How long the next one may take is the affair of who gives it: a gathering has the timeout of its own group.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from r3channel.errors import ConfigError, ManifestMismatch, NonFiniteWeights
from r3channel.weights.checksums import finite
from r3channel.weights.progress import Run

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_NAMES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in (*_NAMES, *_FLOAT8)}
"""What may be named on the wire; nothing is looked up in torch by a name that came from outside."""
SHOWN = 3
"""How many names an error lists, of however many."""
Named = tuple[str, torch.Tensor]
"""A tensor's name, and the tensor."""
Push = Callable[[Sequence[torch.Tensor]], None]
"""Takes the next bucket's tensors, in order. They may be overwritten once the next call but one has returned."""


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
        """Read a row that another process made with `row`.

        Raises:
            ManifestMismatch: no `row` gives such values.
        """
        try:
            name, dtype_name, shape = row
            dtype = _DTYPES[dtype_name]
            if not isinstance(name, str) or not all(type(n) is int and n >= 0 for n in shape):
                raise TypeError
        except KeyError as error:
            raise ManifestMismatch(
                f"tensor {row[0]!r} is {row[1]} {row[2]}; expected one of {', '.join(_DTYPES)}. A UE8M0 scale would have to be "
                "written in its own bytes, which is not done: start the engine with float32 scales"
            ) from error
        except (TypeError, ValueError) as error:
            raise ManifestMismatch(f"manifest row {row!s:.200}: expected [name, dtype, [sizes]]") from error
        return cls(name=name, dtype=dtype, shape=tuple(shape))

    def row(self) -> list[Any]:
        """Return plain values for JSON."""
        return [self.name, self.dtype_name, list(self.shape)]

    @property
    def dtype_name(self) -> str:
        """Return `bfloat16`, not `torch.bfloat16`."""
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        return f"{self.name} {self.dtype_name}{list(self.shape)}"


class Bucket(NamedTuple):
    """Tensors that travel as one flat run of bytes, in wire order.

    >>> norm = TensorMeta(name="norm.weight", dtype=torch.bfloat16, shape=(3,))
    >>> gate = TensorMeta(name="gate.weight", dtype=torch.float32, shape=(2, 2))
    >>> bucket = Bucket.of([norm, gate])
    >>> tuple(meta.name for meta in bucket.tensors), bucket.offsets, bucket.payload_bytes
    (('gate.weight', 'norm.weight'), (0, 16), 22)
    """

    tensors: tuple[TensorMeta, ...]
    offsets: tuple[int, ...]
    """First byte of each tensor; a multiple of its item size."""
    payload_bytes: int

    @classmethod
    def of(cls, tensors: Sequence[TensorMeta]) -> Bucket:
        """Place the tensors in the bucket as the receiver expects them.

        Larger items come first; equal item sizes keep the order in which they came.
        """
        ordered = tuple(sorted(tensors, key=lambda meta: -meta.dtype.itemsize))
        *offsets, end = itertools.accumulate((meta.nbytes for meta in ordered), initial=0)
        return cls(ordered, tuple(offsets), end)

    @property
    def placed(self) -> Iterator[tuple[TensorMeta, int]]:
        """Return each tensor with its first byte."""
        return zip(self.tensors, self.offsets, strict=True)

    def views(self, buffer_N: torch.Tensor) -> list[torch.Tensor]:
        """Return the bucket's tensors as views of a flat buffer.

        Args:
            buffer_N: uint8 memory that holds this bucket.

        Returns:
            The tensors in wire order. Nothing is copied.
        """
        return [buffer_N[at : at + m.nbytes].view(m.dtype).view(m.shape) for m, at in self.placed]

    def __str__(self) -> str:
        return f"{len(self.tensors)} tensors, {self.payload_bytes} bytes, first {self.tensors[0].name}"


class Manifest(NamedTuple):
    """All buckets of a model, in sending order. Built once; later updates must match it."""

    buckets: tuple[Bucket, ...]
    arrivals: tuple[tuple[TensorMeta, int, int], ...]
    """Each tensor, its bucket and its place in the bucket, in the caller's order."""


def nonfinite(where: str, meta: TensorMeta) -> NonFiniteWeights:
    """Return the error for a tensor with NaN or Inf.

    Args:
        where: the place where it was found.
        meta: the tensor.
    """
    return NonFiniteWeights(f"{where}: tensor {meta} holds NaN or Inf. Did the last train step diverge?")


def first_nonfinite(placed: Iterable[tuple[TensorMeta, int]], payload: torch.Tensor) -> TensorMeta | None:
    """Return the first tensor that holds NaN or Inf.

    Neighbours of equal dtype are checked together, because each check waits for a device and costs 16 us. Single tensors are
    checked only to name one.

    Args:
        placed: Neighbours in a packed bucket with their offsets in bytes; equal dtypes lie without a gap.
        payload: The bucket's memory, on any device.

    Returns:
        The tensor; None if all numbers are finite.
    """
    for dtype, run in itertools.groupby(placed, key=lambda pair: pair[0].dtype):
        metas = list(run)
        start, end = metas[0][1], metas[-1][1] + metas[-1][0].nbytes
        if not finite(payload[start:end].view(dtype)):
            views = ((meta, payload[at : at + meta.nbytes].view(dtype)) for meta, at in metas)
            return next(meta for meta, view in views if not finite(view))
    return None


# -- which bucket a tensor goes to -----------------------------------------------------------------------------------------


_FUSED_INTO: Mapping[str, str] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj_with_mqa"),
}
"""Members that a receiver fuses into one parameter, in its order: all go into one bucket."""

_MEMBER = re.compile(rf"(?<![^.])({'|'.join(_FUSED_INTO)})(?=\.[^.]+$)")
_EXPERT = re.compile(r"^(?P<head>.*\.experts)\.\d+\.(?P<module>gate|up|down)_proj\.weight$")
_SCALE_NAMES = (".weight_scale", ".weight_scale_inv")
"""The scales of a float8 weight: a number, a column or blocks (`weight_scale_inv` of DeepSeek-V3)."""
_PACKED_NAME = re.compile(r"\.(input_scale|qweight|qzeros|scales|weight_packed)$")


def fill_buckets(metas: Iterable[TensorMeta], *, cap_bytes: int) -> Manifest:
    """Place tensors in buckets of at most `cap_bytes`, by units.

    Buckets are ordered by the arrival of each unit's last tensor. A unit larger than the cap gets a bucket of its own. Members of
    a unit may come apart: whoever fills buckets from a stream in this order holds those that wait for others.

    Args:
        metas: the tensors in the order in which they come.
        cap_bytes: a bucket's size at most.

    Raises:
        ConfigError: the cap is less than 1.
        ManifestMismatch: a name is given twice, or a tensor is of a packed format (GPTQ, AWQ).
    """
    if cap_bytes < 1:
        raise ConfigError(f"bucket size of {cap_bytes} bytes: expected at least 1")
    arrivals: dict[str, TensorMeta] = {}
    units: dict[str, list[TensorMeta]] = {}
    for meta in metas:
        if meta.name in arrivals:
            raise ManifestMismatch(f"tensor {meta.name} is given twice in one update")
        if _PACKED_NAME.search(meta.name):
            raise ManifestMismatch(f"{meta.name} is of a packed format: give plain or float8 weights")
        arrivals[meta.name], key = meta, unit_of(meta.name)
        units[key] = [*units.pop(key, ()), meta]  # its last one decides its place
    filled, room = list[list[TensorMeta]](), 0
    for unit in units.values():
        nbytes = sum(meta.nbytes for meta in unit)
        if not filled or nbytes > room:
            filled.append([])
            room = cap_bytes
        filled[-1] += unit
        room -= nbytes
    buckets = tuple(map(Bucket.of, filled))
    placed = {m.name: (m, n, at) for n, bucket in enumerate(buckets) for at, m in enumerate(bucket.tensors)}
    return Manifest(buckets, tuple(placed[name] for name in arrivals))


def is_scale(name: str) -> bool:
    """Return whether a float8 weight needs this tensor to mean anything."""
    return name.endswith(_SCALE_NAMES)


def unit_of(name: str) -> str:
    """Return the key of the unit that this tensor belongs to.

    >>> unit_of("model.layers.3.self_attn.k_proj.weight")
    'model.layers.3.self_attn.qkv_proj.weight'
    >>> unit_of("model.norm.weight")
    'model.norm.weight'
    >>> unit_of("model.layers.3.mlp.down_proj.weight_scale_inv")
    'model.layers.3.mlp.down_proj.weight'
    >>> unit_of("a.up_proj.weight_scale") == unit_of("a.gate_proj.weight")
    True
    """
    if is_scale(name):
        name = name[: name.rindex(".")] + ".weight"
    return _fuse(name)


def _fuse(name: str) -> str:
    return _MEMBER.sub(lambda member: _FUSED_INTO[member[0]], name)


def engine_names(names: Iterable[str]) -> frozenset[str]:
    """Return the parameters that tensors of these names fill.

    It serves where no loader can be asked, for the families that the table knows. A part without its fellows keeps its own name:
    DeepSeek-V2-Lite has kv_a_proj_with_mqa without q_a_proj.

    >>> sorted(engine_names(["a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight", "b.q_proj.weight", "norm.weight"]))
    ['a.qkv_proj.weight', 'b.q_proj.weight', 'norm.weight']
    >>> sorted(engine_names(["a.gate_proj.weight", "a.up_proj.weight", "b.q_proj.weight", "b.kv_a_proj_with_mqa.weight"]))
    ['a.gate_up_proj.weight', 'b.kv_a_proj_with_mqa.weight', 'b.q_proj.weight']
    >>> sorted(engine_names(f"a.mlp.experts.{n}.{part}_proj.weight" for n in (0, 7) for part in ("gate", "up", "down")))
    ['a.mlp.experts.w13_weight', 'a.mlp.experts.w2_weight']
    """
    stacked, fused = set[str](), dict[str, list[str]]()
    for name in names:
        if expert := _EXPERT.match(name):
            stacked.add(f"{expert['head']}.{'w2' if expert['module'] == 'down' else 'w13'}_weight")
        else:
            fused.setdefault(_fuse(name), []).append(name)
    # a part without its fellows keeps its own name
    return frozenset(stacked).union(key if len(parts) > 1 else parts[0] for key, parts in fused.items())


# -- the caller's tensors ---------------------------------------------------------------------------------------------------


def read_first(named_tensors: Iterator[Named], run: Run, *, cap_bytes: int) -> tuple[Manifest, list[Named]]:
    """Copy all tensors to the host and group them into buckets.

    Args:
        named_tensors: read once, in the caller's thread.
        run: the update; its deadline is checked between two tensors.
        cap_bytes: a bucket's size at most.

    Returns:
        The manifest, and the copies in the order in which they came.

    Raises:
        ManifestMismatch: `fill_buckets` refuses a tensor.
        NonFiniteWeights: a tensor holds NaN or Inf.
        Exception: whatever the iterator raises.
    """
    copies = list[Named]()
    for name, tensor in _in_time(named_tensors, run):
        with run.stage("pack"):
            copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        with run.stage("digest"):
            if not finite(copy):
                raise nonfinite(f"after {len(copies)} tensors", TensorMeta.of(name, copy))
        copies.append((name, copy))
    return fill_buckets(itertools.starmap(TensorMeta.of, copies), cap_bytes=cap_bytes), copies


def read_again(named_tensors: Iterator[Named], manifest: Manifest, run: Run, push: Push) -> None:
    """Give `push` each bucket's tensors once all have come.

    They are given in the bucket's order.

    Args:
        named_tensors: read once, in the caller's thread.
        manifest: what the first update gave.
        run: the update; its deadline is checked between two tensors.
        push: takes a bucket's tensors.

    Raises:
        ManifestMismatch: other tensors came than the first time; the text names which.
    """
    rows: list[dict[int, torch.Tensor]] = [{} for _ in manifest.buckets]
    due, come = 0, 0
    for come, (name, tensor) in enumerate(_in_time(named_tensors, run), start=1):
        if come > len(manifest.arrivals):
            raise ManifestMismatch(f"the update gives more tensors than the first one did: {name}")
        meta, bucket, slot = manifest.arrivals[come - 1]
        if name != meta.name or tensor.dtype != meta.dtype or tensor.shape != meta.shape:
            raise ManifestMismatch(
                f"tensor {come}: expected {meta}, got {TensorMeta.of(name, tensor)}; did model, layout or cast change since?"
            )
        rows[bucket][slot] = tensor
        while due < len(rows) and len(rows[due]) == len(manifest.buckets[due].tensors):
            full, rows[due] = rows[due], {}
            due += 1
            push([full[slot] for slot in range(len(full))])
    if come < len(manifest.arrivals):
        missing, total = manifest.arrivals[come][0], len(manifest.arrivals)
        raise ManifestMismatch(f"the update ended after {come} of {total} tensors; expected {missing} next")


def _in_time(named_tensors: Iterator[Named], run: Run) -> Iterator[Named]:
    while True:
        with run.stage("convert"):
            named = next(named_tensors, None)
        if named is None:
            return
        run.deadline.left_s()
        yield named
