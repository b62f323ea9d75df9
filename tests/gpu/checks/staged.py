"""The capturer for SGLang 0.5.9 over many passes that overlap, against a copy that waits. Also the cost of a pass's end."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from r3channel.config import EngineConfig
from r3channel.engine.frame_sender import Outlet
from r3channel.engine.staging import StagedCapturer
from r3channel.wire.frame import parse_frame
from tests.direct import hello_of
from tests.gpu.facts import Facts
from tests.samples import SPEC

ROWS, REQUEST = 8, 32
"""Rows of a pass, a request's passes."""


def capturer(device: str) -> StagedCapturer:
    return StagedCapturer(
        SPEC, max_rows=64, fused_columns=0, slots=ROWS * REQUEST, device=device, weight_version="0",
        local_range=lambda batch, graph, size: (0, batch.out_cache_loc.shape[0]),
        outlet=Outlet(EngineConfig(), hello_of()),
    )  # fmt: skip


def batch_at(slots_T: torch.Tensor, *, decode: bool = True, mixed: bool = False) -> Any:
    mode = SimpleNamespace(is_decode=lambda: decode, is_mixed=lambda: mixed)
    return SimpleNamespace(out_cache_loc=slots_T, forward_mode=mode)


def capture(target: StagedCapturer, ids_TLK: torch.Tensor) -> None:
    """What the routers of a pass do."""
    for moe_index, layer in enumerate(SPEC.moe_layers):
        target.capture(layer, ids_TLK[:, moe_index].int())


def collected(target: StagedCapturer, slots_T: torch.Tensor) -> bytes:
    """The reply of a request that is finished."""
    request: Any = SimpleNamespace(
        rid="r", req_pool_idx=0, seqlen=len(slots_T) + 1, return_routed_experts=True, origin_input_ids=[1]
    )
    table = torch.nn.functional.pad(slots_T, (0, 1))[None].int()
    data = target.collect(request, SimpleNamespace(req_to_token=table))
    assert data is not None
    return data.numpy().tobytes()


def frame_of(target: StagedCapturer, slots_T: torch.Tensor) -> Any:
    return parse_frame(collected(target, slots_T), spec=SPEC)


def rows_of(target: StagedCapturer, slots_T: torch.Tensor) -> np.ndarray:
    return frame_of(target, slots_T).ids()


def check(device: str, facts: Facts) -> None:
    target, requests = capturer(device), (320 if facts.small else 10_000) // REQUEST
    generator = torch.Generator(device).manual_seed(0)
    slots_T = torch.arange(ROWS * REQUEST, device=device)
    batches = [batch_at(own) for own in slots_T.split(ROWS)]
    ends_us, different = list[float](), 0
    for _ in range(requests):
        synchronous = []
        for batch in batches:
            scores = torch.rand(
                (ROWS, SPEC.num_moe_layers, SPEC.num_experts), device=device, generator=generator
            )
            synchronous.append(scores.topk(SPEC.top_k, -1).indices)
            capture(target, synchronous[-1])
            begin = time.perf_counter()
            target.on_forward_end(batch, False, None)
            ends_us.append((time.perf_counter() - begin) * 1e6)
            target.device_ids_TAK.zero_()  # the next pass
        if device == "cuda":
            torch.cuda.current_stream().synchronize()  # SGLang handles a result after its pass has ended
        found = rows_of(target, slots_T)
        different += int((found != torch.cat(synchronous).cpu().numpy()).sum())
    p99_us = float(np.percentile(ends_us[REQUEST:], 99))
    facts.expect("ids that differ", different, different == 0, "0")
    facts.note("passes", requests * REQUEST)
    if device == "cuda":
        facts.limit("on_forward_end p99, us", p99_us, p99_us <= 100, "at most 100")
    else:
        facts.left_out.append("the time of on_forward_end: no stream is waited for on a CPU")
