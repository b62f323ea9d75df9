"""The hooks into SGLang: the only module of this room that imports it. Read against the versions in `sglang_hooks.READ_AGAINST`.

The life of an id here: `TopK` writes int32 ids into SGLang's device buffer; at the end of the pass `PassCopies` narrows those of
the MoE layers and brings them to the host on a stream of its own; when SGLang comes to the pass's result they are written, with
their provenance, into a host cache by KV slot; when the request finishes its rows are gathered once, into the memory that
becomes its frame. All of it runs on the scheduler's thread.
"""

from __future__ import annotations

import inspect
import logging
import secrets
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
from sglang.srt import runtime_context
from sglang.srt.layers.moe import topk as routing
from sglang.srt.layers.moe.hash_topk import HashTopK
from sglang.srt.layers.moe.topk import TopK, TopKOutputFormat
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer, get_global_experts_capturer

import r3channel
from r3channel.config import EngineConfig
from r3channel.engine import capture, refusals, sglang_tensors
from r3channel.engine import sglang_hooks as hooks
from r3channel.engine.capture import LayerSelection, SlotRows, UnfinishedFrame, parse_weight_version
from r3channel.engine.copy_stream import PassCopies, Restored
from r3channel.engine.frame_sender import Outlet, is_costly, report
from r3channel.engine.retraction import Kept, KeptStore
from r3channel.engine.sglang_hooks import check_hooks, hooked, installed_version, matching_table
from r3channel.engine.token_tensors import KeptWeights
from r3channel.errors import ConfigError, R3Error
from r3channel.model.spec import RoutingSpec
from r3channel.transport.process_group import nccl_version, torch_version
from r3channel.wire.frame import sample_key
from r3channel.wire.hello import PROBE_PREFIX, Hello
from r3channel.wire.routing import Ids, RowKind
from r3channel.wire.token_tensors import tensors_of

__all__ = ["FrameCapturer", "apply", "check_hooks"]

log = logging.getLogger(__name__)
_config = EngineConfig()
_table = ""
"""Which table of `sglang_hooks.TABLES` this SGLang follows."""
_runner: Any = None
"""The model runner whose passes are captured."""
_scales: Callable[[Any], object] = getattr(
    routing, "is_routed_scaling_factor_fused_in_topk", attrgetter("apply_routed_scaling_factor_on_output")
)
"""Whether a router's configuration has its factor in the weights. The attribute is not all of it: ROCm (0.5.23)."""
_announced_version: str | None = None
"""The last version that a weight update named, where SGLang does not tell its scheduler of versions (0.5.15.post1)."""


def apply(config: EngineConfig) -> None:
    """Register the hooks; SGLang applies them right after its plug-ins have run. Call once per process."""
    set_up(config)
    HookRegistry.register(hooks.CAPTURER, FrameCapturer, HookType.REPLACE)
    HookRegistry.register(hooks.COLLECT, collect_frame, HookType.AROUND)
    HookRegistry.register(hooks.INIT_BATCH, note_batch, HookType.AFTER)
    HookRegistry.register(hooks.RELEASE, keep_rows, HookType.BEFORE)
    HookRegistry.register(hooks.TRANSFERRED, note_transferred, HookType.AFTER)
    HookRegistry.register(hooks.INIT_CAPTURER, refuse_engine, HookType.BEFORE)
    if config.token_tensors:
        HookRegistry.register(hooks.TOP_LOGPROBS[_has_bags()], sglang_tensors.take_topk, HookType.AROUND)
        HookRegistry.register(hooks.STREAM, sglang_tensors.add_tensors, HookType.BEFORE)
        if "combine_weights" in config.token_tensors:
            HookRegistry.register(hooks.WEIGHTS, note_weights, HookType.BEFORE)
        if _has_bags():
            HookRegistry.register(hooks.MASKS, sglang_tensors.keep_masks, HookType.AROUND)
    if not _has_bags():
        for path in hooks.UPDATES:
            HookRegistry.register(path, note_weight_version, HookType.AFTER)


