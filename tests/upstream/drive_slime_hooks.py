"""Drives the three hooks of a patched slime with r3channel's classes: real slime and Megatron modules, a real Ray, no GPU.

python -m tests.upstream.drive_slime_hooks MODEL     MODEL: a folder with a config.json of SPEC; prints one line of JSON
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray

from examples.slime.cpu import patches
from r3channel.bearer import read_token
from r3channel.plan.ticket import Ticket
from r3channel.relay.actor import NAME, RayRelay
from tests.samples import SPEC, reply_for

GLUE = "r3channel.integrations.slime_patched"
HERE = "tests.upstream.drive_slime_hooks"
TOKENS = (9, 12, 7, 10)
MEGATRON = {
    "num_layers": SPEC.num_layers, "num_experts": SPEC.num_experts, "moe_router_topk": SPEC.top_k,
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None, "expert_model_parallel_size": 1, "sequence_parallel": False,
    "allgather_cp": False, "decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None,
    "actor_num_nodes": 1, "actor_num_gpus_per_node": 2, "num_gpus_per_node": 2, "rollout_num_gpus": 2,
    "global_batch_size": 4, "micro_batch_size": 1, "debug_rollout_only": False, "debug_train_only": True,
    "load_debug_rollout_data": None, "use_critic": False, "seq_length": 64, "wandb_run_id": None, "world_size": 2,
    "data_pad_size_multiplier": 128, "kl_coef": 0.0, "sglang_server_concurrency": 8,
}  # fmt: skip
"""What Megatron's and SGLang's parsers would leave, as far as it is read here. debug_train_only: no engines are started."""
BUILT: list[str] = []


class Source:
    """--data-source-path. The data source is built after the engines, and the transport before both."""

    def __init__(self, _args: Any) -> None:
        BUILT.append("source")


class Transport:
    """--rollout-data-transport: whatever it puts is what generate() gives."""

    def __init__(self, args: Any) -> None:
        BUILT.append("transport")

    def put(self, rollout_id: int, samples: list[Any], rollout_data: list[dict[str, Any]]) -> Any:
        return rollout_id, len(samples), [list(part["partition"]) for part in rollout_data]


def rollout(args: Any, rollout_id: int, _source: Any, evaluation: bool = False) -> list[list[Any]]:
    """--rollout-function-path: what engines would have said, in frames."""
    from slime.utils.types import Sample  # pyright: ignore[reportMissingImports]

    samples = []
    for index, count in enumerate(TOKENS):
        sample = Sample(
            index=index, rollout_id=index, tokens=list(range(4)), reward=float(index), metadata={}
        )
        reply = reply_for(f"{rollout_id}.{index}", count, seed=index)["meta_info"]
        said = {**reply, "finish_reason": {"type": "stop"}}
        new = list(range(4, count))
        sample.append_response_tokens(args, tokens=new, log_probs=[0.0] * len(new), meta_info=said)
        samples.append(sample)
    return [samples]


def flat_ids(_args: Any, _sample: Any, meta_info: dict[str, Any]) -> Any:
    """--rollout-routed-experts-decoder-path: another encoding."""
    import torch

    return torch.tensor(
        [int(text) for text in meta_info.get("routed_experts", "").split()], dtype=torch.int32
    )


def parse(*given: str) -> argparse.Namespace:
    """slime's own arguments, beside what Megatron's parser leaves."""
    arguments = importlib.import_module("slime.utils.arguments")
    parser = arguments.get_slime_extra_args_provider()(argparse.ArgumentParser(exit_on_error=False))
    common = ("--rollout-function-path", f"{HERE}.rollout", "--data-source-path", f"{HERE}.Source")
    common += ("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--disable-rewards-normalization")
    args, _ = parser.parse_known_args([*common, *given])
    return argparse.Namespace(**vars(args) | MEGATRON | {"eval_function_path": args.rollout_function_path})


def manager_of(args: argparse.Namespace) -> Any:
    rollout_module = importlib.import_module("slime.ray.rollout")
    manager = rollout_module.RolloutManager.__ray_metadata__.modified_class(args, None)
    dp = args.actor_num_gpus_per_node
    manager.set_train_parallel_config(
        {"dp_size": dp, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    )
    return manager


def decoders() -> dict[str, Any]:
    """Rows that a sample holds after a reply: stock, and with a decoder."""
    from slime.utils.types import Sample  # pyright: ignore[reportMissingImports]

    ids = np.arange(2 * SPEC.num_layers * SPEC.top_k, dtype=np.int32)
    shaped, found = ids.reshape(2, SPEC.num_layers, SPEC.top_k), {}
    for name, args, field in (
        ("stock", parse(), ids.tobytes()),
        (
            "another encoding",
            parse("--rollout-routed-experts-decoder-path", f"{HERE}.flat_ids"),
            " ".join(map(str, ids)),
        ),
    ):
        sample = Sample(tokens=[1, 2])
        sample.append_response_tokens(args, tokens=[3], log_probs=[0.0], meta_info={"routed_experts": field})
        found[name] = np.array_equal(sample.rollout_routed_experts, shaped)
    return found


def actor_classes() -> dict[str, Any]:
    """What `create_training_models` hands on, by argument and by call."""
    placement: Any = importlib.import_module("slime.ray.placement_group")
    handed = []

    def allocate(**options: Any) -> Any:
        handed.append(options.get("actor_cls"))
        return SimpleNamespace(create=lambda **_: [0])

    placement.allocate_train_group = allocate
    by_path = parse("--train-actor-path", f"{GLUE}_trainer.PatchedActor")
    mine = type("Mine", (), {})
    for args, given in ((parse(), None), (by_path, None), (by_path, mine)):
        placement.create_actor_model(args, {"actor": None}, None, actor_cls=given)
    from r3channel.integrations.slime_trainer import ChannelActor

    return {
        "without": str(handed[0]),
        "by path": handed[1].__name__,
        "is ours": issubclass(handed[1], ChannelActor),
        "the call wins": handed[2] is mine,
    }


def plain_transport() -> tuple[list[str], Any]:
    """What is built in which order, and what generate() gives. Engines are only noted."""
    module: Any = importlib.import_module("slime.ray.rollout")
    built = importlib.import_module(HERE).BUILT  # not this module's: this one is __main__
    start, module.start_rollout_servers = (
        module.start_rollout_servers,
        lambda *_: (built.append("engines") or {}, []),
    )
    hooks = (
        "--rollout-data-transport",
        f"{HERE}.Transport",
        "--rollout-routed-experts-decoder-path",
        f"{HERE}.no_ids",
    )
    args = parse(*hooks)
    args.debug_train_only = False
    try:
        put = manager_of(args).generate(7)
        return list(built), put
    finally:
        module.start_rollout_servers = start


def _comes(folder: Path) -> bool:
    """Whether a step is recorded: behind the seal, by the relay's own thread."""
    end_s = time.monotonic() + 20
    while not (found := any(folder.glob("step-*.r3s"))) and time.monotonic() < end_s:
        time.sleep(0.1)
    return found


