"""Qwen3-Next: what its linear attention calls in `sgl_kernel`, written as loops over tokens, and the gate of its shared expert.

Shape letters: N tokens of all requests one behind the other, C channels, W the width of the convolution, H value heads.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F


def causal_conv1d_fn_cpu(
    x_CN: Any, weight_CW: Any, bias: Any, *, conv_states: Any, has_initial_state: Any, cache_indices: Any,
    query_start_loc: Any, **_: Any,
) -> Any:  # fmt: skip
    out_CN = torch.empty_like(x_CN)
    for request, (start, end) in enumerate(_spans(query_start_loc)):
        state = conv_states[cache_indices[request]]
        history = state if has_initial_state[request] else torch.zeros_like(state)
        seen = torch.cat((history, x_CN[:, start:end]), 1)
        out_CN[:, start:end] = F.silu(F.conv1d(seen[None], weight_CW[:, None], bias, groups=len(seen))[0])
        state.copy_(seen[:, -state.shape[1] :])
    return out_CN


def causal_conv1d_update_cpu(
    x_NC: Any, conv_states: Any, weight_CW: Any, bias: Any, activation: Any, *, conv_state_indices: Any
) -> Any:
    one_each = torch.arange(len(x_NC) + 1)
    return causal_conv1d_fn_cpu(
        x_NC.T, weight_CW, bias, conv_states=conv_states, has_initial_state=one_each >= 0,
        cache_indices=conv_state_indices, query_start_loc=one_each,
    ).T  # fmt: skip


def chunk_gated_delta_rule_cpu(
    *, q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, initial_state_indices: Any, cu_seqlens: Any,
    **_: Any,
) -> Any:  # fmt: skip
    """Token by token: the state forgets, then takes the difference between a value and what it holds for its key."""
    share = v.shape[2] // q.shape[2]
    q, k = (F.normalize(x[0].float(), dim=-1).repeat_interleave(share, 1) for x in (q, k))
    out = torch.empty_like(v)
    for request, (start, end) in enumerate(_spans(cu_seqlens)):
        state = initial_state[initial_state_indices[request]].float()  # [H, V, K]
        for token in range(start, end):
            state = state * g[0, token, :, None, None].exp()
            missing = v[0, token] - (state @ k[token].unsqueeze(-1)).squeeze(-1)
            state = state + (beta[0, token].unsqueeze(-1) * missing).unsqueeze(-1) * k[token].unsqueeze(1)
            out[0, token] = (state @ q[token].unsqueeze(-1)).squeeze(-1) * q.shape[-1] ** -0.5
        initial_state[initial_state_indices[request]] = state.to(initial_state.dtype)
    return out, None, None


def fused_gdn_gating_cpu(A_log: Any, a: Any, b: Any, dt_bias: Any) -> Any:
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias)
    return decay[None], b.sigmoid()[None]


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: Any, dt_bias: Any, q: Any, k: Any, v: Any, a: Any, b: Any, state: Any, indices: Any, cu_seqlens: Any, *_: Any
) -> Any:  # fmt: skip
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    where = {"initial_state": state, "initial_state_indices": indices, "cu_seqlens": cu_seqlens}
    return chunk_gated_delta_rule_cpu(q=q, k=k, v=v, g=g, beta=beta, **where)[0]


def _spans(starts: Any) -> Iterator[tuple[int, int]]:
    return itertools.pairwise(starts.tolist())


_operators = torch.library.Library("sgl_kernel", "FRAGMENT")
SCHEMAS = {
    fused_gdn_gating_cpu: "(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)",
    fused_sigmoid_gating_delta_rule_update_cpu: "(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, "
    "Tensor b, Tensor(c!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, bool use_qk_l2norm_in_kernel, "
    "float softplus_beta, float softplus_threshold) -> Tensor",
}  # fmt: skip
for operator, schema in SCHEMAS.items():
    _operators.define(operator.__name__ + schema)
    _operators.impl(operator.__name__, operator, "CPU")
_kernels = ModuleType("sgl_kernel.mamba")
for function in (causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu):
    setattr(_kernels, function.__name__, function)
sys.modules[_kernels.__name__] = _kernels

from sglang.srt.models.qwen3_next import EntryClass, FusedRMSNormGated  # noqa: E402

from examples.embedded.sglang_models import qwen2_moe as qwen2_moe  # noqa: E402  # gates the shared expert in torch

__all__ = ["EntryClass"]


def _normed(norm: Any, x: Any, gate: Any) -> Any:
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.eps) * F.silu(gate)


setattr(FusedRMSNormGated, "forward", _normed)  # noqa: B010
