"""Names that SGLang 0.5.15.post1 imports wherever CUDA is (`layers/sampler.py:30`, `layers/attention/vision.py:47`); with the
backends that `tests.gpu.server` chooses it calls none of them."""

from __future__ import annotations

from typing import Any


def absent(*_: Any, **__: Any) -> None:
    raise NotImplementedError("flashinfer is not installed: this is its name alone")
