"""On one GPU: rows go through two pinned and two device buckets, arrive as they were, and are judged on the device.

NCCL between relay and trainer needs a GPU for each; here a stream of the same GPU stands in for its kernels, ordered after
the staging stream as ProcessGroupNCCL orders its own. Not collected without CUDA.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from r3channel.config import ChannelConfig
from r3channel.errors import DigestMismatch
from r3channel.plan.layout import TrainerLayout
from r3channel.relay import row_server
from r3channel.relay.relay import Relay
from r3channel.relay.send_buffers import DeviceStaging
from r3channel.trainer import relay_connection as member
from r3channel.trainer.receiver import Receiver
from r3channel.transport.base import Pending, Rendezvous, Transport
from r3channel.wire.digest import HostRuns, TorchRuns, column_digests, column_digests_torch
from tests.gpu.facts import silence
from tests.support.delivery import check_rows, sealed
from tests.support.samples import SPEC, random_ids

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none")

BUCKET_BYTES = 1024
LIMIT_S = 30.0
SLOW_CYCLES = 20_000_000
"""About 10 ms of a GPU's clock per message."""


class Deferred:
    """A `Pending` that does everything in its wait."""

    def __init__(self, run: Callable[[float], object]) -> None:
        self._run = run

    def wait(self, *, timeout_s: float) -> None:
        self._run(timeout_s)


class OneDevice(Transport):
    """Both ends of a group: what is given to send is copied late, on a stream of its own, and received on the device."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.sent: queue.SimpleQueue[tuple[torch.Tensor, Any]] = queue.SimpleQueue()

    def start_send(self, dst: int, data_N: torch.Tensor) -> Pending:
        assert data_N.is_cuda, "on the host"
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(SLOW_CYCLES)
            copied = data_N.clone()
            done = self.stream.record_event()
        self.sent.put((copied, done))
        return Deferred(lambda timeout_s: done.synchronize())

    def start_recv(self, src: int, out_N: torch.Tensor) -> Pending:
        assert out_N.is_cuda, "on the host"
        free = torch.cuda.current_stream().record_event()

        def run(timeout_s: float) -> None:
            copied, done = self.sent.get(timeout=timeout_s)
            done.synchronize()
            with torch.cuda.stream(self.stream):
                self.stream.wait_event(free)  # as NCCL does: what was there was placed
                out_N.copy_(copied)
            torch.cuda.current_stream().wait_stream(self.stream)

        return Deferred(run)

    def abort(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> OneDevice:
    """What both sides join."""
    group = OneDevice()

    def join(rendezvous: Rendezvous, *, timeout_s: float) -> Transport:
        assert rendezvous.backend == "nccl"
        return group

    monkeypatch.setattr(row_server, "join", join)
    monkeypatch.setattr(member, "join", join)
    monkeypatch.setattr(member, "gpu_of", lambda: "one of its own")  # else it is refused: it is the relay's
    return group


@pytest.mark.parametrize("layout", ["dp=1", "dp=1,packing=thd"])
def test_rows_arrive_through_two_buckets_for_a_router_on_the_device(group: OneDevice, layout: str) -> None:
    config = ChannelConfig(transport="nccl", bucket_bytes=BUCKET_BYTES, step_timeout_s=LIMIT_S)
    relay = Relay(SPEC, TrainerLayout.parse(layout), config)
    at, device = relay.layout.coords(0), torch.device("cuda", 0)
    receiver = Receiver(relay, spec=SPEC, layout=relay.layout, coords=at, config=config, device=device)
    shard = receiver.receive(sealed(relay))
    relay.join_previous(timeout_s=LIMIT_S)
    row_bytes = SPEC.num_moe_layers * SPEC.top_k
    assert relay.row_server.peak_staging_bytes == 2 * (BUCKET_BYTES // row_bytes) * row_bytes
    assert check_rows(shard) > 0
    layer = shard.shard.layers[-1]
    changed_RK = shard.layer_ids(0, layer).clone()
    changed_RK[0] = changed_RK[0].roll(1)
    shard.check_digest(0, layer, changed_RK)
    with pytest.raises(DigestMismatch, match=f"decoder layer {layer}"):
        shard.verified()
    receiver.close()
    relay.close()


def test_the_host_stages_the_next_bucket_while_one_is_being_sent(group: OneDevice) -> None:
    staging, size = DeviceStaging(device=0), 1 << 20
    with staging.turn(lambda: None, every_s=1.0):
        warming = group.start_send(1, staging.staged(0, len(staging.buffers(size)[0])))
        warming.wait(timeout_s=LIMIT_S)
        group.sent.get(timeout=LIMIT_S)
        for slot, buffer_N in enumerate(staging.buffers(size)):
            buffer_N[:] = slot + 1
            staging.staged(slot, size)
        torch.cuda.synchronize()
        pending = group.start_send(1, staging.staged(0, size))
        staging.staged(1, size)
        assert not group.stream.query(), "the host waited for the send"
        pending.wait(timeout_s=LIMIT_S)
    copied, _ = group.sent.get(timeout=LIMIT_S)
    assert copied.unique().tolist() == [1]


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
