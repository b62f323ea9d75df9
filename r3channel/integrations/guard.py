"""Refuses a run that has `--use-r3-channel` and not the channel: slime and miles ignore arguments that they do not know.

`r3channel.pth`, beside the installed package, imports this in a process whose command line has the flag, and in no other.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

FLAG = "--use-r3-channel"
_REMEDIES = {
    "slime.utils.arguments": f"Start it with `r3channel slime train_async.py ARGUMENTS... {FLAG}`",
    "miles.utils.arguments": "miles has no adapter: take the flag out",
}
"""The module that parses a framework's arguments -> what to do instead."""


class _Refusal:
    """A finder that finds nothing: it only learns that a parser of arguments is about to be imported."""

    hooked = False

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in _REMEDIES and not self.hooked:
            framework = name.partition(".")[0]
            print(
                f"r3channel: {FLAG} does nothing in this run: {framework} was started without the channel's hooks. "
                f"{_REMEDIES[name]}",
                file=sys.stderr,
            )
            raise SystemExit(2)
        return None


refusal = _Refusal()


def allow() -> None:
    """Called by the launcher, which puts the hooks in."""
    refusal.hooked = True


def watch() -> None:
    sys.meta_path.insert(0, refusal)
