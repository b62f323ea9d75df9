"""`--r3-weights`: `WeightSync` in the place of slime's updater. Imported where slime and Megatron are."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import ray
import torch
from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf  # pyright: ignore[reportMissingImports]
from slime.backends.megatron_utils.update_weight import common  # pyright: ignore[reportMissingImports]
from slime.utils.distributed_utils import get_gloo_group  # pyright: ignore[reportMissingImports]

from r3channel.errors import ConfigError, WeightsError
from r3channel.integrations.slime.relay_manager import interface_of
from r3channel.transport.network import local_address
from r3channel.weights.convert import Shard, merged_tp, parts_of, shards_of
from r3channel.weights.session import WeightSync


class ChannelUpdater:
    """Sends the tensors of slime's own conversion with `WeightSync`: whole ones from each pipeline stage's first rank, or every
    rank's part of them. Every rank calls it.
    """

    def __init__(self, actor: Any) -> None:
        """Take over from slime's updater.

        Args:
            actor: A `ChannelActor` that has slime's updater.

        Raises:
            ConfigError: If parts of a quantised checkpoint would be moved.
        """
        replaced, self._actor = actor.weight_updater, actor
        args, model, name = replaced.args, replaced.model, replaced.model_name
        self.args, self.weight_version = args, replaced.weight_version
        self._sync: WeightSync | None = None
        self._exact = args.r3_weights != "broadcast"
        if not self._exact:
            self._tensors = partial(stage_tensors, replaced)
        elif replaced.quantization_config:
            method = replaced.quantization_config.get("quant_method")
            text = f"--r3-weights {args.r3_weights} moves elements as they are, and this checkpoint is quantised ({method})"
            raise ConfigError(text + "; expected --r3-weights broadcast")
        else:
            self._tensors = partial(shards, args, model, name)

    def connect_rollout_engines(self, rollout_engines: Sequence[Any], _lock: Any, **_options: Any) -> None:
        """Connect to the engines whenever slime has started some.

        A restarted engine has the weights of its checkpoint.
        """
        self.disconnect_rollout_engines()
        urls = ray.get([engine.get_url.remote() for engine in rollout_engines])
        make = WeightSync.sharded if self._exact else WeightSync.whole
        self._sync = make(
            urls, group=get_gloo_group(), host=local_address(interface_of(self.args)),
            token_file=self.args.r3_channel["token_file"], backend="nccl" if torch.cuda.is_available() else "gloo",
            wire={"nccl": "nccl", "colocated": "shared_memory"}.get(self.args.r3_weights, "tcp"),
            metrics=self._actor.channel and self._actor.channel.metrics,
        )  # fmt: skip
        self._sync.connect(timeout_s=self.args.r3_channel["join_timeout_s"])

    def disconnect_rollout_engines(self) -> None:
        if self._sync is not None:
            self._sync.close()
            self._sync = None

    @torch.no_grad()
    def update_weights(self) -> None:
        assert self._sync is not None  # slime connects before
        timeout_s = self.args.r3_channel["step_timeout_s"]
        report = self._sync.update(self._tensors(), version=self.weight_version + 1, timeout_s=timeout_s)
        self.weight_version += 1
        if report.evicted and not self.args.use_fault_tolerance:
            # slime's router would send it requests, which a paused engine never answers
            raise WeightsError(f"weights did not reach {report.evicted}; expected --use-fault-tolerance")

    pop_metrics = staticmethod(dict)


def stage_tensors(updater: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the whole tensors of this rank's pipeline stage.

    The call is collective within the stage. Ranks other than the stage's first rank get no tensors.

    Args:
        updater: slime's `UpdateWeightFromDistributed`, which gathers and converts the tensors. With a quantised checkpoint it
            also quantises them.
    """
    mpu = common.mpu
    first = mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    updater._is_pp_src_rank = first and mpu.get_tensor_model_parallel_rank() == 0
    return chain.from_iterable(chain(updater._iter_non_expert_chunks(), updater._iter_expert_chunks()))


def shards(args: Namespace, model: Any, model_name: str) -> list[Shard]:
    """Return this rank's part of every tensor of the checkpoint.

    Names and conversion are slime's.
    """
    # otherwise slime keeps one tensor back until its pair comes
    paired = Namespace(**{**vars(args), "q_lora_rank": None})
    mpu = common.mpu
    dense = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    expert = mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size() or 1
    parts = parts_of(common.named_params_and_buffers(args, model), dense=dense, expert=expert)
    return shards_of(parts, merged_tp, partial(convert_to_hf, paired, model_name), owner=model[0])
