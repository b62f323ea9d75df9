"""Refuses docstrings that begin with "Of", which name no subject: `make lint` runs it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.support.code_lines import ROOT, ROOTS, docstrings


def without_subject(source: str) -> list[int]:
    '''Lines of docstrings that begin with "Of"; docstrings of constants and attributes count too.

    >>> without_subject("""PORT = 80
    ... 'Of the page.'
    ... HOST = 'Of a name, no docstring'
    ... """)
    [2]
    '''
    return [text.lineno for text in docstrings(source) if re.match(r"\s*Of\b", str(text.value))]


def refusals(root: Path) -> str:
    """A line for each such docstring below `root`; empty where there is none."""
    files = [path for top in ROOTS for path in sorted((root / top).rglob("*.py"))]
    found = [f"{path}:{line}" for path in files for line in without_subject(path.read_text())]
    return "\n".join(f'{place}: a docstring begins with "Of"; begin with what it is' for place in found)


if __name__ == "__main__":
    sys.exit(refusals(ROOT) or 0)
