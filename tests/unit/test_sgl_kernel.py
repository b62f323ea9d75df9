"""The CPU stand-in of sgl_kernel against what each kernel does, written out as loops over single numbers."""

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


def request_table(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows of three requests, the table of slots, their lengths)."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randperm(POOL * CONTEXT, generator=generator).view(POOL, CONTEXT).int()
    return torch.randperm(POOL, generator=generator)[:3], table, drawn(seed)(0, 50, 3)


@SEEDS
def test_a_draft_gets_the_slots_behind_its_request(seed: int) -> None:
    rows, table, lengths = request_table(seed)
    out = torch.full((3 * 4,), -1)
    kernels.assign_draft_cache_locs_contiguous_cpu(rows, table, lengths, out, CONTEXT, 1, 4)
    expected = []
    for request in range(3):
        for step in range(4):
            expected.append(int(table[rows[request], lengths[request] + step]))
    assert out.tolist() == expected


@SEEDS
def test_slots_of_several_windows_lie_one_behind_the_other(seed: int) -> None:
    rows, table, start = request_table(seed)
    end = start + drawn(seed + 100)(0, 6, 3)
    out = torch.full((20,), -7)
    kernels.assign_extend_cache_locs_cpu(rows, table, start, end, out, CONTEXT)
    expected = []
    for request in range(3):
        for position in range(int(start[request]), int(end[request])):
            expected.append(int(table[rows[request], position]))
    assert out.tolist() == expected + [-7] * (20 - len(expected))


@pytest.mark.parametrize("drafted", [1, 3, 5])
@SEEDS
def test_a_chain_is_the_tree_of_its_parents(seed: int, drafted: int) -> None:
    nodes, lengths = drafted + 1, drawn(seed)(0, 50, 3)
    # As SGLang describes a chain: the k-th choice was made after the (k - 1)-th, the first after the root.
    parents, chosen = torch.arange(-1, drafted - 1).repeat(3, 1), torch.arange(drafted).repeat(3, 1)
    mask = torch.ones(3 * nodes * nodes, dtype=torch.bool)
    positions = torch.empty(3 * nodes, dtype=torch.long)
    index, following, sibling = torch.full((3, 3, nodes), -1)
    kernels.build_tree_kernel_efficient_cpu(
        parents, chosen, lengths, mask, positions, index, following, sibling, 1, drafted, nodes, 1
    )
    for request in range(3):
        for node in range(nodes):
            path = ancestors(node, parents[request].tolist(), chosen[request].tolist())
            assert positions[request * nodes + node] == lengths[request] + len(path)
            assert index[request, node] == request * nodes + node
            children = [
                other
                for other in range(1, nodes)
                if ancestors(other, parents[request].tolist(), chosen[request].tolist())[0] == node
            ]
            assert following[request, node] == (children[0] if children else -1)
            assert len(children) <= 1 and sibling[request, node] == -1
            seen = mask.view(3, nodes, nodes)[request, node]
            assert [other for other in range(nodes) if seen[other]] == sorted([*path, node])


def ancestors(node: int, parents: list[int], chosen: list[int]) -> list[int]:
    """From the parent up to the root, which is node 0."""
    path = []
    while node:
        place = chosen[node - 1]  # with top-k 1 a choice is its own place in the list of parents
        node = 0 if place == 0 else chosen.index(parents[place]) + 1
        path.append(node)
    return path


@pytest.mark.parametrize("change", [{"topk": 2}, {"mode": 0}], ids=str)
def test_a_tree_with_branches_or_another_mask_is_refused(change: dict[str, int]) -> None:
    asked = {"topk": 1, "mode": 1} | change
    empty = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(RuntimeError, match="builds chains"):
        kernels.build_tree_kernel_efficient_cpu(*([empty] * 8), asked["topk"], 1, 2, asked["mode"])


@SEEDS
def test_a_chain_is_accepted_as_long_as_the_target_agrees(seed: int) -> None:
    nodes, requests, draw = 4, 6, drawn(seed)
    candidates, target = draw(0, 3, requests, nodes), draw(0, 3, requests, nodes)
    target[0, :-1] = candidates[0, 1:]  # all agree
    index = torch.arange(requests * nodes).view(requests, nodes)
    following = torch.tensor([1, 2, 3, -1]).repeat(requests, 1)
    predicts = torch.full((requests * nodes,), -5, dtype=torch.int32)
    accepted = torch.full((requests, nodes), -1, dtype=torch.int32)
    counts = torch.empty(requests, dtype=torch.int32)
    kernels.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=counts,
        candidates=candidates,
        retrive_index=index,
        retrive_next_token=following,
        retrive_next_sibling=torch.full_like(following, -1),
        target_predict=target,
    )
    for request in range(requests):
        node, count = 0, 0
        said, kept = [-5] * nodes, [0]
        while (child := int(following[request, node])) != -1:
            if candidates[request, child] != target[request, node]:
                break
            said[node] = int(target[request, node])
            node, count = child, count + 1
            kept.append(node)
        said[node] = int(target[request, node])
        assert predicts[request * nodes : (request + 1) * nodes].tolist() == said
        places = [request * nodes + node for node in kept]
        assert accepted[request].tolist() == places + [-1] * (nodes - len(places))
        assert counts[request] == count
    assert counts[0] == nodes - 1


def test_a_draft_with_a_sibling_is_refused() -> None:
    nodes = torch.zeros(1, 2, dtype=torch.long)
    names = ("predicts", "accept_index", "accept_token_num", "candidates", "retrive_index", "target_predict")
    with pytest.raises(RuntimeError, match="has a sibling"):
        kernels.verify_tree_greedy_cpu(
            **dict.fromkeys(names, nodes), retrive_next_token=nodes, retrive_next_sibling=nodes
        )


@SEEDS
def test_the_root_of_the_next_chain_is_the_last_accepted_token(seed: int) -> None:
    tokens, lengths = drawn(seed)(0, 500, 5, 4), drawn(seed + 1)(1, 5, 5)
    out = torch.empty(5, dtype=torch.int32)
    kernels.fill_bonus_tokens_cpu(tokens, lengths, out, 4)
    assert out.tolist() == [int(tokens[request, lengths[request] - 1]) for request in range(5)]


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
