"""The `r3channel` command. Each command is imported when it is run."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from r3channel import __version__
from r3channel.errors import R3Error, nearest
from r3channel.tools import commands, extras

_BY_NAME = "r3channel.tools.recordings"
"""This module holds several commands, so it is given the command's name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The command's words; those of the command line without it.

    Returns:
        The exit status: 0 well, 1 the command found fault, 2 it could not run, 130 interrupted, 141 nobody reads its output.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # as with `r3channel inspect rec | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return 141  # the status that a shell gives for SIGPIPE
    except (R3Error, OSError) as error:
        if isinstance(error, OSError) and arguments[:1] in (["slime"], ["miles"]):
            raise  # the script's own
        print(f"r3channel: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "r3channel"):
            raise
        lack = f"this command needs the package {package}, which is not installed"
        print(f"r3channel: {lack}: {extras.remedy(package)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _dispatch(arguments: list[str]) -> int:
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help"):
        print(commands.overview())
        return 0
    if name == "--version":
        print(f"r3channel {__version__}")
        return 0
    if not name:
        print(commands.overview(), file=sys.stderr)
        return 2
    if name not in commands.COMMANDS:
        known = f"{', '.join(commands.COMMANDS)}{nearest(name, commands.COMMANDS)}"
        print(f"r3channel: command {name!r}, expected one of: {known}", file=sys.stderr)
        return 2
    module = commands.COMMANDS[name].module
    # A command's parser belongs to the command: it is imported only when asked for, with options we do not know.
    return importlib.import_module(module).run(arguments if module == _BY_NAME else arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
