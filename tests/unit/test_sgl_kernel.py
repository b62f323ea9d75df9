"""The CPU stand-in of sgl_kernel against what each kernel does, written out as loops over single numbers.

Where slots and chains of drafts lie is held against transformers by tests/engine/test_speculative.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

CHAINS = Path(__file__).parents[2] / "examples" / "embedded" / "shims" / "sgl_kernel" / "chains.py"
POOL, CONTEXT = 5, 64
SEEDS = pytest.mark.parametrize("seed", range(8))


def load(file: Path) -> ModuleType:
    """By file: the folder is on the path of embedded children only."""
    spec = importlib.util.spec_from_file_location("sgl_kernel_chains", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kernels = load(CHAINS)


def drawn(seed: int) -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda low, high, *shape: torch.randint(low, high, shape, generator=generator)


@pytest.mark.parametrize("change", [{"topk": 2}, {"mode": 0}], ids=str)
def test_a_tree_with_branches_or_another_mask_is_refused(change: dict[str, int]) -> None:
    asked = {"topk": 1, "mode": 1} | change
    empty = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(RuntimeError, match="builds chains"):
        kernels.build_tree_kernel_efficient_cpu(*([empty] * 8), asked["topk"], 1, 2, asked["mode"])


def test_a_draft_with_a_sibling_is_refused() -> None:
    nodes = torch.zeros(1, 2, dtype=torch.long)
    names = ("predicts", "accept_index", "accept_token_num", "candidates", "retrive_index", "target_predict")
    with pytest.raises(RuntimeError, match="has a sibling"):
        kernels.verify_tree_greedy_cpu(
            **dict.fromkeys(names, nodes), retrive_next_token=nodes, retrive_next_sibling=nodes
        )


@SEEDS
def test_slots_are_copied_in_every_layer_and_read_before_they_are_written(seed: int) -> None:
    layers = [drawn(seed + layer)(0, 256, 12, 3 + layer).to(torch.uint8) for layer in range(3)]
    generator = torch.Generator().manual_seed(seed)
    source, place = (torch.randperm(12, generator=generator)[:5] for _ in range(2))
    expected = []
    for layer in layers:
        after = [row.tolist() for row in layer]
        for at, take in zip(place.tolist(), source.tolist(), strict=True):
            after[at] = layer[take].tolist()
        expected.append(after)
    kernels.copy_all_layer_kv_cache_cpu(
        torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64),
        torch.tensor([layer.shape[1] for layer in layers]),
        place,
        source,
    )
    assert [layer.tolist() for layer in layers] == expected
