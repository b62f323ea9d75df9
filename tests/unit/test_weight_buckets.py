"""The plan of weight buckets, and the bytes in them as SGLang's own receiver code reads them."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from r3channel.errors import ConfigError, ManifestMismatch
from r3channel.weights import groups, progress
from r3channel.weights.config import SyncConfig
from r3channel.weights.groups import Source
from r3channel.weights.manifest import Bucket, TensorMeta, fill_buckets, unit_of
from r3channel.weights.progress import Deadline, Run

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.float64, torch.bool)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
Model = tuple[list[TensorMeta], int]
FAMILIES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("o_proj",), ("gate",))


def names_of(bucket: Bucket) -> list[str]:
    return [meta.name for meta in bucket.tensors]


def meta(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> TensorMeta:
    return TensorMeta(name=name, dtype=dtype, shape=shape)


@st.composite
def weights(draw: st.DrawFn, module: str) -> list[TensorMeta]:
    """A module's weight, and before or behind it the scale that a float8 one may have."""
    weight = TensorMeta(name=f"{module}.weight", dtype=draw(st.sampled_from(DTYPES)), shape=draw(SHAPES))
    if weight.dtype is not torch.float8_e4m3fn or draw(st.booleans()):
        return [weight]
    return draw(st.permutations([weight, meta(f"{module}.weight_scale_inv", *draw(SHAPES))]))


@st.composite
def models(draw: st.DrawFn) -> tuple[list[TensorMeta], int]:
    """(tensors of some layers, a cap): families whole or mixed up within a layer, dtypes mixed, some float8 with scales.

    Where members are mixed up, the cap can hold a layer, as the contract of `fill_buckets` asks.
    """
    layers, mixed_up = [], draw(st.booleans())
    for layer in range(draw(st.integers(1, 3))):
        families = [draw(st.permutations(family)) for family in draw(st.permutations(FAMILIES))]
        members = [member for family in families for member in family]
        tensors = [tensor for member in members for tensor in draw(weights(f"layers.{layer}.{member}"))]
        layers.append(draw(st.permutations(tensors)) if mixed_up else tensors)
    least = max(sum(m.nbytes for m in layer) for layer in layers) if mixed_up else 1
    return [m for layer in layers for m in layer], max(draw(st.integers(1, 600)), least)


