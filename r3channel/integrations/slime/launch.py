"""Run slime's own script with the channel in it.

  r3channel slime train_async.py $MODEL_ARGS $ROLLOUT_ARGS --use-r3-channel --r3-delivery direct

usage: r3channel slime SCRIPT [ARGUMENTS of slime ...] --use-r3-channel [--r3-... ]

SCRIPT is slime's own train_async.py or train.py, or yours that imports what they import. Under `ray job submit` this
command stands where `python train_async.py` stood. Without --use-r3-channel the script runs as it is.

slime 0.3.1 is run on CPUs in the tests. Of slime 0.4.0 (train.py) only its files were read: the hooks ran against a stand-in of
them. There --r3-delivery direct asks for --r3-ingest-port and --r3-token-file, and --r3-weights stays off.
"""

# No file of slime is edited: its script imports three names late enough that they can be replaced.

from __future__ import annotations

import runpy
import sys
import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any

from r3channel.errors import BackgroundFailed, ConfigError, DeadlineExceeded, R3Error, UsageError
from r3channel.integrations import guard, preflight
from r3channel.integrations.slime import api_check
from r3channel.integrations.slime.arguments import add_arguments, faults, prepare

_Add = Callable[[Any], Any]
_Call = Callable[..., Any]
_RELAYS: list[tuple[Any, str]] = []
"""The rollout manager's relay, and its run."""


def run(argv: Sequence[str]) -> int:
    """Run slime's script in this process.

    Args:
        argv: The script and its arguments.

    Returns:
        The exit status: 2, with one line, for what is wrong before or while the script runs; otherwise the script's own.
    """
    return run_script(argv, hook, add_arguments, help=(__doc__ or "").partition("\n")[2])


def run_script(argv: Sequence[str], hook: Callable[[], None], add: _Add, *, help: str) -> int:
    """Run a framework's script, with hooks if the flag is given.

    Args:
        argv: The script and its arguments.
        hook: Installs the hooks.
        add: Adds the channel's arguments to a parser.
        help: Text that is printed before the arguments.

    Returns:
        The exit status.

    Raises:
        UsageError: If the script is not a file.
    """
    if not argv or argv[0] in ("-h", "--help"):
        options = add(ArgumentParser(usage="", add_help=False)).format_help()
        print(help.lstrip("\n") + "\n" + options.removeprefix("usage: \n\n"))
        return 0 if argv else 2
    script = Path(argv[0])
    if not script.is_file():
        raise UsageError(f"{script} is no file; expected train_async.py, train.py or one like them")
    sys.argv = [str(script), *argv[1:]]
    sys.path.insert(0, str(script.parent.resolve()))
    if guard.FLAG in argv:
        hook()
        _run_hooked(script)
    else:
        runpy.run_path(str(script), run_name="__main__")
    return 0


def with_channel(parse: _Call, add: _Add, prepare: _Call, *, detached: bool = False) -> _Call:
    """Return a `parse_args` that takes the channel's arguments, too.

    The parsed arguments are checked and prepared.

    Args:
        parse: The framework's `parse_args`.
        add: Adds the channel's arguments to a parser.
        prepare: Checks the parsed arguments and returns them.
        detached: Whether engines start before the manager and outlive it (slime 0.4.0).
    """

    @wraps(parse)
    def parse_args(add_custom_arguments: _Add | None = None, **options: Any) -> Any:
        custom = add_custom_arguments or (lambda parser: parser)
        given = parse(add_custom_arguments=lambda parser: add(custom(parser)), **options)
        args, *plan = given if isinstance(given, tuple) else (given,)
        args = prepare(args)
        preflight.refuse(faults(args, detached=detached))
        if journal := args.r3_channel["journal"]:  # a folder for this job: others may have left files there
            args.r3_channel["journal"] = str(Path(journal, uuid.uuid4().hex[:12]))
        return (args, *plan) if plan else args

    return parse_args


def _run_hooked(script: Path) -> None:
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        runpy.run_path(str(script), run_name="__main__")
    except RayError as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        # an error of a relay or a trainer is reported in its own words, not in Ray's
        reason = cause if isinstance(cause, R3Error) else _lost_manager()
        if reason is None:
            raise
        ray.shutdown()  # Ray goes on printing workers' output, and the reason has to be the last line
        raise reason from error


def _lost_manager() -> R3Error | None:
    """Return the error to report if the rollout manager was killed.

    slime's own error may then come from any call.
    """
    text = "the rollout manager was killed, and with it went slime's engines, its router and its place in the data. What was "
    text += "sealed was trained, from --r3-journal. Start the job again from its last checkpoint"
    for relay, run in _RELAYS:
        try:
            return None if relay.status()["run"] == run else BackgroundFailed(text)
        except BackgroundFailed as error:
            return error
        except DeadlineExceeded:
            return None
        except R3Error:  # Ray is starting it again
            return BackgroundFailed(text)
    return None


def hook() -> None:
    """Put the channel's classes where slime's script looks for its own.

    Raises:
        UsageError: If slime is missing.
        ConfigError: If names that we use have moved in slime.
    """
    detached = api_check.check_importable() == api_check.NEWER
    guard.allow()
    import ray
    import slime.ray.placement_group as placement  # pyright: ignore[reportMissingImports]
    import slime.ray.rollout  # pyright: ignore[reportMissingImports]
    import slime.utils.arguments as arguments  # pyright: ignore[reportMissingImports]

    from r3channel.relay.ray_host import RayRelay

    make_manager, make_models = placement.create_rollout_manager, placement.create_training_models

    @wraps(make_manager)
    def create_rollout_manager(args: Namespace, *pg: Any, **options: Any) -> Any:
        if detached:
            from r3channel.integrations.slime.detached import remote_manager
        else:
            from r3channel.integrations.slime.rollout import remote_manager
        slime.ray.rollout.RolloutManager = remote_manager(args, *pg)
        made = make_manager(args, *pg, **options)
        manager = made.manager if detached else made[0]
        ray.get(manager.r3channel_start.remote())
        relay = RayRelay(manager, timeout_s=5.0)
        _RELAYS[:] = [(relay, relay.status()["run"])]
        return made

    @wraps(make_models)
    def create_training_models(args: Namespace, pgs: Any, rollout_manager: Any, actor_cls: Any = None) -> Any:
        if actor_cls is not None:
            raise ConfigError(f"the script brings an actor class of its own, {actor_cls}; expected none")
        from r3channel.integrations.slime.trainer import ChannelActor

        return make_models(args, pgs, rollout_manager, actor_cls=ChannelActor)

    check = partial(prepare, detached=detached)
    arguments.parse_args = with_channel(arguments.parse_args, add_arguments, check, detached=detached)
    placement.create_rollout_manager = create_rollout_manager
    placement.create_training_models = create_training_models
