"""`r3channel miles` on miles' own sources: what moved, what is refused, and rows beside those that miles would bring."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest

from examples.embedded.model import write_model
from examples.embedded.sglang import environment
from r3channel.errors import ConfigError
from r3channel.integrations.miles import launch
from r3channel.integrations.slime.api_check import nearest
from tests.support.children import ROOT, run
from tests.support.slime_checkout import PARSED
from tests.support.waits import RUN_S
from tests.upstream.slime_cpu.sources import MEGATRON
from tests.upstream.wheels import sources

MILES = "miles-31f1ca96"
PROGRAM = """import sys
from tests.upstream import miles_cpu
miles_cpu.setup()
from r3channel.cli import main
sys.exit(main(["miles", "tests/upstream/miles_cpu.py", *sys.argv[1:]]))"""


def test_the_names_that_we_rely_on_are_those_of_this_miles_and_another_is_refused(tmp_path: Path) -> None:
    assert nearest(sources(MILES), "miles") == ("0.1.0", [])
    assert "miles/utils/arguments.py is not there" in nearest(tmp_path, "miles").moved


def test_what_does_not_go_with_miles_is_named_before_anything_starts() -> None:
    known = {name: expected for name, (expected, _) in launch.MILES.items()}

    def prepared(*given: str, **miles: Any) -> Namespace:
        args = launch.add_channel(ArgumentParser()).parse_args(" ".join(given).split())
        return launch.prepare(
            Namespace(custom_megatron_init_path="a.b", **PARSED | vars(args) | known | miles)
        )

    assert prepared().r3_megatron_init == "a.b"
    typed = "--r3-on-missing live", "--r3-transport gloo", "--r3-max-staleness 2", "--r3-journal a"
    with pytest.raises(ConfigError) as refused:
        prepared(*typed, qkv_format="bshd", object_store_backend="mooncake", use_rollout_routing_replay=False)
    found = str(refused.value).split("\n  ")
    assert len(found) == 7 and all(
        any(line.startswith(f"{name}: expected") for line in found) for name in typed
    )


@pytest.mark.full
@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layout", ["--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2 --context-parallel-size 2"]
)  # fmt: skip
def test_trainers_replay_what_miles_would_bring_without_its_objects(layout: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", layers=4, experts=32, top_k=4)
    text = Path(__file__).with_name("miles_arguments.txt").read_text()
    given = f"{text.format(model=model, rollout=tmp_path / '0.pt')} {layout}".split()
    path = os.pathsep.join(map(str, (ROOT, sources(MEGATRON), sources(MILES))))
    variables: Any = environment({"PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    child = run("-c", PROGRAM, *given, limit_s=RUN_S, **variables)
    assert child.returncode == 0 and "replayed" in child.stdout, child.stderr[-4000:]