def channel(model: str) -> dict[str, Any]:
    """A whole rollout through slime's manager: the decoder, the relay in its actor, the split, the ticket."""
    args = parse("--rollout-data-transport", f"{GLUE}.ChannelTransport", "--hf-checkpoint", model)
    args.rollout_routed_experts_decoder_path = f"{GLUE}.decode"
    args.r3_transport, args.r3_record, args.r3_delivery = "tcp", f"{model}/recording", "direct"
    manager = manager_of(args)
    boxes = manager.generate(0)
    parts = ray.get([box.inner for box in boxes])
    ticket = Ticket.from_bytes(ray.get(boxes[0].r3_ticket))
    relay = RayRelay(ray.get_actor(NAME))
    hello = relay.hello(dp=0, pp=0, cp=0)
    return {
        "asks engines for routing": manager.args.use_rollout_routing_replay,
        "fields": sorted({name for part in parts for name in part} & {"rollout_routed_experts", "tokens"}),
        "partition": [[int(place) for place in part["partition"]] for part in parts],
        "tokens": {sample.sample_id: sample.tokens for sample in ticket.samples},
        "ranks": [[sample for batch in rank for sample in batch] for rank in ticket.assignment.ranks],
        "hello": sorted(hello),
        "recorded": _comes(Path(args.r3_record)),
        "engine": importlib.import_module("slime.ray.rollout").SGLangEngine.__name__,
        "told": sorted(manager.args.r3_engine),
        "token told": read_token(manager.args.r3_engine["R3CHANNEL_TOKEN_FILE"]) in repr(manager.args),
    }


def refused(*given: str) -> str:
    try:
        parse(*given)
    except (argparse.ArgumentError, SystemExit) as error:
        return str(error)
    return ""


def main(model: str) -> None:
    patches.setup()
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=128 << 20,
        runtime_env={"worker_process_setup_hook": "examples.slime.cpu.patches.setup"},
    )
    facts: dict[str, Any] = {
        "tokens": TOKENS,
        "refused": refused("--rollout-data-transport", "nixel"),
        "names": [
            parse("--rollout-data-transport", name).rollout_data_transport
            for name in ("nixl", "object-store")
        ],
        "decoders": decoders(),
        "actors": actor_classes(),
    }
    facts["built"], facts["put"] = plain_transport()
    facts["channel"] = channel(model)
    print("FACTS " + json.dumps(facts))


def no_ids(*_: Any) -> None:
    """--rollout-routed-experts-decoder-path: none of them."""


if __name__ == "__main__":
    main(sys.argv[1])
