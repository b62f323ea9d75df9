"""Twenty thousand buckets and two hundred reconnections leave memory, descriptors, threads and shared memory where they were.

A real relay and a trainer's receiver over gloo in one process, so that what either keeps counts, looked at after every few
steps. Descriptors, threads and shared memory have to be equal. Memory moves a little by itself: the second half is cut into
blocks, a slope is fitted to each, and their mean is compared with its own standard error. What is kept once raises the slope of
one block, and the error with it; a leak raises all of them.

And a sample of 131,072 tokens over four context-parallel ranks: every row at its router, and no memory beside the rows. The ranks
are threads of one process, so that what the kernel counts is the relay's and theirs together. The shape is that of
Qwen3-30B-A3B. A router here only takes its ids, as `ReplayDriver` does for it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from r3channel.config import ChannelConfig
from r3channel.observe.stage_clock import StageClock
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.relay.relay import Relay
from r3channel.trainer.rank_shard import RankShard
from r3channel.trainer.receiver import Receiver
from r3channel.trainer.router import RouterHandle
from r3channel.trainer.step import ReplayStep
from r3channel.transport.process_group import ProcessGroupTransport
from r3channel.wire.frame import encode_frame
from tests.support.children import printed
from tests.support.delivery import MakeRelay, hand, lives, receive, receivers_of, relays
from tests.support.memory import growth_of, resident
from tests.support.samples import SPEC, frame_of, sparse
from tests.support.waits import JOB_S

BUCKETS, STEPS, LOOKS = 20, 5, 200
"""Buckets of a step; steps from one look to the next; looks."""
ERRORS, LEAST_BYTES, MOST_BYTES = 4.0, 16, 200
"""A slope of so many standard errors is a leak, unless it is below so many bytes a bucket: the allocator takes them to settle.
It is no answer where the errors could hide so many."""


def held() -> list[int]:
    """Bytes of memory; descriptors, threads, bytes of shared memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return [
        resident("VmRSS"),
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        resident("RssShmem"),
    ]


