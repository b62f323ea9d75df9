"""Llama 4: its router weighs what goes into an expert, and a kernel that is not here rotates its queries and keys in place."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.layers.moe import fused_moe_native
from sglang.srt.models import llama4 as upstream
from sglang.srt.models.mllama4 import EntryClass

__all__ = ["EntryClass"]

_weighing_outputs = fused_moe_native.moe_forward_native


def _weighing_inputs(layer: Any, x_TH: Any, topk: Any, config: Any) -> Any:
    if config.apply_router_weight_on_input:
        x_TH = x_TH * topk.topk_weights  # top-1
        topk = topk._replace(topk_weights=torch.ones_like(topk.topk_weights))
        config = dataclasses.replace(config, apply_router_weight_on_input=False)
    return _weighing_outputs(layer, x_TH, topk, config)


fused_moe_native.moe_forward_native = _weighing_inputs
upstream._is_npu = True  # there too they are returned, and taken
