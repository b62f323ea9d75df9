"""The capturer for SGLang 0.5.9 over many passes that overlap, against a copy that waits. Also the cost of a pass's end."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from r3channel.config import EngineConfig
from r3channel.engine.delivery import Outlet
from r3channel.engine.staging import StagedCapturer
from r3channel.wire.frame import parse_frame
from r3channel.wire.hello import Hello
from tests.gpu.facts import Facts, main
from tests.samples import SPEC

ROWS, REQUEST = 8, 32
"""Rows of a pass, a request's passes."""
HELLO = Hello(
    engine="e", boot_id=1, spec_digest=SPEC.digest, spec=SPEC.to_dict(), sglang="0.5.9", r3channel="0", hooks=(),
    delivery="inband", codec="auto",
)  # fmt: skip


def capturer(device: str) -> StagedCapturer:
    return StagedCapturer(
        SPEC,
        max_rows=64,
        fused_columns=0,
        slots=ROWS * REQUEST,
        device=device,
        weight_version="0",
        local_range=lambda batch, graph, size: (0, batch.out_cache_loc.shape[0]),
        outlet=Outlet(EngineConfig(), HELLO),
    )


def check(device: str, facts: Facts) -> None:
    target, requests = capturer(device), (10_000 if device == "cuda" else 320) // REQUEST
    generator = torch.Generator(device).manual_seed(0)
    ends_us: list[float] = []
    different = 0
    mode = SimpleNamespace(is_decode=lambda: True, is_mixed=lambda: False)
    batches = [
        SimpleNamespace(
            out_cache_loc=torch.arange(at * ROWS, (at + 1) * ROWS, device=device), forward_mode=mode
        )
        for at in range(REQUEST)
    ]
    table = torch.arange(ROWS * REQUEST + 1, dtype=torch.int32, device=device)[None]
    request: Any = SimpleNamespace(
        rid="r", req_pool_idx=0, seqlen=ROWS * REQUEST + 1, return_routed_experts=True, origin_input_ids=[1]
    )
    for _ in range(requests):
        synchronous = []
        for batch in batches:
            scores = torch.rand((SPEC.num_layers, ROWS, SPEC.num_experts), device=device, generator=generator)
            ids = scores.topk(SPEC.top_k, -1).indices.to(torch.int32)
            for layer in SPEC.moe_layers:
                target.capture(layer, ids[layer])
            synchronous.append(ids[list(SPEC.moe_layers)])
            begin = time.perf_counter()
            target.on_forward_end(batch, False, None)
            ends_us.append((time.perf_counter() - begin) * 1e6)
            target.device_ids_TAK.zero_()  # the next pass
        if device == "cuda":
            torch.cuda.current_stream().synchronize()  # SGLang handles a result after its pass has ended
        data = target.collect(request, SimpleNamespace(req_to_token=table))
        assert data is not None
        found = parse_frame(data.numpy().tobytes(), spec=SPEC).decode()
        wanted = torch.cat(synchronous, 1).transpose(0, 1).cpu().numpy()
        different += int((found != wanted).sum())
    p99_us = float(np.percentile(ends_us[REQUEST:], 99))
    facts.expect("ids that differ", different, different == 0, "0")
    facts.figures["passes"] = requests * REQUEST
    if device == "cuda":
        facts.expect("on_forward_end p99, us", p99_us, p99_us <= 100, "at most 100")
    else:
        facts.left_out.append("the time of on_forward_end: no stream is waited for on a CPU")


if __name__ == "__main__":
    main(check)
