"""Stand-in for `sgl_kernel`, without a kernel; found only through the PYTHONPATH of embedded children and of `make gpu`.

The published wheel (sglang-kernel 0.4.10) holds CUDA libraries only. With SGLANG_USE_CPU_ENGINE=1, SGLang 0.5.23 imports ten
names from it without a guard (kernels/ops/kvcache/cache_move.py, kernels/ops/speculative/*, mem_cache/allocation.py). One of
them runs on every batch. The others belong to speculative decoding: those that a chain (top-k 1) takes are here, too, in torch,
and the rest raise when called. So do those that it imports on a GPU on the way to its TopK (`make gpu`).

Shape letters: B requests, N drafted tokens with the root (the last token that is sure), W a window of KV slots.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

__version__ = "0.0.0+cpu.standin"

_QLEN_ONLY = 1  # SGLang's TreeMaskMode: one N x N mask per request; what attention on a CPU asks for
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


# -- the verify path with top-k 1: what is drafted is a chain, never a tree with branches ----------------------------------


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Any,
    req_to_token: Any,
    seq_lens: Any,
    out_cache_loc: Any,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Give each request the slots of its next `topk * num_steps` tokens."""
    positions_BW = seq_lens.view(-1, 1) + torch.arange(topk * num_steps)
    slots_BW = req_to_token[req_pool_indices.view(-1, 1), positions_BW]
    out_cache_loc.copy_(slots_BW.flatten())


def assign_extend_cache_locs_cpu(
    req_pool_indices: Any,
    req_to_token: Any,
    start_offset: Any,
    end_offset: Any,
    out_cache_loc: Any,
    pool_len: int,
) -> None:
    """Lay the slots of every request's tokens [start, end) one behind the other; what is left of the output stays as it is."""
    lengths_B = (end_offset - start_offset).long()
    first_B = lengths_B.cumsum(0) - lengths_B
    positions = torch.arange(int(lengths_B.sum())) + (start_offset - first_B).repeat_interleave(lengths_B)
    slots = req_to_token[req_pool_indices.repeat_interleave(lengths_B), positions]
    out_cache_loc[: len(slots)] = slots.to(out_cache_loc.dtype)


def build_tree_kernel_efficient_cpu(
    parent_list: Any,
    selected_index: Any,
    verified_seq_len: Any,
    tree_mask: Any,
    positions: Any,
    retrieve_index: Any,
    retrieve_next_token: Any,
    retrieve_next_sibling: Any,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Describe each request's chain: its positions, who follows whom, and who sees whom."""
    if topk != 1 or tree_mask_mode != _QLEN_ONLY:
        raise RuntimeError(
            f"the CPU stand-in of sgl_kernel builds chains with a mask of drafts; got top-k {topk}, mask mode {tree_mask_mode}"
        )
    order_N = torch.arange(draft_token_num)
    positions.copy_((verified_seq_len.view(-1, 1) + order_N).flatten())
    retrieve_index.copy_(torch.arange(retrieve_index.numel()).view_as(retrieve_index))
    retrieve_next_token[:, :-1] = order_N[1:]
    retrieve_next_token[:, -1] = -1
    retrieve_next_sibling.fill_(-1)
    sees_NN = order_N.view(-1, 1) >= order_N
    tree_mask.view(-1, draft_token_num, draft_token_num)[: len(verified_seq_len)] = sees_NN


def verify_tree_greedy_cpu(
    *,
    predicts: Any,
    accept_index: Any,
    accept_token_num: Any,
    candidates: Any,
    retrive_index: Any,
    retrive_next_token: Any,
    retrive_next_sibling: Any,
    target_predict: Any,
) -> None:
    """Accept drafted tokens as long as each is what the target says after the one before it.

    Only what is accepted is written: into `predicts` what the target says there, into `accept_index` where it lies.
    """
    if (retrive_next_sibling != -1).any():
        raise RuntimeError("the CPU stand-in of sgl_kernel verifies chains; a drafted token has a sibling")
    agrees_BN = candidates[:, 1:] == target_predict[:, :-1]
    accepted_B = agrees_BN.long().cumprod(1).sum(1)
    accept_token_num.copy_(accepted_B)
    kept_BN = torch.arange(candidates.shape[1]) <= accepted_B.view(-1, 1)
    predicts.view_as(candidates)[kept_BN] = target_predict[kept_BN].to(predicts.dtype)
    accept_index[kept_BN] = retrive_index[kept_BN].to(accept_index.dtype)


def fill_bonus_tokens_cpu(
    accept_tokens: Any, accept_lens: Any, bonus_tokens: Any, accept_stride: int
) -> None:
    """The last accepted token of each request: the root of its next chain."""
    last_B = torch.arange(len(accept_lens)) * accept_stride + accept_lens - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last_B])


def copy_all_layer_kv_cache_cpu(data_ptrs: Any, strides: Any, tgt_loc: Any, src_loc: Any) -> None:
    """Copy slots of each layer's cache, all read before any is written. For a chain only SGLang's warm-up calls this."""
    slots = int(torch.cat((tgt_loc, src_loc)).max()) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (slots * stride)).from_address(address)
        rows = torch.frombuffer(memory, dtype=torch.uint8).view(slots, stride)
        rows[tgt_loc] = rows[src_loc]


# -- what has no stand-in --------------------------------------------------------------------------------------------------


def refusing(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            f"sgl_kernel.{name} has no stand-in; of speculative decoding only chains (--speculative-eagle-topk 1) run here, and "
            "nothing that is quantised"
        )

    refuse.__name__ = name
    return refuse


globals().update({name: refusing(name) for name in (*_BEYOND_CHAINS, *_QUANTISED)})
