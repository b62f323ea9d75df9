"""What is installed is what is in the tree: lock, extras, wheel."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as normal

import r3channel
from examples.embedded.sglang import environment
from r3channel.bench import BENCHES, OF_CLONE
from r3channel.tools.commands import COMMANDS
from tests.support.children import ROOT, printed, said_by
from tests.support.waits import PROGRAM_S

LOCK = ROOT / "examples" / "embedded" / "requirements.txt"


LINES = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
LOCKED = {normal(name): version for name, _, version in (line.partition("==") for line in LINES)}


def test_the_lock_names_each_package_once_at_one_version() -> None:
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.+!-]+", line) for line in LINES)
    assert len(LOCKED) == len(LINES)
    assert "torch" not in LOCKED, "torch is the user's choice of build; the Makefile installs it first"


def test_the_environment_is_the_locked_one() -> None:
    installed = {(normal(d.metadata["Name"]), d.version) for d in importlib.metadata.distributions()}
    assert LOCKED.items() - installed == set()


def test_the_extras_accept_the_locked_versions() -> None:
    for requirement in map(Requirement, importlib.metadata.requires("r3channel") or []):
        assert requirement.specifier.contains(LOCKED[normal(requirement.name)]), requirement


def test_one_version_everywhere() -> None:
    assert importlib.metadata.version("r3channel") == r3channel.__version__
    assert f"## [{r3channel.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_pages_install_a_wheel_that_there_is_with_extras_that_there_are() -> None:
    known = importlib.metadata.metadata("r3channel").get_all("Provides-Extra") or []
    pages = [(ROOT / page).read_text() for page in ("README.md", "examples/slime/README.md")]
    asked = [found for page in pages for found in re.findall(r"([\w./-]*)\[(\w+(?:,\w+)*)\]", page)]
    assert {extra for _, extras in asked for extra in extras.split(",")} <= set(known)
    # An empty one is a list of extras alone.
    built = f"dist/r3channel-{r3channel.__version__}-py3-none-any.whl"
    assert {what for what, _ in asked} == {"", ".", built}


def test_type_checkers_are_told_that_the_package_is_typed() -> None:
    assert "Typing :: Typed" in (importlib.metadata.metadata("r3channel").get_all("Classifier") or [])
    assert (ROOT / "r3channel" / "py.typed").is_file()


PLUGINS = (
    "from importlib.metadata import entry_points\n"
    "found = [entry for entry in entry_points(group='sglang.srt.plugins') if 'r3channel' in entry.value + entry.name]\n"
    "assert all(callable(entry.load()) for entry in found)\n"
    "print(*sorted(entry.name for entry in found))"
)


def test_sglang_opens_the_engines_plugin_and_that_of_the_examples_where_their_shims_are() -> None:
    for env, names in (({}, "r3channel"), (environment({}), "r3channel r3channel_embedded")):
        assert said_by(PLUGINS, **{"PYTHONPATH": ""} | env).strip() == names


PIP, ALONE = ("-m", "pip"), ("-q", "--no-deps", "--no-index")


def built(folder: Path) -> Path:
    """The wheel, made there."""
    printed(*PIP, "wheel", *ALONE, "--no-build-isolation", "-w", str(folder), str(ROOT))
    return next(folder.glob("r3channel-*.whl"))


def fresh(folder: Path, wheel: Path, *more: str) -> Path:
    """The commands of a new environment: the wheel and what it and these packages need, linked from here, without a network."""
    venv.create(folder)
    python, (site,) = folder / "bin/python", folder.glob("lib/python*/site-packages")
    printed(*PIP, "--python", str(python), "install", *ALONE, str(wheel), PYTHONPATH="")
    for found in map(importlib.metadata.distribution, closure("r3channel", *more) - {"r3channel"}):
        for part in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / part).exists():
                (site / part).symlink_to(str(found.locate_file(part)))
    return folder / "bin"


def closure(*names: str) -> set[str]:
    """With all that they need, without an extra."""
    found, left = set[str](), [*names]
    while left:
        found.add(name := left.pop())
        wanted = map(Requirement, importlib.metadata.requires(name) or ())
        needed = {one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})}
        left += needed - found
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("wheel"))


@pytest.mark.full
def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
        entries = archive.read(f"r3channel-{r3channel.__version__}.dist-info/entry_points.txt").decode()
    ours = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "r3channel").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert len(ours) > 20 and wheel.name == f"r3channel-{r3channel.__version__}-py3-none-any.whl"
    assert ours - packed == {"r3channel/r3channel.pth"} and "r3channel.pth" in packed
    assert {name for name in packed if not name.startswith("r3channel")} == set()
    assert [n for n in packed if re.search("embedded|demo|test", n)] == ["r3channel/pytest_plugin.py"]
    _, plugins = entries.split("[sglang.srt.plugins]\n")
    assert plugins == "r3channel = r3channel.engine.sglang_plugin:register\n"
    patches = {f"r3channel/patches/{path.name}" for path in (ROOT / "patches").iterdir()}
    assert patches and patches <= packed, "`r3channel patch` looks for them there"


OUT_OF_PLACE = (
    "ConfigError: bench {} starts real engines or trainers with examples/embedded, which is part of the repository and not of "
    "the wheel; clone the repository, type `make setup`, and run the benchmark there"
)
LACKING = {
    "bench relay --quick": "this command needs the package ray, which is not installed: pip install ",
    "weights verify --engine http://127.0.0.1:1": "this command needs the package torch, which is not installed: "
    "install the build for this machine's accelerator: pip install ",
    **{f"bench {name} --quick": OUT_OF_PLACE.format(name) for name in OF_CLONE},
}
HELPED = [*COMMANDS, *(f"bench {name}" for name in BENCHES), "weights verify", "patch check", "patch apply"]
WITHOUT_TORCH = {
    "relay": {"torch"},
    "engine": {"torch", "sglang"},
    "trainer": {"torch", "megatron-core", "Megatron names"},
}


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Commands of the wheel and what it requires: no extra, no torch, and no clone of ours."""
    return fresh(tmp_path_factory.mktemp("fresh"), wheel)


def type_in(commands: Path, line: str) -> subprocess.CompletedProcess[str]:
    command, env = [str(commands / "r3channel"), *line.split()], os.environ | {"PYTHONPATH": ""}
    return subprocess.run(command, cwd=commands, env=env, capture_output=True, text=True, timeout=PROGRAM_S)


@pytest.mark.full
def test_the_wheel_alone_helps_with_every_command_and_says_what_each_lacks(commands: Path) -> None:
    for command, expected in LACKING.items():
        done = type_in(commands, command)
        (said,) = done.stderr.splitlines()
        assert done.returncode == 2 and said.startswith(f"r3channel: {expected}"), (command, said)
    plan = "plan --model qwen3-30b-a3b --layout dp=4 --tokens 1000000"
    for command in (plan, *(f"{name} --help" for name in HELPED)):
        done = type_in(commands, command)
        assert done.returncode == 0 and done.stdout, (command, done.stderr)


@pytest.mark.full
def test_the_wheel_alone_has_a_doctor_who_names_what_a_role_lacks(commands: Path) -> None:
    for role, lacking in WITHOUT_TORCH.items():
        done = type_in(commands, f"doctor --role {role}")
        faults = {line[6:28].strip() for line in done.stdout.splitlines() if line.startswith("FAIL")}
        assert (done.returncode, faults) == (1, lacking), done.stdout + done.stderr
        assert "pip install torch==" in done.stdout
