"""A checkpoint read from disk: in which order, in how much memory, and what is refused."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from r3channel import errors
from r3channel.weights.session import WeightSync
from r3channel.weights.store import checkpoint_tensors

ATTENTION = "model.layers.0.self_attn"
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files; q, k and v of one layer lie in both, and dtypes are mixed."""
    first = {f"{ATTENTION}.q_proj.weight": torch.randn(8, 4), "model.norm.weight": torch.randn(4).bfloat16()}
    second = {f"{ATTENTION}.{m}_proj.weight": torch.randn(4, 4) for m in "kvo"}
    second |= {"lm_head.weight": torch.tensor(3.0)}
    save_file(first, str(tmp_path / "model-00001-of-00002.safetensors"))
    save_file(second, str(tmp_path / "model-00002-of-00002.safetensors"))
    return tmp_path


def session(**options: object) -> WeightSync:
    values = {"keep_copy": True, "bucket_bytes": 4096, **options}
    return WeightSync([NOBODY], **values)  # pyright: ignore[reportArgumentType]


def test_tensors_that_an_engine_fuses_follow_one_another_whatever_file_they_lie_in(folder: Path) -> None:
    found = list(checkpoint_tensors(folder))
    names = [name for name, _ in found]
    at = names.index(f"{ATTENTION}.k_proj.weight")
    assert {name.rpartition("_proj")[0][-1] for name in names[at : at + 3]} == set("qkv")
    assert len(names) == len(set(names)) == 6
    assert dict(found)["model.norm.weight"].dtype == torch.bfloat16


def test_the_host_copy_holds_the_checkpoints_bytes(folder: Path) -> None:
    with session() as sync:
        sync.load_checkpoint(folder, version=4, timeout_s=20)
        assert sync.version == 4 and sync._copy is not None
        assert sync._copy.given.manifest is not None
        names = [bucket.names for bucket in sync._copy.given.manifest.buckets]
        rows = zip(names, sync._copy.read(), strict=True)
        read = {name: tensor for row in rows for name, tensor in zip(*row, strict=True)}
        for name, tensor in checkpoint_tensors(folder):
            assert torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype


def test_a_checkpoint_is_read_one_tensor_at_a_time(tmp_path: Path) -> None:
    big = {f"model.layers.{n}.mlp.down_proj.weight": torch.randn(64, 64) for n in range(16)}
    save_file(big, str(tmp_path / "model.safetensors"))
    alive: list[int] = []
    given: list[weakref.ref[torch.Tensor]] = []
    for _, tensor in checkpoint_tensors(tmp_path):
        given.append(weakref.ref(tensor))
        alive.append(sum(reference() is not None for reference in given))
    assert len(alive) == 16 and max(alive) <= 2


def test_a_scale_is_taken_only_where_an_engine_without_it_would_be_noticed(tmp_path: Path) -> None:
    weight, scale = "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight_scale_inv"
    tensors = {weight: torch.ones(4, 4).to(torch.float8_e4m3fn), scale: torch.ones(1, 1)}
    save_file(tensors, str(tmp_path / "model.safetensors"))
    with (
        session(expected=None) as sync,
        pytest.raises(errors.ManifestMismatch, match=r"down_proj\.weight_scale_inv is the scale"),
    ):
        sync.load_checkpoint(tmp_path, version=0, timeout_s=20)
    for guard in ({"verify": True, "expected": None}, {"expected": "engine"}):
        with session(**guard) as sync:
            sync.load_checkpoint(tmp_path, version=0, timeout_s=20)
            assert sync.version == 0


def test_what_does_not_fit_is_refused_by_name(folder: Path) -> None:
    with session() as sync, pytest.raises(errors.DeadlineExceeded, match="reading of"):
        sync.load_checkpoint(folder, version=0, timeout_s=1e-9)
    with session(keep_copy=False) as sync, pytest.raises(errors.UsageError, match="keep_copy"):
        sync.load_checkpoint(folder, version=0, timeout_s=20)
    with session() as sync:
        with pytest.raises(errors.UsageError):
            sync.load_checkpoint(folder, version=-1, timeout_s=20)
        sync.load_checkpoint(folder, version=0, timeout_s=20)
        with pytest.raises(errors.UsageError, match="before the first update"):
            sync.load_checkpoint(folder, version=1, timeout_s=20)

    save_file({"lm_head.weight": torch.zeros(3)}, str(folder / "model-00003.safetensors"))
    with pytest.raises(errors.ConfigError, match=r"tensor lm_head\.weight lies in another file"):
        list(checkpoint_tensors(folder))
    (folder / "model-00003.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0no json here ...")
    with pytest.raises(errors.ConfigError, match=r"model-00003.* is it a safetensors file"):
        list(checkpoint_tensors(folder))


def test_numbers_that_are_none_are_refused_in_a_checkpoint_too(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([1.0, float("nan")])}, str(tmp_path / "model.safetensors"))
    with session() as sync:
        with pytest.raises(errors.NonFiniteWeights, match="tensor w"):
            sync.load_checkpoint(tmp_path, version=0, timeout_s=20)
        assert sync.version is None and sync._copy is not None and sync._copy.version is None
