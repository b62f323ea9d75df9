"""Every folder of tests is one that pytest enters: its own list of folders to pass over names `dist`."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def test_no_folder_of_tests_is_passed_over(request: pytest.FixtureRequest) -> None:
    passed_over = request.config.getini("norecursedirs")
    folders = {part for file in TESTS.rglob("test_*.py") for part in file.relative_to(TESTS).parts[:-1]}
    assert {"dist", "unit", "contract", "engine", "e2e"} <= folders
    assert not [name for name in folders if any(fnmatch(name, pattern) for pattern in passed_over)]
