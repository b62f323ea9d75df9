"""SGLang's Qwen2-MoE, with the gate of its shared expert in torch.

SGLang 0.5.23 gates it with a Triton kernel (`fused_gate_sigmoid_mul_add`), for which a machine without a GPU has no driver.
"""

from __future__ import annotations

import torch
from sglang.srt.models import qwen2_moe as upstream
from sglang.srt.models.qwen2_moe import EntryClass

__all__ = ["EntryClass"]


def _add_gated(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    gate = torch.sigmoid(hidden_states.float() @ gate_weight.float()).unsqueeze(-1)
    final_hidden_states += (gate * shared_output.float()).to(final_hidden_states.dtype)


upstream.fused_gate_sigmoid_mul_add = _add_gated
