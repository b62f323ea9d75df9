"""The flags of commands that record. Reads no file and starts nothing."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _ArgumentGroup
from typing import Any

from r3channel.recordings.recorder import Recorder


def add_options(parser: ArgumentParser | _ArgumentGroup, *, prefix: str = "") -> None:
    """`--record` and its limits, each after `prefix`."""
    parser.add_argument(
        f"--{prefix}record",
        metavar="DIR",
        help="keep every step's frames, ticket and tokens there, for offline replay",
    )
    add_limits(parser, prefix=prefix)


def add_limits(parser: ArgumentParser | _ArgumentGroup, *, prefix: str = "") -> None:
    parser.add_argument(
        f"--{prefix}record-steps", metavar="N", type=int, default=0, help="record so many steps at most"
    )
    parser.add_argument(
        f"--{prefix}record-bytes", metavar="N", type=int, default=0, help="record so many bytes at most"
    )
    parser.add_argument(
        f"--{prefix}record-ring",
        action="store_true",
        help="at a limit the oldest step goes, instead of the recording ending",
    )
    parser.add_argument(
        f"--{prefix}record-no-tokens", action="store_true", help="leave token ids out of the recording"
    )


def values_of(args: Namespace, *, prefix: str = "") -> dict[str, Any] | None:
    """What `Recorder` is made of, as plain values for another process; None where nothing is to be recorded."""
    given = {name.removeprefix(prefix): value for name, value in vars(args).items()}
    if not given["record"]:
        return None
    return {
        "root": given["record"],
        "steps": given["record_steps"],
        "max_bytes": given["record_bytes"],
        "ring": given["record_ring"],
        "tokens": not given["record_no_tokens"],
    }


def recorder_of(args: Namespace, *, prefix: str = "") -> Recorder | None:
    """Raises ConfigError."""
    values = values_of(args, prefix=prefix)
    return Recorder(**values) if values else None
