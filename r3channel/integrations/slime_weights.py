"""`--r3-weights`: `WeightSync` in the place of slime's updater. Imported where slime and Megatron are."""

from __future__ import annotations

from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import ray
import torch
from megatron.core import mpu
from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf  # pyright: ignore[reportMissingImports]
from slime.backends.megatron_utils.update_weight import common  # pyright: ignore[reportMissingImports]
from slime.backends.megatron_utils.update_weight.hf_weight_iterator_base import (  # pyright: ignore[reportMissingImports]
    HfWeightIteratorBase,
)
from slime.utils.distributed_utils import get_gloo_group  # pyright: ignore[reportMissingImports]

from r3channel.errors import ConfigError
from r3channel.integrations.slime import interface_of
from r3channel.weights.convert import Part, Shard, shards_of
from r3channel.weights.session import WeightSync


class ChannelUpdater:
    """Tensors that slime's own conversion gives: whole ones from rank 0, or every rank's part of them. Every rank calls."""

    def __init__(self, replaced: Any, backup: Any, *, rank: int) -> None:
        self.args, self.weight_version, self._model = (
            replaced.args,
            replaced.weight_version,
            replaced.model,
        )
        options = {"model_name": replaced.model_name, "quantization_config": replaced.quantization_config}
        self._sync: WeightSync | None = None
        self._exact, self._rank = self.args.r3_weights != "broadcast", rank
        if not self._exact:
            whole = HfWeightIteratorBase.create(args=self.args, model=self._model, **options)
            self._tensors = lambda: chain.from_iterable(whole.get_hf_weight_chunks(backup.get("actor")))
            return
        if replaced.quantization_config:
            raise ConfigError(
                f"--r3-weights {self.args.r3_weights} moves elements as they are, and this checkpoint is quantised "
                f"({replaced.quantization_config.get('quant_method')}); expected --r3-weights broadcast"
            )
        self._tensors = lambda: shards(self.args, self._model, replaced.model_name)

    def connect_rollout_engines(self, rollout_engines: Sequence[Any], _lock: Any, **_options: Any) -> None:
        """Anew whenever slime has started engines: one that came back has the weights of its checkpoint."""
        if self._rank and not self._exact:
            return
        self.disconnect_rollout_engines()
        urls = ray.get([engine.get_url.remote() for engine in rollout_engines])
        exact = {"plan": "exact", "group": get_gloo_group()} if self._exact else {}
        self._sync = WeightSync(
            urls,
            host=interface_of(self.args),
            backend="nccl" if torch.cuda.is_available() else "gloo",
            wire="shared_memory" if self.args.r3_weights == "colocated" else "tcp",
            token_file=self.args.r3_channel["token_file"],
            **exact,
        )
        self._sync.connect(timeout_s=self.args.r3_channel["join_timeout_s"])

    def disconnect_rollout_engines(self) -> None:
        if self._sync is not None:
            self._sync.close()
            self._sync = None

    @torch.no_grad()
    def update_weights(self) -> None:
        if self._sync is None:
            deque(self._tensors(), maxlen=0)  # collective: slime's conversion needs every rank
        else:
            timeout_s = self.args.r3_channel["step_timeout_s"]
            self._sync.update(self._tensors(), version=self.weight_version + 1, timeout_s=timeout_s)
        self.weight_version += 1

    pop_metrics = staticmethod(dict)


def shards(args: Namespace, model: Any, model_name: str) -> list[Shard]:
    """This rank's part of every tensor of the checkpoint, by slime's names and its converter."""
    paired = Namespace(
        **{**vars(args), "q_lora_rank": None}
    )  # slime keeps one tensor back until its pair comes

    def convert(name: str, whole: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        return convert_to_hf(paired, model_name, name, whole)

    return shards_of(_parts(args, model), merged, convert)


def _parts(args: Namespace, model: Any) -> Iterator[Part]:
    dense = (mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size())
    expert = (mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size())
    for name, weight in common.named_params_and_buffers(args, model):
        split = (
            getattr(weight, "tensor_model_parallel", False)
            and getattr(weight, "parallel_mode", "") != "duplicated"
        )
        yield Part(
            name,
            weight,
            weight.partition_dim if split else -1,
            *(expert if ".experts." in name else dense),
        )


def merged(name: str, parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    """As slime's `all_gather_param`: each rank has a part of the gate and of the up projection; Megatron's grouped experts name
    the wrong dimension of the down projection."""
    if "linear_fc1." in name:
        halves = [part.chunk(2) for part in parts]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves], dim)
    return torch.cat(parts, 1 if "linear_fc2.weight" in name else dim)
