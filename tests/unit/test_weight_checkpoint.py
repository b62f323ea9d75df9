"""A checkpoint read from disk: in which order, in how much memory, and what is refused."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from r3channel import errors
from r3channel.weights.store import checkpoint_tensors

ATTENTION = "model.layers.0.self_attn"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files; q, k and v of one layer lie in both, and dtypes are mixed."""
    first = {f"{ATTENTION}.q_proj.weight": torch.randn(8, 4), "model.norm.weight": torch.randn(4).bfloat16()}
    second = {f"{ATTENTION}.{m}_proj.weight": torch.randn(4, 4) for m in "kvo"}
    second |= {"lm_head.weight": torch.tensor(3.0)}
    save_file(first, str(tmp_path / "model-00001-of-00002.safetensors"))
    save_file(second, str(tmp_path / "model-00002-of-00002.safetensors"))
    return tmp_path


def test_tensors_that_an_engine_fuses_follow_one_another_whatever_file_they_lie_in(folder: Path) -> None:
    found = list(checkpoint_tensors(folder))
    names = [name for name, _ in found]
    at = names.index(f"{ATTENTION}.k_proj.weight")
    assert {name.rpartition("_proj")[0][-1] for name in names[at : at + 3]} == set("qkv")
    assert len(names) == len(set(names)) == 6
    assert dict(found)["model.norm.weight"].dtype == torch.bfloat16


def test_a_checkpoint_is_read_one_tensor_at_a_time(tmp_path: Path) -> None:
    big = {f"model.layers.{n}.mlp.down_proj.weight": torch.randn(64, 64) for n in range(16)}
    save_file(big, str(tmp_path / "model.safetensors"))
    alive: list[int] = []
    given: list[weakref.ref[torch.Tensor]] = []
    for _, tensor in checkpoint_tensors(tmp_path):
        given.append(weakref.ref(tensor))
        alive.append(sum(reference() is not None for reference in given))
    assert len(alive) == 16 and max(alive) <= 2


def test_what_does_not_fit_is_refused_by_name(folder: Path) -> None:
    save_file({"lm_head.weight": torch.zeros(3)}, str(folder / "model-00003.safetensors"))
    with pytest.raises(errors.ConfigError, match=r"tensor lm_head\.weight lies in another file"):
        list(checkpoint_tensors(folder))
    (folder / "model-00003.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0no json here ...")
    with pytest.raises(errors.ConfigError, match=r"model-00003.* is it a safetensors file"):
        list(checkpoint_tensors(folder))
