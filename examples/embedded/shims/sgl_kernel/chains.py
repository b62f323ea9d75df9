"""The verify path of speculative decoding with top-k 1 in plain torch: what is drafted is a chain, never a tree with branches.

Shape letters: B requests, N drafted tokens with the root (the last token that is sure), W a window of KV slots.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_QLEN_ONLY = 1  # SGLang's TreeMaskMode: one N x N mask per request; what attention on a CPU asks for


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
