"""The channel's arguments in slime's command line, and a check of the slime arguments that do not go with them.

The launcher passes what slime has parsed; the doctor passes a text.
"""

from __future__ import annotations

import importlib.util
import re
import time
from argparse import SUPPRESS, ArgumentError, ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from r3channel import config
from r3channel.errors import ConfigError
from r3channel.integrations import guard, preflight
from r3channel.model.spec import RoutingSpec
from r3channel.plan.capacity import beside_bytes
from r3channel.plan.layout import TrainerLayout
from r3channel.recordings.recorder import add_options

_SWITCHES = "use-routing-replay use-rollout-routing-replay colocate release-train offload-train"
_NUMBERS = "num-experts rollout-batch-size over-sampling-batch-size"
_LENGTHS = "rollout-max-response-len rollout-max-prompt-len rollout-max-context-len"
"""slime's own arguments that the channel asks about."""
_DEFAULTS = {
    "r3_store_bytes": "Default: what the job needs.", "r3_run_name": "Default: the time.", "r3_expiry_s": "Default: never.",
}  # fmt: skip
"""What `channel_of` puts in the place of the channel's own defaults, for the help."""
_LEAST_BYTES, _SPARE = 64 << 20, 1 / 8
"""Least value of `store_bytes`, and the store's share for rows of evaluated, aborted and dropped samples."""


def add_channel(parser: Any) -> Any:
    """Add the arguments that every framework's command has.

    Returns:
        The parser.
    """
    config.add_arguments(parser)
    for action in (action for action in parser._actions if action.dest in _DEFAULTS):
        action.help = re.sub("Default .*", _DEFAULTS[action.dest], action.help)
    add_options(parser.add_argument_group("recordings of r3channel"), prefix="r3-")
    return parser


def add_arguments(parser: Any) -> Any:
    """Add the channel's options and those that only slime has.

    An option that `prepare` always refuses is parsed as well, but is in no help text.

    Returns:
        The parser.
    """
    for action in add_channel(parser)._actions:
        told = re.sub(",? `mask`[^,.]*", "", action.help or "")
        action.help = SUPPRESS if action.dest == "r3_token_tensors" else told
    group = parser.add_argument_group("r3channel in slime")
    group.add_argument(
        "--r3-delivery", choices=("inband", "direct"), default="inband",
        help="how engines that slime starts send frames: in the reply, or straight to the relay, named by the reply",
    )  # fmt: skip
    group.add_argument(
        "--r3-relay-gpu", choices=("shared", "own"), default="shared",
        help="where --r3-transport nccl sends from: the GPU of an engine, or one that slime leaves; about 1 GB of it",
    )  # fmt: skip
    group.add_argument(
        "--r3-weights", choices=("off", "broadcast", "exact", "nccl", "colocated"), default="off",
        help="who updates the engines' weights: `off`, slime's own updater; `broadcast`, r3channel's WeightSync, all or none, "
        "from one rank of each pipeline stage; `exact`, the same from every rank, each part once; `nccl`, as `exact`, from GPU "
        "to GPU, with engines paused meanwhile; `colocated`, as `exact`, through the shared memory of the one machine",
    )  # fmt: skip
    return parser


