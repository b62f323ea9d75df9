"""README and DESIGN name what is there: tests, files, modules, calls with their parameters."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "r3channel"
README = (ROOT / "README.md").read_text()
DESIGN = (PACKAGE / "DESIGN.md").read_text()
WEIGHTS = (PACKAGE / "weights" / "README.md").read_text()
HOUSE = DESIGN.split("## The house")[1].split("## ")[0]
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)

RESULTS = {
    "relay": "Relay",
    "channel": "TrainerChannel",
    "step": "ReplayStep",
    "sync": "WeightSync",
    "Relay": "Relay",
    "WeightSync": "WeightSync",
    "TrainerChannel": "TrainerChannel",
}
"""What the names in the README's code hold."""


def known_tests() -> Iterator[tuple[str, bool]]:
    """Every test and whether only `make test-full` runs it."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        marks = [
            ast.unparse(n) for n in tree.body if isinstance(n, ast.Assign) and "pytestmark" in ast.unparse(n)
        ]
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                texts = [*marks, *(ast.unparse(decorator) for decorator in node.decorator_list)]
                yield node.name, any("mark.full" in text for text in texts)


def test_every_test_that_the_readmes_name_is_there_and_starred_where_it_is_long() -> None:
    named = {name: bool(star) for name, star in re.findall(r"`(test_\w+)`(\*?)", README + WEIGHTS)}
    known = dict(known_tests())
    assert named and {name: known.get(name) for name in named} == named


@pytest.mark.parametrize("text", [README, DESIGN], ids=["README", "DESIGN"])
def test_every_file_that_is_named_with_its_folder_is_there(text: str) -> None:
    named = set(re.findall(r"`([\w-]+/[\w/.-]*)`", text))
    assert named
    assert {name for name in named if not any((at / name).exists() for at in (ROOT, PACKAGE))} == set()


def test_the_house_names_every_module_of_its_lower_rooms() -> None:
    named = set(re.findall(r"\w+", HOUSE))
    rooms = [path for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]
    inner = [path for room in ("wire", "plan", "transport") for path in (PACKAGE / room).iterdir()]
    names = {
        path.stem for path in [*rooms, *inner] if not path.name.startswith("__") and path.suffix != ".md"
    }
    assert names - named == set()


def _namespace() -> dict[str, Any]:
    """What the README imports."""
    found: dict[str, Any] = {}
    for node in (node for text in SNIPPETS for node in ast.parse(text).body):
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            for alias in node.names:
                found[alias.name] = getattr(importlib.import_module(node.module), alias.name)
    found["ReplayStep"] = importlib.import_module("r3channel.trainer.replay").ReplayStep
    return found


def test_the_readmes_calls_fit_their_signatures() -> None:
    names, checked = _namespace(), 0
    for call in (
        node for text in SNIPPETS for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)
    ):
        bound = 0
        match call.func:
            case ast.Name(id=name) if name in names:
                target = names[name]
            case ast.Attribute(value=ast.Name(id=holder), attr=attribute) if (
                holder in RESULTS or holder in names
            ):
                target = getattr(names[RESULTS.get(holder, holder)], attribute)
                bound = holder not in names  # called on an instance, so `self` is taken
            case _:
                continue
        arguments = [None] * (bound + len(call.args))
        inspect.signature(target).bind(*arguments, **{str(word.arg): None for word in call.keywords})
        checked += 1
    assert checked >= 14
