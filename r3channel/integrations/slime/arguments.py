"""The channel's arguments in slime's command line: which there are, and what of slime's does not go with them.

The launcher asks with what slime has parsed, the doctor with a text.
"""

from __future__ import annotations

import importlib.util
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from r3channel import config
from r3channel.errors import ConfigError
from r3channel.integrations import guard, preflight
from r3channel.plan.layout import TrainerLayout
from r3channel.recordings.recorder import add_options

_WEIGHTS = ("off", "broadcast", "exact", "colocated")


_HELP = f"""  r3channel slime train_async.py $MODEL_ARGS $ROLLOUT_ARGS {guard.FLAG} --r3-delivery direct

usage: r3channel slime SCRIPT [ARGUMENTS of slime ...] {guard.FLAG} [--r3-... ]

SCRIPT is slime's own train_async.py or train.py, or yours that imports what they import. Under `ray job submit` this
command stands where `python train_async.py` stood. Without {guard.FLAG} the script runs as it is.
"""


def help_text() -> str:
    parser = add_arguments(ArgumentParser(prog="r3channel slime SCRIPT", usage="", add_help=False))
    return _HELP + "\n" + parser.format_help().removeprefix("usage: \n\n")


def add_arguments(parser: Any) -> Any:
    config.add_arguments(parser)
    group = parser.add_argument_group("r3channel in slime")
    group.add_argument(
        "--r3-delivery",
        choices=("inband", "direct"),
        default="inband",
        help="how engines that slime starts send frames: in the reply, or straight to the relay, named by the reply",
    )
    add_options(group, prefix="r3-")
    group.add_argument(
        "--r3-weights",
        choices=_WEIGHTS,
        default="off",
        help="who updates the engines' weights: `off`, slime's own updater; `broadcast`, r3channel's WeightSync, all or none, "
        "from rank 0; `exact`, the same from every rank, each part once; `colocated`, as `exact`, through the shared memory of "
        "the one machine that engines and trainers are on",
    )
    return parser


def judged(arguments: Sequence[str]) -> None:
    """Raise as `prepared` would, for the text of a job's arguments. Knows of slime's own only those that matter here."""
    parser = add_arguments(ArgumentParser(add_help=False, allow_abbrev=False))
    for name in (
        "use-routing-replay",
        "use-rollout-routing-replay",
        "colocate",
        "release-train",
        "offload-train",
    ):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("debug-train-only", "debug-rollout-only"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--num-experts", type=int)
    parser.add_argument("--update-weight-mode", default="full")
    parser.add_argument("--update-weight-transport", default="nccl")
    prepared(parser.parse_known_args(list(arguments))[0])


def prepared(args: Namespace) -> Namespace:
    """slime's parsed arguments, checked and with what the channel needs set. Raises `ConfigError` with the argument to change.

    Engines and requests are to give routing, so `use_rollout_routing_replay` is on; slime's own replay, which
    `use_routing_replay` turns on, is off: Megatron's routers replay.
    """
    channel = config.ChannelConfig.from_args(args)
    own_gpus = not args.colocate and not args.release_train and args.update_weight_mode == "full"
    refusals = (
        (not args.num_experts, "--num-experts is not set: a model without experts has no routing to replay"),
        (
            args.use_routing_replay and not args.use_rollout_routing_replay,
            f"--use-routing-replay replays what the trainer itself chose, {guard.FLAG} what the engines chose. Give one of them",
        ),
        (
            "mask" in (channel.invalid_rows, channel.on_stale),
            "--r3-invalid-rows mask and --r3-on-stale mask: slime's loss masks are not reached; give another policy",
        ),
        (
            channel.grouped,
            f"--r3-transport {channel.transport}: slime's rollout manager owns no GPU; expected tcp",
        ),
        (
            channel.sampling_masks,
            "--r3-sampling-masks: slime carries its own (--rollout-top-p); expected it off",
        ),
        (
            args.r3_weights != "off" and not own_gpus,
            f"--r3-weights {args.r3_weights} sends whole weights to engines with GPUs of their own; expected neither --colocate "
            "nor --release-train, and --update-weight-mode full",
        ),
        (
            args.r3_weights in ("exact", "colocated") and getattr(args, "offload_train", False),
            f"--r3-weights {args.r3_weights} sends parameters from where they lie, and --offload-train puts them to sleep; "
            "expected --r3-weights broadcast",
        ),
        (
            args.r3_weights != "off" and args.r3_delivery == "direct" and not channel.token_file,
            f"--r3-weights {args.r3_weights} and --r3-delivery direct: engines ask who sends weights for the run's token; "
            "expected --r3-token-file, a path that every node can read",
        ),
    )
    for wrong, text in refusals:
        if wrong:
            raise ConfigError(text)
    if args.r3_weights == "off" and (problem := _weights_problem(args)):
        raise ConfigError(problem)
    if args.r3_weights != "off":
        args.update_weight_transport = "nccl"  # of slime's ways the one whose updater does it all
    args.r3_channel = asdict(channel)
    args.use_rollout_routing_replay = True
    args.use_routing_replay = False
    args.moe_enable_routing_replay = True
    return args


def faults(args: Namespace) -> Iterator[str]:
    """What in `prepared` arguments would end the run later. Raises ConfigError for a layout that its ranks do not fill.

    Ports and folders are this machine's only where all that speak to the relay are on it, as loopback says.
    """
    layout, channel = layout_of(args), config.ChannelConfig(**args.r3_channel)
    if channel.interface in ("127.0.0.1", "::1", "localhost"):
        yield from preflight.of_channel(channel, ranks=layout.world_size)
        yield preflight.folder("--r3-record", args.r3_record or "")


def layout_of(args: Namespace) -> TrainerLayout:
    """slime's rows: packs; each sequence cut zigzag over CP, or the whole pack (`--allgather-cp`); the tail padded per rank."""
    return TrainerLayout.from_megatron_args(
        args,
        world_size=args.actor_num_nodes * args.actor_num_gpus_per_node,
        packing="thd",
        cp_split="contiguous" if args.allgather_cp else "zigzag",
        pad_multiple=args.data_pad_size_multiplier,
        uniform=False,
    )


def _weights_problem(args: Namespace) -> str:
    """slime's broadcast updater calls neither begin_ nor end_weight_update, and an SGLang that has them refuses broadcasts
    without; slime then waits in the broadcast for ever. Empty where that cannot happen."""
    transport = getattr(args, "update_weight_transport", "")
    if args.colocate or args.debug_train_only or args.debug_rollout_only or transport != "nccl":
        return ""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return ""
    server = Path(found.submodule_search_locations[0], "srt/entrypoints/http_server.py")
    if not server.is_file() or "begin_weight_update" not in server.read_text():
        return ""
    return (
        "this SGLang takes broadcast weights only between begin_weight_update and end_weight_update, which slime's updater "
        "does not call: the run would hang in its first update. Give --r3-weights broadcast, or --update-weight-transport disk"
    )
