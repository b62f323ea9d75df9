"""What is hashed, kept, written, read and looked through on the trainer's side of a weight update. No engine."""

from __future__ import annotations

import json
import weakref
from itertools import starmap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from r3channel.cli import main
from r3channel.errors import ConfigError, ManifestMismatch
from r3channel.tools.weights import compare
from r3channel.weights.checksums import _finite_on_device, cross_sums, finite
from r3channel.weights.manifest import Bucket, TensorMeta, first_nonfinite
from r3channel.weights.store import HeldWeights, checkpoint_tensors
from tests.support.fake_engine import FakeEngine

Named = dict[str, torch.Tensor]
SMALL = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
FLOATS = torch.float64, torch.float32, torch.float16, torch.bfloat16, *SMALL


def nonfinite(named: Named) -> TensorMeta | None:
    bucket = Bucket.of([TensorMeta.of(name, tensor) for name, tensor in named.items()])
    payload = torch.empty(bucket.payload_bytes, dtype=torch.uint8)
    for name, view in zip((meta.name for meta in bucket.tensors), bucket.views(payload), strict=True):
        view.copy_(named[name])
    return first_nonfinite(bucket.placed, payload)


@pytest.mark.parametrize("dtype", FLOATS[1:])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_the_tensor_with_a_number_that_is_none_is_named(dtype: torch.dtype, bad: float) -> None:
    if dtype in SMALL and dtype is not torch.float8_e5m2:
        bad = float("nan")  # it has no infinity
    named = {
        "ids": torch.arange(5), "empty": torch.zeros(0, dtype=dtype), "a": torch.ones(7, dtype=dtype),
        "b": torch.ones(9).to(dtype), "scalar": torch.tensor(1.0).to(dtype),
    }  # fmt: skip
    assert nonfinite(named) is None
    metas = list(starmap(TensorMeta.of, named.items()))
    assert [TensorMeta.from_row(meta.row()) for meta in metas] == metas
    named["b"] = torch.tensor([1.0] * 8 + [bad]).to(dtype)
    found = nonfinite(named)
    assert found is not None and found.name == "b"


def test_the_file_of_committed_weights_comes_back_and_nothing_else_is_taken_for_one(tmp_path: Path) -> None:
    held = HeldWeights(7, {"1": [{"a": "0123456789abcdef"}]})
    path = tmp_path / "committed.json"
    held.write(path)
    assert HeldWeights.read(path) == held and not path.with_suffix(".json.new").exists()
    for text in ("", "[]", "{}", json.dumps({**json.loads(path.read_text()), "r3channel_weights": 1})):
        path.write_text(text)
        with pytest.raises(ManifestMismatch, match="no manifest"):
            HeldWeights.read(path)


def test_a_comparison_names_what_differs_lacks_and_is_too_much() -> None:
    wanted, held = {"same": "1", "other": "2", "lost": "3"}, {"same": "1", "other": "9", "extra": "4"}
    found = [(row.name, row.expected, row.found) for row in compare(wanted, held, engine="e")]
    assert found == [("extra", None, "4"), ("lost", "3", None), ("other", "2", "9")]


@pytest.mark.parametrize(("version", "changed", "status"), [("7", 0, 0), ("6", 0, 1), ("7", 1, 1)])
def test_a_stale_version_and_another_byte_are_exit_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], version: str, changed: int, status: int
) -> None:
    engine = FakeEngine(receives={"w": torch.arange(4.0)})
    HeldWeights(7, {"1": [engine.checksums()]}).write(path := tmp_path / "committed.json")
    engine.version = version
    engine.tensors["w"] += changed
    try:
        assert main(["weights", "verify", "--engine", engine.url, "--manifest", str(path)]) == status
    finally:
        engine.die()
    said = capsys.readouterr().out
    assert ("but it says version 6" in said) == (version == "6") and ("1 differ" in said) == bool(changed)


def test_one_engine_without_a_manifest_is_no_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "verify", "--engine", "http://127.0.0.1:9"]) == 2
    assert main(["weights", "verify", "--engine", "http://127.0.0.1:9", "--manifest", "/nowhere.json"]) == 2
    assert "no manifest of committed weights" in capsys.readouterr().err


@given(st.integers(1, 40_000), st.integers(0, 40_000), st.sampled_from([0, 1, 8, 16_384, 32_768]))
def test_sums_show_a_byte_that_changed_and_two_that_changed_places(size: int, one: int, by: int) -> None:
    data_N = torch.randint(256, (1 + size,), dtype=torch.uint8)[1:]  # its words are not aligned
    told, places = cross_sums(data_N), torch.tensor([one % size, (one + by) % size])
    assert torch.equal(cross_sums(data_N.clone().view(torch.int8)), told)
    data_N[places] = data_N[places.flip(0)]
    assert torch.equal(cross_sums(data_N), told) == bool(data_N[places[0]] == data_N[places[1]])
    told = cross_sums(data_N)
    data_N[places[0]] ^= 1 << one % 8
    assert not torch.equal(cross_sums(data_N), told)


# -- NaN and Inf in every float type -------------------------------------------------------------------------------------


def is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor.to(torch.float64)).all())


@given(st.sampled_from(FLOATS), st.binary(min_size=8, max_size=64))
def test_any_bits_of_any_float_type_are_judged_as_torch_judges_them(dtype: torch.dtype, raw: bytes) -> None:
    whole = raw[: len(raw) // 8 * 8]
    tensor = torch.frombuffer(bytearray(whole), dtype=torch.uint8).view(dtype)
    assert bool(_finite_on_device(tensor)) == finite(tensor) == is_finite(tensor)


def test_all_bit_patterns_of_the_small_types() -> None:
    for dtype in (*SMALL, torch.float8_e8m0fnu):
        for pattern in range(256):
            tensor = torch.tensor([0, pattern], dtype=torch.uint8).view(dtype)
            assert finite(tensor) == is_finite(tensor), (dtype, pattern)


# -- a checkpoint read from disk ---------------------------------------------------------------------------------------

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
    with pytest.raises(ConfigError, match=r"tensor lm_head\.weight lies in another file"):
        list(checkpoint_tensors(folder))
    (folder / "model-00003.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0no json here ...")
    with pytest.raises(ConfigError, match=r"model-00003.* is it a safetensors file"):
        list(checkpoint_tensors(folder))
