"""miles' own rollout manager with a relay in it, and trainers as Ray tasks, without a GPU and without a model.

    r3channel miles tests/upstream/miles_cpu.py ARGUMENTS of miles... --use-r3-channel

Real are miles' parser, manager, schedule, split, store, data iterator, groups and replay, Megatron's groups and the channel.
Stand-ins: packages that miles imports and nothing here calls, pinned memory, and of a model its config.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import sys
from argparse import Namespace
from importlib.machinery import ModuleSpec
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from examples.async_grpo.rays import fetch, start
from examples.embedded import megatron, megatron_shim
from r3channel.errors import TicketMismatch
from r3channel.integrations.slime.arguments import layout_of, spec_of
from tests.support.samples import random_ids
from tests.support.waits import ENGINE_S
from tests.upstream.slime_cpu import patches

_ABSENT = "polars pylatexenc sglang_router sglang_router.launch_router "
_ABSENT += "sglang.srt.entrypoints.openai.encoding_dsv4 "
_ABSENT += "miles.backends.megatron_utils.update_weight.update_weight_from_distributed.p2p"
"""Not in our lock, or names of miles' own SGLang."""
KEYS = [
    "tokens", "loss_masks", "multimodal_train_inputs", "total_lengths", "response_lengths", "max_seq_lens", "witness_ids",
]  # fmt: skip
"""What miles' forward step asks of a batch."""


def setup() -> None:
    """In every process, first."""
    sys.modules.update({name: MagicMock(__spec__=ModuleSpec(name, None)) for name in _ABSENT.split()})
    patches._device_properties(torch)
    patches._unpinned()
    megatron_shim.install()


def rows_of(index: int, args: Namespace) -> np.ndarray[Any, Any]:
    """[tokens - 1, layers, K] int32, as miles decodes a reply."""
    spec = spec_of(args)
    whole = np.zeros((9 + 5 * index, spec.num_layers, spec.top_k), np.int32)
    whole[:, list(spec.moe_layers)] = random_ids(len(whole), spec=spec, seed=index)
    return whole


def rank(args: Namespace, number: int, refs: Any) -> list[int]:
    """What miles' trainer does with a step's routing up to its replay: with the relay's rows, and with miles' own, which are to
    be the same. Gives the rank's samples."""
    meeting: Any = {"init_method": f"file://{args.load_debug_rollout_data}.ranks", "layout": layout_of(args)}
    megatron.init_distributed(rank=number, world_size=4, timeout_s=ENGINE_S, **meeting)
    from megatron.core import mpu
    from megatron.training import arguments, global_vars
    from miles.backends.megatron_utils import actor, model, replay_utils
    from miles.backends.megatron_utils.parallel import GroupInfo, create_megatron_parallel_state
    from miles.backends.training_utils import data, parallel, replay_data
    from miles.utils import misc, object_store, replay_base

    global_vars._GLOBAL_ARGS = args
    mpu.get_data_parallel_group_gloo = mpu.get_data_parallel_group  # every group is gloo's here
    parallel.set_parallel_state(create_megatron_parallel_state(GroupInfo(rank=0, size=1, group=None)))
    object_store._INSTANCE = object_store._create_instance(args, contribute_segment=None)
    misc.load_function(args.custom_megatron_init_path)(args)
    batch, _ = data.get_rollout_data(args, refs)
    config = arguments.core_transformer_config_from_args(args)
    given: Any = {"args": args, "models": [SimpleNamespace(module=SimpleNamespace(config=config))]}
    given |= {"rollout_data": batch, "data_key": "rollout_routed_experts"}
    given |= {"register_replay_list_func": replay_utils.register_replay_list_moe}

    def replayed(fill: Any) -> list[torch.Tensor]:
        iterators, counts = data.get_data_iterator(args, given["models"], batch)
        replays = [replay_base.Replay() for _ in range(4)]
        fill(**given, data_iterator=iterators, num_microbatches=counts, replay_list=replays)
        return [rows for replay in replays for rows in replay.top_indices_list]

    assert "rollout_routed_experts" not in batch, "miles' objects have rows"
    ours, metrics = replayed(actor.fill_replay_data), actor.fill_replay_data.receiver.metrics
    batch["rollout_routed_experts"] = [
        torch.from_numpy(rows_of(each, args)) for each in batch["sample_indices"]
    ]
    theirs = replayed(replay_data.fill_replay_data)
    assert [each.dtype for each in ours] == [each.dtype for each in theirs] and sum(map(len, ours))
    assert all(map(torch.equal, ours, theirs)) and metrics.value("r3channel_digests_checked_total")
    (iterator,), _ = data.get_data_iterator(args, given["models"], batch)
    first, *others = batch["micro_batch_indices"]
    batch["tokens"][first[0]] = batch["tokens"][first[0]].flip(0)
    with pytest.raises(TicketMismatch, match="micro-batch 0: the model got other tokens"):
        model.get_batch(iterator, KEYS, args.data_pad_size_multiplier, "thd")
    for _ in others:
        model.get_batch(iterator, KEYS, args.data_pad_size_multiplier, "thd")
    assert not actor.fill_replay_data._unseen
    megatron.close_distributed()
    return batch["sample_indices"]


def main() -> None:
    """As miles' train_async.py, up to the models."""
    import ray
    from miles.ray.placement_group import create_rollout_manager
    from miles.utils.arguments import parse_args
    from miles.utils.types import Sample

    from tests.upstream import miles_cpu

    args, each = parse_args(), ray.remote(miles_cpu.rank)
    hook: Any = {"runtime_env": {"worker_process_setup_hook": "tests.upstream.miles_cpu.setup"}}
    start(address="local", num_cpus=8, include_dashboard=False, object_store_memory=80 << 20, **hook)
    samples = [Sample(index=at, group_index=at // 2, response_length=4, reward=float(at)) for at in range(8)]
    for sample in samples:
        sample.rollout_routed_experts = rows_of(sample.index, args)
        sample.tokens = [*range(len(sample.rollout_routed_experts) + 1)]
    torch.save({"samples": [sample.to_dict() for sample in samples]}, args.load_debug_rollout_data)
    manager, _ = create_rollout_manager(args, None)
    sizes = {"dp_size": layout_of(args).dp, "cp_size": args.context_parallel_size, "vpp_size": 1}
    fetch(manager.set_train_parallel_config.remote(sizes | {"microbatch_group_size_per_vp_stage": None}))
    refs = fetch(manager.generate.remote(0))["data_ref"]
    assert {*chain(*fetch([each.remote(args, number, refs) for number in range(4)]))} == {*range(8)}
    fetch(manager.dispose.remote())
    print("replayed", flush=True)


if __name__ == "__main__":
    main()
