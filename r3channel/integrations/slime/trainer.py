"""slime's Megatron actor, replaying what the channel delivers. Imported where slime and Megatron are.

Routers are Megatron's own, with their RouterReplay; slime's `RoutingReplay` stays off. All calls are on the actor's main thread.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray
import slime.backends.megatron_utils.loss as slime_loss  # pyright: ignore[reportMissingImports]
import slime.backends.megatron_utils.model as slime_model  # pyright: ignore[reportMissingImports]
import torch
from slime.backends.megatron_utils.actor import MegatronTrainRayActor  # pyright: ignore[reportMissingImports]
from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp  # pyright: ignore[reportMissingImports]
from slime.backends.megatron_utils.initialize import is_megatron_main_rank  # pyright: ignore[reportMissingImports]
from slime.observability import logging_utils  # pyright: ignore[reportMissingImports]
from slime.observability.metric_utils import compute_rollout_step  # pyright: ignore[reportMissingImports]

from r3channel.errors import StepError
from r3channel.integrations.slime.arguments import layout_of
from r3channel.integrations.slime.relay_manager import config_of
from r3channel.integrations.slime.sample_rows import by_microbatch, names_at
from r3channel.plan.ticket import Ticket
from r3channel.relay.ray_host import RayRelay
from r3channel.trainer.adapters.megatron import parallel_coords
from r3channel.trainer.adapters.megatron_schedule import with_replay
from r3channel.trainer.channel import TrainerChannel
from r3channel.trainer.replay import ReplayStep

log = logging.getLogger(__name__)

_LIVE = ("ref_", "teacher_")
"""Log-prob passes of other models, whose routers choose for themselves."""


class ChannelActor(MegatronTrainRayActor):
    channel: TrainerChannel | None = None
    _step: ReplayStep | None = None
    _ticket: Ticket | None = None

    def init(self, args: Namespace, role: str, *rest: Any, **options: Any) -> Any:
        schedule_of = slime_model.get_forward_backward_func
        slime_model.get_forward_backward_func = lambda: with_replay(schedule_of(), lambda: self._step)
        seen = slime_loss._maybe_capture_log_probs
        slime_loss._maybe_capture_log_probs = lambda *given: (self._compare(*given), seen(*given))
        start = super().init(args, role, *rest, **options)
        if args.r3_weights != "off":
            # imported here: slime 0.4.0 need not have the names that it uses
            from r3channel.integrations.slime.weights import ChannelUpdater

            self.weight_updater = ChannelUpdater(self)
        return start

    def set_rollout_manager(self, rollout_manager: Any) -> None:
        super().set_rollout_manager(rollout_manager)
        if not self.args.offload_train:
            self._attach()

    def _attach(self) -> TrainerChannel:
        # At the start, or in the first step if the model sleeps until then.
        if self.channel is None:
            attach = partial(TrainerChannel.attach, self.model, RayRelay(self.rollout_manager))
            self.channel = attach(layout=layout_of(self.args), config=config_of(self.args))
            self.channel.metrics.measure("r3channel_weight_updates_total")
        return self.channel

    def train(self, rollout_id: int, rollout_data_ref: Sequence[Any], external_data: Any = None) -> Any:
        """Start to fetch the step's rows, then train as slime does.

        The rows begin to travel before slime fetches the batch, unless the model sleeps: its GPU has no memory for them then.
        """
        sealed = getattr(rollout_data_ref[0], "r3_ticket", None)
        self._ticket = None if sealed is None else Ticket.from_bytes(ray.get(sealed))
        if self.channel is not None and self._ticket is not None and not self.args.offload_train:
            self.channel.prefetch(self._ticket)
        return super().train(rollout_id, rollout_data_ref, external_data=external_data)

    def train_actor(self, rollout_id: int, rollout_data: dict[str, Any], external_data: Any = None) -> None:
        ticket, channel = self._ticket, self._attach()
        if ticket is None:
            text = f"rollout {rollout_id} came without a ticket; expected one from r3channel's rollout manager. Was the job "
            raise StepError(text + "started with `r3channel slime`?")
        batches = rollout_data["micro_batch_indices"]
        names = names_at(ticket, parallel_coords().dp, by_microbatch(rollout_data["sample_indices"], batches))
        tokens = by_microbatch(_token_ids(rollout_data["tokens"]), batches)
        version = self.weight_updater.weight_version
        with channel.step(ticket, tokens=tokens, samples=names, version=version) as self._step:
            try:
                with channel.receiver.clock.span("train", step=ticket.step):
                    super().train_actor(rollout_id, rollout_data, external_data=external_data)
            finally:
                self._step = None
        if is_megatron_main_rank():
            log_step(self.args, rollout_id, channel.log_dict())

    def update_weights(self) -> None:
        """Update the weights, and count an update by slime's own updater.

        `WeightSync` counts its updates itself.
        """
        result = "failed"
        try:
            super().update_weights()
            result = "committed"
        finally:
            if self.args.r3_weights == "off" and self.channel is not None:
                self.channel.metrics.inc("r3channel_weight_updates_total", result=result)

    def _compare(self, batch: dict[str, Any], ours: list[torch.Tensor]) -> None:
        # Called in slime's loss: nothing else has the log-probs of the training pass.
        audit, engine = self._step and self._step.audit, batch.get("rollout_log_probs")
        if audit and audit.chosen and engine:
            sizes = zip(batch["loss_masks"], batch["total_lengths"], batch["response_lengths"], strict=True)
            masks = [slice_log_prob_with_cp(*each) for each in sizes]
            audit.add_logprobs(torch.cat(ours), torch.cat(engine), torch.cat(masks))

    def fill_routing_replay(self, *_args: Any, **_options: Any) -> None:
        """Ignore the call: the step has the ids.

        slime would copy them into its own replay here.
        """

    def compute_log_prob(self, *given: Any, store_prefix: str = "", **options: Any) -> Any:
        compute = partial(super().compute_log_prob, *given, store_prefix=store_prefix, **options)
        channel = self._attach()
        if store_prefix not in _LIVE:
            with channel.receiver.clock.span("logprob"):
                return compute()
        step, self._step = self._step, None
        try:
            with torch.no_grad(), channel.driver.disable(), channel.receiver.clock.span("logprob"):
                return compute()
        finally:
            self._step = step


def log_step(args: Namespace, rollout_id: int, figures: dict[str, float]) -> None:
    """Log a step's figures through slime's own logger.

    They stand beside slime's `rollout/` and `perf/`. Call it on the one rank on which slime logs.
    """
    log.info("r3channel %d: %s", rollout_id, figures)
    if args.use_wandb:
        logging_utils.wandb.define_metric("r3channel/*", step_metric="rollout/step")
    step = compute_rollout_step(args, rollout_id)
    logging_utils.log(args, figures | {"rollout/step": step}, step_key="rollout/step")


def _token_ids(tokens: list[torch.Tensor]) -> list[list[int]]:
    # One fetch from the device for all samples.
    return [own.tolist() for own in torch.cat(tokens).cpu().split([*map(len, tokens)])]
