"""The plug-in as a user has it: the example's test is green on the example's model, and red, with the reason, on sabotaged ones.

All of it runs in a fresh virtual environment: the built wheel, numpy, xxhash, lz4, torch and pytest (with what these need, linked
from here, as torch is large), found by pytest through the wheel's entry point.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from r3channel.recordings.recorder import write_step
from tests.support import children
from tests.support.children import ROOT
from tests.support.misaligned import engine_step
from tests.support.waits import PROGRAM_S
from tests.unit.test_packaging import built, fresh

EXAMPLE, GOLDEN = ROOT / "examples" / "04_pytest", ROOT / "tests" / "golden" / "recording"
ABSENT = (
    "sglang", "ray", "megatron", "transformers", "numba", "prometheus_client", "safetensors", "pydantic",
)  # fmt: skip
SABOTAGES = {
    "rows": ("replay(router.layer))", "replay(router.layer).roll(-1, 0))", "dp=1", "rotated_rows"),
    "layers": (
        "for router in self.routers:", "for router, other in zip(self.routers, reversed(self.routers)):", "dp=1",
        "stage_reversed",
    ),
    "zeros": ("replay_RK.long()", "replay_RK.long() * (torch.arange(len(replay_RK)) % 7 > 0)[:, None]", "dp=1", "zero_rows"),
    "halves": (
        "rank.rows(m, layer)", "rank.shard.views(rank.data_N)[m][1 - rank.coords.tp, rank.layers.index(layer)]", "tp=2",
        "sp_halves_swapped",
    ),
    "ids": ("replay_RK.long()", "(replay_RK.long() * 5 + 3) % 128", "dp=2,cp=2,packing=thd", "physical_ids"),
    "silent": (
        "rank.record_used(m, layer, ids)", "layer == 3 or rank.record_used(m, layer, ids)", "dp=1",
        "no router used rows of 16 of 16 samples",
    ),
}  # fmt: skip
"""Name -> (what stands in the example's model, what is put there, layout, what the failure says)."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of that environment."""
    folder = tmp_path_factory.mktemp("bare")
    return fresh(folder, built(folder), "torch", "pytest") / "python"


def run(command: list[str]) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    elsewhere = Path(sys.executable).parent  # the checkout must not be imported for being where one stands
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PROGRAM_S, env={**environment, "OMP_NUM_THREADS": "1"}, cwd=elsewhere,
        check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def pytested(python: Path, *arguments: str) -> str:
    shared = ["-m", "pytest", "-c", os.devnull, "-p", "no:cacheprovider", "-q", "-rA"]
    return run([str(python), *shared, *arguments])


def test_the_environment_has_the_wheel_and_no_upstream(python: Path) -> None:
    absent = f"print([name for name in {ABSENT} if u.find_spec(name)], r3channel.__file__)"
    said = run([str(python), "-c", f"import importlib.util as u, r3channel, torch, numpy\n{absent}"])
    assert said.startswith(f"[] {python.parents[1]}"), said


def test_the_examples_test_fails_for_each_sabotaged_model_and_says_why(python: Path, tmp_path: Path) -> None:
    model, users = (EXAMPLE / "model.py").read_text(), (EXAMPLE / "test_my_model.py").read_text()
    for name, (old, new, *_) in {**SABOTAGES, "good": ("", "")}.items():
        assert old in model, name
        changed = model.replace(old, new, 1)
        if name == "layers":
            changed = changed.replace("replay(router.layer))", "replay(other.layer))", 1)
        (tmp_path / f"model_{name}.py").write_text(changed)
        own = users.replace("from model import", f"from model_{name} import")
        (tmp_path / f"test_{name}.py").write_text(own)
    report = tmp_path / "report.xml"
    said = pytested(
        python, "--rootdir", str(tmp_path), "--r3-recording", str(GOLDEN), "-k", "consumes", f"--junitxml={report}",
        str(tmp_path),
    )  # fmt: skip
    assert report.is_file(), said
    failures = {
        (case.attrib["classname"], case.attrib["name"].partition("[")[2]): one.attrib["message"]
        for case in ElementTree.parse(report).iter("testcase")
        for one in [*case.iter("failure"), *case.iter("error")]
    }
    assert not [failed for failed in failures if failed[0] == "test_good"] and " 0 passed" not in said
    for name, (_, _, layout, named) in SABOTAGES.items():
        told = failures[f"test_{name}", f"{layout}-step2]"]
        assert named in told, told
        words = () if name == "silent" else ("sample step2/sample", "position", "expected [", "seen [")
        assert all(word in told for word in words), told


def test_the_example_passes_in_real_processes_and_without_a_recording_says_so(python: Path) -> None:
    test = str(EXAMPLE / "test_my_model.py::test_the_same_in_real_processes")
    said = pytested(python, "--rootdir", str(EXAMPLE), "--r3-recording", str(GOLDEN), test)
    assert "1 passed" in said, said
    without = pytested(python, "--rootdir", str(EXAMPLE), test)
    assert "1 skipped" in without and "give --r3-recording PATH" in without


def test_the_examples_own_command_finds_its_tests() -> None:
    """From the checkout, whose own settings would not find the module beside the test."""
    words = (EXAMPLE / "test_my_model.py").read_text().splitlines()[0].strip('"').split()
    done = children.run("-m", *words, "--collect-only", "-q")
    assert done.returncode == 0, done.stdout
    assert "test_my_model_consumes_what_the_engine_chose[dp=1" in done.stdout


SWAPS = """
import pytest
@pytest.mark.r3_layouts("dp=2", "dp=3")
def test_swaps(r3_step):
    for rank in r3_step.ranks():
        for m, layer in ((m, layer) for m in rank.microbatches for layer in rank.layers):
            ids = rank.rows(m, layer).reshape(-1, len(rank.shard.microbatches[m].sample_ids), 4)
            rank.record_used(m, layer, ids[:, [1, 0, *range(2, ids.shape[1])]].reshape(-1, 4))
    r3_step.check()
"""


def test_every_recorded_step_runs_and_what_is_not_tested_is_said(tmp_path: Path) -> None:
    for number in (3, 7):
        step = engine_step(seed=number, lengths=(33, 25, 33, 25, 40, 41, 42, 43))
        write_step(tmp_path / "rec", replace(step, ticket=replace(step.ticket, step=number)))
    (tmp_path / "test_swaps.py").write_text(SWAPS)
    shared = f"-m pytest -c {os.devnull} -p no:cacheprovider -q --rootdir {tmp_path} --r3-recording {tmp_path}/rec {tmp_path}"
    every = children.run(*shared.split()).stdout
    assert all(f"test_swaps[dp={dp}-step{number}]" in every for dp in (2, 3) for number in (3, 7)), every
    assert "4 failed" in every and every.count("swapped_samples (") >= 4, every
    assert "not tested: step 7, dp=3" in every and "2 samples do not fill 3 DP ranks: s6, s7" in every
    assert "2 failed" in children.run(*shared.split(), "--r3-steps", "1").stdout
    for segment in (tmp_path / "rec").glob("step*"):
        segment.unlink()
    assert "has no step 0" in children.run(*shared.split()).stdout
