"""patches/miles-31f1ca96.patch on miles's own sources: its store and its actor by path. Its Megatron actor is a stand-in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from r3channel.cli import main
from r3channel.report import seams
from tests.upstream.wheels import sources

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]

MINE = """
class Store:
    def __init__(self, args, *, contribute_segment):
        self.given = contribute_segment

class Actor: ...
"""

DRIVE = """
import json, sys, types
from argparse import ArgumentTypeError, Namespace

actor_module = types.ModuleType("miles.backends.megatron_utils.actor")
actor_module.MegatronTrainRayActor = type("Stock", (), {})
sys.modules[actor_module.__name__] = actor_module
import miles.utils.object_store as store
import miles.ray.train.actor_factory as factory

class Chosen(Exception): ...

def remote(**options):
    def wrap(cls):
        raise Chosen(cls.__name__)
    return wrap

factory.ray = types.SimpleNamespace(remote=remote)

def chosen(path, role="actor"):
    args = Namespace(train_env_vars={}, dumper_source_patcher_config_train=None, offload_train=False,
        train_backend="megatron", use_fault_tolerance=False, train_actor_path=path)
    try:
        factory.allocate_gpus_for_actor(args, 1, (None, [], []), 1, "", role, 0)
    except Chosen as found:
        return str(found)

def built(name):
    made = store._create_instance(Namespace(object_store_backend=name), contribute_segment=False)
    return [type(made).__name__, getattr(made, "given", None)]

try:
    store.object_store_backend("rai")
except ArgumentTypeError as error:
    refused = str(error)
print("FACTS " + json.dumps({
    "stores": [built("ray"), built(store.object_store_backend("mine.Store"))],
    "refused": refused,
    "actors": [chosen(None), chosen("mine.Actor"), chosen("mine.Actor", role="critic")],
}))
"""


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("miles")
    shutil.copytree(sources("miles-31f1ca96"), folder, dirs_exist_ok=True)
    assert main(["patch", "apply", "--target", str(folder)]) == 0
    (folder / "mine.py").write_text(MINE)
    return folder


@pytest.fixture(scope="module")
def facts(patched: Path) -> dict[str, Any]:
    child = subprocess.run(
        [sys.executable, "-c", DRIVE],
        env={**os.environ, "PYTHONPATH": str(patched)},
        cwd=patched, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    lines = [line for line in child.stdout.splitlines() if line.startswith("FACTS ")]
    assert lines, f"the child gave no facts:\n{child.stderr[-3000:]}"
    return json.loads(lines[0].removeprefix("FACTS "))


def test_a_store_is_a_known_name_or_the_path_of_a_class(facts: dict[str, Any]) -> None:
    assert facts["stores"] == [["RayObjectStore", None], ["Store", False]]
    assert "'rai'" in facts["refused"] and "path of a class" in facts["refused"]


def test_the_actors_class_is_taken_by_path_and_the_critics_is_not(facts: dict[str, Any]) -> None:
    assert facts["actors"] == ["Stock", "Actor", "Stock"]


def test_what_an_adapter_would_stand_on_is_where_it_was(patched: Path) -> None:
    assert seams.moved(patched, framework="miles") == []
