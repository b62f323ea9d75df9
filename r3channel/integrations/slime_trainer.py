"""slime's Megatron actor, replaying what the channel delivers. Imported where slime and Megatron are.

Routers are Megatron's own, with their RouterReplay; slime's `RoutingReplay` stays off. All on the actor's main thread.
"""

from __future__ import annotations

from argparse import Namespace
from collections import deque
from collections.abc import Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import ray
import slime.backends.megatron_utils.model as slime_model  # pyright: ignore[reportMissingImports]
import torch
from slime.backends.megatron_utils.actor import MegatronTrainRayActor  # pyright: ignore[reportMissingImports]
from slime.backends.megatron_utils.update_weight.hf_weight_iterator_base import (  # pyright: ignore[reportMissingImports]
    HfWeightIteratorBase,
)

from r3channel.config import ChannelConfig
from r3channel.errors import StepError
from r3channel.integrations.slime import interface_of, layout_of
from r3channel.metrics import Metrics, StageClock
from r3channel.plan.ticket import Ticket
from r3channel.relay.actor import RayRelay
from r3channel.trainer.channel import TrainerChannel
from r3channel.trainer.replay import ReplayStep
from r3channel.trainer.schedule import replayed
from r3channel.weights.session import WeightSync
from r3channel.weights.sglang import EngineClient

_LIVE = ("ref_", "teacher_")
"""Log-prob passes of other models: what the engines chose is not theirs."""


class ChannelActor(MegatronTrainRayActor):
    channel: TrainerChannel | None = None
    _step: ReplayStep | None = None
    _ticket: Any = None

    def init(self, args: Namespace, role: str, *rest: Any, **options: Any) -> Any:
        schedule_of = slime_model.get_forward_backward_func
        slime_model.get_forward_backward_func = lambda: replayed(schedule_of(), lambda: self._step)
        start = super().init(args, role, *rest, **options)
        if args.r3_weights != "off" and not args.debug_rollout_only:
            self.weight_updater = ChannelUpdater(self.weight_updater, self.weights_backuper, rank=self._rank)
        return start

    def set_rollout_manager(self, rollout_manager: Any) -> None:
        super().set_rollout_manager(rollout_manager)
        if not (self.args.debug_rollout_only or self.args.offload_train):
            self._attach()

    def _relay_actor(self) -> Any:
        return self.rollout_manager

    def _attach(self) -> TrainerChannel:
        """At the start, or in the first step where the model sleeps until then."""
        if self.channel is None:
            config = ChannelConfig(**self.args.r3_channel)
            clock = StageClock("trainer")
            metrics = Metrics("trainer", clock=clock)
            if config.metrics_port >= 0:
                metrics.serve(config.interface)
            self.channel = TrainerChannel.attach(
                self.model,
                RayRelay(self._relay_actor()),
                layout=layout_of(self.args),
                config=config,
                clock=clock,
                metrics=metrics,
            )
        return self.channel

    def train(self, rollout_id: int, rollout_data_ref: Sequence[Any], external_data: Any = None) -> Any:
        self._ticket = getattr(rollout_data_ref[0], "r3_ticket", None)
        return super().train(rollout_id, rollout_data_ref, external_data=external_data)

    def train_actor(self, rollout_id: int, rollout_data: dict[str, Any], external_data: Any = None) -> None:
        with self._replayed(rollout_id, rollout_data):
            super().train_actor(rollout_id, rollout_data, external_data=external_data)

    @contextmanager
    def _replayed(self, rollout_id: int, rollout_data: dict[str, Any]):
        if self._ticket is None:
            raise StepError(
                f"rollout {rollout_id} came without a ticket; expected one from r3channel's rollout manager. Was the job started "
                "with `r3channel slime`?"
            )
        ticket = Ticket.from_bytes(ray.get(self._ticket))
        version = self.weight_updater.weight_version
        with self._attach().step(ticket, tokens=_tokens(rollout_data), version=version) as self._step:
            try:
                yield
            finally:
                self._step = None

    def fill_routing_replay(self, *_args: Any, **_options: Any) -> None:
        """slime would copy the ids into its own replay here; the step has them."""

    def compute_log_prob(self, data_iterator: Any, num_microbatches: Any, store_prefix: str = "") -> Any:
        if store_prefix not in _LIVE:
            return super().compute_log_prob(data_iterator, num_microbatches, store_prefix=store_prefix)
        step, self._step = self._step, None
        try:
            with torch.no_grad(), self._attach().driver.off():
                return super().compute_log_prob(data_iterator, num_microbatches, store_prefix=store_prefix)
        finally:
            self._step = step


class ChannelUpdater:
    """slime's updater's place: the tensors that slime's own conversion gives, over `WeightSync`. Every rank calls, one sends."""

    def __init__(self, replaced: Any, backup: Any, *, rank: int) -> None:
        self.args, self.weight_version = replaced.args, replaced.weight_version
        self._weights, self._rank = lambda: backup.get("actor"), rank
        self._chunks = HfWeightIteratorBase.create(
            args=replaced.args,
            model=replaced.model,
            model_name=replaced.model_name,
            quantization_config=replaced.quantization_config,
        )
        self._sync: WeightSync | None = None

    def connect_rollout_engines(
        self, rollout_engines: Sequence[Any], _lock: Any, engine_gpu_counts: Sequence[int], **_options: Any
    ) -> None:
        """Anew whenever slime has started engines: one that came back has the weights of its checkpoint."""
        if self._rank:
            return
        self.disconnect_rollout_engines()
        urls = ray.get([engine.get_url.remote() for engine in rollout_engines])
        engines = [EngineClient(url, ranks=ranks) for url, ranks in zip(urls, engine_gpu_counts, strict=True)]
        self._sync = WeightSync(
            engines, host=interface_of(self.args), backend="nccl" if torch.cuda.is_available() else "gloo"
        )
        self._sync.connect(timeout_s=self.args.r3_channel["join_timeout_s"])

    def disconnect_rollout_engines(self) -> None:
        if self._sync is not None:
            self._sync.close()
            self._sync = None

    @torch.no_grad()
    def update_weights(self) -> None:
        tensors = chain.from_iterable(self._chunks.get_hf_weight_chunks(self._weights()))
        if self._sync is None:
            deque(tensors, maxlen=0)  # collective: slime's conversion needs every rank
        else:
            timeout_s = self.args.r3_channel["step_timeout_s"]
            self._sync.update(tensors, version=self.weight_version + 1, timeout_s=timeout_s)
        self.weight_version += 1

    pop_metrics = staticmethod(dict)


def _tokens(rollout_data: dict[str, Any]) -> list[list[list[int]]]:
    """Of each sample of each micro-batch, fetched from the device at once."""
    tokens = rollout_data["tokens"]
    flat = torch.cat(tokens).tolist()
    ends = torch.tensor([len(one) for one in tokens]).cumsum(0).tolist()
    each = [flat[end - len(one) : end] for one, end in zip(tokens, ends, strict=True)]
    return [[each[index] for index in batch] for batch in rollout_data["micro_batch_indices"]]
