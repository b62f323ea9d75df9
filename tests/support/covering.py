"""Long tests that belong to what a change touched: `make covering SINCE=<commit>` runs them, covering.toml is their table."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path, PurePath

from tests.support.code_lines import ROOT


def table() -> dict[str, list[str]]:
    """Folder -> the files whose long tests cover it, as covering.toml has them."""
    found = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["covering"]
    return {folder: [f"tests/{name}.py" for name in names] for folder, names in found.items()}


def long_files() -> set[str]:
    """Files with tests that `make test` leaves out."""
    files = ((path, path.read_text()) for path in (ROOT / "tests").rglob("test_*.py"))
    return {
        path.relative_to(ROOT).as_posix() for path, text in files if re.search(r"mark\.(full|long)\b", text)
    }


def covering(changed: Iterable[str], folders: dict[str, list[str]]) -> list[str]:
    """The files to run: those of each path's nearest folder in the table, and long files that changed themselves.

    >>> covering(["a/b/x.py", "a/y.md"], {"a": ["tests/test_a.py"], "a/b": ["tests/test_b.py"]})
    ['tests/test_b.py']
    >>> covering(["a/z.py", "tests/e2e/test_chaos.py", "tests/README.md"], {"a": ["tests/test_a.py"], "tests": ["no"]})
    ['no', 'tests/e2e/test_chaos.py', 'tests/test_a.py']
    """
    found = set[str](changed) & long_files()
    for path in (PurePath(path) for path in changed if not path.endswith(".md")):
        near = max((folder for folder in folders if path.is_relative_to(folder)), key=len, default="")
        found.update(folders.get(near, ()))
    return sorted(found)


def main(since: str) -> None:
    """Print the files for what differs from that commit, files that git does not know yet included."""
    asked = (["git", "diff", "--name-only", since], ["git", "ls-files", "--others", "--exclude-standard"])
    told = [subprocess.run(one, cwd=ROOT, capture_output=True, check=True, text=True).stdout for one in asked]
    print("\n".join(covering("".join(told).split(), table())))


if __name__ == "__main__":
    main(sys.argv[1])
