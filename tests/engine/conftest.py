"""Weights of the engines' model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.waits import UPDATE_S
from tests.support.weights import connected

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def original(model_dir: Path) -> Weights:
    return load_file(model_dir / "model.safetensors")


@pytest.fixture(scope="module")
def changed(original: Weights) -> Weights:
    noise = torch.Generator().manual_seed(7)
    return {
        name: w if "norm" in name else 0.5 * w + 0.1 * torch.randn(w.shape, generator=noise)
        for name, w in original.items()
    }


@pytest.fixture
def restored(engine_url: str, original: Weights) -> Iterator[None]:
    """The shared engine serves its first weights as version 0 again, however a test left it."""
    yield
    with connected([engine_url], verify=True) as repair:
        repair.update(original.items(), version=0, timeout_s=UPDATE_S)
