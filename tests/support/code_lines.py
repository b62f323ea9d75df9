"""Lines of code by room, held against the ceilings in code_lines.toml: `make lint` runs `python -m tests.support.code_lines`.

A line counts where it holds a token that is neither comment nor docstring, so documentation costs nothing. Ceilings only fall:
`python -m tests.support.code_lines --lower` writes lower figures of today. One is raised by hand, in a change that says why.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = "[code-lines]"
ROOTS = ("r3channel", "examples", "tests")
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.DEDENT, tokenize.ENDMARKER}
"""Tokens on lines without code; other tokens without text stand on the line of one that counts."""


def docstrings(source: str) -> Iterator[ast.Constant]:
    """The docstrings of modules, classes and functions, and the texts below constants and attributes."""
    values = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
    return (text for text in values if isinstance(text, ast.Constant) and isinstance(text.value, str))


def code_lines(source: str) -> int:
    '''Lines that hold code; a statement over three lines counts three.

    >>> code_lines("""def f():
    ...     "What it is."
    ...     return (  # why
    ...         1
    ...     )
    ... """)
    4
    '''
    documented, lines = set[int](), set[int]()
    for text in docstrings(source):
        documented.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def rooms(root: Path) -> dict[str, int]:
    """Room -> code lines: each folder of r3channel, its loose files, then examples and tests as they are."""
    found: dict[str, int] = dict.fromkeys(ROOTS, 0)
    for top in ROOTS:
        for path in sorted((root / top).rglob("*.py")):
            count, parts = code_lines(path.read_text()), path.relative_to(root).parts
            found[top] += count
            if top == "r3channel":
                room = f"{top}/{parts[1]}" if len(parts) > 2 else f"{top}/*.py"
                found[room] = found.get(room, 0) + count
    return found


def lowered(text: str, now: dict[str, int]) -> str:
    """The file of ceilings with today's figures where they are below them; rooms that are gone, go."""
    ceilings = ceilings_of(text)
    lines = [f'"{room}" = {min(count, ceilings.get(room, count))}\n' for room, count in sorted(now.items())]
    return re.sub(re.escape(TABLE) + r"\n(?:\".*\n)*", lambda _: TABLE + "\n" + "".join(lines), text)


def ceilings_of(text: str) -> dict[str, int]:
    return tomllib.loads(text)["code-lines"]


def above(ceilings: dict[str, int], now: dict[str, int]) -> list[str]:
    """A line for each room that has more than its ceiling; a room without one has a ceiling of 0."""
    return [
        f"{room}: {count:,} code lines, at most {ceilings.get(room, 0):,}. Take something out of this room, or say why not"
        for room, count in now.items()
        if count > ceilings.get(room, 0)
    ]


def main(arguments: list[str]) -> int:
    ceilings, now = Path(__file__).with_suffix(".toml"), rooms(ROOT)
    if "--lower" in arguments:
        ceilings.write_text(lowered(ceilings.read_text(), now))
        return 0
    too_many = above(ceilings_of(ceilings.read_text()), now)
    print("\n".join(too_many) or "code lines: no room is above its ceiling")
    return int(bool(too_many))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
