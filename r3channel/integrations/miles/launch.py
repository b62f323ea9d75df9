"""Run miles' own script: rows go from its rollout manager to its trainers.

  r3channel miles train_async.py $ARGUMENTS --use-rollout-routing-replay --use-r3-channel

usage: r3channel miles SCRIPT [ARGUMENTS of miles ...] --use-r3-channel [--r3-... ]

SCRIPT is miles' own train_async.py or train.py. Half of the way is covered: rows from the rollout manager to each trainer,
exactly those of its rank, verified; from engines to the manager they go miles' own way, and are hashed when a step is sealed.
Without --use-r3-channel the script runs as it is.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict

from r3channel.integrations import guard, preflight
from r3channel.integrations.slime.api_check import check_importable
from r3channel.integrations.slime.arguments import add_channel, channel_of
from r3channel.integrations.slime.launch import run_script, with_channel

MILES = {
    "use_rollout_routing_replay": (True, "else engines give miles no routing"),
    "train_backend": ("megatron", "trainers learn of the relay by --custom-megatron-init-path"),
    "qkv_format": ("thd", "the relay does not know how bshd pads"),
    "object_store_backend": ("ray", "a ticket travels in the data of a rank"),
    "delay_split_train_data_by_dp": (False, "the manager seals what it splits itself"),
}
_NO_LIVE = "error", "miles' replay leaves no row to the live router"
_CHANNEL = {
    "r3_transport": ("tcp", "no other was run in miles"),
    "r3_journal": ("", "miles does not start a killed manager again"),
    "r3_max_staleness": (-1, "miles keeps no weight version of a row"),
    "r3_token_tensors": ("", "miles' samples have none"),
} | dict.fromkeys(("r3_invalid_rows", "r3_on_missing", "r3_on_lost", "r3_on_changed"), _NO_LIVE)
"""Name -> the value that is expected, and why."""


def run(argv: Sequence[str]) -> int:
    """Run miles' script in this process.

    Args:
        argv: The script and its arguments.

    Returns:
        The exit status, as `r3channel.integrations.slime.launch.run` returns it.
    """
    return run_script(argv, hook, add_channel, help=(__doc__ or "").partition("\n")[2])


def hook() -> None:
    """Put the channel where miles' script looks for its own.

    Raises:
        UsageError: If miles is missing.
        ConfigError: If names that we use have moved in miles.
    """
    check_importable("miles")
    guard.allow()
    import miles.ray.placement_group as placement  # pyright: ignore[reportMissingImports]
    import miles.utils.arguments as arguments  # pyright: ignore[reportMissingImports]
    import ray

    from r3channel.integrations.miles.rollout import ChannelManager

    arguments.parse_args = with_channel(arguments.parse_args, add_channel, prepare)
    placement.RolloutManager = ray.remote(ChannelManager)


def prepare(args: Namespace) -> Namespace:
    """Check miles' parsed arguments and set what the channel needs.

    Args:
        args: miles' parsed arguments, which are changed.

    Returns:
        The same arguments.

    Raises:
        ConfigError: With every argument to change.
    """
    channel = asdict(channel_of(args))
    given = vars(args) | {f"r3_{name}": value for name, value in channel.items()}
    preflight.refuse(
        f"--{name.replace('_', '-')} {given[name]}: expected {wanted!r}, because {why}"
        for name, (wanted, why) in (MILES | _CHANNEL).items() if given[name] != wanted
    )  # fmt: skip
    args.r3_channel, args.r3_megatron_init = channel, args.custom_megatron_init_path
    args.custom_megatron_init_path = "r3channel.integrations.miles.trainer.start"
    return args
