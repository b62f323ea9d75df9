"""The names of slime that the integration relies on, looked up in its sources without importing it.

`seams.json` holds names and signatures only, by file.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from r3channel.errors import ConfigError, UsageError
from r3channel.integrations.slime.arguments import refusal_of
from r3channel.observe.check import Check, CheckContext

KNOWN = "slime 624b824a (0.3.1)"
_NEW_SLIME = "slime/data/batch_builder.py"


def check_importable() -> None:
    """Refuse to start where slime is missing, or is one whose names have moved."""
    found = importlib.util.find_spec("slime")
    if found is None or not found.submodule_search_locations:
        raise UsageError("slime cannot be imported; expected it installed, or its checkout on PYTHONPATH")
    if lines := moved(Path(found.submodule_search_locations[0]).parent):
        more = f" and {len(lines) - 4} more" if len(lines) > 4 else ""
        raise ConfigError(
            f"this slime is not one that r3channel knows: {'; '.join(lines[:4])}{more}. Known: {KNOWN}; nothing was started"
        )


def check_checkout(context: CheckContext) -> Iterator[Check]:
    """Whether the checkout of `--slime DIR` has every name that the integration uses, which these are, and what a job's
    arguments ask for that is refused. Nothing of slime is imported."""
    root = Path(context.slime or "")
    lines = moved(root)
    yield Check(
        name=f"slime {root}",
        ok=not lines,
        found="; ".join(lines) or f"all names of {KNOWN}",
        remedy=f"use {KNOWN}; to adapt: r3channel/integrations",
    )
    for line in () if lines else used():
        yield Check(name="used", ok=True, found=line)
    if context.arguments:
        fault = refusal_of(context.arguments)
        well = "nothing that is refused at start"
        yield Check(name="arguments", ok=not fault, found=fault or well, remedy="change them")


def moved(root: Path) -> list[str]:
    """One line per name that a checkout lacks or has with other parameters: what was found, what was expected."""
    if (root / _NEW_SLIME).is_file():
        return [f"{_NEW_SLIME} is there: slime 0.4.0 splits in BatchBuilder, which is not supported"]
    lines: list[str] = []
    for file, names in _listed().items():
        if not (root / file).is_file():
            lines.append(f"{file} is not there")
            continue
        lines += filter(None, (_difference(root / file, file, *named) for named in names.items()))
    return lines


def _difference(path: Path, file: str, name: str, parameters: list[str]) -> str:
    found = signatures(path).get(name)
    if found is None:
        return f"{file} has no {name}"
    if found == parameters:
        return ""
    return f"{file}: {name}({', '.join(found)}), expected ({', '.join(parameters)})"


@cache
def signatures(path: Path) -> dict[str, list[str]]:
    """Function or Class.method -> its parameters, `*args` and `**kwargs` included; classes have none."""
    found: dict[str, list[str]] = {}

    def visit(body: list[ast.stmt], before: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found[before + node.name] = []
                visit(node.body, f"{before}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[before + node.name] = _parameters(node.args)

    visit(ast.parse(path.read_text()).body, "")
    return found


def _parameters(args: ast.arguments) -> list[str]:
    named = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    named += [f"*{args.vararg.arg}"] if args.vararg else []
    named += [arg.arg for arg in args.kwonlyargs]
    return named + ([f"**{args.kwarg.arg}"] if args.kwarg else [])


def used() -> list[str]:
    """What is replaced, watched or called, by file."""
    return [f"{file}: {', '.join(filter(names.get, names))}" for file, names in _listed().items()]


def _listed() -> dict[str, dict[str, list[str]]]:
    """File -> name -> its parameters."""
    return json.loads(Path(__file__).with_name("seams.json").read_text())
