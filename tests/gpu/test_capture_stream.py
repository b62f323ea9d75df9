"""On a GPU: capture never synchronises the compute stream, and what it stages arrives. Not collected without one."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from r3channel.config import EngineConfig
from r3channel.engine.capture import LayerSelection
from r3channel.engine.delivery import Outlet
from r3channel.engine.staging import StagedCapturer
from r3channel.wire.frame import parse_frame
from r3channel.wire.hello import Hello
from tests.samples import SPEC, random_ids

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none")

BUSY_CYCLES = 400_000_000
"""About 0.2 s of a GPU's clock."""
HELLO = Hello(
    engine="e", boot_id=1, spec_digest=SPEC.digest, spec=SPEC.to_dict(), sglang="0.5.9", r3channel="0", hooks=(),
    delivery="inband", codec="auto",
)  # fmt: skip


def capturer() -> StagedCapturer:
    return StagedCapturer(
        SPEC,
        max_rows=64,
        fused_columns=0,
        slots=256,
        device="cuda",
        weight_version="0",
        local_range=lambda batch, graph, size: (0, batch.out_cache_loc.shape[0]),
        outlet=Outlet(EngineConfig(), HELLO),
    )


def batch_at(slots: list[int]) -> Any:
    mode = SimpleNamespace(is_decode=lambda: len(slots) == 1, is_mixed=lambda: False)
    return SimpleNamespace(out_cache_loc=torch.tensor(slots, device="cuda"), forward_mode=mode)


def capture(target: StagedCapturer, ids_TLK: np.ndarray) -> None:
    for moe_index, layer in enumerate(SPEC.moe_layers):
        target.capture(layer, torch.from_numpy(ids_TLK[:, moe_index].astype(np.int32)).cuda())


def warm(target: StagedCapturer, batch: Any) -> None:
    """Streams, kernels, and pinned blocks: those of passes that were written to the host cache lie in torch's pool again, so that
    what is timed later allocates none."""
    for _ in range(3):
        target.on_forward_end(batch, False, None)
    torch.cuda.synchronize()
    target.flush()
    assert not target._staged


def rows_of(target: StagedCapturer, slots: list[int]) -> np.ndarray:
    table = torch.tensor([[*slots, 0]], dtype=torch.int32, device="cuda")
    req = SimpleNamespace(
        rid="r", req_pool_idx=0, seqlen=len(slots) + 1, return_routed_experts=True, origin_input_ids=[1]
    )
    data = target.collect(req, SimpleNamespace(req_to_token=table))
    assert data is not None
    return parse_frame(data.numpy().tobytes(), spec=SPEC).decode()


def test_the_end_of_a_pass_does_not_wait_for_the_pass() -> None:
    target, batch = capturer(), batch_at([3, 4, 5])
    capture(target, random_ids(3))
    warm(target, batch)
    torch.cuda._sleep(BUSY_CYCLES)  # the pass is still running
    start_s = time.monotonic()
    target.on_forward_end(batch, False, None)
    spent_s = time.monotonic() - start_s
    assert not torch.cuda.current_stream().query(), "the compute stream has been waited for"
    assert spent_s < 0.05
    torch.cuda.synchronize()


def test_a_synchronisation_is_an_error_in_the_forward_thread() -> None:
    target, batch = capturer(), batch_at([3, 4, 5])
    capture(target, random_ids(3))
    warm(target, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        target.on_forward_end(batch, False, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_synchronisation_would_be_noticed() -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError):
            torch.ones(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_rows_arrive_although_the_device_buffer_is_overwritten_at_once() -> None:
    target, ids = capturer(), random_ids(40)
    for row in range(40):
        capture(target, ids[row : row + 1])
        target.on_forward_end(batch_at([row + 10]), False, None)
        target.device_ids_TAK.zero_()
    torch.cuda.synchronize()
    assert np.array_equal(rows_of(target, list(range(10, 50))), ids)


def test_a_finished_request_does_not_wait_for_the_pass_that_runs() -> None:
    # All tensors are made before the pass: a copy from pageable memory waits for what runs on its stream.
    target, ids, first, second = capturer(), random_ids(2), batch_at([5]), batch_at([6])
    warm(target, batch_at([7]))
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
    assert np.array_equal(rows_of(target, [5, 6]), ids)


def test_narrowing_is_captured_into_a_cuda_graph() -> None:
    selection = LayerSelection(SPEC, device="cuda")
    buffer = torch.zeros((8, SPEC.num_layers, SPEC.top_k), dtype=torch.int32, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        selection.narrow(buffer)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        ids_TLK = selection.narrow(buffer)
    buffer[:, list(SPEC.moe_layers)] = torch.from_numpy(random_ids(8).astype(np.int32)).cuda()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(ids_TLK.cpu(), torch.from_numpy(random_ids(8)))
