"""Worker: one sample of many tokens, from the relay to the routers of four context-parallel ranks; prints what memory it took.

The ranks are threads of this process, so that what the kernel counts is the relay's and theirs together. The shape is that of
Qwen3-30B-A3B. A router here only takes its ids, as `ReplayDriver` does for it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.trainer.rank_shard import RankShard
from r3channel.trainer.step import ReplayStep
from r3channel.wire.frame import encode_frame
from tests.delivery import receive, receivers_of, relays

SPEC = RoutingSpec(num_layers=48, moe_layers=tuple(range(48)), num_experts=128, top_k=8)


def ids_of(offsets: np.ndarray) -> np.ndarray:
    """[..., K] distinct experts from one random byte each: all rows of a long sample need no more memory than themselves."""
    return (offsets[..., None] + np.arange(SPEC.top_k, dtype=np.uint8) * 3) % np.uint8(SPEC.num_experts)


def anonymous_bytes() -> int:
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10  # type: ignore[index]


class Peak:
    """The largest anonymous memory inside the block, above that at its start."""

    def __enter__(self) -> Peak:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.start = self.most = anonymous_bytes()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._left.wait(0.002):
            self.most = max(self.most, anonymous_bytes())


def replay(shard: RankShard, offsets_TL: np.ndarray) -> tuple[int, int]:
    """Every router of a rank takes its rows in two passes. (rows of the sample that were right, wrong)."""
    handles: list[Any] = [
        SimpleNamespace(
            layer=layer,
            chunk=0,
            top_k=SPEC.top_k,
            num_experts=SPEC.num_experts,
            recomputed=False,
            counts=None,
        )
        for layer in SPEC.moe_layers
    ]
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


def run(tokens: int) -> dict[str, int]:
    offsets_TL = np.random.default_rng(tokens).integers(0, 256, (tokens - 1, SPEC.num_moe_layers), np.uint8)
    frame = encode_frame(SPEC, expert_ids_TLK=ids_of(offsets_TL))
    with relays() as make:
        relay = make("cp=4", spec=SPEC, bucket_bytes=1 << 20)
        receivers = receivers_of(relay)
        with Peak() as peak:
            relay.add_frame("long", frame, range(tokens))
            shards = receive(receivers, relay.seal(0, Assignment.given([[["long"]]])))
            found = [replay(shard, offsets_TL) for shard in shards]
        return {
            "rows": (tokens - 1) * SPEC.num_moe_layers,
            "row_bytes": (tokens - 1) * SPEC.bytes_per_token,
            "right": sum(right for right, _ in found),
            "wrong": sum(wrong for _, wrong in found),
            "peak_bytes": peak.most - peak.start,
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(2048)  # threads, kernels and pools that stay
    print(json.dumps(run(int(sys.argv[1]))))
