"""What the weight sessions of tests give, and fake engines that take it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from r3channel.errors import WeightUpdateFailed
from r3channel.weights.session import WeightSync
from tests.fake_engine import FakeEngine

Weights = dict[str, torch.Tensor]
NAMES = [f"model.layers.{index}.mlp.gate.weight" for index in range(8)]
BUCKETS = 4
COMMIT = ["/pause_generation", "order/commit", "/continue_generation"]


def weights(version: int) -> Weights:
    """One kilobyte each; a bucket takes two."""
    return {name: torch.full((16, 16), float(10 * version + index)) for index, name in enumerate(NAMES)}


def serving() -> FakeEngine:
    """An engine with our half in it and the weights of version 0."""
    return FakeEngine(receives=weights(0))


def session(*engines: Any, **options: Any) -> WeightSync:
    """A connected one that stages."""
    values: dict[str, Any] = {"bucket_bytes": 2048, "staged": True, **options}
    opened = WeightSync([engine.url for engine in engines], **values)
    opened.connect(timeout_s=20)
    return opened


def broadcasting(*engines: Any, **options: Any) -> WeightSync:
    """A connected one that keeps a copy, compares, and broadcasts."""
    return session(*engines, **{"staged": False, "verify": True, "keep_copy": True, **options})


def give(sync: WeightSync, version: int, named: Iterable[Any] | None = None, *, timeout_s: float = 20) -> Any:
    """The report of an update to `weights(version)`, or to what is named."""
    return sync.update(
        weights(version).items() if named is None else named, version=version, timeout_s=timeout_s
    )


def refused(
    sync: WeightSync, version: int, why: str, named: Iterable[Any] | None = None, *,
    error: type[Exception] = WeightUpdateFailed, cause: type[BaseException] | None = None, timeout_s: float = 20,
) -> str:  # fmt: skip
    """What the error of such an update says."""
    with pytest.raises(error, match=why) as failure:
        give(sync, version, named, timeout_s=timeout_s)
    assert cause is None or isinstance(failure.value.__cause__, cause)
    return str(failure.value)


def holds(engine: FakeEngine, version: int) -> bool:
    """Whole weights of this version, under this version, and serving."""
    equal = all(torch.equal(engine.tensors[name], tensor) for name, tensor in weights(version).items())
    return equal and engine.version == str(version) and not engine.paused and not engine.open
