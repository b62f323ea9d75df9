"""`r3channel patch check|apply|reverse --target DIR`: our diffs on an upstream's sources, whole or not at all.

    r3channel patch apply --target "$(python -c 'import pathlib, sglang; print(pathlib.Path(sglang.__file__).parents[1])')"

DIR is what a file's path begins in: a checkout, or the site-packages that a wheel was installed to. Which version lies there is
known by the hashes of the files that a patch touches, before and after, as git writes them into a diff (`git diff --full-index`).

Exit status: 0 done, or there is nothing to do; 2 refused, with what was found and what was expected; then no file was changed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import r3channel
from r3channel.errors import UsageError
from r3channel.tools import commands

_FILE = re.compile(r"^diff --git a/(\S+) b/\1\nindex ([0-9a-f]{40})\.\.([0-9a-f]{40})", re.MULTILINE)
_APPLY_TIMEOUT_S = 60
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Change:
    """One file of a patch, with git's hashes of its content before and after."""

    file: str
    before: str
    after: str

    def state(self, target: Path) -> str:
        """Return `clean`, `patched`, `changed` (neither of them) or `missing`."""
        path = target / self.file
        if not path.is_file():
            return "missing"
        return {self.before: "clean", self.after: "patched"}.get(blob(path.read_bytes()), "changed")


@dataclass(frozen=True, slots=True)
class Patch:
    """A diff of files. It adds and removes none, and its first line says what it is for."""

    path: Path
    title: str
    changes: tuple[Change, ...]

    @classmethod
    def read(cls, path: Path) -> Patch:
        text = path.read_text()
        return cls(path, text.partition("\n")[0], tuple(Change(*fields) for fields in _FILE.findall(text)))

    @property
    def name(self) -> str:
        return self.path.stem

    def state(self, target: Path) -> str:
        """Return `clean` or `patched` if all files are, else `other`."""
        states = {change.state(target) for change in self.changes}
        return states.pop() if states in ({"clean"}, {"patched"}) else "other"

    def why_not(self, target: Path) -> str:
        by_state: dict[str, list[str]] = {}
        for change in self.changes:
            by_state.setdefault(change.state(target), []).append(change.file)
        state_text = "; ".join(f"{state}: {_list_some(files)}" for state, files in sorted(by_state.items()))
        if by_state.keys() == {"clean", "patched"}:
            return (
                f"{self.name} is half applied in {target}: {state_text}; expected all clean, or all patched. "
                "Put the upstream's own files in place of the patched ones, then apply"
            )
        return (
            f"{target} is not what {self.name} is for ({self.title}): {state_text}; "
            "expected each file as that version has it, or as this patch leaves it. Get that version, or undo the changes"
        )


def run(argv: Sequence[str]) -> int:
    """Run the command as the module describes it."""
    options = _parser().parse_args(argv)
    patch = choose(options.target, options.patch)
    state = patch.state(options.target)
    if state == "other":
        raise UsageError(patch.why_not(options.target))
    wanted = {"check": state, "apply": "patched", "reverse": "clean"}[options.action]
    if wanted != state:
        turn(patch, options.target, reverse=wanted == "clean")
    outcome = "is applied" if wanted == "patched" else "is applicable"
    note = "" if wanted != state or options.action == "check" else ", and was; nothing was changed"
    print(f"{patch.name} {outcome}{note}: {len(patch.changes)} files below {options.target}")
    return 0


def _parser() -> argparse.ArgumentParser:
    names = ", ".join(patch.name for patch in known_patches())
    parser = commands.parser("patch", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=("check", "apply", "reverse"))
    parser.add_argument(
        "--target", type=Path, required=True, metavar="DIR", help="a checkout, or site-packages"
    )
    parser.add_argument(
        "--patch", metavar="NAME", help=f"default: the one whose version lies there, of {names}"
    )
    return parser


def known_patches() -> list[Patch]:
    """Return all patches: an installed wheel's, or a source tree's.

    A wheel has them inside the package.
    """
    package = Path(r3channel.__file__).parent
    folder = next(at / "patches" for at in (package, package.parent) if (at / "patches").is_dir())
    return [Patch.read(path) for path in sorted(folder.glob("*.patch"))]


