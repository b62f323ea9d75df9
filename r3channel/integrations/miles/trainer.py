"""miles' trainers: their routers replay this rank's shard. Imported where miles and Megatron are.

Routers, replay and its order stay miles' own; `start` replaces the function that fills the replay. All calls are on the actor's
main thread.
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

import ray
import torch
from miles.utils.misc import load_function  # pyright: ignore[reportMissingImports]

from r3channel.errors import StepError
from r3channel.integrations.slime.arguments import layout_of
from r3channel.integrations.slime.relay_manager import config_of
from r3channel.integrations.slime.sample_rows import by_microbatch
from r3channel.model.spec import RoutingSpec
from r3channel.plan.ticket import Ticket
from r3channel.relay.ray_host import RayRelay
from r3channel.trainer.adapters import megatron
from r3channel.trainer.channel import DIGESTS
from r3channel.trainer.model_tokens import ModelTokens
from r3channel.trainer.rank_shard import RankShard
from r3channel.trainer.receiver import Receiver
from r3channel.transport.tp_fanout import TensorParallelFanout


def start(args: Namespace) -> None:
    """Replace the function that fills miles' replay.

    miles calls this in each trainer, once Megatron's groups exist: `--custom-megatron-init-path`.
    """
    from miles.backends.megatron_utils import actor, model  # pyright: ignore[reportMissingImports]

    if args.r3_megatron_init:
        load_function(args.r3_megatron_init)(args)
    actor.fill_replay_data = replay = ShardReplay(args, actor.fill_replay_data)
    model.get_batch = partial(replay.get_batch, model.get_batch)


class ShardReplay:
    """Replaces miles' `fill_replay_data`: a step's experts come from the relay, and all else as before."""

    receiver: Receiver | None = None
    """Set from the first step on."""
    _tokens: ModelTokens | None = None
    """Compares the tokens that the model is given in this step with the ticket."""

    def __init__(self, args: Namespace, fill: Any) -> None:
        self._args, self._fill = args, fill
        self._unseen = set[int]()
        """Micro-batches of the step that no pass has been given yet. miles gives later passes the same ones."""

    def get_batch(self, get_batch: Any, iterator: Any, *given: Any, **words: Any) -> Any:
        """Call miles' `get_batch`, and check the token ids of its batch.

        Raises:
            TicketMismatch: If rows of other tokens would be replayed. On a GPU it is raised when the next pass or step begins.
        """
        microbatch, batch = iterator.offset, get_batch(iterator, *given, **words)
        if self._tokens is not None:
            if not microbatch:
                self._tokens.verify()
            if microbatch in self._unseen:
                self._unseen.remove(microbatch)
                self._tokens.check(microbatch, batch["tokens"])
        return batch

    def __call__(self, *, data_key: str, models: Any, rollout_data: dict[str, Any], **given: Any) -> None:
        if data_key != "rollout_routed_experts":  # the replay of an indexer's choices
            return self._fill(data_key=data_key, models=models, rollout_data=rollout_data, **given)
        manager, sealed = rollout_data.pop("r3_ticket", (None, None))
        if sealed is None:
            text = "a batch came without a ticket. Was the job started with `r3channel miles`? The manager seals nothing where "
            text += "it leaves micro-batches to trainers: LoRA adapters, images, fewer rollouts than --global-batch-size"
            raise StepError(text)
        receiver = self.receiver = self.receiver or self._join(manager, models[0].module.config)
        if self._tokens is not None:
            self._tokens.verify()
        each = [sample.tolist() for sample in rollout_data["tokens"]]
        tokens = by_microbatch(each, rollout_data["micro_batch_indices"])
        shard = receiver.receive(Ticket.from_bytes(ray.get(sealed)), tokens=tokens)
        try:
            for microbatch in range(shard.num_microbatches):
                rows = _rows(shard, microbatch)
                given["register_replay_list_func"](given["replay_list"], rows, models=models)
            shard.verify()
            self._tokens, self._unseen = ModelTokens(shard, tokens), {*range(shard.num_microbatches)}
        finally:
            for name, count in zip(DIGESTS, (shard.digests.checked, shard.digests.different), strict=True):
                receiver.metrics.inc(name, count)

    def _join(self, manager: Any, config: Any) -> Receiver:
        """Return a receiver that has joined the relay.

        Rows stay in host memory, where miles keeps them. A GPU sees them only if a TP group hands them on over NCCL.

        Raises:
            ConfigError: If the model lies on its stages otherwise than the relay cuts it: miles registers replays by `config`.
        """
        layout = layout_of(self._args)
        megatron.check_layout(layout, config=config)
        on_gpu = layout.tp > 1 and torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        fanout = TensorParallelFanout(megatron.tp_group() if layout.tp > 1 else None, device=device)
        receiver = Receiver(
            RayRelay(manager), spec=RoutingSpec.from_megatron(config), layout=layout, coords=megatron.parallel_coords(),
            config=config_of(self._args), fanout=fanout, device=device,
        )  # fmt: skip
        for name in DIGESTS:
            receiver.metrics.measure(name)
        receiver.join()
        return receiver


def _rows(shard: RankShard, microbatch: int) -> torch.Tensor:
    """Return a micro-batch's rows of all decoder layers.

    The ids are [rows, layers, K] int32, as miles has them: -1 in padding, at a sample's last token, and in layers of other
    stages. They are verified here on a CPU; on a GPU `shard.verify` verifies them.
    """
    spec, padding_R = shard.shard.spec, shard.padding_rows(microbatch)
    shape = len(padding_R), spec.num_layers, spec.top_k
    whole = torch.full(shape, -1, dtype=torch.int32, device=padding_R.device)
    for layer in shard.shard.layers:
        ids_RK = shard.layer_ids(microbatch, layer)
        wide_RK = shard.check_digest(microbatch, layer, ids_RK, torch.int32)
        whole[:, layer] = wide_RK.masked_fill(padding_R[:, None], -1)
    return whole
