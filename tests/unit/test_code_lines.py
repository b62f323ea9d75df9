"""The ceilings of code lines: what counts, what is too many, and that they only fall."""

from __future__ import annotations

import doctest

from tests import code_lines
from tests.code_lines import ROOT, TABLE, above, ceilings_of, lowered, rooms

PROJECT = f'[project]\nname = "x"\n\n{TABLE}\n"a" = 10\n"b" = 5\n"gone" = 7\n\n[tool.other]\ny = 1\n'


def test_documentation_costs_nothing_and_long_statements_count_each_line() -> None:
    result = doctest.testmod(code_lines)
    assert result.attempted and not result.failed


def test_a_room_above_its_ceiling_or_without_one_is_named() -> None:
    told = above(ceilings_of(PROJECT), {"a": 10, "b": 6, "new": 1})
    assert [line.partition(":")[0] for line in told] == ["b", "new"]


def test_ceilings_fall_and_never_rise() -> None:
    written = lowered(PROJECT, {"a": 12, "b": 3})
    assert ceilings_of(written) == {"a": 10, "b": 3}
    assert written.endswith("\n[tool.other]\ny = 1\n") and written.startswith("[project]")


def test_every_room_has_a_ceiling() -> None:
    assert ceilings_of((ROOT / "tests/code_lines.toml").read_text()).keys() == rooms(ROOT).keys()
