"""What a check found, as its last line of output; `tests.gpu.run` reads it. Each check is a program: `python -m NAME cuda`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
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


def main(check: Callable[[str, Facts], None]) -> None:
    facts = Facts()
    check(sys.argv[1], facts)
    print(ANSWER + json.dumps(vars(facts)), flush=True)
