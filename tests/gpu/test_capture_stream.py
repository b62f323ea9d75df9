"""On a GPU: narrowing is part of a graph, and a synchronisation would be noticed. Not collected without one."""

from __future__ import annotations

import pytest
import torch

from r3channel.engine.capture import LayerSelection
from tests.gpu.facts import silence
from tests.support.samples import SPEC, random_ids

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none")


def test_a_synchronisation_would_be_noticed() -> None:
    with pytest.raises(RuntimeError), silence():
        torch.ones(1, device="cuda").item()


def test_narrowing_is_captured_into_a_cuda_graph() -> None:
    selection = LayerSelection(SPEC, device="cuda")
    buffer = torch.zeros((8, SPEC.num_layers, SPEC.top_k), dtype=torch.int32, device="cuda")
    ids_TLK = torch.empty(random_ids(8).shape, dtype=torch.uint8, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        selection.narrow(buffer, out=ids_TLK)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        selection.narrow(buffer, out=ids_TLK)
    buffer[:, list(SPEC.moe_layers)] = torch.from_numpy(random_ids(8)).cuda().int()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(ids_TLK.cpu(), torch.from_numpy(random_ids(8)))
