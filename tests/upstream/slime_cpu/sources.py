"""The sources that slime's image pins, made ready to import: unpacked, Megatron with slime's patch, and what slime needs beside
our lock.

    R3TEST_UPSTREAM=FOLDER     archives (slime-624b824a.tar.gz, megatron-lm-1dcf0daf.tar.gz) or checkouts of those names
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from r3channel.errors import UsageError
from tests.support.waits import ENGINE_S, PROGRAM_S

SLIME, MEGATRON = "slime-624b824a", "megatron-lm-1dcf0daf"
_REQUIREMENTS = Path(__file__).with_name("requirements.txt")
_PATCH = "docker/patch/latest/megatron.patch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    slime: Path
    megatron: Path
    extra: Path
    """A folder of packages, for the end of the path."""

    @property
    def path(self) -> list[str]:
        """Entries of PYTHONPATH, before and behind which others may stand."""
        return [str(self.megatron), str(self.slime), str(self.extra)]


def upstream() -> Path | None:
    """Where the archives or checkouts are; None where nobody says."""
    named = os.environ.get("R3TEST_UPSTREAM")
    return Path(named).resolve() if named else None


def ready(folder: Path) -> Sources:
    """Everything below `folder`, made where it is not there yet. Raises `UsageError` for what is missing."""
    given = upstream()
    if given is None:
        raise UsageError(
            f"R3TEST_UPSTREAM is not set; expected a folder with {SLIME} and {MEGATRON}, each a checkout or a .tar.gz"
        )
    key = hashlib.sha256(_REQUIREMENTS.read_bytes()).hexdigest()[:12]
    return Sources(
        slime=_made(folder / SLIME, lambda at: unpack(given, SLIME, at)),
        megatron=_made(folder / MEGATRON, lambda at: _patched(given, folder / SLIME / _PATCH, at)),
        extra=_made(folder / f"extra-{key}", _install),
    )


def _made(folder: Path, make) -> Path:
    """Whole or not at all, for the next run as well."""
    if not folder.is_dir():
        scratch = folder.with_name(f".{folder.name}-{os.getpid()}")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        make(scratch)
        scratch.rename(folder)
    return folder


def unpack(given: Path, name: str, at: Path) -> None:
    if (given / name).is_dir():
        shutil.copytree(given / name, at, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git"))
        return
    archive = given / f"{name}.tar.gz"
    if not archive.is_file():
        raise UsageError(f"{given} has neither {name}/ nor {archive.name}")
    with tempfile.TemporaryDirectory(dir=at.parent) as whole, tarfile.open(archive) as file:
        file.extractall(whole, filter="data")
        (inner,) = Path(whole).iterdir()  # the archive's one folder
        at.rmdir()
        inner.rename(at)


def _patched(given: Path, patch: Path, at: Path) -> None:
    unpack(given, MEGATRON, at)
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(at.parent)}
    subprocess.run(["git", "apply", str(patch)], cwd=at, env=environment, check=True, timeout=PROGRAM_S)


def _install(at: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*command, "--target", str(at), "-r", str(_REQUIREMENTS)], check=True, timeout=ENGINE_S)
