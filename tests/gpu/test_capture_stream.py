"""On a GPU: capture never synchronises the compute stream, and what it stages arrives. Not collected without one."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from r3channel.engine.capture import LayerSelection
from r3channel.engine.staging import StagedCapturer
from tests.gpu.checks.staged import batch_at, capture, capturer, rows_of
from tests.gpu.facts import silence
from tests.samples import SPEC, random_ids

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none")

BUSY_CYCLES = 400_000_000
"""About 0.2 s of a GPU's clock."""


def on_device(values: Any) -> torch.Tensor:
    return torch.as_tensor(values).cuda()


def warm(target: StagedCapturer, batch: Any) -> None:
    """Streams, kernels, and pinned blocks: those of passes that were written to the host cache lie in torch's pool again, so that
    what is timed later allocates none."""
    for _ in range(3):
        target.on_forward_end(batch, False, None)
    torch.cuda.synchronize()
    target.flush()
    assert not target._staged


def test_the_end_of_a_pass_does_not_wait_for_the_pass() -> None:
    target, batch = capturer("cuda"), batch_at(on_device([3, 4, 5]))
    capture(target, on_device(random_ids(3)))
    warm(target, batch)
    torch.cuda._sleep(BUSY_CYCLES)  # the pass is still running
    start_s = time.monotonic()
    target.on_forward_end(batch, False, None)
    spent_s = time.monotonic() - start_s
    assert not torch.cuda.current_stream().query(), "the compute stream has been waited for"
    assert spent_s < 0.05
    torch.cuda.synchronize()


def test_a_synchronisation_is_an_error_in_the_forward_thread() -> None:
    target, batch = capturer("cuda"), batch_at(on_device([3, 4, 5]))
    capture(target, on_device(random_ids(3)))
    warm(target, batch)
    with silence():
        target.on_forward_end(batch, False, None)


def test_a_synchronisation_would_be_noticed() -> None:
    with pytest.raises(RuntimeError), silence():
        torch.ones(1, device="cuda").item()


def test_a_finished_request_does_not_wait_for_the_pass_that_runs() -> None:
    # All tensors are made before the pass: a copy from pageable memory waits for what runs on its stream.
    target, ids, slots = capturer("cuda"), on_device(random_ids(2)), on_device([5, 6, 7])
    first, second, third = map(batch_at, slots.split(1))
    warm(target, third)
    capture(target, ids[:1])
    target.on_forward_end(first, False, None)
    torch.cuda.synchronize()
    capture(target, ids[1:])
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    target.on_forward_end(second, False, None)
    start_s = time.monotonic()
    target.flush()
    assert time.monotonic() - start_s < 0.05
    assert not torch.cuda.current_stream().query(), "the pass has been waited for"
    assert len(target._staged) == 1, "the pass that runs is left alone"
    torch.cuda.synchronize()
    assert np.array_equal(rows_of(target, slots[:2]), ids.cpu().numpy())


def test_narrowing_is_captured_into_a_cuda_graph() -> None:
    selection = LayerSelection(SPEC, device="cuda")
    buffer = torch.zeros((8, SPEC.num_layers, SPEC.top_k), dtype=torch.int32, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        selection.narrow(buffer)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        ids_TLK = selection.narrow(buffer)
    buffer[:, list(SPEC.moe_layers)] = on_device(random_ids(8)).int()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(ids_TLK.cpu(), torch.from_numpy(random_ids(8)))