def choose(target: Path, name: str | None) -> Patch:
    """Return the named patch, or the one that fits `target`.

    Raises:
        UsageError: no patch could be meant, or more than one.
    """
    patches = [patch for patch in known_patches() if name in (None, patch.name)]
    names = ", ".join(patch.name for patch in patches or known_patches())
    if not patches:
        raise UsageError(f"--patch {name}: no such patch, expected one of {names}")
    here = [patch for patch in patches if any((target / change.file).is_file() for change in patch.changes)]
    nearest = sorted(here, key=lambda patch: [file.state(target) for file in patch.changes].count("changed"))
    fitting = [patch for patch in here if patch.state(target) != "other"] or nearest[:1]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise UsageError(
            f"{target} has none of the files that {names} change; expected the folder that holds sglang/: the python/ of a "
            "checkout, or the site-packages of a wheel"
        )
    raise UsageError(
        f"{target} could be meant by {' and '.join(patch.name for patch in fitting)}; choose with --patch"
    )


def turn(patch: Patch, target: Path, *, reverse: bool) -> None:
    """Apply a patch to every file, or take it back.

    Raises:
        UsageError: the patch cannot be applied; then all files are as they were.
    """
    with tempfile.TemporaryDirectory(prefix="r3channel-patch-") as scratch:
        copies = Path(scratch)
        for change in patch.changes:
            (copies / change.file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target / change.file, copies / change.file)
        _git_apply(patch, copies, reverse=reverse)
        contents = {change.file: (copies / change.file).read_bytes() for change in patch.changes}
    for change in patch.changes:
        expected = change.before if reverse else change.after
        if (actual := blob(contents[change.file])) != expected:
            raise UsageError(
                f"{patch.name} made {actual[:12]} of {change.file}, expected {expected[:12]}; no file was changed"
            )
        _check_compiles(change.file, contents[change.file])
    _replace(target, contents)


def _git_apply(patch: Patch, folder: Path, *, reverse: bool) -> None:
    git = shutil.which("git")
    if git is None:
        raise UsageError("git, which applies the diff, is not installed; no file was changed")
    command = [git, "apply", "--whitespace=nowarn", *["--reverse"] * reverse, str(patch.path.resolve())]
    # Neither a checkout around the folder nor the user's settings may change what git does.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    environment |= {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    where = {"cwd": folder, "env": environment, "timeout": _APPLY_TIMEOUT_S}
    child = subprocess.run(command, capture_output=True, text=True, check=False, **where)
    if child.returncode:
        raise UsageError(
            f"git could not apply {patch.name}: {' '.join(child.stderr.split())}; no file was changed"
        )


def _check_compiles(file: str, content: bytes) -> None:
    if file.endswith(".py"):
        try:
            compile(content, file, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise UsageError(f"{file} would not compile: {error}; no file was changed") from error


def _replace(target: Path, contents: Mapping[str, bytes]) -> None:
    # All files or none: new files are written beside the old ones first, so a full disk is noticed before any is replaced.
    before = {file: (target / file).read_bytes() for file in contents}
    done: list[str] = []
    try:
        for file, content in contents.items():
            _temporary_path(target / file).write_bytes(content)
            shutil.copymode(target / file, _temporary_path(target / file))
        for file in contents:
            # A rename leaves the old content to other hard links of the file, for example in a package cache.
            os.replace(_temporary_path(target / file), target / file)
            done.append(file)
    except BaseException as error:
        for file in done:
            (target / file).write_bytes(before[file])
        for file in contents:
            _temporary_path(target / file).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise UsageError(f"a file cannot be replaced: {error}; all are as they were") from error
        raise


def _temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.r3channel")


def blob(content: bytes) -> str:
    """Return git's hash of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _list_some(files: Sequence[str]) -> str:
    more = len(files) - _SHOWN
    return ", ".join(files[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
