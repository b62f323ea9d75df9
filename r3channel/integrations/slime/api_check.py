"""The names of slime and of miles that the integrations rely on, looked up in sources without importing them.

The `seams.json` of each framework holds only names and signatures, by known version, by the commit at which a file was read, and
by file. `unread` holds names that are used and whose parameters could not be read at that version: these names have to exist.
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
from r3channel.observe.check import Check, CheckContext

RUN, NEWER = "0.3.1", "0.4.0"
"""The version that the tests run, and the version of which only files were read."""
_READ = "its files were read and the hooks ran against a stand-in of them; no job of it was run, nor its trainer side"


class Found(NamedTuple):
    """What a checkout was found to be."""

    version: str
    """The known version from which the checkout differs least."""
    moved: list[str]
    """One line for each name that is missing or has other parameters: what was found, what was expected."""


def check_importable(package: str = "slime") -> str:
    """Return the version of slime or miles that can be imported.

    Raises:
        UsageError: If the package is missing.
        ConfigError: If names that we use have moved.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(
            f"{package} cannot be imported; expected it installed, or its checkout on PYTHONPATH"
        )
    version, lines = nearest(Path(spec.submodule_search_locations[0]).parent, package)
    if lines:
        more = f" and {len(lines) - 4} more" if len(lines) > 4 else ""
        text = f"this {package} is not one that r3channel knows. It is nearest to {_known_version(version, package)}, but: "
        raise ConfigError(text + f"{'; '.join(lines[:4])}{more}; nothing was started")
    return version


def check_checkout(context: CheckContext) -> Iterator[Check]:
    """Check which version the checkout of `--slime DIR` is.

    The checks say whether it has every name that the integration uses, and which names these are. Nothing of slime is imported.
    """
    root = Path(context.slime or "")
    found = nearest(root)
    known = _known_version(found.version)
    remedy = f"it is nearest to {known}: use that; to adapt: r3channel/integrations"
    seen = "; ".join(found.moved) or f"all names of {known}"
    yield Check(name=f"slime {root}", ok=not found.moved, found=seen, remedy=remedy)
    if not found.moved and found.version != RUN:
        yield Check(name="only read", ok=True, found=f"slime {found.version}: {_READ}")
    for file, names in () if found.moved else files_of(found.version):
        yield Check(name="used", ok=True, found=f"{file}: {', '.join(names)}")


def nearest(root: Path, package: str = "slime") -> Found:
    """Return the known version from which a checkout differs least.

    Args:
        root: Folder of the checkout.
        package: "slime" or "miles".
    """
    found = [Found(version, [*_find_moved(root, version, package)]) for version in _load_list(package)]
    return min(found, key=lambda each: len(each.moved))


def _known_version(version: str, package: str = "slime") -> str:
    return f"{package} {version} ({next(iter(_load_list(package)[version]))})"


def _find_moved(root: Path, version: str, package: str) -> Iterator[str]:
    for file, names in files_of(version, package):
        if not (root / file).is_file():
            yield f"{file} is not there"
            continue
        there = signatures(root / file)
        for name, parameters in names.items():
            if name not in there:
                yield f"{file} has no {name}"
            elif parameters not in (None, there[name]):
                yield f"{file}: {name}({there[name]}), expected ({parameters})"


@cache
def signatures(path: Path) -> dict[str, str]:
    """Return the parameters of each function of a file.

    Args:
        path: A Python file.

    Returns:
        Parameters, `*args` and `**kwargs` included, by function or Class.method; classes have an empty text.
    """
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


def files_of(version: str, package: str = "slime") -> Iterator[tuple[str, dict[str, str | None]]]:
    """Yield each file of a version with its names.

    Args:
        version: A known version.
        package: "slime" or "miles".

    Returns:
        An iterator of (file, name -> parameters). The parameters are None for a class, and where they were not read.
    """
    for files in _load_list(package)[version].values():
        yield from files.items()


@cache
def _load_list(package: str) -> dict[str, dict[str, dict[str, dict[str, str | None]]]]:
    """Return parameters by version, commit, file and name."""
    return json.loads(Path(__file__).parents[1].joinpath(package, "seams.json").read_text())