def set_up(config: EngineConfig) -> None:
    """Comes before any hook is called, once per process. Raises ConfigError for what this SGLang has not."""
    global _config, _table
    is_costly(config)  # an unknown codec ends the start, not the first request
    masks = [tensor.name for tensor in tensors_of(config.token_tensors) if tensor.made_by == "mask_rows"]
    if masks and not _has_bags():
        raise ConfigError(f"R3CHANNEL_TOKEN_TENSORS: SGLang {installed_version()} returns no {masks}")
    _config, _table = config, matching_table() or ""  # before a hook changes what is looked at


# -- what the engine was started with --------------------------------------------------------------------------------------


def _has_bags() -> bool:
    """0.5.23 keeps settings in bags by theme; 0.5.15.post1 has one object."""
    return hasattr(runtime_context, "get_serving")


def settings() -> dict[str, Any]:
    """What SGLang runs with, by the names of its arguments."""
    args: Any = runtime_context.get_server_args()
    values = args.resolved_dict() if _has_bags() else vars(args)
    return {**values, "weight_version": weight_version()}


def asked_for() -> dict[str, Any]:
    """The settings that are not SGLang's defaults. 0.5.15.post1 writes what it resolves over them: each of those is judged."""
    args: Any = runtime_context.get_server_args()
    plain: Any = type(args)(model_path="none")  # for which 0.5.15.post1 resolves nothing
    names = args.__struct_fields__ if _has_bags() else vars(plain)
    shown = [name for name in names if not name.startswith("_")]  # the others are notes of its parser
    values = settings()
    return {name: values[name] for name in shown if getattr(args, name) != getattr(plain, name)}


def weight_version() -> str:
    """The version that SGLang's scheduler knows now."""
    if _has_bags():
        return runtime_context.get_serving().weight_version
    args: Any = runtime_context.get_server_args()
    return args.weight_version if _announced_version is None else _announced_version


def note_weight_version(result: Any, updater: Any, recv_req: Any) -> None:
    """AFTER a weight update of 0.5.15.post1: its version is in the request and reaches the scheduler nowhere else."""
    global _announced_version
    del updater
    if result.success and recv_req.weight_version is not None:
        _announced_version = recv_req.weight_version


def _streams_replies() -> bool:
    """Whether this rank answers, the only one of those that share a request; the others need not gather its rows."""
    parallel = runtime_context.get_parallel()
    return parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0


def _replica() -> int:
    """Which of the engine's processes that reply this is: data-parallel copies, or groups of DP attention."""
    parallel: Any = runtime_context.get_parallel()
    return getattr(parallel, "dp_rank", None) or getattr(parallel, "attn_dp_rank", None) or 0


# -- capture ---------------------------------------------------------------------------------------------------------------


