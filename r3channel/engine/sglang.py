"""The hooks of capture in SGLang, and what registers all hooks. Read against the versions in `sglang_hooks.READ_AGAINST`.

`TopK` writes int32 ids into SGLang's device buffer. At the end of the pass `PassCopies` narrows the ids of the MoE layers and
copies them to the host on a stream of its own. When SGLang handles the pass's result, the ids are written, with their
provenance, into a host cache by KV slot. When the request finishes, its rows are gathered once, into the memory that becomes
its frame. All of it runs on the scheduler's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer, get_global_experts_capturer

from r3channel.config import EngineConfig
from r3channel.engine import capture, sglang_tensors
from r3channel.engine import sglang_engine as engine
from r3channel.engine.capture import LayerSelection, SlotRows, UnfinishedFrame
from r3channel.engine.copy_stream import PassCopies, Restored
from r3channel.engine.frame_sender import Outlet, report
from r3channel.engine.refusals import parse_weight_version
from r3channel.engine.retraction import Kept, KeptStore
from r3channel.engine.sglang_engine import note_weight_version, refuse_engine, set_up, weight_version
from r3channel.engine.sglang_hooks import hooks_of, path_of
from r3channel.engine.token_tensors import KeptWeights
from r3channel.errors import ConfigError, R3Error
from r3channel.wire.frame import sample_key
from r3channel.wire.hello import PROBE_PREFIX
from r3channel.wire.routing import Ids, RowKind
from r3channel.wire.token_tensors import tensors_of

__all__ = ["FrameCapturer", "apply", "note_weight_version", "refuse_engine", "set_up"]

log = logging.getLogger(__name__)


def apply(config: EngineConfig) -> None:
    """Register the hooks with SGLang.

    SGLang applies them right after its plug-ins have run. Call this once per process.

    Args:
        config: The engine's settings.

    Raises:
        ConfigError: If `set_up` refuses the settings.
    """
    set_up(config)
    functions = vars(sglang_tensors) | globals()
    for hook in hooks_of(bags=engine.HAS_BAGS, token_tensors=config.token_tensors):
        HookRegistry.register(hook.path, functions[hook.function], HookType[hook.kind])


# -- capture ---------------------------------------------------------------------------------------------------------------


class FrameCapturer(RoutedExpertsCapturer):
    """SGLang's capturer with narrow staging. `collect_frame` finishes the frame that `get_topk` makes."""

    weighs = False
    """Whether ids are captured in pairs with their weights."""
    weights: torch.Tensor | None = None
    """Weights of the ids that come next. A draft model's router may leave some."""

    @staticmethod
    def create(**kwargs: Any) -> RoutedExpertsCapturer | None:
        # SGLang's class is not named: REPLACE has bound its name to this class, here too. So SGLang's create builds this class.
        return super(FrameCapturer, FrameCapturer).create(**kwargs)

    def __init__(
        self, model_config: Any, *, num_tokens: int, max_running_requests: int, device: str, **kwargs: Any
    ) -> None:
        # One slot, because SGLang's int32 host cache for all layers is freed at once. SGLang's device buffer holds a chunk, or
        # one token of each request. A pass with more rows than the buffer ends the engine.
        most = max(max_running_requests * engine.verified_tokens(), engine.unchunked_tokens(model_config))
        super().__init__(model_config, num_tokens=1, max_running_requests=most, device=device, **kwargs)
        if hasattr(self.host_cache, "destroy"):  # not in 0.5.15.post1
            self.host_cache.destroy()
        self.host_cache: Any = None
        self.spec = engine.engine_spec(model_config)
        config = engine.engine_config
        tensors = tensors_of(config.token_tensors, self.spec)
        self.weighs = any(tensor.made_by == "router_weights" for tensor in tensors)
        if self.weighs:  # an element holds a pair
            self.device_cache.buffer = self.device_cache.buffer.long()
            if hasattr(self, "gather_buffer"):
                self.gather_buffer = self.gather_buffer.long()
        self._version = (weight_version(), parse_weight_version(weight_version()))
        self.request: Any = None
        """The request whose rows `get_topk` gathers."""
        self.outlet: Outlet | None = None
        """None on a rank that does not reply; such a rank copies nothing."""
        if not engine.streams_replies():
            return
        hello = engine.engine_hello(self.spec, context=getattr(model_config, "context_len", None) or 0)
        self.outlet = outlet = Outlet(config, hello, replica=engine.replica())
        sglang_tensors.declare(tensors)
        outlet.metrics.watch("r3channel_weight_version", lambda: parse_weight_version(weight_version()))
        self.rows = SlotRows(self.spec, slots=num_tokens, weights=self.weighs)
        log.info("r3channel: %.2f GB of host memory for %d rows", self.rows.nbytes / 1e9, num_tokens)
        count = outlet.metrics.inc
        self.kept = KeptStore(
            self.rows, limit_bytes=config.kept_bytes,
            counted=lambda fate, rows: count("r3channel_engine_kept_rows_total", rows, fate=fate),
        )  # fmt: skip
        self.passes = PassCopies(
            self.rows, LayerSelection(self.spec, device=device), most_rows=len(self.device_cache.buffer), device=device,
            timed=partial(outlet.stage, "capture"),
            counted=lambda until: count("r3channel_engine_capture_waits_total", until=until),
        )  # fmt: skip

    def destroy(self) -> None:
        if self.outlet is not None:
            self.outlet.close()

    def capture(self, layer_id: int, topk_indices: torch.Tensor) -> None:
        """Capture a layer's ids or, if weights are captured, pairs.

        It replaces SGLang's method. A pair takes the place of an id in SGLang's buffer, and in the gather between ranks.

        Args:
            layer_id: The decoder layer.
            topk_indices: The ids that its router chose.

        Raises:
            R3Error: If weights are captured and the layer routes past the hook that sees them.
        """
        if not self.weighs:
            return super().capture(layer_id, topk_indices)
        weights, self.weights = self.weights, None
        if weights is None:
            where = path_of("note_weights")
            raise R3Error(f"layer {layer_id} routes past {where}, where combine_weights are seen")
        pairs_TK = self.device_cache.buffer[: len(topk_indices), layer_id]
        in_place = topk_indices.shape == pairs_TK.shape and not hasattr(self, "gather_buffer")
        if not in_place:  # ranks gather them first, or columns are added
            pairs_TK = torch.empty_like(topk_indices, dtype=torch.int64)
        capture.pair(topk_indices, weights, out_TK=pairs_TK)
        return None if in_place else super().capture(layer_id, pairs_TK)

    def on_forward_end(
        self, forward_batch: Any, can_run_graph: bool, cuda_graph_batch: int | None, no_copy_to_cpu: bool = False
    ) -> Any:  # fmt: skip
        """Start to copy the rows of the pass that was just launched.

        It replaces SGLang's method, which returns a `TopkCaptureOutput` under overlap scheduling, and otherwise copies and waits.

        Returns:
            The pass, in place of SGLang's `TopkCaptureOutput`; None for an idle batch and on a rank that does not reply.
        """
        # Attention may work with other slot ids than those of req_to_token (0.5.23). A padded batch is longer.
        slots_T = getattr(forward_batch, "out_cache_loc_virtual", None)
        if slots_T is None:
            slots_T = forward_batch.out_cache_loc
        rows = slots_T.shape[0]  # a tensor's len() takes five calls
        if self.outlet is None or not rows:  # SGLang never handles the result of an idle batch
            return None
        local_TAK = self._get_local_slice(forward_batch, can_run_graph, cuda_graph_batch)
        if local_TAK.shape[0] != rows:
            local_TAK = local_TAK[:rows]
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
        """Return this rank's rows of the captured ids.

        SGLang's method takes the decode graph's size for a prefill graph's. With DP attention a rank's rows begin at that size.
        """
        # Only a pass that ran without a decode graph is padded by its batch, and the batch notes its own size first.
        if can_run_graph and forward_batch._original_batch_size is not None:
            cuda_graph_batch = _prefill_graph_size(max(forward_batch.global_num_tokens_cpu))
        return super()._get_local_slice(forward_batch, can_run_graph, cuda_graph_batch)

    def get_topk(self, req_pool_idx: int, seqlen: int, req_to_token_pool: Any, start_len: int = 0) -> Any:
        """Gather rows [start_len, seqlen - 1) of a request.

        Args:
            req_pool_idx: The request's row in SGLang's table of slots.
            seqlen: Number of the request's tokens.
            req_to_token_pool: SGLang's table of slots.
            start_len: Position of the first row.

        Returns:
            The unfinished frame; SGLang counts the rows of its shape.

        Raises:
            ValueError: If `start_len` is negative.
        """
        if start_len < 0:
            raise ValueError(f"start_len is {start_len}, expected >= 0")
        first_row = min(start_len, seqlen - 1)
        slots_T = self._slots_of(self.request, req_to_token_pool, req_pool_idx, seqlen - 1)
        kept = getattr(self.request, "r3channel_kept", None)
        return self.rows.gather_frame(
            slots_T[first_row:], first_row=first_row, sample_key=sample_key(str(self.request.rid)),
            kept=tuple(kept.rows_between(first_row, seqlen - 1)) if kept else (),
            hashed=self.outlet is not None and self.outlet.sender is None,
        )  # fmt: skip

    def keep(self, req: Any, req_to_token_pool: Any) -> None:
        """Keep the rows of a request before it loses its slots.

        Rows are kept up to the request's last answered token.

        Args:
            req: The request, which SGLang retracts.
            req_to_token_pool: SGLang's table of slots.
        """
        kept, kv = getattr(req, "r3channel_kept", None) or Kept(), getattr(req, "kv", req)
        answered = len(req.origin_input_ids) + len(req.output_ids) - 1
        # A request that embeds its input forgets its answer. One without a new token since its last prefill has no new rows, and
        # the rows of a prefill may still be on their way.
        if req.input_embeds is not None or not req.output_ids or answered <= kept.seen:
            return
        end = min(answered, kv.kv_committed_len)
        slots_T = self._slots_of(req, req_to_token_pool, kv.req_pool_idx, end)
        self.kept.keep(kept, slots_T[kept.seen :], first_row=kept.seen)
        kept.seen, req.r3channel_kept = answered, kept

    def _slots_of(self, req: Any, req_to_token_pool: Any, req_pool_idx: int, end: int) -> Ids:
        """Return the slots of rows [0, end), after writing those rows."""
        self.passes.flush()
        slots_T = self.passes.read(req_to_token_pool.req_to_token, req_pool_idx, end)
        # Not at the transfer: an older request's last pass may write its row only after that.
        transferred = getattr(req, "r3channel_transferred", slice(0))
        if transferred.stop:
            self.rows.forget(slots_T[transferred])
        return slots_T

    def _current_version(self) -> int:
        text = weight_version()
        if text != self._version[0]:
            self._version = (text, _version_or_mark(text))
        return self._version[1]


