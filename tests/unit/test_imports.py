"""The house keeps its shape: imports point down, each upstream has its place, nothing unpickles or evaluates."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import pytest

import r3channel
from tests.support.children import ROOT, said_by
from tests.support.pages import LEVELS

PACKAGE = ROOT / "r3channel"
TOP = max(LEVELS.values())
DOORS = {("engine/sglang_plugin.py", "r3channel.weights.receiver")}
"""SGLang's processes have one door, and both rooms that live there are entered by it."""

PLACES = {
    "sglang": ("engine/sglang.py", "engine/sglang_engine.py", "weights/receiver.py"),
    "megatron": ("trainer/adapters/megatron.py",),
    "ray": ("relay/ray_host.py", "integrations/", "bench/relay.py", "bench/relay_peers.py"),
    "torch.distributed": ("transport/", "weights/", "recordings/run_ranks.py"),
    "prometheus_client": ("observe/metrics.py",),
}

HEAVY = ("torch", "ray", "sglang", "megatron", "mbridge", "transformers", "prometheus_client")
NO_IO = {"socket", "os", "pathlib", "subprocess", "threading", "asyncio", "tempfile", "mmap"}
DECISIONS_MAY_USE = {"numpy", "xxhash", "lz4", "zstandard", "r3channel"}
COMPILERS = {"numba", "llvmlite"}
UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


class Import(NamedTuple):
    file: str
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


@cache
def sources() -> list[tuple[str, ast.Module]]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return [(path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(), str(path))) for path in paths]