def run() -> None:
    start_send, sent, seen = ProcessGroupTransport.start_send, [0, 0], list[list[int]]()

    def counted(self: ProcessGroupTransport, dst: int, data_N: Any) -> Any:
        sent[0] += len(data_N) > 1  # not the byte of a join
        if len(data_N) > 1 and sent[0] % (BUCKETS * STEPS) == BUCKETS // 2:
            sent[1] += 1
            self.abort()  # gloo closes its sockets in the middle of a step's rows
        return start_send(self, dst, data_N)

    ProcessGroupTransport.start_send = counted
    config, layout = ChannelConfig(transport="gloo", bucket_bytes=1024), TrainerLayout()
    # Of the newest spans a clock keeps a hundred thousand by default, 20 MB: it is full when this run is over.
    clocks = [StageClock(role, max_spans=1000) for role in ("relay", "trainer")]
    frame = frame_of(tokens := BUCKETS * 1024 // SPEC.bytes_per_token + 1)
    options: dict[str, Any] = {"layout": layout, "config": config, "clock": clocks[1]}
    with (
        closing(Relay(SPEC, layout, config, clock=clocks[0])) as relay,
        closing(Receiver(relay, spec=SPEC, coords=layout.coords(0), **options)) as receiver,
    ):
        for number in range(STEPS * LOOKS):
            relay.add_frame("a", frame, range(tokens))
            hand(receiver.receive(relay.seal(number, Assignment.given([[["a"]]]))))
            relay.join_previous()
            if number % STEPS == STEPS - 1:
                seen.append(held())
        print(json.dumps([*sent, *lives(relay), seen]))


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.timeout(900)
def test_twenty_thousand_buckets_and_two_hundred_reconnections_leave_nothing_behind() -> None:
    buckets, cuts, connections, seen = json.loads(printed("-m", __name__, limit_s=JOB_S).splitlines()[-1])
    assert buckets >= BUCKETS * STEPS * LOOKS and connections == cuts + 1 > LOOKS
    memory, *others = zip(*seen[LOOKS // 2 :], strict=True)
    blocks = np.split(np.array(memory, float), 10)
    slopes = [np.polyfit(range(len(block)), block, 1)[0] / STEPS / BUCKETS for block in blocks]
    mean, error = np.mean(slopes), np.std(slopes, ddof=1) / len(slopes) ** 0.5
    told = f"memory grows by {mean:.0f} +- {error:.0f} bytes a bucket; descriptors, threads, shared memory: {others}"
    assert mean < max(ERRORS * error, LEAST_BYTES), told
    assert ERRORS * error < MOST_BYTES, f"too noisy to tell: {told}"
    assert all(max(each) == min(each) for each in others), told


# -- a long sample -------------------------------------------------------------------------------------------------------

LONG = sparse(48, experts=128, top_k=8)
MIB = 1 << 20
MARGIN = 24 * MIB
"""Four receivers' buckets of 1 MiB, two alive at each end, row maps of one layer's size, and what the allocator keeps."""


@pytest.mark.full
def test_131072_tokens_reach_their_routers_in_the_memory_of_their_rows() -> None:
    """The relay holds the rows once and the receivers once; what is beside them does not grow with the tokens."""
    beside = []
    for tokens in (32_768, 131_072):
        beside.append(growth_of(long_sample, tokens).peak - 2 * (tokens - 1) * LONG.bytes_per_token)
    assert max(beside) < MARGIN and beside[1] < beside[0] + 8 * MIB, [size / MIB for size in beside]


def long_sample(tokens: int) -> Iterator[None]:
    torch.set_num_threads(1)
    with relays() as make:
        deliver(make, 2048, long_frame(2048))  # threads, kernels and pools that stay
        frame = long_frame(tokens)
        yield
        deliver(make, tokens, frame)
        yield


def long_frame(tokens: int) -> bytes:
    """Distinct experts from one random byte for each layer: the rows of a long sample need no more memory than themselves."""
    rng, shape = np.random.default_rng(tokens), (tokens - 1, LONG.num_moe_layers, 1)
    offsets_TL1 = rng.integers(0, 256, shape, np.uint8)
    steps_K = np.arange(LONG.top_k, dtype=np.uint8) * 3
    return encode_frame(LONG, expert_ids_TLK=(offsets_TL1 + steps_K) % np.uint8(LONG.num_experts))


def deliver(make: MakeRelay, tokens: int, frame: bytes) -> None:
    relay = make("cp=4", spec=LONG, bucket_bytes=1 << 20)
    receivers = receivers_of(relay)
    relay.add_frame("long", frame, range(tokens))
    shards = receive(receivers, relay.seal(0, Assignment.given([[["long"]]])))
    for shard in shards:
        replay(shard)
    assert sum(int(shard.counted_rows(0).sum()) for shard in shards) == tokens - 1


def replay(shard: RankShard) -> None:
    """Every router of a rank takes its rows in two passes, in which they are held against the engine's digests."""
    router = {
        "module": torch.nn.Identity(), "replay": None, "top_k": LONG.top_k, "num_experts": LONG.num_experts,
    }  # fmt: skip
    handles = [RouterHandle(layer=layer, **router) for layer in LONG.moe_layers]
    step = ReplayStep(handles, [torch.nn.Identity()], shard, number=0)
    rows = len(shard.counted_rows(0))

    def unwanted() -> torch.Tensor:
        raise AssertionError("no live rows here")

    for mode in ("logprob", "train"):
        with torch.set_grad_enabled(mode == "train"), step.microbatch(0, mode=mode):
            for handle in handles:
                step.router_ids(handle, rows, unwanted)
    step.verify()
    assert shard.digests.checked == 2 * LONG.num_moe_layers and not shard.digests.different


if __name__ == "__main__":
    run()
