"""`r3channel record REC` begins or ends a recording while the channel runs. It asks; the relay writes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from r3channel.errors import UsageError
from r3channel.recordings.recorder import add_limits, values_of
from r3channel.relay.actor import NAME, RayRelay
from r3channel.tools import commands


def run(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    if options.stop == (options.record is not None):
        raise UsageError("expected either a folder to record into, or --stop")
    if options.record:
        options.record = str(Path(options.record).absolute())  # the relay stands elsewhere
    for name in options.actor or [NAME]:
        RayRelay.named(name, address=options.address).record(values_of(options) or {})
        print(f"{name}: " + (f"records into {options.record}" if options.record else "records no more"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser("record")
    parser.add_argument(
        "record", nargs="?", metavar="REC", help="a folder on the relay's node; new, or of this run"
    )
    add_limits(parser)
    parser.add_argument("--stop", action="store_true", help="end the recording that is being written")
    parser.add_argument(
        "--actor",
        action="append",
        metavar="NAME",
        help=f"Ray actor that holds a relay (default: {NAME}); repeatable",
    )
    parser.add_argument("--address", default="auto", help="of the running Ray")
    return parser
