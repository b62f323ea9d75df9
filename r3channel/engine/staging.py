"""Asynchronous capture for an engine that has none: SGLang 0.5.9, whose patch (patches/) calls this. Imports no engine.

    forward's thread, end of a pass   narrow on the device -> copy stream -> pinned memory; nothing waits
    when a request finishes           copies of finished passes -> host cache by KV slot -> the request's frame

The scatter is deferred to the next flush: SGLang handles a pass's result only after that pass has ended on the device, so
the flush needs the passes that have ended, and their copies follow them at once. The pass that runs meanwhile is left alone.
Everything runs on the scheduler's one thread.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import r3channel
from r3channel.config import REFUSALS, EngineConfig
from r3channel.engine.capture import (
    UNREADABLE_VERSION,
    LayerSelection,
    SlotRows,
    parse_weight_version,
    torch_id_dtype,
)
from r3channel.engine.frame_sender import Outlet, is_costly, report
from r3channel.engine.refusals import KERNEL_ROUTING, Refusal, refusals, refuse
from r3channel.engine.sglang_hooks import installed_version
from r3channel.engine.sglang_settings import flag
from r3channel.errors import ConfigError
from r3channel.model.spec import RoutingSpec
from r3channel.transport.process_group import nccl_version, torch_version
from r3channel.wire.frame import sample_key
from r3channel.wire.hello import Hello
from r3channel.wire.routing import RowKind

log = logging.getLogger(__name__)

LocalRange = Callable[[Any, bool, "int | None"], tuple[int, int]]
"""(forward_batch, can_run_graph, cuda_graph_batch) -> (first row, rows) of this rank in the device buffer, as host numbers."""
_PATCHED = (
    "layers.moe.routed_experts_capturer.RoutedExpertsCapturer.create",
    "managers.scheduler_output_processor_mixin.SchedulerOutputProcessorMixin.maybe_collect_routed_experts",
    "managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin",
)


def create_capturer(
    *,
    model_config: Any,
    num_fused_shared_experts: int,
    num_tokens: int,
    max_running_requests: int,
    device: str,
    server_args: Any,
    streams_replies: bool,
    local_range: LocalRange,
) -> StagedCapturer | None:
    """What the patched `RoutedExpertsCapturer.create` returns in place of SGLang's own; None when r3channel is off.

    `num_tokens` counts KV slots. Raises ConfigError with every reason for which this engine's rows would be wrong.
    """
    config = EngineConfig.from_environment()
    if not config.engine:
        return None
    if config.sampling_masks:
        raise ConfigError("R3CHANNEL_SAMPLING_MASKS=1: SGLang 0.5.9 returns no sampling masks")
    is_costly(config)  # an unknown codec ends the start, not the first request
    spec = RoutingSpec.from_hf_config(model_config.hf_text_config)
    values = vars(server_args)
    refuse([*refusals(values, spec=spec), *_of_0_5_9(values)], allowed=config.allowed)
    rows = max(server_args.chunked_prefill_size * server_args.dp_size, max_running_requests)
    hello = Hello(
        engine=config.name or f"http://{server_args.host}:{server_args.port}",
        boot_id=secrets.randbits(63),
        spec_digest=spec.digest,
        spec=spec.to_dict(),
        sglang=installed_version(),
        r3channel=r3channel.__version__,
        hooks=_PATCHED,
        delivery=config.delivery,
        codec=config.codec,
        allowed=tuple(sorted(config.allowed)),
        torch=torch_version(),
        nccl=nccl_version(),
        context=getattr(model_config, "context_len", None) or 0,
    )
    return StagedCapturer(
        spec,
        max_rows=rows,
        fused_columns=num_fused_shared_experts,
        slots=num_tokens,
        device=device,
        weight_version=server_args.weight_version,
        local_range=local_range,
        outlet=Outlet(config, hello) if streams_replies else None,
    )


def _of_0_5_9(values: Mapping[str, Any]) -> Iterator[Refusal]:
    """What only this release does: its capture gathers no ids, and its routers choose their output by the runner's name."""
    if values["moe_a2a_backend"] in ("deepep", "deepep_v2"):
        yield "a2a", f"{flag('moe_a2a_backend', values['moe_a2a_backend'])}: {REFUSALS['a2a']}"
    if values["moe_runner_backend"] in KERNEL_ROUTING:
        yield (
            "kernel_routing",
            f"{flag('moe_runner_backend', values['moe_runner_backend'])}: {REFUSALS['kernel_routing']}",
        )


@dataclass(frozen=True, slots=True)
class _Stage:
    """One pass on its way to the host. Holds the device tensors until their copy has been waited for."""

    device_tensors: tuple[torch.Tensor, torch.Tensor]
    host_slots_T: torch.Tensor
    host_ids_TLK: torch.Tensor
    weight_version: int
    kind: RowKind
    computed: Any
    """Event: the pass has ended on the device. None where there is nothing to wait for."""
    copied: Any


