"""The checks of our own in `make lint`: ceilings of code lines, which only fall, and docstrings without a subject."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.support import covering, docstrings
from tests.support.code_lines import ROOT, TABLE, above, ceilings_of, lowered, rooms

PROJECT = f'[project]\nname = "x"\n\n{TABLE}\n"a" = 10\n"b" = 5\n"gone" = 7\n\n[tool.other]\ny = 1\n'


def test_a_room_above_its_ceiling_or_without_one_is_named() -> None:
    told = above(ceilings_of(PROJECT), {"a": 10, "b": 6, "new": 1})
    assert [line.partition(":")[0] for line in told] == ["b", "new"]


def test_ceilings_fall_and_never_rise() -> None:
    written = lowered(PROJECT, {"a": 12, "b": 3})
    assert ceilings_of(written) == {"a": 10, "b": 3}
    assert written.endswith("\n[tool.other]\ny = 1\n") and written.startswith("[project]")


def test_every_room_has_a_ceiling() -> None:
    assert ceilings_of((ROOT / "tests/support/code_lines.toml").read_text()).keys() == rooms(ROOT).keys()


def test_no_folder_of_tests_is_passed_over(request: pytest.FixtureRequest) -> None:
    """pytest's own list of folders to pass over names `dist`."""
    tests = ROOT / "tests"
    passed_over = request.config.getini("norecursedirs")
    folders = {part for file in tests.rglob("test_*.py") for part in file.relative_to(tests).parts[:-1]}
    assert {"dist", "unit", "contract", "engine", "e2e"} <= folders
    assert not [name for name in folders if any(fnmatch(name, pattern) for pattern in passed_over)]


def test_a_docstring_without_a_subject_is_refused_and_named(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (page := tmp_path / "tests" / "page.py").write_text('"""Often."""\nPORT = 80\n"""Of the page."""\n')
    (line,) = docstrings.refusals(tmp_path).splitlines()
    assert line.startswith(f"{page}:3: ")


def test_every_room_has_long_tests_that_cover_it_and_every_file_of_them_is_in_the_table() -> None:
    folders = covering.table()
    named = {file for files in folders.values() for file in files}
    assert named == covering.long_files()
    assert {room.removesuffix("/*.py") for room in rooms(ROOT)} - {"tests"} <= folders.keys()
    assert not [folder for folder, files in folders.items() if not files or not (ROOT / folder).is_dir()]
