"""The hooks that give requests their tensors beside expert ids. Without `token_tensors` none of them is registered.

Read against SGLang 0.5.15.post1 and 0.5.23.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from r3channel.engine.frame_sender import report
from r3channel.engine.token_tensors import KeptMasks, KeptTopk, TopkBatch, TopkRow, tensor_frame
from r3channel.errors import RoutingError
from r3channel.wire.token_tensors import MOST_ENTRIES, TOPK_VOCABULARY, TokenTensor

log = logging.getLogger(__name__)
_WHOLE_VOCABULARY = 1 << 30
"""SGLang's top_k without a filter."""
_PLAIN = {
    "top_p": 1.0, "top_k": _WHOLE_VOCABULARY, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    "repetition_penalty": 1.0, "min_new_tokens": 0, "logit_bias": None, "json_schema": None, "regex": None, "ebnf": None,
    "structural_tag": None, "watermark": None,
}  # fmt: skip
"""Sampling parameters with which tokens are sampled from the softmax of the logits over the temperature."""
_PAST_WEIGHTS = {"capture_routed_experts_if_allowed", "build_precomputed_topk_output", "get_global_experts_capturer"}  # fmt: skip
"""Names that a model imports if it tells the capturer of its ids by itself."""

_declared: Sequence[TokenTensor] = ()
"""The tensors of this process; empty on a rank that does not reply."""


def declare(tensors: Sequence[TokenTensor]) -> None:
    """Set the tensors that this process replies with."""
    global _declared
    _declared = tensors


def _topk() -> TokenTensor | None:
    return next((tensor for tensor in _declared if tensor.made_by == "top_logprobs"), None)


def keep_masks(
    original: Callable[..., None], processor: Any, i: int, req: Any, *rest: Any, **more: Any
) -> None:
    """Keep sampling masks until the request finishes.

    Hook AROUND `add_sampling_mask_return_values`. The masks do not go into JSON.
    """
    if _declared and req.return_routed_experts and not isinstance(req.sampling_mask_rows, KeptMasks):
        support = req.sampling_logprobs_mode == "support"
        req.sampling_mask_rows = KeptMasks(req.sampling_mask_rows, support=support)
    original(processor, i, req, *rest, **more)


def take_topk(
    original: Callable[..., Any], logprobs: torch.Tensor, top_logprobs_nums: Sequence[int], *rest: Any, **more: Any
) -> Any:  # fmt: skip
    """Return the likeliest tokens, packed where the tensor wants them.

    Hook AROUND `get_top_logprobs` of a pass that samples. Requests for as many tokens as the tensor has get them as one packed
    tensor; the others get SGLang's own lists.
    """
    tensor = _topk()
    wanted = tensor.entry["low"].shape[0] if tensor else 0
    if tensor is None or wanted not in top_logprobs_nums:
        return original(logprobs, top_logprobs_nums, *rest, **more)
    others = [0 if num == wanted else num for num in top_logprobs_nums]
    none: list[Any] = [logprobs[0, :0]] * len(others)  # SGLang's own takes 4 us for each of these
    values, ids = original(logprobs, others, *rest, **more) if any(others) else (none, [*none])
    batch = TopkBatch(logprobs, tensor)
    for row, num in enumerate(top_logprobs_nums):
        if num == wanted:
            values[row] = ids[row] = TopkRow(batch, row)
    return values, ids


def add_tensors(streamer: Any, reqs: Sequence[Any], *_rest: Any, **_more: Any) -> None:
    """Add a finished request's tensor frames behind its rows.

    Hook BEFORE `stream_output`. What SGLang noted of the pass for the tensor is taken out of its lists.
    """
    del streamer
    topk = _topk()
    for req in reqs if _declared else ():
        _sweep(req, topk)
        if req.finished() and req.routed_experts is not None and not getattr(req, "r3channel_tensors", False):
            req.r3channel_tensors = True
            _append(req)


def _sweep(req: Any, tensor: TokenTensor | None) -> None:
    if tensor is None or not req.return_logprob or not req.logprob.output_top_logprobs_val:
        return
    kept = req.r3channel_topk = getattr(req, "r3channel_topk", None) or KeptTopk()
    values, ids = req.logprob.output_top_logprobs_val, req.logprob.output_top_logprobs_idx
    for at in range(kept.swept, len(values)):
        if isinstance(row := values[at], TopkRow):
            kept.add(row)
            values[at], ids[at] = [], []
    kept.swept = len(values)


