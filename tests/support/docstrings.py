"""Refuses docstrings and names that are hard to read: `make lint` runs it.

No docstring begins with "Of", which names no subject. In the package a function's begins with a verb, and its first paragraph has
at most twelve words. There a call's name is no participle, pronoun or adverb alone: such a word names a value.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.code_lines import ROOT, ROOTS, docstrings

_MOST_WORDS = 12
_NO_VERB = re.compile(
    r"[\"'`]*(a|all|an|and|another|any|as|at|both|by|each|every|for|from|how|if|in|it|its|many|more|most|no|none|not|of|on|one|only"
    r"|other|raises|some|such|that|the|their|these|they|this|those|to|under|until|what|when|where|whether|which|who|whose|with)\b",
    re.IGNORECASE,
)


_NO_CALL = re.compile(
    r"_*(?!(?:need|feed|seed|embed|speed)$)([a-z]+ed|told|sent|held|kept|given|taken|drawn|shown|said|seen|found|made|done|gone|known"
    r"|written|chosen|brought|bound|spent|left|lost|due|both|each|others?|here|there|which|those|these|that|what|who|some|any|all"
    r"|still|alone|together|apart|again|alike|ahead|why|when|where|until|after|before|beside|between|once|twice|most|over|off)"
)


def without_subject(source: str) -> list[int]:
    '''Lines of docstrings that begin with "Of"; docstrings of constants and attributes count too.

    >>> without_subject("""PORT = 80
    ... 'Of the page.'
    ... HOST = 'Of a name, no docstring'
    ... """)
    [2]
    '''
    return [text.lineno for text in docstrings(source) if re.match(r"\s*Of\b", str(text.value))]


def without_verb(source: str) -> Iterator[int]:
    '''Yield the lines of functions whose docstring begins with no verb, or with a long paragraph.

    >>> list(without_verb("""def size():
    ...     'The bytes of a row.'
    ... def send():
    ...     'Send a row.'
    ... """))
    [1]
    '''
    functions = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    for node in functions:
        text = ast.get_docstring(node) or "Do"
        if _NO_VERB.match(text) or len(text.split("\n\n")[0].split()) > _MOST_WORDS:
            yield node.lineno


def without_action(source: str) -> Iterator[int]:
    """Yield the lines of calls whose names are no verbs; properties and named constructors are values.

    >>> list(without_action("def joined(): ...\\ndef join(): ...\\n"))
    [1]
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _NO_CALL.fullmatch(node.name):
            kinds = " ".join(map(ast.unparse, node.decorator_list))
            if "property" not in kinds and "classmethod" not in kinds:
                yield node.lineno


def refusals(root: Path) -> str:
    """A line for each such docstring below `root`; empty where there is none."""
    files = {path: path.read_text() for top in ROOTS for path in sorted((root / top).rglob("*.py"))}
    package = {path: source for path, source in files.items() if path.is_relative_to(root / "r3channel")}
    found = [
        f"{path}:{line}: {why}"
        for check, sources, why in (
            (without_subject, files, 'a docstring begins with "Of"; begin with what it is'),
            (without_verb, package, f"a function's docstring begins with a verb, in a sentence of {_MOST_WORDS} words at most"),
            (without_action, package, "a call is named by a verb; a participle, pronoun or adverb names a value"),
        )
        for path, source in sources.items()
        for line in check(source)
    ]  # fmt: skip
    return "\n".join(found)


if __name__ == "__main__":
    sys.exit(refusals(ROOT) or 0)
