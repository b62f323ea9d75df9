"""Upstreams, unpacked once per test run: published wheels, and the sources in R3TEST_UPSTREAM. Nothing is installed."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from examples.embedded.sglang import environment
from r3channel.errors import UsageError
from tests.support.waits import ENGINE_S, PROGRAM_S
from tests.upstream.slime_cpu.sources import SLIME, unpack, upstream

BESIDE_INSTALLED = {
    "0.5.15.post1": ("sglang==0.5.15.post1", "transformers==5.12.1", "tokenizers==0.22.2"), "0.5.23": (),
}  # fmt: skip
"""Releases of SGLang, and the wheels that are laid over the installed packages for one. They are what it names in its metadata;
torch 2.13.0 and the other installed packages serve it too (seen, not promised)."""
SLIMES_PATCHES = ("", "-top_p", "-release_hicache", "-pull_weights", "-deterministic")
"""Its patches of SGLang, in the order in which the Dockerfile of slime's image applies them."""


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="r3channel-wheels-")


@functools.cache
def unpacked(requirement: str) -> Path:
    """A folder that can stand first on the path: the wheel of `requirement` without dependencies, or the installed packages
    when that release is installed."""
    name, _, version = requirement.partition("==")
    if version and version == importlib.metadata.version(name):
        return Path(str(importlib.metadata.distribution(name).locate_file("")))
    folder = Path(_folder().name) / requirement.replace("=", "-").replace("<", "-")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--ignore-requires-python"]  # megatron-core 0.17 to 0.19 asks for 3.12, and runs on 3.11
    command += ["--disable-pip-version-check", "-d", str(folder / "wheel"), requirement]
    child = subprocess.run(command, capture_output=True, text=True, timeout=ENGINE_S, check=False)
    assert child.returncode == 0, f"{requirement} cannot be downloaded:\n{child.stderr[-1000:]}"
    (wheel,) = (folder / "wheel").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    wheel.unlink()
    return folder / "site"


def without_other_models(tree: Path) -> dict[str, str]:
    """Variables with which that older release, which knows no deferred import of its 200 model files, leaves most of them out."""
    others = (path.stem for path in (tree / "sglang/srt/models").glob("*.py") if "qwen3" not in path.stem)
    return {"SGLANG_EXTERNAL_MODEL_PACKAGE": "", "SGLANG_DISABLED_MODEL_ARCHS": ",".join(others)}


def path_with(version: str, *first: Path) -> str:
    """PYTHONPATH of a process with that release of SGLang; what stands in `first` wins."""
    folders = [*first, *map(unpacked, BESIDE_INSTALLED[version])]
    return os.pathsep.join([*map(str, folders), environment()["PYTHONPATH"]])


@functools.cache
def sources(name: str) -> Path:
    """The checkout or unpacked archive `name` of R3TEST_UPSTREAM. Skips where there is none."""
    given = upstream()
    if given is None:
        pytest.skip(f"R3TEST_UPSTREAM is not set: a folder with {name}, a checkout or a .tar.gz")
    if (given / name).is_dir():
        return given / name
    (at := Path(_folder().name) / name).mkdir(exist_ok=True)
    try:
        unpack(given, name, at)
    except UsageError as error:
        pytest.skip(f"R3TEST_UPSTREAM: {error}")
    return at


@functools.cache
def slimes_sglang(requirement: str) -> Path:
    """As `unpacked`, patched as in slime's image. Skips where there are no sources of slime."""
    patches, tree = sources(SLIME) / "docker/patch/latest", Path(_folder().name) / "slimes-sglang"
    shutil.copytree(unpacked(requirement), tree / "python")
    for name in SLIMES_PATCHES:
        # the wheel lacks what the last one changes beside the package: kernels in C++ and SGLang's own tests
        command = ["git", "apply", "--include=python/sglang/*", str(patches / f"sglang{name}.patch")]
        done = subprocess.run(
            command, cwd=tree, capture_output=True, text=True, timeout=PROGRAM_S, check=False
        )
        assert done.returncode == 0, done.stderr
    return tree / "python"
