"""The hooks into SGLang: the only module of this room that imports it. Read against 0.5.23; the names are in `hooks`.

The life of an id here: `TopK` writes int32 ids into SGLang's device buffer; `_get_local_slice` keeps the MoE layers and
narrows them, on the device and the current stream; SGLang's result copy brings them to the host with the sampled tokens (no
synchronisation is added); `finalize` writes them, with their provenance, into a host cache by KV slot; when the request
finishes its rows are gathered once and become one frame. Only `get_topk` and `finalize` touch host memory, both on the
scheduler's thread.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import (
    get_disagg,
    get_exec,
    get_memory,
    get_parallel,
    get_schedule,
    get_serving,
    get_spec,
)
from sglang.srt.state_capturer import base
from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer, get_global_experts_capturer

from r3channel.config import EngineConfig
from r3channel.engine.capture import (
    UNREADABLE_VERSION,
    LayerSelection,
    SlotProvenance,
    build_frame,
    check_representable,
    parse_weight_version,
    torch_id_dtype,
)
from r3channel.engine.hooks import CAPTURER, COLLECT, check_hooks
from r3channel.errors import ConfigError, R3Error
from r3channel.routing import RowKind
from r3channel.spec import RoutingSpec
from r3channel.wire.codec import check_codec
from r3channel.wire.frame import encode_error, sample_key

__all__ = ["FrameCapturer", "apply", "check_hooks"]

log = logging.getLogger(__name__)
_config = EngineConfig()


def apply(config: EngineConfig) -> None:
    """Register the hooks; SGLang applies them right after its plug-ins have run. Call once per process."""
    global _config
    check_codec(config.codec)  # an unknown codec ends the start, not the first request
    _config = config
    HookRegistry.register(CAPTURER, FrameCapturer, HookType.REPLACE)
    HookRegistry.register(COLLECT, collect_frame, HookType.AROUND)


class NarrowHostCache(base.BaseHostCache):
    """Ids by KV slot, [slots, L, K] in the id dtype, and what made each slot's row."""

    def __init__(self, slots: int, *, spec: RoutingSpec, device: str) -> None:
        # BaseHostCache.__init__ is not called: it would allocate int32 for all layers.
        allocate: Any = base.ALLOC_MEMORY_FUNCS[device]
        self.buffer = allocate(
            (slots, spec.num_moe_layers, spec.top_k),
            dtype=torch_id_dtype(spec),
            device="cpu",
            pin_memory=True,
            allocator=base.HostTensorAllocator(),
        )
        self.buffer.zero_()
        self.num_tokens, self.num_layers, self.topk_size = slots, spec.num_moe_layers, spec.top_k
        self.name = "r3channel"
        self.provenance = SlotProvenance(slots)
        self._log_allocation()


@dataclasses.dataclass
class StampedOutput(base.TopkCaptureOutput):
    """One forward pass's ids on their way to the host, with what made them."""

    provenance: SlotProvenance
    weight_version: int
    kind: RowKind

    def finalize(self) -> None:
        """Write ids and provenance by slot. SGLang calls it after the copy has completed."""
        super().finalize()
        self.provenance.stamp(self.out_cache_loc, weight_version=self.weight_version, kind=self.kind)


