"""Refuses a run that has `--use-r3-channel` but not the channel: slime and miles ignore arguments that they do not know.

`r3channel.pth`, beside the installed package, imports this module in a process whose command line has the flag, and in no other.
"""

from __future__ import annotations

import sys

FLAG = "--use-r3-channel"
_PARSERS = ("slime.utils.arguments", "miles.utils.arguments")
"""The modules that parse a framework's arguments."""


class _Refusal:
    """An import finder that finds nothing. It ends the process if a parser of arguments is imported without the channel's
    hooks.
    """

    hooked = False

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        if name in _PARSERS and not self.hooked:
            framework = name.partition(".")[0]
            said = f"r3channel: {FLAG} does nothing in this run: {framework} was started without the channel's hooks. Start it "
            print(said + f"with `r3channel {framework} train_async.py ARGUMENTS... {FLAG}`", file=sys.stderr)
            raise SystemExit(2)


refusal = _Refusal()


def allow() -> None:
    """Allow the import of a framework's parser; the launcher calls it."""
    refusal.hooked = True


def watch() -> None:
    sys.meta_path.insert(0, refusal)
