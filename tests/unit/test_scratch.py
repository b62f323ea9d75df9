"""What a killed run left in the temporary folder is found and removed; what is another's, or in use, stays."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from examples.embedded.scratch import PREFIX, remove_leftovers, scratch


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left_by_a_killed_run(base: Path, name: str) -> Path:
    folder = base / f"{PREFIX}{name}"
    (folder / "ray").mkdir(parents=True)
    (folder / "ray" / "log").write_text("x")
    (folder / "lock").touch()
    return folder


def test_a_killed_runs_folder_goes_and_a_living_ones_stays(base: Path) -> None:
    dead = left_by_a_killed_run(base, "dead")
    with scratch() as living:
        assert remove_leftovers() == [dead]
        assert [path.name for path in base.iterdir()] == [living.name]


def test_what_is_not_ours_stays(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = base / "home"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (base / f"{PREFIX}link").symlink_to(elsewhere)
    (base / f"{PREFIX}new").mkdir()  # its run has not come to its lock yet
    left_by_a_killed_run(base, "x").rename(base / "r3other-x")
    before = sorted(os.listdir(base))
    assert remove_leftovers() == [] and sorted(os.listdir(base)) == before
    assert (elsewhere / "lock").exists()
    folder = left_by_a_killed_run(base, "theirs")
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)  # another user asks
    assert remove_leftovers() == [] and folder.exists()