class FrameCapturer(RoutedExpertsCapturer):
    """SGLang's capturer with narrow staging; `take_frame` turns the rows of the last `get_topk` into a frame."""

    @staticmethod
    def create(**kwargs: Any) -> RoutedExpertsCapturer | None:
        """Refuse, with every reason, what would be silently wrong; then create as SGLang does (None when capture is off)."""
        if not get_exec().features.enable_return_routed_experts:
            log.warning(
                "r3channel is on, but the engine was started without --enable-return-routed-experts: no routing"
            )
            return None
        reasons = list(refusals(kwargs["model"], model_config=kwargs["model_config"]))
        if reasons:
            raise ConfigError("r3channel refuses this engine: " + "; ".join(reasons))
        # Not by name: REPLACE has bound SGLang's name to this class, here too. For the same reason SGLang's create builds this.
        return super(FrameCapturer, FrameCapturer).create(**kwargs)

    def __init__(self, model_config: Any, *, num_tokens: int, device: str, **kwargs: Any) -> None:
        # One slot: SGLang's int32 host cache for all layers is given back at once.
        super().__init__(model_config, num_tokens=1, device=device, **kwargs)
        self.host_cache.destroy()
        self.spec = engine_spec(model_config)
        self.host_cache = NarrowHostCache(num_tokens, spec=self.spec, device=device)
        self._selection = LayerSelection(self.spec, device=device)
        self._version = (get_serving().weight_version, parse_weight_version(get_serving().weight_version))
        self._gathered: tuple[int, torch.Tensor] | None = None

    def _get_local_slice(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._selection.narrow(super()._get_local_slice(*args, **kwargs))

    def on_forward_end(
        self,
        forward_batch: Any,
        can_run_graph: bool,
        cuda_graph_batch: int | None,
        no_copy_to_cpu: bool = False,
    ) -> StampedOutput | None:
        """As SGLang's. The version is the one that is current now: the forward pass has just been launched with it."""
        staged = super().on_forward_end(forward_batch, can_run_graph, cuda_graph_batch, no_copy_to_cpu=True)
        assert staged is not None  # asked to leave the copy to us
        output = StampedOutput(
            out_cache_loc=staged.out_cache_loc,
            topk=staged.topk,
            host_cache=self.host_cache,
            provenance=self.host_cache.provenance,
            weight_version=self._current_version(),
            kind=RowKind.DECODED if forward_batch.forward_mode.is_decode() else RowKind.PREFILLED,
        )
        if no_copy_to_cpu:
            return output
        output.map_device_tensors(torch.Tensor.cpu)
        output.finalize()
        return None

    def get_topk(
        self, req_pool_idx: int, seqlen: int, req_to_token_pool: Any, start_len: int = 0
    ) -> torch.Tensor:
        """Rows [start_len, seqlen - 1) of a request, as SGLang's; remembers their slots for `take_frame`."""
        if start_len < 0:
            raise ValueError(f"start_len is {start_len}, expected >= 0")
        first_row = min(start_len, seqlen - 1)
        slots_T = req_to_token_pool.req_to_token[req_pool_idx][first_row : seqlen - 1].cpu()
        self._gathered = (first_row, slots_T)
        return self.host_cache.buffer.index_select(0, slots_T)  # 10 times as fast as buffer[slots_T] on uint8

    def take_frame(self, expert_ids_TLK: torch.Tensor, *, request_id: str) -> bytes:
        """The frame of the rows that `get_topk` has just returned."""
        if self._gathered is None:
            raise R3Error(
                "SGLang collected rows without get_topk; was another plug-in applied over r3channel's?"
            )
        first_row, slots_T = self._gathered
        self._gathered = None
        weight_versions_T, kinds_T = self.host_cache.provenance.gather(slots_T)
        return build_frame(
            self.spec,
            expert_ids_TLK=expert_ids_TLK,
            weight_versions_T=weight_versions_T,
            kinds_T=kinds_T,
            first_row=first_row,
            sample_key=sample_key(request_id),
            codec=_config.codec,
            row_digests=_config.row_digests,
        )

    def _current_version(self) -> int:
        text = get_serving().weight_version
        if text != self._version[0]:
            self._version = (text, _version_or_mark(text))
        return self._version[1]


def _version_or_mark(text: str) -> int:
    """An update cannot be refused here, so its rows are marked and their requests answered with an error frame."""
    try:
        return parse_weight_version(text)
    except ConfigError as error:
        log.error("r3channel: %s", error)
        return UNREADABLE_VERSION


def collect_frame(original: Callable[..., None], processor: Any, req: Any) -> None:
    """AROUND `_maybe_collect_routed_experts`: the gathered rows become one frame, a 1-D uint8 tensor.

    Whatever fails here fails for this request only: its reply carries a frame that names the reason.
    """
    capturer = get_global_experts_capturer()
    if not isinstance(capturer, FrameCapturer):
        return original(processor, req)
    request_id = str(req.rid)
    try:
        original(processor, req)
        if req.routed_experts is None:
            return None
        frame = capturer.take_frame(req.routed_experts, request_id=request_id)
    except Exception as error:
        log.exception("r3channel: no frame for request %s", request_id)
        frame = encode_error(f"{type(error).__name__}: {error}", sample_key=sample_key(request_id))
    req.routed_experts = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    return None


def engine_spec(model_config: Any) -> RoutingSpec:
    """From the configuration of the model that this engine serves."""
    return RoutingSpec.from_hf_config(model_config.hf_text_config.to_dict())


def refusals(model: torch.nn.Module, *, model_config: Any) -> Iterator[str]:
    """Why this engine's rows would be wrong without anybody noticing; nothing when they are right."""
    if get_spec().speculative_algorithm not in (None, "NONE"):
        yield f"speculative decoding ({get_spec().speculative_algorithm}): rows of draft trees are moved without their ids"
    if get_disagg().disaggregation_mode != "null":
        yield f"disaggregation ({get_disagg().disaggregation_mode}): nothing carries the prefill engine's rows to decode"
    if get_parallel().pp_size > 1:
        yield f"pipeline-parallel engine (pp_size {get_parallel().pp_size}): each stage holds its own layers only"
    if get_memory().enable_hierarchical_cache or get_memory().enable_lmcache:
        yield "hierarchical or external KV cache: slots are reloaded without their ids, so old rows would pass for new"
    if get_schedule().enable_mixed_chunk:
        yield "--enable-mixed-chunk: decoded and prefilled rows cannot be told apart"
    try:
        check_representable(engine_spec(model_config))
        parse_weight_version(get_serving().weight_version)
    except ConfigError as error:
        yield str(error)
        return
    yield from _router_mismatch(model, spec=engine_spec(model_config))


def _router_mismatch(model: torch.nn.Module, *, spec: RoutingSpec) -> Iterator[str]:
    """The model that was built must have its routers where its configuration says; models with own routers are not seen."""
    built = sorted({module.layer_id for module in model.modules() if isinstance(module, TopK)})
    if built and tuple(built) != spec.moe_layers:
        yield (
            f"the engine built routers in layers {built}, the checkpoint's configuration says {list(spec.moe_layers)}; "
            "SGLang's class for this model may ignore dense layers"
        )
