"""`r3channel patch` on an upstream of two files: known by hashes, all or nothing. Real ones: tests/upstream/test_patch.py."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from r3channel.cli import main
from r3channel.engine.sglang_hooks import hooks_of
from r3channel.tools import patch as command
from tests.support.children import ROOT

BEFORE = {"lib/one.py": "x = 1\n", "lib/two.py": "y = 1\n"}
AFTER = {"lib/one.py": "x = 2\n", "lib/two.py": "y = 2\n"}


def write(folder: Path, files: dict[str, str]) -> Path:
    for file, text in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    return folder


def files_of(folder: Path) -> dict[str, str]:
    """Everything that is there, so that nothing can be left beside."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def diff(repository: Path, before: dict[str, str], after: dict[str, str]) -> str:
    """As the patches of this project are made."""

    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", *words]
        return subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True).stdout

    write(repository, before)
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "before")
    write(repository, after)
    return git("diff", "--full-index")


@pytest.fixture
def patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of patches in the place of ours, with one."""
    (tmp_path / "repository").mkdir()
    folder = tmp_path / "installed/patches"
    write(folder, {"lib-1.patch": f"lib 1: x and y\n\n{diff(tmp_path / 'repository', BEFORE, AFTER)}"})
    monkeypatch.setattr(command.r3channel, "__file__", str(folder.parent / "__init__.py"))
    return folder


@pytest.fixture
def target(tmp_path: Path, patches: Path) -> Path:
    return write(tmp_path / "target", BEFORE)


def run(action: str, target: Path, *more: str) -> int:
    return main(["patch", action, "--target", str(target), *more])


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    return err


def test_applied_and_reversed_files_are_as_before(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (target / "lib/one.py").chmod(0o755)
    said = []
    for action in ("check", "apply", "check", "apply", "reverse", "check", "reverse"):
        assert run(action, target) == 0
        said.append(capsys.readouterr().out.partition(":")[0])
        expected = AFTER if "is applied" in said[-1] else BEFORE
        assert files_of(target) == expected and (target / "lib/one.py").stat().st_mode & 0o777 == 0o755
    again = ", and was; nothing was changed"
    words = "applicable", *["applied"] * 2, f"applied{again}", *["applicable"] * 2, f"applicable{again}"
    assert said == [f"lib-1 is {word}" for word in words]


@pytest.mark.parametrize("action", ["check", "apply", "reverse"])
@pytest.mark.parametrize(
    ("found", "words"),
    [
        (BEFORE | {"lib/two.py": "y = 1  # mine\n"}, ("changed: lib/two.py", "lib 1: x and y")),
        ({"lib/one.py": "x = 1\n"}, ("missing: lib/two.py",)),
        (BEFORE | {"lib/one.py": "x = 2\n"}, ("half applied", "clean: lib/two.py; patched: lib/one.py")),
    ],
)
def test_what_is_neither_before_nor_after_is_named(
    target: Path, action: str, found: dict[str, str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (target / "lib/two.py").unlink()
    write(target, found)
    assert run(action, target) == 2 and files_of(target) == found
    told = refusal(capsys)
    assert all(word in told for word in words)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failure_in_the_middle_leaves_the_files_of_before(
    target: Path, failing: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = os.replace, []

    def replace(source: Path, to: Path) -> None:
        calls.append(to)
        if len(calls) == failing:
            raise OSError(28, "No space left on device")
        real(source, to)

    monkeypatch.setattr(os, "replace", replace)
    assert run("apply", target) == 2 and len(calls) == failing
    assert files_of(target) == BEFORE
    assert "No space left" in refusal(capsys)


def test_a_strange_result_is_unused(target: Path, patches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = patches / "lib-1.patch"
    path.write_text(path.read_text().replace("+y = 2", "+y = 3"))
    assert run("apply", target) == 2 and files_of(target) == BEFORE
    assert "lib/two.py, expected" in refusal(capsys)


def test_a_result_that_does_not_compile_is_not_used(
    target: Path, patches: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    broken = diff(tmp_path / "other", BEFORE, AFTER | {"lib/two.py": "y = = 2\n"})
    (patches / "lib-1.patch").write_text(broken)
    assert run("apply", target) == 2 and files_of(target) == BEFORE
    assert "lib/two.py would not compile" in refusal(capsys)


def test_what_cannot_be_is_told(target: Path, patches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("apply", target, "--patch", "lib-9") == 2
    assert "expected one of lib-1" in refusal(capsys)
    assert run("check", target.parent / "nowhere") == 2
    assert "none of the files that lib-1 change" in refusal(capsys)
    write(patches, {"lib-1b.patch": (patches / "lib-1.patch").read_text()})
    assert run("apply", target) == 2 and files_of(target) == BEFORE
    assert "lib-1 and lib-1b" in refusal(capsys)
    assert run("apply", target, "--patch", "lib-1b") == 0 and files_of(target) == AFTER


def test_of_two_patches_the_one_that_fits_is_meant(target: Path, patches: Path, tmp_path: Path) -> None:
    (tmp_path / "newer").mkdir()
    write(patches, {"lib-2.patch": diff(tmp_path / "newer", BEFORE | {"lib/two.py": "y = 5\n"}, AFTER)})
    assert run("apply", target) == 0 and files_of(target) == AFTER


@pytest.mark.parametrize("where", ["file", "variables", "checkout"])
def test_a_users_git_has_no_say(target: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Its settings would end every line with two characters, its checkout would be asked."""
    home = target.parent
    (home / ".gitconfig").write_text("[core]\n\tautocrlf = true\n")
    settings = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.autocrlf", "GIT_CONFIG_VALUE_0": "true"}
    checkout = {"GIT_DIR": f"{home}/.git", "GIT_WORK_TREE": str(home)}
    if where == "checkout":
        subprocess.run(["git", "init", "-q"], cwd=home, check=True)
        monkeypatch.setattr(tempfile, "tempdir", str(home))
    for name, value in {"file": {"HOME": str(home)}, "variables": settings, "checkout": checkout}[
        where
    ].items():
        monkeypatch.setenv(name, value)
    assert run("apply", target) == 0 and files_of(target) == AFTER


def test_each_patch_of_this_project_names_every_file_with_both_hashes() -> None:
    patches = command.known_patches()
    assert [patch.name for patch in patches] == ["sglang-0.5.15.post1", "sglang-0.5.23"]
    for patch in patches:
        assert len(patch.changes) == patch.path.read_text().count("\n+++ b/") > 0, patch.name
        assert patch.title.endswith((".", "path")) and "diff --git" not in patch.title


def test_every_hook_of_our_patches_is_one_of_the_plug_in_and_a_function_of_the_engine_room() -> None:
    patches = "".join(path.read_text() for path in (ROOT / "patches").glob("sglang-*.patch"))
    rooms = "".join(path.read_text() for path in (ROOT / "r3channel/engine").glob("sglang*.py"))
    names = set(re.findall(r'@r3channel_hook\("(\w+)"', patches))
    registered = {
        hook.function
        for bags in (True, False)
        for hook in hooks_of(bags=bags, token_tensors="combine_weights")
    }
    assert len(names) >= 8 and names < registered
    assert registered <= set(re.findall(r"^(?:def|class) (\w+)", rooms, re.MULTILINE))
