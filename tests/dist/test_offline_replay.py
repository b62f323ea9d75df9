"""A recorded step goes through the trainer side alone; the examples of the README run as they stand.

The recording is the third step of `make demo ARGS="--steps 3 --record DIR"`; a new format of ticket or frame needs a new one.
"""

from __future__ import annotations

import json

import pytest

from tests.support.children import ROOT, printed, said_by

pytestmark = [pytest.mark.dist, pytest.mark.long]
EXAMPLES = ROOT / "examples"
GOLDEN = ROOT / "tests" / "golden" / "recording"
NOTHING_BUT_MEGATRON = (
    "import runpy, sys; sys.argv = sys.argv[1:]\n"
    "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    "finally:\n"
    "    loaded = {m.split('.')[0] for m in sys.modules} | {'.'.join(m.split('.')[:2]) for m in sys.modules}\n"
    "    assert not loaded & {'ray', 'sglang', 'r3channel.relay', 'r3channel.engine'}, loaded"
)


def test_a_recorded_step_is_replayed_exactly_by_real_megatron_alone() -> None:
    said = said_by(NOTHING_BUT_MEGATRON, f"{EXAMPLES}/03_offline_replay.py", OMP_NUM_THREADS="1")
    assert "0 different" in said and " 0 ids" not in said


RANKS = {"01_one_process": 1, "02_processes": 4, "06_plain_torch": 1, "07_score_centering": 1}


@pytest.mark.parametrize("name", RANKS)
def test_the_examples_run_and_show_no_difference(name: str) -> None:
    assert printed(f"{EXAMPLES}/{name}.py", OMP_NUM_THREADS="1").count(" 0 different") == RANKS[name]


def test_the_first_example_fits_one_screen() -> None:
    assert len((EXAMPLES / "01_one_process.py").read_text().splitlines()) < 60


@pytest.mark.parametrize("layout", ["dp=2,cp=2,packing=thd", "tp=2"])
def test_real_ranks_of_other_layouts_use_every_row(layout: str) -> None:
    replay = ("-m", "r3channel.cli", "replay", str(GOLDEN), "--layout", layout, "--gloo", "--json")
    told = json.loads(printed(*replay))
    (step,) = told["steps"]
    assert told["findings"] == [] and step["rows_of_layers"] == step["expected_rows_of_layers"] > 0
