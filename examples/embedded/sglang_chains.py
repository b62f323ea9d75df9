"""Speculative decoding with top-k 1 without a GPU: the parts of SGLang that are written for AMX, or for Triton only.

Read against SGLang 0.5.23 and 0.5.15.post1. No tree is known here: what is drafted is a chain. Names relied on:
`TorchNativeAttnBackend.forward_extend` and `forward_decode`, `DraftBackendFactory._create_backend` (its table of backends),
`ForwardBatch.seq_lens` (without the drafted tokens while they are verified), `spec_info.draft_token_num`,
`speculative_hook._disable_overlap_schedule_for_cpu`, `overlap_utils.gather_spec_extras`; in 0.5.15.post1 `_is_xpu` of
`eagle_utils` and `triton_ops.cache_locs`.
"""

from __future__ import annotations

import copy
import pkgutil
from typing import Any

import torch

_SRT = "sglang.srt"
_BACKEND = f"{_SRT}.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_FACTORY = f"{_SRT}.speculative.draft_utils.DraftBackendFactory"
_KEEP_OVERLAP = f"{_SRT}.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu"
_GATHER = f"{_SRT}.managers.overlap_utils.gather_spec_extras"


def register(*, older: bool = False) -> None:
    """Register the hooks; an engine that does not speculate never comes to what they do.

    `older` is 0.5.15.post1. With TRITON_INTERPRET=1 its kernels in Triton are interpreted, those for XPUs where CUDA has others.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_BACKEND}.forward_extend", extend_by_chain, HookType.AROUND)
    HookRegistry.register(f"{_FACTORY}._create_backend", offer_torch_native, HookType.BEFORE)
    # On a GPU speculation runs under the overlap scheduler. Here SGLang turns it off, for want of the gather alone.
    replaced = {_KEEP_OVERLAP: _nothing, _GATHER: gather_rows}
    if older:
        for module in ("eagle_utils", "triton_ops.cache_locs"):
            pkgutil.resolve_name(f"{_SRT}.speculative.{module}")._is_xpu = True
        HookRegistry.register(f"{_FACTORY}._create_backend", lambda made, *_: made[1], HookType.AFTER)
        replaced = dict.fromkeys(("torch.cuda.synchronize", "torch.Tensor.record_stream"), _nothing)
    for name, stand_in in replaced.items():
        HookRegistry.register(name, stand_in, HookType.REPLACE)


def _nothing(*_: Any) -> None: ...


def gather_rows(indices: Any, *buffers: Any) -> tuple[Any, ...]:
    """The same rows of each buffer; a buffer that the engine does not have gives None."""
    return tuple(None if buffer is None else buffer[indices] for buffer in buffers)


def extend_by_chain(
    original: Any, backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *rest: Any, **options: Any
) -> Any:
    """AROUND `forward_extend`: a chain to verify is an extend by its length. Each drafted token sees those before it."""
    if batch.forward_mode.is_target_verify():
        batch = verified_as_extend(batch)
    return original(backend, q, k, v, layer, batch, *rest, **options)


def verified_as_extend(batch: Any) -> Any:
    """A view of the batch with the lengths of an extend; the batch itself goes on to SGLang's bookkeeping as it is."""
    chain = batch.spec_info.draft_token_num
    view = copy.copy(batch)
    view.extend_prefix_lens = batch.seq_lens
    view.extend_seq_lens = torch.full_like(batch.seq_lens, chain)
    view.seq_lens = batch.seq_lens + chain
    return view


class DraftSteps:
    """One attention backend for each forward pass of a draft, as SGLang's multi-step backends."""

    def __init__(self, runner: Any, *, steps: int) -> None:
        self.attn_backends = [_step_backend(runner, step + 1) for step in range(steps)]

    def init_forward_metadata(self, batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(batch)


def offer_torch_native(factory: Any, name: str, table: dict[str, Any], *_: Any, **__: Any) -> None:
    """BEFORE `_create_backend`: put torch attention into the table that it looks in, for drafting steps and for extends."""
    table["torch_native"] = lambda: ("torch_native", _draft_backend(factory, name))


def _draft_backend(factory: Any, name: str) -> Any:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    runner = factory.draft_model_runner
    if name != "decode_attention_backend":
        return TorchNativeAttnBackend(runner)
    # The first drafted token comes from the extend before, so a chain takes one pass less than it has tokens.
    return DraftSteps(runner, steps=factory.speculative_num_steps - 1)


def _step_backend(runner: Any, ahead: int) -> Any:
    """Attention of the pass that drafts from a token `ahead - 1` places behind the last sure one.

    If it were wrong, fewer tokens would be accepted; rows and tokens are the target's in any case.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class StepAttention(TorchNativeAttnBackend):
        def forward_decode(
            self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **options: Any
        ) -> Any:
            view = copy.copy(forward_batch)
            view.seq_lens = forward_batch.seq_lens + ahead
            return super().forward_decode(q, k, v, layer, view, *args, **options)

    return StepAttention(runner)