def note_batch(made: Any, _class: Any, batch: Any, *_rest: Any, **_more: Any) -> None:
    """Note what a batch's rows need; hook AFTER `ForwardBatch.init_new`.

    A runner turns a pass that also decodes into a prefill before the pass ends, so the mix is noted here. A request that was
    retracted gets its rows back as it is prefilled.
    """
    made.r3channel_mixed = bool(batch.decoding_reqs)
    if made.forward_mode.is_extend_without_speculative():
        made.r3channel_restored = tuple(_find_restored(batch))


def _find_restored(batch: Any) -> Iterator[Restored]:
    at = 0
    for req, start, count in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
        if kept := getattr(req, "r3channel_kept", None):
            for rows in kept.rows_between(start, start + count):
                yield Restored(at + rows.first_row - start, rows)
        at += count


def note_weights(topk_ids: Any, topk_weights: torch.Tensor, *_rest: Any, **_more: Any) -> None:
    """Keep the weights of the ids that SGLang captures next.

    Hook BEFORE `_post_process_topk_ids`, which captures the ids as its first step.
    """
    del topk_ids
    if isinstance(capturer := get_global_experts_capturer(), FrameCapturer):
        capturer.weights = topk_weights


def keep_rows(*_args: Any, req: Any, req_to_token_pool: Any, **_more: Any) -> None:
    """Keep a retracted request's rows; hook BEFORE `release_req`.

    Each retraction goes through `release_req`: because of a full pool, a pause or a request of higher priority. An error loses
    these rows only: it is logged, and its rows are counted as given up.
    """
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
    """Note which slots a decode engine took over from elsewhere.

    Hook AFTER `prepare_for_prebuilt`. The keys up to here came from a prefill engine, or back from the host after a retraction.
    They lie in slots that hold other requests' rows.
    """
    del result
    for req, start, count in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
        req.r3channel_transferred = slice(start, start + count)


