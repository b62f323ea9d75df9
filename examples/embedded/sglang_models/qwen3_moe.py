"""SGLang's Qwen3-MoE, with the dense layers that the checkpoint's `mlp_only_layers` asks for.

SGLang 0.5.23 takes every layer as sparse (`Qwen3MoeDecoderLayer.stage_facts`) and would run, with whatever the memory holds,
router and experts that the checkpoint does not fill. Its decoder layer can build a dense MLP and its loader can fill one;
the declaration is missing, and the MLP does not take the layer's second argument.

Its experts in torch take the id of an expert that another rank has, -1, for an index, and cost most of an engine's time on a
CPU; here such an expert adds nothing, and a batch of any size is two calls.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.moe import fused_moe_native
from sglang.srt.models import qwen3_moe as upstream
from sglang.srt.models.qwen3_moe import EntryClass, Qwen3MoeMLP

__all__ = ["EntryClass"]


class DenseMLP(Qwen3MoeMLP):
    def forward(self, x: Any, forward_batch: Any = None) -> Any:
        return super().forward(x)


def _stage_facts(config: Any, layer_id: int) -> tuple[Any, Any]:
    return (
        upstream.declare_attn(),
        upstream.declare_ffn(
            sparse=_is_sparse(config, layer_id), next_layer_sparse=_is_sparse(config, layer_id + 1)
        ),
    )


def _is_sparse(config: Any, layer_id: int) -> bool:
    step = getattr(config, "decoder_sparse_step", 1) or 1
    return layer_id not in (getattr(config, "mlp_only_layers", None) or ()) and (layer_id + 1) % step == 0


def _experts(layer: Any, x_TH: Any, topk: Any, config: Any) -> Any:
    """Two grouped matmuls for SGLang's loop in Python over the experts: the same bits, at 8 tokens in 0.4 of its time.

    Experts that are more than SwiGLU stay with the loop.
    """
    if not _is_swiglu(layer, config):
        return _loop_over_experts(layer, x_TH, topk, config)
    shape_TK, ids_N = topk.topk_ids.shape, topk.topk_ids.reshape(-1).long()
    order_N = ids_N.argsort(stable=True)
    own_M = order_N[(ids_N < 0).sum() :]
    ends_E = torch.bincount(ids_N[own_M], minlength=len(layer.w13_weight)).cumsum(0, dtype=torch.int32)
    gate, up = F.grouped_mm(x_TH[own_M // shape_TK[1]], layer.w13_weight.transpose(1, 2), offs=ends_E).chunk(
        2, -1
    )
    out_NH = x_TH.new_zeros(len(ids_N), x_TH.shape[1])
    out_NH[own_M] = F.grouped_mm(F.silu(gate) * up, layer.w2_weight.transpose(1, 2), offs=ends_E)
    weights_TK1 = topk.topk_weights.unsqueeze(-1)
    return (out_NH.view(*shape_TK, -1).type(weights_TK1.dtype) * weights_TK1).sum(dim=1).type(x_TH.dtype)


def _is_swiglu(layer: Any, config: Any) -> bool:
    """Neither gpt-oss' (biases, a limit, gate and up interleaved) nor Llama 4's (a weighed input)."""
    plain = (
        config.activation == "silu" and config.gemm1_alpha is None and not config.apply_router_weight_on_input
    )
    return plain and not hasattr(layer, "w13_weight_bias")


_loop_over_experts = fused_moe_native.moe_forward_native
fused_moe_native.moe_forward_native = _experts
upstream.Qwen3MoeMLP = DenseMLP
upstream.Qwen3MoeDecoderLayer.stage_facts = staticmethod(_stage_facts)