class StagedCapturer:
    """Stands where SGLang 0.5.9 has its capturer: same calls, no synchronisation of the compute stream."""

    def __init__(
        self,
        spec: RoutingSpec,
        *,
        max_rows: int,
        fused_columns: int,
        slots: int,
        device: str,
        weight_version: str,
        local_range: LocalRange,
        outlet: Outlet | None,
    ) -> None:
        self.spec, self.outlet = spec, outlet
        self._local_range = local_range
        shape = (max_rows, spec.num_layers, spec.top_k + fused_columns)
        self.device_ids_TAK = torch.zeros(shape, dtype=torch.int32, device=device)
        on_gpu = self.device_ids_TAK.is_cuda
        self.rows = SlotRows(
            spec,
            torch.zeros(
                (slots, spec.num_moe_layers, spec.top_k), dtype=torch_id_dtype(spec), pin_memory=on_gpu
            ),
        )
        self._selection = LayerSelection(spec, device=device)
        self._copy_stream = torch.cuda.Stream(device) if on_gpu else None
        self._staged: deque[_Stage] = deque()
        self._weight_version = parse_weight_version(weight_version)

    # -- SGLang's calls --------------------------------------------------------------------------------------------

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Ids [tokens, K + fused] of one layer, on the compute stream; may be recorded into a CUDA graph."""
        self.device_ids_TAK[: topk_ids.shape[0], layer_id, :] = topk_ids

    def on_forward_end(self, forward_batch: Any, can_run_graph: bool, cuda_graph_batch: int | None) -> None:
        """Start the copy of this pass's rows. Never waits."""
        start, rows = self._local_range(forward_batch, can_run_graph, cuda_graph_batch)
        ids_TLK = self._selection.narrow(self.device_ids_TAK[start : start + rows, :, : self.spec.top_k])
        self._staged.append(
            self._stage(
                forward_batch.out_cache_loc.clone(), ids_TLK, kind=_kind_of(forward_batch.forward_mode)
            )
        )
        self._write_copied()

    def collect(self, req: Any, req_to_token_pool: Any) -> torch.Tensor | None:
        """What the reply of a finished request carries, as a 1-D uint8 tensor; None when it did not ask for routing."""
        if self.outlet is None or not req.return_routed_experts:
            return None
        request_id = str(req.rid)
        try:
            with self.outlet.stage("frame"):
                self.flush()
                slots_T = req_to_token_pool.req_to_token[req.req_pool_idx][: req.seqlen - 1].cpu()
                unfinished = self.rows.unfinished(slots_T, first_row=0, sample_key=sample_key(request_id))
                reply = self.outlet.reply(unfinished, request_id=request_id)
        except Exception as error:
            log.exception("r3channel: no frame for request %s", request_id)
            reply = report(error, request_id=request_id)
        return torch.frombuffer(bytearray(reply) if isinstance(reply, bytes) else reply, dtype=torch.uint8)

    def note_weight_version(self, text: str) -> None:
        """A weight update has named its version; rows of passes launched from now on carry it."""
        try:
            self._weight_version = parse_weight_version(text)
        except ConfigError as error:
            log.error("r3channel: %s", error)
            self._weight_version = UNREADABLE_VERSION

    # -- staging ---------------------------------------------------------------------------------------------------

    def _stage(self, slots_T: torch.Tensor, ids_TLK: torch.Tensor, *, kind: RowKind) -> _Stage:
        if self._copy_stream is None:
            return _Stage((slots_T, ids_TLK), slots_T, ids_TLK, self._weight_version, kind, None, None)
        computed, copied = torch.cuda.Event(), torch.cuda.Event()
        computed.record(torch.cuda.current_stream(ids_TLK.device))
        self._copy_stream.wait_event(computed)
        with torch.cuda.stream(self._copy_stream):
            host_slots_T, host_ids_TLK = _to_pinned(slots_T), _to_pinned(ids_TLK)
            copied.record(self._copy_stream)
        return _Stage(
            (slots_T, ids_TLK), host_slots_T, host_ids_TLK, self._weight_version, kind, computed, copied
        )

    def flush(self) -> None:
        """Write the rows of every pass that has ended to the host cache; waits for their copies only."""
        while self._staged and (self._staged[0].computed is None or self._staged[0].computed.query()):
            stage = self._staged.popleft()
            if stage.copied is not None:
                stage.copied.synchronize()
            self._write(stage)

    def _write_copied(self) -> None:
        """Those whose copy is there anyway, so that few are ever alive."""
        while self._staged and self._staged[0].copied is not None and self._staged[0].copied.query():
            self._write(self._staged.popleft())

    def _write(self, stage: _Stage) -> None:
        self.rows.write(
            stage.host_slots_T, stage.host_ids_TLK, weight_version=stage.weight_version, kind=stage.kind
        )


def _kind_of(mode: Any) -> RowKind:
    if mode.is_mixed():
        return RowKind.UNKNOWN
    return RowKind.DECODED if mode.is_decode() else RowKind.PREFILLED


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned host memory, ordered on the current stream."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
