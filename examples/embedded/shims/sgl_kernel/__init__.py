"""Stand-in for `sgl_kernel`, without a kernel; found only through the PYTHONPATH of embedded children and of `make gpu`.

The published wheel (sglang-kernel 0.4.10) holds CUDA libraries only. With SGLANG_USE_CPU_ENGINE=1, SGLang 0.5.23 imports ten
names from it without a guard (kernels/ops/kvcache/cache_move.py, kernels/ops/speculative/*, mem_cache/allocation.py). One of
them runs on every batch and is written here in torch. The others belong to speculative decoding: those that a chain (top-k 1)
takes are in `chains`, and the rest raise when called. So do those that it imports on a GPU on the way to its TopK (`make gpu`).
"""

from __future__ import annotations

from typing import Any

from sgl_kernel.chains import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_bonus_tokens_cpu,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
]

__version__ = "0.0.0+cpu.standin"

_BEYOND_CHAINS = (
    "build_draft_decode_metadata_cpu",  # AMX attention
    "fill_accept_out_cache_loc_cpu",  # the accepted branch of a tree is moved
    "rotate_input_ids_cpu",  # several draft layers
)

_QUANTISED = ("int8_scaled_mm", "moe_sum", "moe_sum_reduce")


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any,
    req_to_token: Any,
    start_offset: Any,
    end_offset: Any,
    out_cache_loc: Any,
    pool_len: int,
) -> None:
    """Write each request's new KV slots into its row of the request-to-token table."""
    taken = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def refusing(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            f"sgl_kernel.{name} has no stand-in; of speculative decoding only chains (--speculative-eagle-topk 1) run here, and "
            "nothing that is quantised"
        )

    refuse.__name__ = name
    return refuse


globals().update({name: refusing(name) for name in (*_BEYOND_CHAINS, *_QUANTISED)})