def _append(req: Any) -> None:
    kept = {
        "top_logprobs": getattr(req, "r3channel_topk", None),
        "mask_rows": getattr(req, "sampling_mask_rows", None),
        "router_weights": getattr(req, "r3channel_weights", None),
    }
    if kept == dict.fromkeys(kept):
        return  # the request asked for no tensor
    reply, frames = req.routed_experts, [_frame(tensor, kept[tensor.made_by], req) for tensor in _declared]
    nbytes, own = reply.shape[0], frames[0] if len(frames) == 1 else b""
    if not isinstance(own, bytes) and torch.from_numpy(own).data_ptr() == reply.data_ptr() + nbytes:
        whole = own.base[-nbytes - len(own) :]  # weights lie behind their ids
    else:
        whole = bytearray().join([reply.numpy(), *frames])  # torch wants memory that may be written
    req.routed_experts = torch.frombuffer(whole, dtype=torch.uint8)


def _frame(tensor: TokenTensor, kept: Any, req: Any) -> Any:
    request_id = str(req.rid)
    try:
        if tensor.made_by == "top_logprobs" and (why := "; ".join(_filters(req))):
            raise RoutingError(
                f"{tensor.name} of a request with {why}: what sampled is not the softmax over all tokens"
            )
        tokens = {"prompt_tokens": len(req.origin_input_ids), "new_tokens": len(req.output_ids_through_stop)}
        return tensor_frame(tensor, kept, **tokens, request_id=request_id)
    except Exception as error:
        log.exception("r3channel: no %s for request %s", tensor.name, request_id)
        return report(error, request_id=request_id)


def _filters(req: Any) -> Iterator[str]:
    values = req.sampling_params
    for name, plain in _PLAIN.items():
        value = getattr(values, name, plain)
        if value != plain and value:
            yield f"{name}={value}"
    if getattr(req, "custom_logit_processor", None):
        yield "a custom_logit_processor"


def refused_tensors(
    values: dict[str, Any], tensors: Sequence[TokenTensor], *, vocabulary: int, past: Sequence[str] = ()
) -> Iterator[tuple[str, str]]:
    """Return (word, reason) for each tensor that would be wrong.

    A tensor is refused if it could not follow its frames, or would not be what it is declared to be. The word is always "":
    nothing overrides these refusals.

    Args:
        values: Settings by argument name.
        tensors: The tensors that are asked for.
        vocabulary: Number of tokens in the vocabulary.
        past: Modules of the model that tell the capturer of ids past the hook that sees their weights.
    """
    made = {tensor.made_by: tensor.name for tensor in tensors}
    topk, weights = made.get("top_logprobs"), made.get("router_weights")
    mode, drafts = values["disaggregation_mode"], values["speculative_algorithm"]
    most = values.get("sampling_mask_max_tokens", 0)
    past = [*past, *["hardware_backend.npu"] * (values.get("device") == "npu")]
    scaled = os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "").lower() not in ("1", "true", "yes")
    faults = {
        f"token tensors {[tensor.name for tensor in tensors]} with --disaggregation-mode {mode}; expected null": mode != "null",
        f"--sampling-mask-max-tokens {most}; expected at most {MOST_ENTRIES}": "mask_rows" in made and most > MOST_ENTRIES,
        f"{topk} with --speculative-algorithm {drafts}; expected none": topk and drafts not in (None, "NONE"),
        f"{topk} of {vocabulary} tokens; expected at most {TOPK_VOCABULARY}": topk and vocabulary > TOPK_VOCABULARY,
        f"{topk} with SGLANG_RETURN_ORIGINAL_LOGPROB: they are not of what sampled; unset it": topk and not scaled,
        f"{weights}: {', '.join(past)} routes past SGLang's _post_process_topk_ids, where weights are seen": weights and past,
    }  # fmt: skip
    return (("", fault) for fault, there in faults.items() if there)


def past_weights(model: Any, hooked: str) -> list[str]:
    """Return the model's modules that tell the capturer of ids themselves.

    Their ids pass by the module whose hook sees the weights.

    Args:
        model: The built model.
        hooked: Name of the module that has the hook.

    Returns:
        Names of modules, sorted.
    """
    names = {type(module).__module__ for module in model.modules()} - {hooked}
    return sorted(name for name in names if _PAST_WEIGHTS.intersection(vars(sys.modules[name])))


def weighing(model: Any, scales: Callable[[Any], object]) -> tuple[str, ...]:
    """Return how the model's routers make the weights that they hand on.

    Args:
        model: The built model.
        scales: Returns whether a router's configuration has its scaling factor in the weights.

    Returns:
        One text for each way, without duplicates, sorted.
    """
    ways = {
        f"scoring={getattr(c.custom_routing_function, '__name__', c.scoring_func)} renormalize={c.renormalize} "
        f"scaling={c.routed_scaling_factor or 1.0} applied={scales(c)} dtype=float16"
        for c in (module.topk_config for module in model.modules() if hasattr(module, "topk_config"))
    }
    return tuple(sorted(ways))
