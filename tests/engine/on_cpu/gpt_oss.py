"""gpt-oss with the sinks of its attention (a logit of each head that takes its share and has no value), and with layers of a
window in memory of their own, which has other slots than the requests' table names."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention import torch_native_backend as upstream
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.models.gpt_oss import EntryClass

__all__ = ["EntryClass"]

_plain = upstream.scaled_dot_product_attention
_sinks_H: Any = None
"""The sinks of the layer that runs."""


def _taking_sinks(forward: Any) -> Any:
    def run(
        backend: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, sinks: Any = None, **kwargs: Any
    ) -> Any:
        global _sinks_H
        _sinks_H = sinks
        if backend.use_sliding_window_kv_pool and backend.token_to_kv_pool.layers_mapping[layer.layer_id][1]:
            backend = _in_window(backend)
        return forward(backend, q, k, v, layer, *args, **kwargs)

    return run


def _in_window(backend: Any) -> Any:
    view = copy.copy(backend)
    slots = backend.token_to_kv_pool.translate_loc_from_full_to_swa(backend.req_to_token_pool.req_to_token)
    view.req_to_token_pool = SimpleNamespace(req_to_token=slots)
    return view


def _attend(query: Any, key: Any, value: Any, *, attn_mask: Any, is_causal: bool, **more: Any) -> Any:
    if _sinks_H is None:
        return _plain(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **more)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * more["scale"]
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    sinks = _sinks_H.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1] @ value


upstream.scaled_dot_product_attention = _attend
TorchNativeAttnBackend.forward_extend = _taking_sinks(TorchNativeAttnBackend.forward_extend)
TorchNativeAttnBackend.forward_decode = _taking_sinks(TorchNativeAttnBackend.forward_decode)
