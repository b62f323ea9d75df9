"""One thing that is wrong with recorded routing, or may be. Plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault, named as in `diagnose.FAULTS`, with the first cell that shows it as an example of `cells`."""

    name: str
    verdict: bool
    """True: the bytes say so. False: a suspicion, from statistics."""
    what: str
    """The fault in a sentence, and what usually makes it."""
    step: int
    sample: str
    position: int = -1
    layer: int = -1
    expected: tuple[int, ...] = ()
    seen: tuple[int, ...] = ()
    cells: int = 0
    """(row, layer) pairs that it explains."""
    of_pass: str = "forward"

    def __str__(self) -> str:
        kind = "" if self.verdict else "suspicion: "
        place = f"step {self.step}, sample {self.sample}"
        if self.position >= 0:
            place += f", position {self.position}"
        if self.layer >= 0:
            place += f", layer {self.layer}"
        ids = f": expected {list(self.expected)}, seen {list(self.seen)}" if self.seen else ""
        count = f" ({self.cells:,} rows of layers)" if self.cells else ""
        passed = f" in the {self.of_pass} pass" if self.of_pass != "forward" else ""
        return f"{kind}{self.name}{count}{passed}: {place}{ids}. {self.what}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
