"""The example of a loop of one's own, as a user runs it, with a server that other tests share and one more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.engine.client import serving
from tests.support.children import printed

pytestmark = [pytest.mark.engine, pytest.mark.long]


def test_an_own_loop_of_two_engines_two_turns_and_a_discard_runs(model_dir: Path, engine_url: str) -> None:
    with serving(model_dir) as second:
        said = printed("examples/05_own_loop.py", str(model_dir), engine_url, second.url, OMP_NUM_THREADS="1")
    steps = re.findall(r"step (\d): 4 samples, 88 tokens, live router agrees (\d\.\d+)", said)
    assert [number for number, _ in steps] == ["0", "1"]
    # Engines and trainer hold the same float32 weights in step 0: rows of other tokens would agree by chance, 0.06.
    assert float(steps[0][1]) > 0.99 and float(steps[1][1]) > 0.9
