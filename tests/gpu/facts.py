"""What a check measured. Each figure is printed at once, so that a check that raises, hangs or dies leaves those it had.

`python -m tests.gpu.facts NAME DEVICE [small]` runs one; the last line that begins with ANSWER counts.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

ANSWER = "R3CHANNEL-GPU "
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""The runtime's calls in which the host waits for the device."""
FURTHER = ("cost", "weights", "digests")
"""A check that is called `<module>_<this>` is that function of its module; others are its `check`."""


class Facts:
    """Figures, what is wrong, and what costs more than it should."""

    def __init__(self, *, small: bool = True) -> None:
        self.small = small
        """The sizes of a CPU; its times say nothing, so no limit is judged."""
        self.figures: dict[str, Any] = {}
        self.wrong: list[str] = []
        """What must hold on every machine."""
        self.missed: list[str] = []
        """Limits of time."""
        self.left_out: list[str] = []
        """What means nothing on this device, and why."""
        self.not_run = ""
        """Why all of it means nothing here."""
        self.traceback = ""

    def note(self, name: str, value: Any) -> None:
        self.figures[name] = value
        self.tell()

    def expect(self, name: str, value: Any, holds: bool, wanted: str) -> None:
        if not holds:
            self.wrong.append(f"{name} is {value}, expected {wanted}")
        self.note(name, value)

    def limit(self, name: str, value: float, holds: bool, wanted: str) -> None:
        if not holds and not self.small:
            self.missed.append(f"{name} is {value:.4g}, wanted {wanted}")
        self.note(name, value)

    def tell(self) -> None:
        print("\n" + ANSWER + json.dumps(vars(self)), flush=True)


@contextmanager
def silence() -> Iterator[None]:
    """torch raises where the host waits for the device inside."""
    import torch  # `run` looks for it first

    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def words_of(call: Callable[[], object], kind: type[Exception]) -> str:
    """What the error says that it ends with; empty where it ends well."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def main(name: str, device: str, *sizes: str) -> int:
    faulthandler.register(signal.SIGUSR1)
    facts = Facts(small=bool(sizes))
    try:
        module, _, further = name.rpartition("_")
        if not module or further not in FURTHER:
            module, further = name, "check"
        getattr(import_module(f"tests.gpu.checks.{module}"), further)(device, facts)
    except Exception:  # whatever it is: what was measured before stays
        facts.traceback = traceback.format_exc()
    facts.tell()
    return int(bool(facts.traceback))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
