"""On one GPU: the host fills a bucket while another is sent, and digests are computed on the device. Not collected without CUDA.

Rows that go this way to routers: the checks `pair`, over NCCL, and `staging`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from r3channel.relay.send_buffers import DeviceStaging
from r3channel.wire.digest import HostRuns, TorchRuns, column_digests, column_digests_torch
from tests.gpu.facts import silence
from tests.support.samples import SPEC, random_ids

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none")

SLOW_CYCLES = 20_000_000
"""About 10 ms of a GPU's clock."""


def test_the_host_stages_the_next_bucket_while_one_is_being_sent() -> None:
    """A stream stands in for NCCL's kernels, ordered after the staging stream as ProcessGroupNCCL orders its own."""
    staging, size, sending = DeviceStaging(device=0), 1 << 20, torch.cuda.Stream()
    with staging.turn(lambda: None, every_s=1.0):
        for slot, buffer_N in enumerate(staging.buffers(size)):
            buffer_N[:] = slot + 1
            staging.staged(slot, size)  # makes its memory
        torch.cuda.synchronize()
        bucket_N = staging.staged(0, size)
        sending.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(sending):
            torch.cuda._sleep(SLOW_CYCLES)
            sent_N = bucket_N.clone()
        staging.staged(1, size)
        assert not sending.query(), "the host waited for the send"
        sending.synchronize()
    assert sent_N.unique().tolist() == [1]


def on_device(values: Any) -> torch.Tensor:
    return torch.from_numpy(values).cuda()


def test_digests_on_the_device_are_those_of_the_host_and_wait_for_nothing() -> None:
    rows_RK = np.ascontiguousarray(random_ids(40)[:, 0])
    runs_N5 = np.array([[0, 3, 0, 2, 10], [1, 0, 1, 2, 10], [2, 7, 20, 1, 15]], np.int64)
    runs = TorchRuns.of(runs_N5, rows=40, samples=3, spec=SPEC, tensor=on_device)
    ids_RK = on_device(rows_RK)
    torch.cuda.synchronize()
    with silence():
        found_S = column_digests_torch(ids_RK, runs)
    wanted_S = column_digests(rows_RK, HostRuns.of(runs_N5, samples=3, spec=SPEC))
    assert np.array_equal(found_S.cpu().numpy().view(np.uint64), wanted_S)
