"""The rooms of the house: their levels, and what each module says of itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "r3channel"

ROOMS = (
    *("errors", "model typed", "observe", "transport", "config", "wire", "plan", "recordings"),
    *("engine relay trainer weights", "integrations", "cli pytest_plugin bench tools"),
)
LEVELS = {room: level for level, rooms in enumerate(ROOMS) for room in rooms.split()}
"""Level of each room. A room imports itself and lower levels only; what people type (the highest level) may also import its
own level."""


def sentence_of(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return f"{' '.join(text.split())} ".partition(". ")[0].replace("|", r"\|")


def room_lines() -> list[str]:
    """Return every room and module by level, each with the first sentence of its docstring."""
    lines = ["| module | what it does |", "|---|---|"]
    for room, level in LEVELS.items():
        folder = PACKAGE / room
        if not folder.is_dir():
            lines.append(f"| **`{room}`** | level {level}: {sentence_of(folder.with_suffix('.py'))} |")
            continue
        lines.append(f"| **`{room}/`** | level {level}: {sentence_of(folder / '__init__.py')} |")
        lines += [f"| `{name}` | {sentence_of(path)} |" for name, path in modules_of(folder)]
    return lines


def modules_of(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the modules of a room, by their path in the package."""
    for path in sorted(folder.rglob("*.py")):
        if path.name != "__init__.py":
            yield path.relative_to(PACKAGE).with_suffix("").as_posix(), path