class FrameCapturer(RoutedExpertsCapturer):
    """SGLang's capturer with narrow staging; `take_unfinished` has the rows of the last `get_topk`."""

    weighs = False
    """Whether ids are captured in pairs with their weights."""
    weights: torch.Tensor | None = None
    """Those of the ids that come next; a router that draft models have may leave some."""

    @staticmethod
    def create(**kwargs: Any) -> RoutedExpertsCapturer | None:
        # Not by name: REPLACE has bound SGLang's name to this class, here too. For the same reason SGLang's create builds this.
        return super(FrameCapturer, FrameCapturer).create(**kwargs)

    def __init__(
        self, model_config: Any, *, num_tokens: int, max_running_requests: int, device: str, **kwargs: Any
    ) -> None:
        # One slot: SGLang's int32 host cache for all layers is given back at once. Its device buffer is made for a chunk, and for
        # one token of each request; more rows than the buffer's end the engine.
        most = max(max_running_requests * _verified_tokens(), _unchunked_tokens(model_config))
        super().__init__(model_config, num_tokens=1, max_running_requests=most, device=device, **kwargs)
        if hasattr(self.host_cache, "destroy"):  # not in 0.5.15.post1
            self.host_cache.destroy()
        self.host_cache: Any = None
        self.spec = engine_spec(model_config)
        tensors = tensors_of(_config.token_tensors, self.spec)
        self.weighs = any(tensor.made_by == "router_weights" for tensor in tensors)
        self._version = (weight_version(), parse_weight_version(weight_version()))
        self._unfinished: UnfinishedFrame | None = None
        self.request: Any = None
        """Whose rows `get_topk` is asked for."""
        self.outlet: Outlet | None = None
        """None on a rank that does not reply: it copies nothing."""
        if not _streams_replies():
            return
        hello = engine_hello(self.spec, context=getattr(model_config, "context_len", None) or 0)
        self.outlet = outlet = Outlet(_config, hello, replica=_replica())
        sglang_tensors.declare(tensors)
        outlet.metrics.watch("r3channel_weight_version", lambda: parse_weight_version(weight_version()))
        self.rows = SlotRows(self.spec, slots=num_tokens, weights=self.weighs)
        log.info("r3channel: %.2f GB of host memory for %d rows", self.rows.nbytes / 1e9, num_tokens)
        count = outlet.metrics.inc
        self.kept = KeptStore(
            self.rows, limit_bytes=_config.kept_bytes,
            counted=lambda fate, rows: count("r3channel_engine_kept_rows_total", rows, fate=fate),
        )  # fmt: skip
        self.passes = PassCopies(
            self.rows, LayerSelection(self.spec, device=device), most_rows=len(self.device_cache.buffer), device=device,
            timed=lambda: outlet.stage("capture"),
            counted=lambda until: count("r3channel_engine_capture_waits_total", until=until),
        )  # fmt: skip

    def destroy(self) -> None:
        if self.outlet is not None:
            self.outlet.close()

    def capture(self, layer_id: int, topk_indices: torch.Tensor) -> None:
        """As SGLang's: a pair takes the place of an id in its buffer, and on the way there between ranks."""
        if not self.weighs:
            return super().capture(layer_id, topk_indices)
        weights, self.weights = self.weights, None
        if weights is None:
            raise R3Error(f"layer {layer_id} routes past {hooks.WEIGHTS}, where combine_weights are seen")
        pairs_TK = self.device_cache.buffer[: len(topk_indices), layer_id]
        in_place = topk_indices.shape == pairs_TK.shape and not hasattr(self, "gather_buffer")
        if not in_place:  # ranks gather them first, or columns are added
            pairs_TK = torch.empty_like(topk_indices, dtype=torch.int32)
        capture.pair(topk_indices, weights, out_TK=pairs_TK)
        return None if in_place else super().capture(layer_id, pairs_TK)

    def on_forward_end(
        self, forward_batch: Any, can_run_graph: bool, cuda_graph_batch: int | None, no_copy_to_cpu: bool = False
    ) -> Any:  # fmt: skip
        """In place of SGLang's, which returns a `TopkCaptureOutput` under overlap scheduling, and else copies and waits."""
        # Ids that attention works with may be other ones than those of req_to_token (0.5.23); a padded batch is longer.
        slots_T = getattr(forward_batch, "out_cache_loc_virtual", None)
        if slots_T is None:
            slots_T = forward_batch.out_cache_loc
        if self.outlet is None or not len(slots_T):  # SGLang never comes to the result of an idle batch
            return None
        local_TAK = self._get_local_slice(forward_batch, can_run_graph, cuda_graph_batch)
        if len(local_TAK) != len(slots_T):
            local_TAK = local_TAK[: len(slots_T)]
        # The version is the current one: the pass was just launched with it.
        staged = self.passes.stage(
            slots_T, local_TAK, weight_version=self._current_version(), kind=_kind_of(forward_batch),
            restored=getattr(forward_batch, "r3channel_restored", ()),
        )  # fmt: skip
        if not no_copy_to_cpu:
            staged.finalize()  # without overlap no later pass is launched before this one's result is handled
        return staged

    def _get_local_slice(
        self, forward_batch: Any, can_run_graph: bool, cuda_graph_batch: int | None
    ) -> torch.Tensor:
        """As SGLang's, which takes the decode graph's size for a prefill graph's: with DP attention a rank's rows begin there."""
        # Only a pass that no decode graph ran is padded by its batch, which notes its size first.
        if can_run_graph and forward_batch._original_batch_size is not None:
            cuda_graph_batch = _prefill_graph_size(max(forward_batch.global_num_tokens_cpu))
        return super()._get_local_slice(forward_batch, can_run_graph, cuda_graph_batch)

    def get_topk(self, req_pool_idx: int, seqlen: int, req_to_token_pool: Any, start_len: int = 0) -> Any:
        """Rows [start_len, seqlen - 1) of a request, which SGLang counts; they stay unfinished for `take_unfinished`."""
        if start_len < 0:
            raise ValueError(f"start_len is {start_len}, expected >= 0")
        first_row = min(start_len, seqlen - 1)
        slots_T = self._slots_of(self.request, req_to_token_pool, req_pool_idx, seqlen - 1)
        kept = getattr(self.request, "r3channel_kept", None)
        self._unfinished = self.rows.unfinished(
            slots_T[first_row:], first_row=first_row, sample_key=sample_key(str(self.request.rid)),
            kept=tuple(kept.within(first_row, seqlen - 1)) if kept else (),
            hashed=self.outlet is not None and self.outlet.encodes_here,
        )  # fmt: skip
        return self._unfinished.bytes_TN

    def take_unfinished(self) -> UnfinishedFrame:
        """What `get_topk` has just gathered."""
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is None:
            raise R3Error(
                "SGLang collected rows without get_topk; was another plug-in applied over r3channel's?"
            )
        return unfinished

    def keep(self, req: Any, req_to_token_pool: Any) -> None:
        """Keep the rows of a request that is about to lose its slots, up to its last answered token."""
        kept, kv = getattr(req, "r3channel_kept", None) or Kept(), getattr(req, "kv", req)
        answered = len(req.origin_input_ids) + len(req.output_ids) - 1
        # A request that embeds its input forgets its answer. One without a new token since its last prefill has no new rows, and
        # those of a prefill may still be on their way.
        if req.input_embeds is not None or not req.output_ids or answered <= kept.seen:
            return
        end = min(answered, kv.kv_committed_len)
        slots_T = self._slots_of(req, req_to_token_pool, kv.req_pool_idx, end)
        self.kept.keep(kept, slots_T[kept.seen :], first_row=kept.seen)
        kept.seen, req.r3channel_kept = answered, kept

    def _slots_of(self, req: Any, req_to_token_pool: Any, req_pool_idx: int, end: int) -> Ids:
        """The slots of rows [0, end) of a request, whose rows have been written."""
        self.passes.flush()
        slots_T = self.passes.read(req_to_token_pool.req_to_token, req_pool_idx, end)
        # Not when they were transferred: an older request's last pass may write its row only then.
        transferred = getattr(req, "r3channel_transferred", slice(0))
        if transferred.stop:
            self.rows.forget(slots_T[transferred])
        return slots_T

    def _current_version(self) -> int:
        text = weight_version()
        if text != self._version[0]:
            self._version = (text, _version_or_mark(text))
        return self._version[1]


