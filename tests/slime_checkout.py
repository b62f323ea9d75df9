"""A checkout with all names of slime that we rely on and nothing else, made from the list of a known version."""

from __future__ import annotations

from pathlib import Path

from r3channel.integrations.slime.api_check import files_of


def write(folder: Path, version: str) -> Path:
    for file, names in files_of(version):
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        lines: list[str] = []
        for name, parameters in names.items():
            owner, _, method = name.rpartition(".")
            named = "*unread" if parameters is None else parameters
            plain = f"class {name}: pass" if method[0].isupper() else f"def {method}({named}): pass"
            lines.append(f"class {owner}:\n {plain}" if owner else plain)
        with path.open("a") as file_:
            file_.write("\n".join([*lines, ""]))
    return folder
