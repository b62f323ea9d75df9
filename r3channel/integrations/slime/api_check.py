"""The names of slime that the integration relies on, looked up in its sources without importing it.

`seams.json` holds names and signatures only: of each known version, by the commit at which a file was read, by file. `unread` are
names that are used and whose parameters could not be read at that version: they have to be there.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from r3channel.errors import ConfigError, UsageError
from r3channel.integrations.slime.arguments import refusal_of
from r3channel.observe.check import Check, CheckContext

RUN, NEWER = "0.3.1", "0.4.0"
"""The version that runs in the tests, and the one of which only files were read."""
_READ = "its files were read and the hooks ran against a stand-in of them; no job of it was run, nor its trainer side"


class Found(NamedTuple):
    """What a checkout is."""

    version: str
    """The known version that it differs least from."""
    moved: list[str]
    """One line per name that it lacks or has with other parameters: what was found, what was expected."""

    @property
    def known(self) -> str:
        return f"slime {self.version} ({next(iter(_listed()[self.version]))})"


def check_importable() -> str:
    """The version of the slime that is there. Refuses to start where it is missing, or is one whose names have moved."""
    spec = importlib.util.find_spec("slime")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError("slime cannot be imported; expected it installed, or its checkout on PYTHONPATH")
    found = nearest(Path(spec.submodule_search_locations[0]).parent)
    if lines := found.moved:
        more = f" and {len(lines) - 4} more" if len(lines) > 4 else ""
        raise ConfigError(
            f"this slime is not one that r3channel knows. It is nearest to {found.known}, but: {'; '.join(lines[:4])}{more}; "
            "nothing was started"
        )
    return found.version


def check_checkout(context: CheckContext) -> Iterator[Check]:
    """Which version the checkout of `--slime DIR` is and whether it has every name that the integration uses, which these are,
    and what a job's arguments ask for that is refused. Nothing of slime is imported."""
    root = Path(context.slime or "")
    found = nearest(root)
    yield Check(
        name=f"slime {root}",
        ok=not found.moved,
        found="; ".join(found.moved) or f"all names of {found.known}",
        remedy=f"it is nearest to {found.known}: use that; to adapt: r3channel/integrations",
    )
    if not found.moved and found.version != RUN:
        yield Check(name="only read", ok=True, found=f"slime {found.version}: {_READ}")
    for line in () if found.moved else used(found.version):
        yield Check(name="used", ok=True, found=line)
    if context.arguments:
        fault = refusal_of(context.arguments, detached=found.version == NEWER)
        well = "nothing that is refused at start"
        yield Check(name="arguments", ok=not fault, found=fault or well, remedy="change them")


def nearest(root: Path) -> Found:
    """The known version that a checkout is, or differs least from."""
    return min(
        (Found(version, _moved(root, version)) for version in _listed()), key=lambda each: len(each.moved)
    )


def _moved(root: Path, version: str) -> list[str]:
    lines: list[str] = []
    for file, names in files_of(version):
        if not (root / file).is_file():
            lines.append(f"{file} is not there")
            continue
        lines += filter(None, (_difference(root / file, file, *named) for named in names.items()))
    return lines


def _difference(path: Path, file: str, name: str, parameters: str | None) -> str:
    found = signatures(path).get(name)
    if found is None:
        return f"{file} has no {name}"
    if parameters in (None, found):
        return ""
    return f"{file}: {name}({found}), expected ({parameters})"


@cache
def signatures(path: Path) -> dict[str, str]:
    """Function or Class.method -> its parameters, `*args` and `**kwargs` included; classes have none."""
    found: dict[str, str] = {}

    def visit(body: list[ast.stmt], before: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found[before + node.name] = ""
                visit(node.body, f"{before}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[before + node.name] = ", ".join(_parameters(node.args))

    visit(ast.parse(path.read_text()).body, "")
    return found


def _parameters(args: ast.arguments) -> list[str]:
    named = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    named += [f"*{args.vararg.arg}"] if args.vararg else []
    named += [arg.arg for arg in args.kwonlyargs]
    return named + ([f"**{args.kwarg.arg}"] if args.kwarg else [])


def used(version: str) -> list[str]:
    """What is replaced, watched or called, by file."""
    return [f"{file}: {', '.join(filter(names.get, names))}" for file, names in files_of(version)]


def files_of(version: str) -> Iterator[tuple[str, dict[str, str | None]]]:
    """File, and name -> its parameters: None for a class, and where they were not read."""
    for files in _listed()[version].values():
        yield from files.items()


@cache
def _listed() -> dict[str, dict[str, dict[str, dict[str, str | None]]]]:
    """Version -> commit -> file -> name -> parameters."""
    return json.loads(Path(__file__).with_name("seams.json").read_text())