def _verified_tokens() -> int:
    """How many tokens of a request one pass verifies at most; 1 where nothing is drafted."""
    context: Any = runtime_context
    if _has_bags():
        return context.max_speculative_num_draft_tokens() or 1
    return context.get_server_args().max_speculative_num_draft_tokens or 1


def _unchunked_tokens(model_config: Any) -> int:
    """How many tokens one prefill has at most where prompts are not chunked: several prompts' up to a budget, or one prompt's."""
    values = settings()
    if values["chunked_prefill_size"] > 0:
        return 0
    return max(values["max_prefill_tokens"], model_config.context_len)


def note_batch(made: Any, _class: Any, batch: Any, *_rest: Any, **_more: Any) -> None:
    """AFTER `ForwardBatch.init_new`: notes what of a batch its rows need. A runner turns a pass that also decodes into a prefill
    before it ends; a request that was retracted gets its rows back as it is prefilled."""
    made.r3channel_mixed = bool(batch.decoding_reqs)
    if made.forward_mode.is_extend_without_speculative():
        made.r3channel_restored = tuple(_restored(batch))


def _restored(batch: Any) -> Iterator[Restored]:
    at = 0
    for req, start, count in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
        if kept := getattr(req, "r3channel_kept", None):
            for rows in kept.within(start, start + count):
                yield Restored(at + rows.first_row - start, rows)
        at += count