def _kind_of(forward_batch: Any) -> RowKind:
    mode = forward_batch.forward_mode
    # Verified tokens are generated tokens. The next pass writes the slots of the rejected ones again.
    if mode.is_decode() or mode.is_target_verify():
        return RowKind.DECODED
    return RowKind.UNKNOWN if getattr(forward_batch, "r3channel_mixed", False) else RowKind.PREFILLED


def _prefill_graph_size(tokens: int) -> int:
    sizes: Any = engine.model_runner.prefill_cuda_graph_runner.capture_num_tokens
    return min(size for size in sizes if size >= tokens)


def _version_or_mark(text: str) -> int:
    try:
        return parse_weight_version(text)
    except ConfigError as error:
        log.error("r3channel: %s", error)  # an update cannot be refused here
        return capture.UNREADABLE_VERSION


def collect_frame(original: Callable[..., None], processor: Any, req: Any) -> None:
    """Reply with a frame or a frame reference; hook AROUND `_maybe_collect_routed_experts`.

    The reply is a 1-D uint8 tensor. An error fails this request only: its reply carries a frame that names the reason.
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
            if not isinstance(unfinished := req.routed_experts, UnfinishedFrame):
                raise R3Error(
                    "SGLang collected rows without get_topk; was another plug-in applied over r3channel's?"
                )
            if capturer.weighs and not request_id.startswith(PROBE_PREFIX):
                req.r3channel_weights = KeptWeights(unfinished)
            reply = capturer.outlet.reply(unfinished, request_id=request_id)
        req.r3channel_kept = None
    except Exception as error:
        log.exception("r3channel: no frame for request %s", request_id)
        reply = bytearray(report(error, request_id=request_id))
    req.routed_experts = torch.frombuffer(reply, dtype=torch.uint8)
    return None
