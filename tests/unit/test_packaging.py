"""What is installed is what is in the tree: lock, extras, wheel."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import r3channel

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "r3channel" / "embedded" / "requirements.txt"


def locked() -> dict[str, str]:
    lines = [
        line.strip() for line in LOCK.read_text().splitlines() if line.strip() and not line.startswith("#")
    ]
    return {normal(name): version for name, version in (line.split("==") for line in lines)}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_lock_names_each_package_once_at_one_version() -> None:
    lines = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.+!-]+", line) for line in lines)
    assert len(locked()) == len(lines)
    assert "torch" not in locked(), "torch is the user's choice of build; the Makefile installs it first"


def test_the_environment_is_the_locked_one() -> None:
    installed = {normal(d.metadata["Name"]): d.version for d in importlib.metadata.distributions()}
    different = {name: (version, installed.get(name)) for name, version in locked().items()}
    assert {name: pair for name, pair in different.items() if pair[0] != pair[1]} == {}


def test_the_extras_accept_the_locked_versions() -> None:
    from packaging.requirements import Requirement

    versions = locked()
    for text in importlib.metadata.requires("r3channel") or []:
        requirement = Requirement(text)
        assert requirement.specifier.contains(versions[normal(requirement.name)]), text


def test_one_version_everywhere() -> None:
    assert importlib.metadata.version("r3channel") == r3channel.__version__
    assert f"## [{r3channel.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_pages_install_a_wheel_that_there_is_with_extras_that_there_are() -> None:
    known = importlib.metadata.metadata("r3channel").get_all("Provides-Extra") or []
    pages = [(ROOT / page).read_text() for page in ("README.md", "examples/slime/README.md")]
    asked = [found for page in pages for found in re.findall(r"([\w./-]*)\[(\w+(?:,\w+)*)\]", page)]
    assert {extra for _, extras in asked for extra in extras.split(",")} <= set(known)
    # An empty one is a list of extras alone.
    assert {what for what, _ in asked} == {
        "",
        ".",
        f"dist/r3channel-{r3channel.__version__}-py3-none-any.whl",
    }


def test_type_checkers_are_told_that_the_package_is_typed() -> None:
    assert "Typing :: Typed" in (importlib.metadata.metadata("r3channel").get_all("Classifier") or [])
    assert (ROOT / "r3channel" / "py.typed").is_file()


def test_sglang_finds_the_plugins() -> None:
    group = importlib.metadata.entry_points(group="sglang.srt.plugins")
    assert {entry.name for entry in group} >= {"r3channel", "r3channel_embedded"}
    for entry in group:
        if entry.name.startswith("r3channel"):
            assert callable(entry.load())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run(
        [*command, "-w", str(folder), str(ROOT)], capture_output=True, text=True, timeout=150
    )
    assert built.returncode == 0, built.stderr
    return next(folder.glob("r3channel-*.whl"))


@pytest.mark.full
def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    ours = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "r3channel").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert len(ours) > 20 and wheel.name == f"r3channel-{r3channel.__version__}-py3-none-any.whl"
    assert ours - packed == {"r3channel/r3channel.pth"} and "r3channel.pth" in packed
    assert {name for name in packed if not name.startswith("r3channel")} == set()
    patches = {f"r3channel/patches/{path.name}" for path in (ROOT / "patches").iterdir()}
    assert patches and patches <= packed, "`r3channel patch` looks for them there"


@pytest.mark.full
def test_the_wheel_imports_elsewhere(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    modules = sorted(
        path.relative_to(tmp_path).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for path in (tmp_path / "r3channel").rglob("*.py")
        if "embedded" not in path.parts and path.name != "__main__.py"
    )
    # Upstreams that refuse to be imported without a GPU or a shim are the doctor's business.
    in_slime = (".slime", ".slime_trainer", ".slime_weights")
    heavy = (".sglang", ".megatron", *in_slime)
    light = [name for name in modules if not name.endswith(heavy)]
    program = (
        f"import sys, importlib; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"for name in {light!r}:\n"
        f"    module = importlib.import_module(name); assert module.__file__.startswith({str(tmp_path)!r}), name"
    )
    child = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=150
    )
    assert child.returncode == 0, child.stderr


LACKING = {
    "bench e2e --quick": "torch",
    "bench replay --quick": "torch",
    "bench weights --quick": "torch",
    "bench relay --quick": "ray",
    "bench capture --quick": "torch",
    "weights verify --engine http://127.0.0.1:1": "torch",
}


@pytest.mark.full
def test_a_wheel_in_a_bare_environment_says_what_each_command_lacks(wheel: Path, tmp_path: Path) -> None:
    """Only numpy, xxhash and lz4 beside it, as an installation without extras has them."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    bare = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "class Bare:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name in {MISSING!r}: raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)\n"
        "sys.meta_path.insert(0, Bare())\n"
        "from r3channel.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    for command, package in LACKING.items():
        done = subprocess.run(
            [sys.executable, "-c", bare, *command.split()],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=150,
        )
        (said,) = done.stderr.splitlines()
        assert done.returncode == 2 and f"needs the package {package}, which is not installed: " in said, (
            command
        )
        assert "pip install" in said
    light = "plan --model qwen3-30b-a3b --layout dp=4 --tokens 1000000"
    done = subprocess.run(
        [sys.executable, "-c", bare, *light.split()], cwd=tmp_path, capture_output=True, timeout=150
    )
    assert done.returncode == 0


MISSING = (
    "torch", "ray", "sglang", "megatron", "mbridge", "transformers", "numba", "orjson", "pybase64", "h11", "zstandard",
    "prometheus_client", "matplotlib", "safetensors",
)  # fmt: skip
