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
        delivered(make, *sample(2048))  # threads, kernels and pools that stay
        frame, offsets_TL = sample(tokens)
        yield
        right, wrong = delivered(make, frame, offsets_TL)
        assert (right, wrong) == (2 * offsets_TL.size, 0)  # a log-prob and a forward pass
        yield


def sample(tokens: int) -> tuple[bytes, np.ndarray]:
    rng = np.random.default_rng(tokens)
    offsets_TL = rng.integers(0, 256, (tokens - 1, SPEC.num_moe_layers), np.uint8)
    return encode_frame(SPEC, expert_ids_TLK=ids_of(offsets_TL)), offsets_TL


def ids_of(offsets: np.ndarray) -> np.ndarray:
    """[..., K] distinct experts from one random byte each: all rows of a long sample need no more memory than themselves."""
    return (offsets[..., None] + np.arange(SPEC.top_k, dtype=np.uint8) * 3) % np.uint8(SPEC.num_experts)


def delivered(make: MakeRelay, frame: bytes, offsets_TL: np.ndarray) -> tuple[int, int]:
    """Rows of the sample that were right, and wrong, at the routers of all ranks."""
    relay = make("cp=4", spec=SPEC, bucket_bytes=1 << 20)
    receivers = receivers_of(relay)
    relay.add_frame("long", frame, range(len(offsets_TL) + 1))
    shards = receive(receivers, relay.seal(0, Assignment.given([[["long"]]])))
    right, wrong = zip(*(replay(shard, offsets_TL) for shard in shards), strict=True)
    return sum(right), sum(wrong)


def replay(shard: RankShard, offsets_TL: np.ndarray) -> tuple[int, int]:
    """Every router of a rank takes its rows in two passes."""
    router = {
        "module": torch.nn.Identity(), "replay": None, "top_k": SPEC.top_k, "num_experts": SPEC.num_experts,
    }  # fmt: skip
    handles = [RouterHandle(layer=layer, **router) for layer in SPEC.moe_layers]
    step = ReplayStep(handles, [torch.nn.Identity()], shard, number=0)
    right = wrong = 0
    sample_R, position_R = shard.shard.row_map(0, tp=0)
    real_R = sample_R >= 0

    def unwanted() -> torch.Tensor:
        raise AssertionError("no live rows here")

    for mode in ("logprob", "train"):
        with torch.set_grad_enabled(mode == "train"), step.microbatch(0, mode=mode):
            for handle in handles:
                _, ids_RK = step.router_ids(handle, len(sample_R), unwanted)
                wanted_RK = ids_of(offsets_TL[position_R[real_R], handle.layer])
                same = int((ids_RK.numpy()[real_R] == wanted_RK).all(axis=1).sum())
                right, wrong = right + same, wrong + len(wanted_RK) - same
    step.verify()
    return right, wrong
