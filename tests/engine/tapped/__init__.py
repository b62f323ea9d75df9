"""Models of a server that notes each pass's choices where the routers make them, for each request and position. Every pass
adds noise of its own to the logits, as kernels of different batches do: a token that is prefilled again chooses otherwise.

SGLANG_EXTERNAL_MODEL_PACKAGE names this package, so every scheduler imports it. Lines of JSON go to a file of the process in the
folder R3TEST_TAP: [request, first position, whether its last row makes a token, ids [rows][layer][K]].
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner

_new, _route, _forward = ForwardBatch.init_new, TopK.forward, ModelRunner.forward
_MOST = 4096
"""Rows of a pass."""
_chosen = dict[int, torch.Tensor]()
"""By layer, [rows, K]: one tensor for all passes, so that a CUDA graph writes where `_noted` reads."""
_noise = torch.Generator().manual_seed(0)


def _init_new(batch: Any, *args: Any, **kwargs: Any) -> Any:
    made: Any = _new(batch, *args, **kwargs)
    decodes = batch.forward_mode.is_decode()
    starts = (batch.seq_lens_cpu - 1).tolist() if decodes else batch.prefix_lens or ()
    counts = [1] * len(starts) if decodes else batch.extend_lens or ()
    made.tapped = [
        (req.rid, start, decodes or start + count == len(req.origin_input_ids) + len(req.output_ids), count)
        for req, start, count in zip(batch.reqs, starts, counts, strict=False)
    ]
    return made


def _routed(router: Any, hidden_states: Any, router_logits: Any, *args: Any, **kwargs: Any) -> Any:
    given: dict[str, Any] = {"device": router_logits.device, "dtype": router_logits.dtype}
    own = (
        None if router_logits.is_cuda else _noise
    )  # the device's own generator goes on from replay to replay of a graph
    noise = 0.2 * router_logits.std() * torch.randn(router_logits.shape, generator=own, **given)
    output = _route(router, hidden_states, router_logits + noise, *args, **kwargs)
    ids = output.topk_ids
    if router.layer_id not in _chosen:  # the passes before a graph is captured
        _chosen[router.layer_id] = ids.new_zeros((_MOST, ids.shape[1]))
    _chosen[router.layer_id][: len(ids)] = ids
    return output


def _noted(runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    output = _forward(runner, forward_batch, *args, **kwargs)
    tapped = getattr(forward_batch, "tapped", [])  # none where a graph is captured
    rows = sum(count for *_, count in tapped)
    if rows:
        ids_TLK, at = torch.stack([_chosen[layer][:rows] for layer in sorted(_chosen)], 1).cpu(), 0
        path = Path(os.environ["R3TEST_TAP"]) / f"{os.getpid()}.jsonl"
        with path.open("a") as file:
            for *told, count in tapped:
                line = [*told, ids_TLK[at : at + count].tolist()]
                print(json.dumps(line), file=file)
                at += count
    return output


setattr(ForwardBatch, "init_new", staticmethod(_init_new))  # noqa: B010
setattr(TopK, "forward", _routed)  # noqa: B010
setattr(ModelRunner, "forward", _noted)  # noqa: B010
