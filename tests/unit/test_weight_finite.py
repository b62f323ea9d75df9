"""NaN and Inf are found in every float type."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from r3channel.weights.pack import _finite_on_device, finite

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
