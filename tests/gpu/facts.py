"""What a check found, as its last line of output; `tests.gpu.run` reads it. `python -m tests.gpu.facts NAME cuda` runs one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

ANSWER = "R3CHANNEL-GPU "


class Facts:
    """Collects figures, and what is not as it should be."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}
        self.wrong: list[str] = []
        self.left_out: list[str] = []
        """What means nothing on this device, and why."""
        self.not_run = ""
        """Why all of it means nothing here."""

    def expect(self, name: str, value: Any, holds: bool, wanted: str) -> None:
        self.figures[name] = value
        if not holds:
            self.wrong.append(f"{name} is {value}, expected {wanted}")


@contextmanager
def silence() -> Iterator[None]:
    """torch raises where the host waits for the device inside."""
    import torch  # `run` looks for it first

    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    facts = Facts()
    import_module(f"tests.gpu.checks.{sys.argv[1]}").check(sys.argv[2], facts)
    print(ANSWER + json.dumps(vars(facts)), flush=True)
