"""`r3channel demo`: the complete loop of examples/async_grpo with the channel on. Knows only where the script lies."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from r3channel.errors import ConfigError

SCRIPT = Path(__file__).parents[1] / "examples" / "async_grpo" / "train_async.py"


def run(argv: Sequence[str]) -> NoReturn:
    """Become the example with `--use-r3-channel` and the given options."""
    if not SCRIPT.is_file():
        raise ConfigError(
            "the demo runs examples/async_grpo/train_async.py, which is part of the repository and not of the wheel; "
            "clone the repository and type `make demo`"
        )
    # In place of this process, so that a signal to the command reaches the run itself.
    os.execv(sys.executable, [sys.executable, str(SCRIPT), "--use-r3-channel", *argv])
