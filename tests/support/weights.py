"""What the weight sessions of tests give, and fake engines that take it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from r3channel.errors import WeightUpdateFailed
from r3channel.weights import hold, rank_link, staged_copy
from r3channel.weights.checksums import cross_sums, host_bytes, tensor_digest
from r3channel.weights.engine import EngineHandle
from r3channel.weights.session import WeightSync
from tests.support.fake_engine import FakeEngine
from tests.support.waits import UPDATE_S

Weights = dict[str, torch.Tensor]
NAMES = [f"model.layers.{index}.mlp.gate.weight" for index in range(8)]
COMMIT = ["/pause_generation", "order/commit", "/continue_generation"]


def weights(version: int) -> Weights:
    """One kilobyte each; a bucket takes two."""
    return {name: torch.full((16, 16), float(10 * version + index)) for index, name in enumerate(NAMES)}


def serving() -> FakeEngine:
    """An engine with our half in it and the weights of version 0."""
    return FakeEngine(receives=weights(0))


def session(*engines: Any, **options: Any) -> WeightSync:
    """A connected one that stages."""
    joint: dict[str, Any] = (
        {"make": WeightSync.sharded, "group": None} if options.get("wire") == "gloo" else {}
    )
    values = {"bucket_bytes": 2048, "staged": True, **joint, **options}
    return connected([engine.url for engine in engines], **values)


def connected(
    urls: list[Any], *, make: Callable[..., WeightSync] = WeightSync.whole, **options: Any
) -> WeightSync:
    opened = make(urls, **options)
    opened.connect(timeout_s=UPDATE_S)
    return opened


def checksums(*urls: str) -> list[list[dict[str, str]]]:
    """What each engine's own checker says of its parameters, by rank."""
    return [EngineHandle(url).weight_checksums(timeout_s=UPDATE_S) for url in urls]


def broadcasting(*engines: Any, **options: Any) -> WeightSync:
    """A connected one that broadcasts."""
    return session(*engines, **{"staged": False, **options})


def give(sync: WeightSync, version: int, named: Iterable[Any] | None = None, *, timeout_s: float = 60) -> Any:
    """The report of an update to `weights(version)`, or to what is named."""
    return sync.update(
        weights(version).items() if named is None else named, version=version, timeout_s=timeout_s
    )


def in_gpu_memory(patch: pytest.MonkeyPatch) -> None:
    """For `cuda_ipc`: memory of this process for a GPU's, hashed as there, and its number for a handle."""
    flats = list[torch.Tensor]()
    patch.setattr(staged_copy, "gpu_lacks", lambda *_: "")
    patch.setattr(staged_copy, "ipc_handle", lambda flat: [flats.append(flat) or len(flats) - 1])
    patch.setattr(staged_copy, "ipc_memory", lambda told: flats[told[0]])
    for module in (hold, staged_copy, rank_link):
        patch.setattr(module, "hashed_bytes", lambda flat, **_: host_bytes(cross_sums(flat)))
    patch.setattr(staged_copy, "_copy", lambda new, kept: tensor_digest(cross_sums(new.copy_(kept))))


def refused(
    sync: WeightSync, version: int, why: str, named: Iterable[Any] | None = None, *,
    error: type[Exception] = WeightUpdateFailed, cause: type[BaseException] | None = None, timeout_s: float = 60,
) -> str:  # fmt: skip
    """What the error of such an update says."""
    with pytest.raises(error, match=why) as failure:
        give(sync, version, named, timeout_s=timeout_s)
    assert cause is None or isinstance(failure.value.__cause__, cause)
    return str(failure.value)


def holds(engine: FakeEngine, version: int, wanted: Weights | None = None) -> bool:
    """Whole weights of this version, or those that are wanted, under this version, and serving."""
    wanted = weights(version) if wanted is None else wanted
    equal = all(torch.equal(engine.tensors[name], tensor) for name, tensor in wanted.items())
    return equal and engine.version == str(version) and not engine.paused and not engine.open


def as_engine_keeps(weights: Weights) -> Weights:
    """Hugging Face tensors under SGLang's names: q, k, v and gate, up fused, experts stacked."""
    kept, experts = Weights(), dict[str, list[torch.Tensor]]()
    for name in sorted(weights, key=_numbers):
        head, _, module = name.removesuffix(".weight").rpartition(".")
        if module in ("k_proj", "v_proj", "up_proj"):
            continue  # with the first one of those that are fused
        parts = {"q_proj": ("q_proj", "k_proj", "v_proj"), "gate_proj": ("gate_proj", "up_proj")}.get(module)
        whole = torch.cat([weights[f"{head}.{part}.weight"] for part in parts]) if parts else weights[name]
        if ".experts." in name:
            stack = f"{head.rpartition('.')[0]}.{'w2' if module == 'down_proj' else 'w13'}_weight"
            experts.setdefault(stack, []).append(whole)
        else:
            fused = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}.get(module)
            kept[f"{head}.{fused}.weight" if fused else name] = whole
    return kept | {name: torch.stack(parts) for name, parts in experts.items()}


def _numbers(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
