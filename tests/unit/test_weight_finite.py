"""NaN and Inf are found in every float type, and named."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from r3channel.errors import NonFiniteWeights
from r3channel.weights.pack import _finite_on_device, check_finite

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
    assert bool(_finite_on_device(tensor)) == is_finite(tensor)
    if is_finite(tensor):
        check_finite([("w", tensor)], where="bucket 0")
    else:
        with pytest.raises(NonFiniteWeights, match=r"bucket 0: tensor w"):
            check_finite([("w", tensor)], where="bucket 0")


def test_all_bit_patterns_of_the_small_types() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for pattern in range(256):
            tensor = torch.tensor([0, pattern], dtype=torch.uint8).view(dtype)
            judged = True
            try:
                check_finite([("w", tensor)], where="")
            except NonFiniteWeights:
                judged = False
            assert judged == is_finite(tensor), (dtype, pattern)


def test_the_first_bad_tensor_is_named_with_its_type_and_how_many_follow() -> None:
    bad = torch.tensor([[1.0, float("-inf")]], dtype=torch.bfloat16)
    named = [("a", torch.ones(3)), ("b", bad), ("c", torch.tensor(float("nan"))), ("d", torch.ones(2).int())]
    with pytest.raises(NonFiniteWeights, match=r"bucket 7: tensor b \(torch\.bfloat16\).*as do 1 more"):
        check_finite(named, where="bucket 7")


def test_strided_views_empty_tensors_and_integers_pass() -> None:
    wide = torch.full((4, 6), float("inf"))
    wide[:, ::2] = 1.0
    check_finite([("w", wide[:, ::2]), ("e", torch.empty(0)), ("i", torch.ones(3).long())], where="")