def note_weights(topk_ids: Any, topk_weights: torch.Tensor, *_rest: Any, **_more: Any) -> None:
    """BEFORE `_post_process_topk_ids`, which captures the ids as its first step."""
    del topk_ids
    if isinstance(capturer := get_global_experts_capturer(), FrameCapturer):
        capturer.weights = topk_weights


def keep_rows(*_args: Any, req: Any, req_to_token_pool: Any, **_more: Any) -> None:
    """BEFORE `release_req`, through which each retraction goes: of a full pool, of a pause, of a higher priority."""
    capturer = get_global_experts_capturer()
    if not isinstance(capturer, FrameCapturer) or capturer.outlet is None:
        return
    if not req.return_routed_experts or req.finished() or req.to_finish:
        return
    try:
        capturer.keep(req, req_to_token_pool)
    except Exception:
        log.exception("r3channel: rows of request %s are lost as it is retracted", req.rid)
        capturer.outlet.metrics.inc("r3channel_engine_kept_rows_total", len(req.output_ids), fate="given_up")


def note_transferred(result: Any, batch: Any) -> None:
    """AFTER a decode engine has taken requests over: their keys so far came from a prefill engine, or back from the host after
    a retraction, into slots that hold other requests' rows."""
    del result
    for req, start, count in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
        req.r3channel_transferred = slice(start, start + count)


def _kind_of(forward_batch: Any) -> RowKind:
    """Tokens that are verified have been generated. What is rejected of them lies in slots that the next pass writes again."""
    mode = forward_batch.forward_mode
    if mode.is_decode() or mode.is_target_verify():
        return RowKind.DECODED
    return RowKind.UNKNOWN if getattr(forward_batch, "r3channel_mixed", False) else RowKind.PREFILLED


def _prefill_graph_size(tokens: int) -> int:
    """Rows that each rank has in the graph that a prefill of so many is padded to."""
    sizes: Any = _runner.prefill_cuda_graph_runner.capture_num_tokens
    return min(size for size in sizes if size >= tokens)


def _version_or_mark(text: str) -> int:
    """An update cannot be refused here, so its rows are marked and their requests answered with an error frame."""
    try:
        return parse_weight_version(text)
    except ConfigError as error:
        log.error("r3channel: %s", error)
        return capture.UNREADABLE_VERSION


def collect_frame(original: Callable[..., None], processor: Any, req: Any) -> None:
    """AROUND `_maybe_collect_routed_experts`: the reply gets a frame, or a frame reference for it, as a 1-D uint8 tensor.

    Whatever fails here fails for this request only: its reply carries a frame that names the reason.
    """
    capturer = get_global_experts_capturer()
    if not isinstance(capturer, FrameCapturer):
        return original(processor, req)
    if capturer.outlet is None or not req.return_routed_experts:
        return None
    request_id = str(req.rid)
    try:
        capturer.request = req
        with capturer.outlet.stage("frame"):
            original(processor, req)
            unfinished = capturer.take_unfinished()
            if capturer.weighs and not request_id.startswith(PROBE_PREFIX):
                req.r3channel_weights = KeptWeights(unfinished)
            reply = capturer.outlet.reply(unfinished, request_id=request_id)
        req.r3channel_kept = None
    except Exception as error:
        log.exception("r3channel: no frame for request %s", request_id)
        reply = report(error, request_id=request_id)
    if isinstance(reply, bytes):
        reply = bytearray(reply)  # torch wants memory that may be written
    req.routed_experts = torch.frombuffer(reply, dtype=torch.uint8)
    return None


