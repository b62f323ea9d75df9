"""A sample of 131,072 tokens over four context-parallel ranks: every row at its router, and no memory beside the rows.

The ranks are threads of one process, so that what the kernel counts is the relay's and theirs together. The shape is that of
Qwen3-30B-A3B. A router here only takes its ids, as `ReplayDriver` does for it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.trainer.rank_shard import RankShard
from r3channel.trainer.router import RouterHandle
from r3channel.trainer.step import ReplayStep
from r3channel.wire.frame import encode_frame
from tests.support.delivery import MakeRelay, receive, receivers_of, relays
from tests.support.memory import growth_of

SPEC = RoutingSpec(num_layers=48, moe_layers=tuple(range(48)), num_experts=128, top_k=8)
MIB = 1 << 20
MARGIN = 24 * MIB
"""Four receivers' buckets of 1 MiB, two alive at each end, row maps of one layer's size, and what the allocator keeps."""


@pytest.mark.full
def test_131072_tokens_reach_their_routers_in_the_memory_of_their_rows() -> None:
    """The relay holds the rows once and the receivers once; what is beside them does not grow with the tokens."""
    beside = []
    for tokens in (32_768, 131_072):
        beside.append(growth_of(long_sample, tokens).peak - 2 * (tokens - 1) * SPEC.bytes_per_token)
    assert max(beside) < MARGIN and beside[1] < beside[0] + 8 * MIB, [size / MIB for size in beside]


def long_sample(tokens: int) -> Iterator[None]:
    torch.set_num_threads(1)
    with relays() as make:
        deliver(make, 2048, frame_of(2048))  # threads, kernels and pools that stay
        frame = frame_of(tokens)
        yield
        deliver(make, tokens, frame)
        yield


def frame_of(tokens: int) -> bytes:
    """Distinct experts from one random byte for each layer: the rows of a long sample need no more memory than themselves."""
    rng, shape = np.random.default_rng(tokens), (tokens - 1, SPEC.num_moe_layers, 1)
    offsets_TL1 = rng.integers(0, 256, shape, np.uint8)
    steps_K = np.arange(SPEC.top_k, dtype=np.uint8) * 3
    return encode_frame(SPEC, expert_ids_TLK=(offsets_TL1 + steps_K) % np.uint8(SPEC.num_experts))


def deliver(make: MakeRelay, tokens: int, frame: bytes) -> None:
    relay = make("cp=4", spec=SPEC, bucket_bytes=1 << 20)
    receivers = receivers_of(relay)
    relay.add_frame("long", frame, range(tokens))
    shards = receive(receivers, relay.seal(0, Assignment.given([[["long"]]])))
    for shard in shards:
        replay(shard)
    real = sum(int(shard.counted_rows(0).sum()) for shard in shards)
    assert real == tokens - 1


def replay(shard: RankShard) -> None:
    """Every router of a rank takes its rows in two passes, in which they are held against the engine's digests."""
    router = {
        "module": torch.nn.Identity(), "replay": None, "top_k": SPEC.top_k, "num_experts": SPEC.num_experts,
    }  # fmt: skip
    handles = [RouterHandle(layer=layer, **router) for layer in SPEC.moe_layers]
    step = ReplayStep(handles, [torch.nn.Identity()], shard, number=0)
    rows = len(shard.counted_rows(0))

    def unwanted() -> torch.Tensor:
        raise AssertionError("no live rows here")

    for mode in ("logprob", "train"):
        with torch.set_grad_enabled(mode == "train"), step.microbatch(0, mode=mode):
            for handle in handles:
                step.router_ids(handle, rows, unwanted)
    step.verify()
    assert shard.digests.checked == 2 * SPEC.num_moe_layers and not shard.digests.different
