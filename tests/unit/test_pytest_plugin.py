"""The plug-in as a user has it: a five-line test is green on the example's model, and red, with the reason, on sabotaged ones.

One child runs all of them, and it can import numpy, xxhash, lz4, torch (with what torch needs) and pytest only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE, GOLDEN = ROOT / "examples" / "04_pytest", ROOT / "tests" / "golden" / "recording"
BARE = """
import sys
from importlib.abc import MetaPathFinder
class Only(MetaPathFinder):
    names = {"numpy", "xxhash", "lz4", "torch", "torchgen", "pytest", "r3channel", "typing_extensions", "sympy", "mpmath",
             "networkx", "jinja2", "markupsafe", "filelock", "fsspec", "setuptools", "pkg_resources", "_distutils_hack",
             "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py", "functorch", "optree"}
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top in self.names or top.startswith(("model", "test_", "_")):
            return None
        raise ModuleNotFoundError(f"No module named {name!r} (a bare environment)", name=name)
sys.meta_path.insert(0, Only())
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
SABOTAGES = {
    "rows": ("replay(router.layer))", "replay(router.layer).roll(-1, 0))", "dp=1", "off_by_one_row"),
    "layers": (
        "for router in self.routers:",
        "for router, other in zip(self.routers, reversed(self.routers)):",
        "dp=1",
        "stage_reversed",
    ),
    "zeros": ("replay_RK.long()", "replay_RK.long() * (torch.arange(len(replay_RK)) % 7 > 0)[:, None]", "dp=1", "zero_rows"),
    "halves": (
        "rank.rows(m, layer)",
        "rank.shard.views(rank.data_N)[m][1 - rank.coords.tp, rank.layers.index(layer)]",
        "tp=2",
        "sp_halves_swapped",
    ),
    "ids": ("replay_RK.long()", "(replay_RK.long() * 5 + 3) % 128", "dp=2,cp=2,packing=thd", "physical_ids"),
    "silent": (
        "rank.used(m, layer, ids)",
        "layer == 3 or rank.used(m, layer, ids)",
        "dp=1",
        "no router used rows of 16 of 16 samples",
    ),
}  # fmt: skip
"""Name -> (what stands in the example's model, what is put there, layout, what the failure says)."""
USERS = """
import pytest
from model_{name} import train

@pytest.mark.r3_layouts("{layout}")
def test_{name}(r3_step):
    for rank in r3_step.ranks():
        train(rank)
    r3_step.check()
"""


def bare_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-c",
        BARE,
        "-p",
        "r3channel.pytest_plugin",
        "-c",
        os.devnull,
        "-q",
        "-rA",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment, check=False)


def test_a_users_test_fails_for_each_sabotaged_model_and_says_why(tmp_path: Path) -> None:
    model = (EXAMPLE / "model.py").read_text()
    for name, (old, new, layout, _) in SABOTAGES.items():
        assert old in model, name
        changed = model.replace(old, new, 1)
        if name == "layers":
            changed = changed.replace("replay(router.layer))", "replay(other.layer))", 1)
        (tmp_path / f"model_{name}.py").write_text(changed)
        (tmp_path / f"test_{name}.py").write_text(USERS.format(name=name, layout=layout))
    (tmp_path / "model_good.py").write_text(model)
    (tmp_path / "test_good.py").write_text(USERS.format(name="good", layout="tp=2"))
    done = bare_pytest("--rootdir", str(tmp_path), "--r3-recording", str(GOLDEN), str(tmp_path))
    assert f"{len(SABOTAGES)} failed, 1 passed" in done.stdout, done.stdout[-4000:] + done.stderr
    for name, (_, _, layout, said) in SABOTAGES.items():
        (line,) = [
            line for line in done.stdout.splitlines() if line.startswith("FAILED") and f"test_{name}[" in line
        ]
        assert layout in line
        told = done.stdout.split(f"test_{name}[{layout}] ___")[1].split("\n____")[0]
        assert said in told, told
        if name not in ("silent",):
            assert (
                "sample step2/sample" in told
                and "position" in told
                and "expected [" in told
                and "seen [" in told
            )


def test_the_example_passes_in_real_processes_and_without_a_recording_says_what_is_missing(
    tmp_path: Path,
) -> None:
    test = "test_my_model.py::test_the_same_in_real_processes"
    done = bare_pytest("--rootdir", str(EXAMPLE), "--r3-recording", str(GOLDEN), str(EXAMPLE / test))
    assert "1 passed" in done.stdout, done.stdout[-3000:] + done.stderr
    without = bare_pytest("--rootdir", str(EXAMPLE), str(EXAMPLE / test))
    assert "1 skipped" in without.stdout and "give --r3-recording PATH" in without.stdout


def test_loading_the_plugin_imports_nothing_of_it() -> None:
    program = "import sys, r3channel.pytest_plugin; print([m for m in ('torch', 'r3channel.recordings') if m in sys.modules])"
    child = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert child.stdout.strip() == "[]", child.stderr


def test_the_entry_point_is_declared() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points.pytest11]\nr3channel = "r3channel.pytest_plugin"' in text
