"""Is a dotted name in a source tree, and does it take these parameters? Read from the syntax, nothing is imported."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from r3channel.engine.sglang_hooks import Name

Found = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.stmt


class Tree:
    """The sources of one release."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def problem(self, name: Name) -> str | None:
        """Why the release cannot be hooked at this name; None when it can."""
        found = self.find(name.path)
        if found is None:
            return f"{name.path} is gone"
        missing = [parameter for parameter in name.parameters if parameter not in self._parameters(found)]
        return f"{name.path} no longer takes {', '.join(missing)}" if missing else None

    def find(self, path: str) -> tuple[Path, Found] | None:
        module, names = self._split(path)
        if module is None or not names:
            return None
        return self._walk(module, names)

    def _split(self, path: str) -> tuple[Path | None, list[str]]:
        """The longest prefix that is a module, and what is left."""
        parts = path.split(".")
        for count in range(len(parts), 0, -1):
            base = self.root.joinpath(*parts[:count])
            for file in (base.with_suffix(".py"), base / "__init__.py"):
                if file.is_file():
                    return file, parts[count:]
        return None, parts

    def _walk(self, module: Path, names: list[str]) -> tuple[Path, Found] | None:
        found = self._in_module(module, names[0])
        for name in names[1:]:
            if found is None or not isinstance(found[1], ast.ClassDef):
                return None
            found = self._in_class(found[0], found[1], name)
        return found

    def _in_module(self, module: Path, name: str) -> tuple[Path, Found] | None:
        for node in _statements(_parsed(module).body):
            if name in _bound(node):
                return module, node
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(f"{node.module}.{alias.name}")
        return None

    def _in_class(self, module: Path, owner: ast.ClassDef, name: str) -> tuple[Path, Found] | None:
        for node in owner.body:
            if name in _bound(node):
                return module, node
        for base in owner.bases:
            if isinstance(base, ast.Name):
                parent = self._in_module(module, base.id)
                if parent is not None and isinstance(parent[1], ast.ClassDef):
                    inherited = self._in_class(parent[0], parent[1], name)
                    if inherited is not None:
                        return inherited
        return None

    def _parameters(self, found: tuple[Path, Found]) -> set[str]:
        node = found[1]
        if isinstance(node, ast.ClassDef):  # a dataclass: its fields
            return {name for statement in node.body for name in _bound(statement)}
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return set()
        arguments = node.args
        return {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


@functools.cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Top-level statements, those under `if` and `try` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _statements(node.body)


def _bound(node: ast.stmt) -> set[str]:
    """Names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    return {target.id for target in targets if isinstance(target, ast.Name)}
