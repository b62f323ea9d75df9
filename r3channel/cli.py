"""The `r3channel` command. Knows the names of the commands, not what they do: each is imported when it is run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from r3channel import __version__
from r3channel.errors import R3Error, UsageError

_DESCRIPTION = "Rollout routing replay: expert choices from SGLang engines to Megatron routers, exactly."
_ON_RECORDINGS = {
    "inspect": "a recording (--record): steps, rows, versions, expert load",
    "diff": "two recordings: the first difference, and how much of each layer",
    "replay": "the trainer's side of a recording under any layout",
    "check": "silent misalignments, by name, in one recording or between two sides",
    "import": "a recording out of .npz files",
    "export": "a recording as .npz files",
}
_EPILOG = "r3channel COMMAND --help tells each command's options."
_NO_MILES = (
    "miles has no adapter yet: its samples hold the decoded ids as arrays, which it cuts and joins in places that no hook "
    "reaches, and its replay lives in its own fork of Megatron (patches/README.md says where). Give Relay and TrainerChannel "
    "a loop of your own, or use `r3channel slime`"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0 well, 1 the command found fault, 2 it could not run."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except R3Error as error:
        print(f"r3channel: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "r3channel"):
            raise
        print(
            f"r3channel: this command needs the package {package}, which is not installed; `r3channel doctor` says how to get it",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130


def _dispatch(arguments: list[str]) -> int:
    # The demo's parser belongs to the demo: it is imported only when asked for, with options we do not know.
    if arguments[:1] == ["demo"]:
        from r3channel.demo import run

        return run(arguments[1:])
    if arguments[:1] == ["bench"]:
        from r3channel import bench

        return bench.run(arguments[1:])
    if arguments[:1] == ["plan"]:
        from r3channel.report import planner

        return planner.run(arguments[1:])
    if arguments[:1] == ["weights"]:
        from r3channel.report import weights

        return weights.run(arguments[1:])
    if arguments[:1] == ["patch"]:
        from r3channel.report import patch

        return patch.run(arguments[1:])
    if arguments[:1] == ["slime"]:
        from r3channel.integrations import slime_launch

        return slime_launch.run(arguments[1:])
    if arguments[:1] == ["miles"]:
        raise UsageError(_NO_MILES)
    if arguments[:1] == ["record"]:
        from r3channel.report import record

        return record.run(arguments[1:])
    if arguments[:1] and arguments[0] in _ON_RECORDINGS:
        from r3channel.report import recordings

        return recordings.run(arguments)
    options = _parser().parse_args(arguments)
    from r3channel.report import doctor

    return doctor.run(
        ports=options.port,
        engines=options.engine,
        timeout_s=options.timeout_s,
        nodes=options.nodes,
        config=options.config,
        slime=options.slime,
        arguments=options.arguments,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="r3channel", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"r3channel {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "demo", help="the whole loop on this machine: SGLang, Ray, Megatron-core", add_help=False
    )
    commands.add_parser("bench", help="measurements beside their peers: r3channel bench NAME", add_help=False)
    commands.add_parser("plan", help="bytes, memory and times of a step before it is run", add_help=False)
    commands.add_parser("weights", help="r3channel weights verify: what engines hold", add_help=False)
    commands.add_parser(
        "patch", help="hooks for an upstream that has none: check, apply, reverse", add_help=False
    )
    commands.add_parser("slime", help="slime's own script with the channel in it", add_help=False)
    commands.add_parser("miles", help="why miles has no adapter yet", add_help=False)
    commands.add_parser("record", help="record steps of a running channel", add_help=False)
    for name, what in _ON_RECORDINGS.items():
        commands.add_parser(name, help=what, add_help=False)
    doctor = commands.add_parser(
        "doctor", help="what is installed, and whether everything would work together"
    )
    doctor.add_argument("--port", type=int, action="append", default=[], help="must be free; repeatable")
    doctor.add_argument(
        "--engine", metavar="URL", action="append", default=[], help="a running engine to ask; repeatable"
    )
    doctor.add_argument(
        "--nodes", type=int, default=1, help="machines of the run: with several, loopback is a fault"
    )
    doctor.add_argument(
        "--slime", metavar="DIR", help="a checkout of slime: is it one that is known, what would be hooked"
    )
    doctor.add_argument(
        "arguments", nargs="*", help="with --slime, after --: those of the job, to be looked through"
    )
    doctor.add_argument("--config", metavar="FILE", help="channel options, as --r3-config")
    doctor.add_argument(
        "--timeout-s", type=float, default=120.0, help="deadline of each check that imports an upstream"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
