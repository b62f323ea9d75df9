"""What is hashed, kept, written and looked through on the trainer's side of a weight update. No engine."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from r3channel.cli import main
from r3channel.errors import ManifestMismatch, WeightsCorrupt
from r3channel.tools.weights import compare
from r3channel.weights.checksums import EngineChecksums, tensor_checksum
from r3channel.weights.convert import te_name
from r3channel.weights.manifest import Bucket, TensorMeta, fill_buckets
from r3channel.weights.pack import Packer, _finite_on_device, finite, first_nonfinite
from r3channel.weights.progress import Deadline, Run
from r3channel.weights.stages import Given
from r3channel.weights.store import HeldWeights, HostCopy
from tests.fake_engine import FakeEngine

Named = dict[str, torch.Tensor]


def packed(named: Named) -> tuple[Bucket, torch.Tensor]:
    bucket = Bucket.of([TensorMeta.of(name, tensor) for name, tensor in named.items()])
    return bucket, Packer(torch.device("cpu"), look=False).pack(
        0, bucket, [named[name] for name in bucket.names], Run(Deadline(9, ""))
    )


def nonfinite(named: Named) -> TensorMeta | None:
    bucket, payload = packed(named)
    return first_nonfinite(bucket.placed, payload)


def sha(*tensors: torch.Tensor) -> str:
    whole = b"".join(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(whole).hexdigest()[:16]


def test_fused_parameters_are_hashed_in_the_engines_order_whatever_order_the_parts_come_in() -> None:
    head = "model.layers.0"
    parts = {
        name: torch.randn(3, 4) for name in ("q", "k", "v", "gate", "up", "g0", "u0", "d0", "g1", "u1", "d1")
    }
    sums = EngineChecksums()
    given = {
        f"{head}.self_attn.v_proj.weight": "v", f"{head}.self_attn.q_proj.weight": "q",
        f"{head}.self_attn.k_proj.weight": "k", f"{head}.mlp.up_proj.weight": "up", f"{head}.mlp.gate_proj.weight": "gate",
        f"{head}.mlp.experts.1.up_proj.weight": "u1", f"{head}.mlp.experts.1.down_proj.weight": "d1",
        f"{head}.mlp.experts.1.gate_proj.weight": "g1", f"{head}.mlp.experts.0.up_proj.weight": "u0",
        f"{head}.mlp.experts.0.gate_proj.weight": "g0", f"{head}.mlp.experts.0.down_proj.weight": "d0",
    }  # fmt: skip
    for name, part in given.items():
        sums.add(name, parts[part])
    p = parts
    assert sums.result() == {
        f"{head}.self_attn.qkv_proj.weight": sha(p["q"], p["k"], p["v"]),
        f"{head}.mlp.gate_up_proj.weight": sha(p["gate"], p["up"]),
        f"{head}.mlp.experts.w13_weight": sha(p["g0"], p["u0"], p["g1"], p["u1"]),
        f"{head}.mlp.experts.w2_weight": sha(p["d0"], p["d1"]),
    }


def test_a_part_without_its_fellows_keeps_its_own_name() -> None:
    """DeepSeek-V2-Lite has q_proj without k_proj, and kv_a_proj_with_mqa without q_a_proj."""
    sums = EngineChecksums()
    named = {f"a.{part}.weight": torch.randn(2) for part in ("q_proj", "kv_a_proj_with_mqa")}
    for name, tensor in named.items():
        sums.add(name, tensor)
    assert sums.result() == {name: tensor_checksum(tensor) for name, tensor in named.items()}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_the_tensor_with_a_number_that_is_none_is_named(dtype: torch.dtype, bad: float) -> None:
    if dtype is torch.float8_e4m3fn:
        bad = float("nan")  # it has no infinity
    named = {
        "ids": torch.arange(5), "empty": torch.zeros(0, dtype=dtype), "a": torch.ones(7, dtype=dtype),
        "b": torch.ones(9).to(dtype), "scalar": torch.tensor(1.0).to(dtype),
    }  # fmt: skip
    assert nonfinite(named) is None
    named["b"] = torch.tensor([1.0] * 8 + [bad]).to(dtype)
    found = nonfinite(named)
    assert found is not None and found.name == "b"


def test_large_finite_numbers_are_no_infinity() -> None:
    assert nonfinite({"a": torch.full((1000,), torch.finfo(torch.bfloat16).max).bfloat16()}) is None


def test_the_host_copy_gives_the_committed_bytes_while_the_next_version_is_copied() -> None:
    copy, given = HostCopy(), Given.whole(fill_buckets([TensorMeta.of("a", torch.zeros(4))], cap_bytes=64))
    assert copy.version is None and list(copy.read()) == []
    for version in (1, 2):
        put = copy.put(0, torch.full((4,), float(version)))
        if version == 1:
            copy.commit(1, given)
    ((held,),) = copy.read()
    assert held.tolist() == [1.0] * 4 and put.tolist() == [2.0] * 4
    assert copy.put(0, torch.zeros(4)) is put  # the memory is used again
    assert copy.put(0, torch.zeros(5)) is not put
    held[3] += 1
    with pytest.raises(WeightsCorrupt, match=r"tensor a float32\[4\] of the host copy of version 1 changed"):
        next(copy.read())


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
    found = compare(
        {"same": "1", "other": "2", "lost": "3"}, {"same": "1", "other": "9", "extra": "4"}, engine="e"
    )
    assert [(row.name, row.expected, row.found) for row in found] == [
        ("extra", None, "4"), ("lost", "3", None), ("other", "2", "9"),
    ]  # fmt: skip


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


def test_norms_of_latent_attention_have_other_names() -> None:
    name = "decoder.layers.1.input_layernorm.weight"
    assert te_name(name, latent=True) == name
    assert te_name(name) == "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"


# -- NaN and Inf in every float type -------------------------------------------------------------------------------------

FLOATS = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


def is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor.to(torch.float64)).all())


@given(st.sampled_from(FLOATS), st.binary(min_size=8, max_size=64))
def test_any_bits_of_any_float_type_are_judged_as_torch_judges_them(dtype: torch.dtype, raw: bytes) -> None:
    whole = raw[: len(raw) // 8 * 8]
    tensor = torch.frombuffer(bytearray(whole), dtype=torch.uint8).view(dtype)
    assert bool(_finite_on_device(tensor)) == finite(tensor) == is_finite(tensor)


def test_all_bit_patterns_of_the_small_types() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for pattern in range(256):
            tensor = torch.tensor([0, pattern], dtype=torch.uint8).view(dtype)
            assert finite(tensor) == is_finite(tensor), (dtype, pattern)


def test_strided_views_empty_tensors_and_integers_pass() -> None:
    wide = torch.full((4, 6), float("inf"))
    assert not finite(wide)
    wide[:, ::2] = 1.0
    assert all(map(finite, (wide[:, ::2], torch.empty(0), torch.ones(3).long())))