def filled_tensor(meta: TensorMeta, seed: int) -> torch.Tensor:
    """Random bytes in the tensor's shape: NaNs and denormals too."""
    generator = torch.Generator().manual_seed(seed)
    if meta.dtype is torch.bool:
        return torch.randint(0, 2, meta.shape, generator=generator).bool()
    raw = torch.randint(0, 256, (meta.nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(meta.dtype).view(meta.shape)


@pytest.fixture(scope="session")
def receiver() -> Any:
    """SGLang's own buckets, out of a file that needs only torch; its package needs much more."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None, "sglang is not installed"
    file = Path(spec.origin).parent / "srt/weight_sync/tensor_bucket.py"
    return runpy.run_path(str(file))["FlattenedTensorBucket"]


def facts_of(named: dict[str, torch.Tensor]) -> dict[str, Any]:
    data = {name: t.contiguous().flatten().view(torch.uint8).tolist() for name, t in named.items()}
    return {name: (t.dtype, t.shape, data[name]) for name, t in named.items()}


@given(model=models())
@settings(max_examples=100)
def test_every_tensor_lies_once_aligned_and_beside_its_unit_in_a_bucket_below_the_cap(model: Model) -> None:
    """A bucket is above the cap only as a single unit; units come in the order of their last tensors.

    The manifest says where each tensor of the caller's order lies.
    """
    metas, cap_bytes = model
    manifest = fill_buckets(metas, cap_bytes=cap_bytes)
    buckets = manifest.buckets
    assert sorted(name for bucket in buckets for name in names_of(bucket)) == sorted(m.name for m in metas)
    for bucket in buckets:
        end = 0
        for tensor, offset in zip(bucket.tensors, bucket.offsets, strict=True):
            assert offset == end and offset % tensor.dtype.itemsize == 0
            end += tensor.nbytes
        with_bytes = {unit_of(tensor.name) for tensor in bucket.tensors if tensor.nbytes}
        assert end == bucket.payload_bytes and (end <= cap_bytes or len(with_bytes) == 1)
    where = [{unit_of(name) for name in names_of(bucket)} for bucket in buckets]
    last = {unit_of(meta.name): at for at, meta in enumerate(metas)}
    assert [at for units in where for at in sorted(map(last.__getitem__, units))] == sorted(last.values())
    assert [meta for meta, _, _ in manifest.arrivals] == metas
    assert all(buckets[bucket].tensors[at] == meta for meta, bucket, at in manifest.arrivals)


@given(model=models(), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_the_real_receiver_reads_back_every_byte(receiver: Any, model: Model, seed: int) -> None:
    metas, cap_bytes = model
    sent = {m.name: filled_tensor(m, seed + i) for i, m in enumerate(metas)}
    received: dict[str, torch.Tensor] = {}
    source, run = Source(SyncConfig(engines=[])), Run(Deadline(20, "test"))
    for number, bucket in enumerate(fill_buckets(metas, cap_bytes=cap_bytes).buckets):
        with patch.object(groups, "first_nonfinite", lambda *_: None):  # random bytes may be none
            payload = source.pack(number, bucket, [sent[name] for name in names_of(bucket)], run)
        tensors, shapes = bucket.tensors, [list(m.shape) for m in bucket.tensors]
        names, dtypes = [m.name for m in tensors], [m.dtype_name for m in tensors]
        theirs = receiver.empty(names, dtypes, shapes, "cpu")
        assert theirs.get_flattened_tensor().shape == payload.shape
        theirs.get_flattened_tensor().copy_(payload)
        received |= dict(theirs.reconstruct_tensors())
    assert facts_of(received) == facts_of(sent)


@pytest.mark.parametrize(
    ("names", "cap_bytes", "error", "said"),
    [
        (["a.input_scale"], 80, ManifestMismatch, "packed format"),
        (["a.q_proj.qweight"], 80, ManifestMismatch, "packed format"),
        (["a.weight", "a.weight"], 80, ManifestMismatch, r"a\.weight is given twice"),
        (["a"], 0, ConfigError, "0 bytes"),
    ],
)
def test_misfits_are_refused(names: list[str], cap_bytes: int, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        fill_buckets([meta(name, 1) for name in names], cap_bytes=cap_bytes)


def test_packing_takes_parameters_and_any_strides() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3)).t()
    bucket, source = Bucket.of([TensorMeta.of("a", weight)]), Source(SyncConfig(engines=[]))
    packed = source.pack(0, bucket, [weight], Run(Deadline(20, "test")))
    assert torch.equal(packed.view(torch.float32).view(3, 2), weight) and not packed.requires_grad


def test_packing_reuses_two_buffers() -> None:
    source, run = Source(SyncConfig(engines=[])), Run(Deadline(20, "test"))
    packed = []
    for number, size in enumerate((64, 64, 10, 64)):
        tensor = torch.zeros(size, dtype=torch.uint8)
        packed.append(source.pack(number, Bucket.of([TensorMeta.of("a", tensor)]), [tensor], run))
    addresses = [payload.data_ptr() for payload in packed]
    assert addresses[0] == addresses[2] != addresses[1] == addresses[3]
    assert [len(payload) for payload in packed] == [64, 64, 10, 64]


class OnDevice(torch.Tensor):
    """Host memory that says it is on a CUDA device: what is asked of the device can then be counted."""

    @property
    def is_cuda(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_a_bucket_packed_on_a_device_is_whole_when_it_is_handed_over(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """The group sends from a thread of its own, whose current stream is not the one on which the trainer packs."""
    waited: list[torch.Tensor] = []
    out_N = torch.zeros(16, dtype=torch.uint8).as_subclass(OnDevice)

    class Stream:
        def synchronize(self) -> None:
            waited.append(out_N.as_subclass(torch.Tensor).clone())

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    tensor = torch.arange(4).to(dtype)
    bucket = Bucket.of([TensorMeta.of("w", tensor)])
    source = Source(SyncConfig(engines=[]))
    source._rooms[0] = out_N
    source.pack(0, bucket, [tensor], Run(Deadline(20, "test")))
    assert [held.view(dtype).tolist() for held in waited] == [tensor.tolist()]


# -- where an update's time went: each moment belongs to one stage --------------------------------------------------------------


def test_a_stage_counts_its_own_time_and_not_that_of_inner_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    run = Run(Deadline(20, "test"))

    def spend(seconds: float) -> None:
        now_s[0] += seconds

    with run.stage("join"):
        spend(16)
    with run.stage("plan"):
        spend(2)
        for _ in range(2):
            with run.stage("convert"):
                spend(4)
            with run.stage("pack"):
                spend(8)
        spend(32)
    assert run.report.seconds == {"join": 16, "convert": 8, "pack": 16, "plan": 34}
    assert sum(run.report.seconds.values()) == now_s[0]
