"""The names of SGLang that the engine room relies on, per version, and a check of each. Imports SGLang only when asked, by name.

The names are in sglang_names.toml, read against SGLang 0.5.15.post1 and 0.5.23; what lies between follows one table or
is refused. When a release moves a name, `check_hooks` says which, before anything is patched.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import pkgutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from r3channel.errors import PluginNotApplied

READ_AGAINST = ("0.5.15.post1", "0.5.23")
_SRT = "sglang.srt"


class Name(NamedTuple):
    """A dotted name and, for a callable, parameters that it must still have."""

    path: str
    parameters: tuple[str, ...] = ()


class Hook(NamedTuple):
    """One row of `hooks` in sglang_names.toml, which says what each column is."""

    path: str
    function: str
    kind: str
    """A name of SGLang's `HookType`."""
    tensor: str | None = None
    bags: bool | None = None


_TABLES: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("sglang_names.toml").read_text())
_HOOKS = tuple(Hook(**row | {"path": f"{_SRT}.{row['path']}"}) for row in _TABLES["hooks"])
TABLES: Mapping[str, tuple[Name, ...]] = {
    version: tuple(
        Name(f"{_SRT}.{name}", tuple(parameters))
        for table in ("common", version)
        for name, parameters in _TABLES[table].items()
    )
    for version in READ_AGAINST
}
"""Version -> every name that we rely on there."""


def installed_version() -> str:
    """Return SGLang's version from its metadata.

    Nothing of SGLang is imported.

    Returns:
        The version, or "not installed".
    """
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def hooks_of(*, bags: bool, token_tensors: str = "") -> list[Hook]:
    """Return the names that we replace or wrap.

    Args:
        bags: Whether SGLang keeps its settings in bags by theme.
        token_tensors: The engine's setting of that name.
    """
    asked = (
        hook for hook in _HOOKS if hook.tensor is None or (token_tensors and hook.tensor in token_tensors)
    )
    return [hook for hook in asked if hook.bags in (None, bags)]


def hooked_names(table: str) -> tuple[str, ...]:
    """Return the paths that are hooked in any case.

    Args:
        table: A table of `TABLES`.
    """
    return tuple(hook.path for hook in hooks_of(bags=table != "0.5.15.post1"))


def path_of(function: str) -> str:
    """Return where one of our functions is hooked first."""
    return next(hook.path for hook in _HOOKS if hook.function == function)


def is_patched() -> bool:
    """Return whether SGLang's sources have the hooks in them (patches/).

    These hooks are on with R3CHANNEL_ENGINE=1. Call this before hooks are registered.

    Raises:
        PluginNotApplied: If the sources have only some of the hooks.
    """
    paths = [path for path in hooked_names(matching_table() or "") if path != path_of("FrameCapturer")]
    bare = [path for path in paths if not hasattr(pkgutil.resolve_name(path), "r3channel_hook")]
    if 0 < len(bare) < len(paths):
        raise PluginNotApplied(
            f"this SGLang was patched by another r3channel, which had no hook in {', '.join(bare)}; put SGLang's own files back, "
            "then `r3channel patch apply`"
        )
    return not bare


def matching_table() -> str | None:
    """Return the table whose names are all there.

    It is the installed version's own table, or for a version between two tables the one that it follows.

    Returns:
        The name of the table, or None if no table matches.
    """
    return next((table for table in _candidates() if not _problems(table)), None)


def check_hooks() -> list[str]:
    """Return one line for each name that is gone or changed.

    A name is changed if it lacks a parameter that we rely on. The call imports SGLang, which on a machine without a GPU needs the
    environment of `examples.embedded`. It patches nothing.

    Returns:
        Problems; empty if the hooks will apply.
    """
    if importlib.util.find_spec("sglang") is None:
        return [f"SGLang is not installed; r3channel was read against SGLang {' and '.join(READ_AGAINST)}"]
    return min(map(_problems, _candidates()), key=len)


def _candidates() -> list[str]:
    own = installed_version()
    return [own] if own in TABLES else sorted(TABLES, reverse=True)


def _problems(table: str) -> list[str]:
    return [problem for name in TABLES[table] if (problem := _problem(name)) is not None]


def _problem(name: Name) -> str | None:
    where = f"r3channel was read against SGLang {' and '.join(READ_AGAINST)}, this is {installed_version()}"
    try:
        found = pkgutil.resolve_name(name.path)
    except (ImportError, AttributeError) as error:
        return f"{name.path} is gone ({error}); {where}"
    missing = [one for one in name.parameters if one not in inspect.signature(found).parameters]
    if missing:
        return f"{name.path} no longer takes {', '.join(missing)}; {where}"
    return None