# -- at start --------------------------------------------------------------------------------------------------------------


def engine_spec(model_config: Any) -> RoutingSpec:
    """From the configuration of the model that this engine serves."""
    return RoutingSpec.from_hf_config(model_config.hf_text_config)


def engine_hello(spec: RoutingSpec, *, context: int) -> Hello:
    args: Any = runtime_context.get_server_args()
    weighs = "combine_weights" in _config.token_tensors
    return Hello(
        engine=_config.name or args.url(), boot_id=secrets.randbits(63), spec_digest=spec.digest, spec=spec.to_dict(),
        sglang=installed_version(), r3channel=r3channel.__version__, hooks=hooked(_table), delivery=_config.delivery,
        codec=_config.codec, allowed=tuple(sorted(_config.allowed)), unread=tuple(refusals.unread(asked_for())),
        weighing=sglang_tensors.weighing(_runner.model, _scales) if weighs else (),
        torch=torch_version(), nccl=nccl_version(), context=context, kept_bytes=_config.kept_bytes,
    )  # fmt: skip


def refuse_engine(runner: Any) -> None:
    """BEFORE `ModelRunner.init_routed_experts_capturer`: end the start, with every reason, where rows would be wrong unseen."""
    global _runner
    if runner.is_draft_worker:
        return
    _runner = runner
    if not settings()["enable_return_routed_experts"]:
        log.warning(
            "r3channel is on, but the engine was started without --enable-return-routed-experts: no routing"
        )
        return
    values = settings()
    found = [
        *refusals.refusals(values, spec=engine_spec(runner.model_config), routers=_routers(runner.model))
    ]
    found += () if _tells_graphs_in_tokens(runner) else refusals.refused_chains(values)
    if tensors := tensors_of(_config.token_tensors):
        vocabulary, past = (
            runner.model_config.vocab_size,
            sglang_tensors.past_weights(runner.model, routing.__name__),
        )
        found += sglang_tensors.refused_tensors(values, tensors, vocabulary=vocabulary, past=past)
    refusals.refuse([*found, *refusals.refused_unread(refusals.unread(asked_for()))], allowed=_config.allowed)


def _tells_graphs_in_tokens(runner: Any) -> bool:
    """Whether a capturer is told a graph's size in tokens, as in slime's image, and not in requests."""
    return "num_tokens_per_bs" in inspect.unwrap(type(runner).forward).__code__.co_consts


def _routers(model: Any) -> Iterator[refusals.Router]:
    for module in model.modules():
        if isinstance(module, HashTopK):
            layer = -1 if module.layer_id is None else module.layer_id
            yield refusals.Router(layer, "HashTopK, a table by token")
        elif isinstance(module, TopK):
            yield refusals.Router(module.layer_id, _unseen(module))


def _unseen(router: Any) -> str:
    """Why a router's choices never reach the capturer; empty where they do."""
    config = router.topk_config
    if not getattr(config, "allow_routed_experts_capture", True):
        return "its capture is switched off"
    if config.output_format is not None:
        return "" if config.output_format is TopKOutputFormat.STANDARD else config.output_format.name
    backend = "" if _has_bags() else settings()["moe_runner_backend"]
    standard = backend == "flashinfer_mxfp4" and router.is_fp4_experts
    return backend if backend in refusals.KERNEL_ROUTING and not standard else ""