def refusals_of(arguments: Sequence[str], *, detached: bool = False) -> list[str]:
    """Return what `prepare` refuses of a job's arguments.

    Of slime's own arguments only those that matter here are known.

    Args:
        arguments: The command line of a job.
        detached: As in `prepare`.

    Returns:
        Reasons; empty if the job would start.
    """
    parser = add_arguments(ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False))
    for name in (*_SWITCHES.split(), "debug-train-only", "debug-rollout-only"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in f"{_NUMBERS} {_LENGTHS}".split():
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--n-samples-per-prompt", type=int, default=1)
    for name in ("hf-checkpoint", "dynamic-sampling-filter-path", "advantage-estimator"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--update-weight-mode", default="full")
    parser.add_argument("--update-weight-transport", default="nccl")
    parser.add_argument("--rollout-data-transport", default="object-store")
    try:
        prepare(parser.parse_known_args(list(arguments))[0], detached=detached)
    except (ConfigError, ArgumentError) as error:
        return str(error).split(preflight.NEXT)
    return []


def prepare(args: Namespace, *, detached: bool = False) -> Namespace:
    """Check slime's parsed arguments and set what the channel needs.

    Engines and requests have to give routing, so `use_rollout_routing_replay` is on. slime's own replay, which
    `use_routing_replay` turns on, is off: Megatron's routers replay.

    Args:
        args: slime's parsed arguments, which are changed.
        detached: Whether engines start before the manager and outlive it (slime 0.4.0).

    Returns:
        The same arguments.

    Raises:
        ConfigError: With every argument to change.
    """
    channel = channel_of(args)
    updates, exact = args.r3_weights != "off", args.r3_weights not in ("off", "broadcast")
    # slime's broadcast updater calls neither begin_weight_update nor end_weight_update. An SGLang that has these calls refuses
    # broadcasts without them, and slime then waits in the broadcast for ever.
    broadcasts = not updates and getattr(args, "update_weight_transport", "") == "nccl"
    alone = args.colocate or args.debug_train_only
    own_gpus = not args.colocate and not args.release_train and args.update_weight_mode == "full"
    direct, transport = args.r3_delivery == "direct", getattr(args, "rollout_data_transport", "object-store")
    refusals = (
        (transport != "object-store", f"--rollout-data-transport {transport}: the step's ticket travels beside each rank's data "
         "in Ray's object store; expected object-store"),
        (detached and direct and not (channel.ingest_port and channel.token_file), "--r3-delivery direct in slime 0.4.0: its "
         "engines start before the relay and outlive it; expected --r3-ingest-port, free on this script's node, and "
         "--r3-token-file, a path that every node can read"),
        (detached and updates, f"--r3-weights {args.r3_weights}: slime 0.4.0's updaters were not read; expected off"),
        (detached and channel.transport == "nccl", "--r3-transport nccl in slime 0.4.0: its manager takes no GPU; expected tcp "
         "or gloo"),
        (args.colocate and channel.transport == "nccl", "--r3-transport nccl and --colocate: every GPU has a trainer, and NCCL "
         "refuses two ranks on one; expected tcp"),
        (args.debug_rollout_only, "--debug-rollout-only trains nothing, so nothing is to be replayed; expected it alone"),
        (not args.num_experts, "--num-experts is not set: a model without experts has no routing to replay"),
        (args.use_routing_replay and not args.use_rollout_routing_replay, "--use-routing-replay replays what the trainer itself "
         f"chose, {guard.FLAG} what the engines chose. Give one of them"),
        ("mask" in (channel.invalid_rows, channel.on_stale), "--r3-invalid-rows mask and --r3-on-stale mask: slime's loss masks "
         "are not reached; give another policy"),
        (channel.token_tensors, "--r3-token-tensors: slime carries its own (--rollout-top-p); expected none"),
        (updates and not own_gpus, f"--r3-weights {args.r3_weights} sends whole weights to engines with GPUs of their own; "
         "expected neither --colocate nor --release-train, and --update-weight-mode full"),
        (updates and getattr(args, "offload_train", False) and (exact or args.advantage_estimator != "ppo"),
         f"--r3-weights {args.r3_weights} sends parameters from where they lie, and --offload-train puts them to sleep: with a "
         "critic slime wakes them for broadcast; expected no --offload-train, or --advantage-estimator ppo and broadcast"),
        (exact and _takes_staged() is False, f"--r3-weights {args.r3_weights} stages weights in engines, and this SGLang has no "
         "begin_weight_update: 0.5.23 has; expected off or broadcast"),
        (updates and direct and not channel.token_file, f"--r3-weights {args.r3_weights} and --r3-delivery "
         "direct: engines ask who sends weights for the run's token; expected --r3-token-file, a path that every node can read"),
        (broadcasts and not alone and _takes_staged(), "this SGLang takes broadcast weights only between begin_weight_update and "
         "end_weight_update, which slime's updater does not call: the run would hang in its first update. Give --r3-weights "
         "broadcast, or --update-weight-transport disk"),
    )  # fmt: skip
    preflight.refuse(text for wrong, text in refusals if wrong)
    if updates:
        args.update_weight_transport = "nccl"  # the one of slime's ways whose updater does everything
    args.r3_channel = asdict(channel) | {"trace": channel.trace and str(Path(channel.trace).absolute())}
    args.use_rollout_routing_replay = args.moe_enable_routing_replay = True
    args.use_routing_replay = False
    return args


def channel_of(args: Namespace) -> config.ChannelConfig:
    """Return the channel's settings from a framework's arguments.

    If no size of the store is given, the store is as large as the job needs.

    Raises:
        ConfigError: If the given store cannot hold a step.
    """
    size = step_size(args)
    # A sample's rows end with its object, however long a rollout takes.
    defaults = {"run_name": time.strftime("%Y%m%d-%H%M%S"), "expiry_s": 1e9}
    defaults |= {"store_bytes": size.store} if size else {}
    channel = config.ChannelConfig.from_args(args, **defaults)
    if size and channel.store_bytes < size.step:
        text = f"--r3-store-bytes {channel.store_bytes}: one step may have more rows, {size.counted}. Expected {size.step}, "
        raise ConfigError(text + f"with which engines wait for room, or better {size.store}")
    return channel


def faults(args: Namespace, *, detached: bool = False) -> Iterator[str]:
    """Yield what in prepared arguments would end the run later.

    Ports, folders and memory are checked only if the interface is loopback and one node trains: then all processes that speak to
    the relay are on this machine.

    Args:
        args: Arguments from `prepare`.
        detached: Whether the manager may have outlived its script. Such a manager holds its ports, and is used again.

    Raises:
        ConfigError: If the ranks do not fill the layout.
    """
    layout, channel = layout_of(args), config.ChannelConfig(**args.r3_channel)
    channel = replace(channel, ingest_port=0, metrics_port=0) if detached else channel
    if channel.interface in ("127.0.0.1", "::1", "localhost") and args.actor_num_nodes < 2:
        yield memory_fault(args)
        yield from preflight.of_channel(channel, ranks=layout.world_size)
        yield preflight.folder("--r3-record", args.r3_record or "")


class StepSize(NamedTuple):
    """Bytes of rows and of what lies beside them, if every response is as long as slime allows."""

    step: int
    """Bytes of one step, without prompts whose length slime does not bound. A smaller store cannot hold such a step."""
    store: int
    """Bytes that live at once, with unbounded prompts as long as a response, and an eighth more."""
    counted: str


def step_size(args: Namespace) -> StepSize | None:
    """Return the sizes of a job's steps, or None.

    The sizes are unknown if slime's arguments do not say how long a response may be, or if nothing is known of the model. One
    step is held until its trainers have it, and `train_async.py` generates the next one meanwhile. slime samples
    `--over-sampling-batch-size` prompts at a time, and once more while a filter drops groups.
    """
    response, prompt = args.rollout_max_response_len, args.rollout_max_prompt_len
    if not (args.hf_checkpoint and args.rollout_batch_size and response):
        return None
    spec, groups, each = spec_of(args), args.rollout_batch_size, args.n_samples_per_prompt
    context = args.rollout_max_context_len or response + (prompt or response)
    sure, longest = (min(context, response + more) for more in (prompt or 0, prompt or response))
    live = args.over_sampling_batch_size or groups
    live += groups * (not args.colocate) + groups * (args.dynamic_sampling_filter_path is not None)
    # A sample that is continued once, by a turn or from the buffer, has two frames beside its rows. Each frame has a span of
    # prefilled rows and a span of decoded rows. More turns, and weights that change meanwhile, take more.
    row, beside = spec.bytes_per_token, 2 * beside_bytes(spec, spans=2)
    return StepSize(
        step=groups * each * (sure * row + beside),
        store=max(_LEAST_BYTES, int(live * each * (longest * row + beside) * (1 + _SPARE))),
        counted=f"{groups} prompts x {each} samples x ({sure} tokens x {row} bytes + {beside} beside them in two turns), "
        f"and {live} prompts live at once",
    )


def memory_fault(args: Namespace) -> str:
    """Return a fault if this machine lacks memory for the store.

    The store is on this machine, the rollout manager's, and needs memory for what it may come to hold.
    """
    size, given = step_size(args), args.r3_channel["store_bytes"]
    if size is None:
        return ""
    remedy = f"give --r3-store-bytes, at least {size.step}, so that engines wait for room, or ask for less: {size.counted}"
    return preflight.memory(min(given, size.store), remedy=remedy)


def spec_of(args: Namespace) -> RoutingSpec:
    """Return the model's routing shape.

    `--hf-checkpoint` is what slime takes: a folder, or an id of the Hub, of which `config.json` is fetched or already in the
    cache.

    Raises:
        ConfigError: If it is neither.
    """
    name = args.hf_checkpoint
    if Path(name).exists():
        return RoutingSpec.from_hf_config(name)
    from huggingface_hub import hf_hub_download  # installed with transformers, which slime needs

    try:
        return RoutingSpec.from_hf_config(hf_hub_download(name, "config.json"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--hf-checkpoint {name}: no folder, and no id of the Hub here: {error}") from error


def layout_of(args: Namespace) -> TrainerLayout:
    """Return the layout of slime's trainers.

    Rows are packed. Each sequence is cut zigzag over CP, or with `--allgather-cp` the whole pack is cut. The tail is padded per
    rank.
    """
    return TrainerLayout.from_megatron_args(
        args, world_size=args.actor_num_nodes * args.actor_num_gpus_per_node, packing="thd", uniform=False,
        cp_split="contiguous" if args.allgather_cp else "zigzag", pad_multiple=args.data_pad_size_multiplier,
    )  # fmt: skip


def _takes_staged() -> bool | None:
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return None
    server = Path(found.submodule_search_locations[0], "srt/entrypoints/http_server.py")
    return "begin_weight_update" in server.read_text() if server.is_file() else None
