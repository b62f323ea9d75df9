"""SGLang's Qwen3-MoE, with the dense layers that the checkpoint's `mlp_only_layers` asks for.

SGLang 0.5.23 takes every layer as sparse (`Qwen3MoeDecoderLayer.stage_facts`) and would run, with whatever the memory holds,
router and experts that the checkpoint does not fill. Its decoder layer can build a dense MLP and its loader can fill one;
the declaration is missing, and the MLP does not take the layer's second argument.

Its experts in torch take the id of an expert that another rank has, -1, for an index; here such an expert adds nothing.
"""

from __future__ import annotations

from typing import Any

import torch
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


_all_experts = fused_moe_native.moe_forward_native


def _own_experts(layer: Any, x: Any, topk: Any, config: Any) -> Any:
    ids_TK, weights_TK = topk.topk_ids, topk.topk_weights
    if (ids_TK >= 0).all():
        return _all_experts(layer, x, topk, config)
    own = (ids_TK >= 0).nonzero(as_tuple=True)
    summed = torch.zeros_like(x)
    if not len(own[0]):
        return summed
    one_each = topk._replace(topk_ids=ids_TK[own][:, None], topk_weights=weights_TK[own][:, None])
    return summed.index_add_(0, own[0], _all_experts(layer, x[own[0]], one_each, config))


fused_moe_native.moe_forward_native = _own_experts
upstream.Qwen3MoeMLP = DenseMLP
upstream.Qwen3MoeDecoderLayer.stage_facts = staticmethod(_stage_facts)