def imports_of(file: str, tree: ast.Module) -> Iterator[Import]:
    """Every import, lazy ones too; `from a import b` counts as a.b. Reading `a.b` of an imported a counts as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} is a relative import"
            for alias in node.names:
                yield Import(file, node.lineno, f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield Import(file, node.lineno, "torch.distributed")


@cache
def all_imports() -> list[Import]:
    return [found for file, tree in sources() for found in imports_of(file, tree)]


def room_of(module: str) -> str:
    return module.split(".")[1]


def room_of_file(file: str) -> str:
    return file.removesuffix(".py").split("/")[0]


def wrong_direction(found: Import) -> bool:
    here, there = room_of_file(found.file), room_of(found.module)
    if here == there or here == "__init__" or (found.file, found.module) in DOORS:
        return False
    assert here in LEVELS, f"{found.file}: give its room a level in tests/support/pages.py"
    if there not in LEVELS:  # a name of the package's face, such as __version__
        return LEVELS[here] < TOP
    same_is_fine = LEVELS[here] == TOP
    return LEVELS[there] > LEVELS[here] or (LEVELS[there] == LEVELS[here] and not same_is_fine)


def out_of_place(found: Import) -> bool:
    for upstream, places in PLACES.items():
        if found.module == upstream or found.module.startswith(upstream + "."):
            return not found.file.startswith(places)
    return False


def module_of(file: str) -> str:
    return "r3channel." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def check_no_circle(found: Iterable[Import], modules: set[str]) -> None:
    """Raises a CycleError that names the modules of one; lazily counts."""
    below: dict[str, set[str]] = defaultdict(set)
    for one in found:
        name = one.module  # may be a module's content: its longest part that is a module was imported
        while name and name not in modules:
            name = name.rpartition(".")[0]
        if name and name != module_of(one.file):
            below[module_of(one.file)].add(name)
    TopologicalSorter(below).prepare()


def parsed(file: str, text: str) -> list[Import]:
    return list(imports_of(file, ast.parse(text)))


def test_imports_point_down() -> None:
    ours = [found for found in all_imports() if found.module.startswith("r3channel.")]
    assert ours
    assert [str(found) for found in ours if wrong_direction(found)] == []


def test_an_upward_or_sideways_import_is_noticed() -> None:
    lazy = "def f():\n    from r3channel.relay.memory import FrameStore"
    assert [wrong_direction(found) for found in parsed("wire/frame.py", lazy)] == [True]
    assert [wrong_direction(found) for found in parsed("trainer/receiver.py", lazy)] == [True]
    assert [wrong_direction(found) for found in parsed("relay/sender.py", lazy)] == [False]


def test_no_modules_import_one_another() -> None:
    """Not even in functions or for type hints: who reads one of them must not have to read all."""
    check_no_circle(all_imports(), {module_of(file) for file, _ in sources()})


def test_a_circle_is_noticed() -> None:
    lines = {"a": "from r3channel.plan.b import name", "b": "def f():\n    from r3channel.plan import a"}
    found = [one for name, line in lines.items() for one in parsed(f"plan/{name}.py", line)]
    with pytest.raises(CycleError, match=r"r3channel\.plan\.[ab]"):
        check_no_circle(found, {"r3channel.plan", "r3channel.plan.a", "r3channel.plan.b"})


def test_each_upstream_is_imported_in_its_place_only() -> None:
    assert [str(found) for found in all_imports() if out_of_place(found)] == []


def test_the_design_page_says_who_imports_what_and_no_place_is_left_over() -> None:
    text = (PACKAGE / "DESIGN.md").read_text().split("Each upstream has its places: ")[1].split(".\n\n")[0]
    spans = [re.findall(r"`([^`]+)`", part) for part in text.split(";")]
    assert {upstream: sorted(places) for upstream, *places in spans} == {
        upstream: sorted(place.removesuffix(".py") for place in places) for upstream, places in PLACES.items()
    }
    used = {
        (upstream, place)
        for found in all_imports()
        for upstream, places in PLACES.items()
        for place in places
        if f"{found.module}.".startswith(f"{upstream}.") and found.file.startswith(place)
    }
    assert used == {(upstream, place) for upstream, places in PLACES.items() for place in places}


def is_of_a_clone(found: Import) -> bool:
    return found.module.split(".")[0] in ("examples", "tests")


def test_nothing_of_the_package_imports_what_only_a_clone_has() -> None:
    assert [str(found) for found in all_imports() if is_of_a_clone(found)] == []
    assert [
        is_of_a_clone(found) for found in parsed("cli.py", "def f():\n    from examples import demo")
    ] == [True]


def test_an_upstream_out_of_place_is_noticed() -> None:
    torch_lines = "from torch import distributed as dist", "import torch\ntorch.distributed.barrier()"
    for text in ("import ray", *torch_lines):
        assert any(out_of_place(found) for found in parsed("trainer/receiver.py", text)), text


def test_decisions_use_numpy_only_and_do_no_io() -> None:
    offenders = []
    for found in all_imports():
        if room_of_file(found.file) in ("wire", "plan"):
            top = found.module.split(".")[0]
            known = top in DECISIONS_MAY_USE or (top in COMPILERS and found.file == "wire/kernels.py")
            known = known or (top in sys.stdlib_module_names and top not in NO_IO)
            offenders += [] if known else [str(found)]
    assert offenders == []


def test_nothing_unpickles_or_evaluates() -> None:
    offenders = [str(found) for found in all_imports() if found.module.split(".")[0] in UNPICKLERS]
    for file, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and is_dangerous(ast.unparse(node.func)):
                offenders.append(f"{file}:{node.lineno} calls {ast.unparse(node.func)}")
    assert offenders == []


def is_dangerous(called: str) -> bool:
    names = called.split(".")
    return (
        names in (["eval"], ["exec"])
        or (names[-1] == "load" and names[0] in {"torch", "yaml"})
        or ("dist" in names[0] and names[-1].endswith(("_object", "_object_list")))
    )


@pytest.mark.parametrize(
    ("imports", "late"),
    [
        ("from r3channel import *\nRoutingSpec, Ticket, add_arguments", HEAVY),
        ("import r3channel.cli, r3channel.observe.metrics, r3channel.tools.doctor", HEAVY),
        ("import r3channel.pytest_plugin", (*HEAVY, "r3channel.recordings")),
    ],
    ids=["the package", "its command", "its plug-in of pytest"],
)
def test_importing_the_package_or_its_doors_pulls_in_no_upstream(imports: str, late: tuple[str, ...]) -> None:
    program = f"import sys, json\n{imports}\nprint(json.dumps([m for m in {late!r} if m in sys.modules]))"
    assert json.loads(said_by(program)) == []


def test_importing_the_package_alone_brings_no_other_package_not_even_numpy() -> None:
    program = "import sys; before = {*sys.modules}; import r3channel; new = {*sys.modules} - before\n"
    program += "print({name.partition('.')[0] for name in new} - sys.stdlib_module_names)"
    assert said_by(program) == "{'r3channel'}\n"


def test_every_public_name_is_there_and_has_one_home() -> None:
    assert {*r3channel._HOMES, "__version__"} == set(r3channel.__all__)
    assert all(getattr(r3channel, name) is not None for name in r3channel.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Tickets'"):
        _ = r3channel.Tickets  # pyright: ignore[reportAttributeAccessIssue]


def test_every_module_of_the_weights_room_is_reached_by_a_user() -> None:
    """From `WeightSync`, the trainers' names, the command line or the plug-in: no idea lies on a shelf."""
    inside: dict[str, set[str]] = defaultdict(set)
    for found in all_imports():
        if found.module.startswith("r3channel.weights"):
            inside[found.file].add("/".join(found.module.split(".")[1:3]) + ".py")
    names = {f"weights/{module}.py" for module in ("session", "convert")}
    doors = {*names, *inside["tools/weights.py"], *inside["engine/sglang_plugin.py"]}
    reached, waiting = set[str](), set(doors)
    while waiting:
        reached.add(file := waiting.pop())
        waiting |= inside[file] - reached
    rooms = {file for file, _ in sources() if file.startswith("weights/")} - {"weights/__init__.py"}
    assert sorted(rooms - reached) == []
