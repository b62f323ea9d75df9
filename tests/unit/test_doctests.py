"""The examples in docstrings are true, wherever in the package or beside the tests they stand."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted([*(ROOT / "r3channel").rglob("*.py"), *(ROOT / "tests/support").glob("*.py")])
    if re.search(r"^ +>>> ", path.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_documentation_are_true(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted and not result.failed
    assert {"r3channel.wire.codec", "r3channel.tools.extras", "tests.support.code_lines"} <= set(MODULES)
