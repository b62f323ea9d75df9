"""Several real engines under one session: one filled or repaired alone, one that dies, a trainer that dies."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.embedded.sglang import EngineServer, kill_family
from r3channel.cli import main
from r3channel.weights.engine import EngineHandle
from r3channel.weights.store import checkpoint_tensors
from tests.engine.client import greedy, serving
from tests.engine.conftest import Weights
from tests.support.waits import UPDATE_S, meanwhile
from tests.support.weights import checksums, connected

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
NORM = "model.layers.3.post_attention_layernorm.weight"
BUCKET_BYTES = 1 << 20
PLUGIN = {"R3CHANNEL_WEIGHTS": "1"}


class Watched(EngineHandle):
    """Notes every command that reaches the engine."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.routes: list[str] = []

    def _command(self, route: str, timeout_s: float, **body: Any) -> dict[str, Any]:
        self.routes.append(route)
        return super()._command(route, timeout_s, **body)


@pytest.fixture(scope="module")
def dummy(model_dir: Path) -> Iterator[EngineServer]:
    """A second engine that was started without the checkpoint's weights."""
    with serving(model_dir, r3channel=False, env=PLUGIN, extra_args=("--load-format", "dummy")) as server:
        yield server


@pytest.mark.long
def test_an_engine_with_dummy_weights_is_filled_alone_while_the_other_serves(
    restored: None, engine_url: str, dummy: EngineServer, original: Weights, changed: Weights
) -> None:
    watched = Watched(engine_url)
    with connected([watched], bucket_bytes=BUCKET_BYTES) as sync:
        sync.update(original.items(), version=1, timeout_s=UPDATE_S)
        tokens, _ = greedy(engine_url)
        assert greedy(dummy.url)[0] != tokens
        watched.routes.clear()
        answers = list[tuple[list[int], str]]()
        with meanwhile(lambda: answers.append(greedy(engine_url))):
            report = sync.add_engine(dummy.url, timeout_s=UPDATE_S)
        assert watched.routes == [] and answers and all(one == (tokens, "1") for one in answers)
        assert report is not None and report.verified == 38 and report.way == "staged"
        assert greedy(dummy.url) == (tokens, "1")

        sync.update(changed.items(), version=2, timeout_s=UPDATE_S)
        assert greedy(dummy.url) == greedy(engine_url) and greedy(dummy.url)[1] == "2"
        report = sync.republish(changed.items(), engines=[dummy.url], timeout_s=UPDATE_S)
        assert report.verified == 38 and greedy(dummy.url) == greedy(engine_url)


@pytest.mark.long
def test_checkpoint_engine_a_dummy_engine_is_filled_from_a_checkpoint_alone(
    restored: None, engine_url: str, dummy: EngineServer, model_dir: Path
) -> None:
    """No trainer and no other engine takes part; the outputs equal those of an engine that loaded the checkpoint itself."""
    tokens, _ = greedy(engine_url)
    with connected([dummy.url], bucket_bytes=BUCKET_BYTES) as alone:
        report = alone.update(checkpoint_tensors(model_dir), version=3, timeout_s=UPDATE_S)
        assert report.verified == 38 and alone.routable() == (dummy.url,)
    assert greedy(dummy.url) == (tokens, "3")
    one, other = checksums(engine_url, dummy.url)
    assert one == other


@pytest.mark.long
def test_the_verify_command_names_the_one_tensor_that_differs(
    restored: None, engine_url: str, dummy: EngineServer, changed: Weights, tmp_path: Path, capsys: Any
) -> None:
    manifest = str(tmp_path / "committed.json")
    one, both = ["--engine", engine_url], ["--engine", engine_url, "--engine", dummy.url]
    with connected([engine_url, dummy.url], verify=True) as sync:
        sync.update(changed.items(), version=5, timeout_s=UPDATE_S)
        assert sync.held is not None
        sync.held.write(manifest)
        assert verify(*both, "--manifest", manifest) == 0
        assert capsys.readouterr().out.count("38 parameters of version 5: equal") == 2

        sync.update({**changed, NORM: changed[NORM] + 1}.items(), version=6, timeout_s=UPDATE_S)
    assert verify(*one, "--manifest", manifest, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["different"]] == [NORM]
    assert found["engine_versions"] == {engine_url: "6"}
    assert verify(*both) == 0  # each other
    assert verify(*one) == verify("--engine", "http://127.0.0.1:9", "--manifest", manifest) == 2


def verify(*arguments: str) -> int:
    return main(["weights", "verify", *arguments])


TRAINER = """  # gives the checkpoint as version 7, and half of version 8
import sys, time
from safetensors.torch import load_file
from r3channel.weights.session import WeightSync

def slowly(weights):
    for number, named in enumerate(weights.items()):
        if number == 600:
            print("half", flush=True)
            time.sleep(60)
        yield named

url, path = sys.argv[1:]
weights = load_file(path)
with WeightSync.whole([url], bucket_bytes=1 << 20, staged=True) as sync:
    sync.connect(timeout_s=100)
    sync.update(weights.items(), version=7, timeout_s=100)
    sync.update(slowly({name: weight + 1 for name, weight in weights.items()}), version=8, timeout_s=100)
"""


@pytest.mark.full
def test_a_trainer_that_dies_while_it_stages_leaves_an_engine_that_serves_as_before(
    restored: None, engine_url: str, model_dir: Path, changed: Weights
) -> None:
    (tokens, _), before = greedy(engine_url), checksums(engine_url)
    command = [sys.executable, "-c", TRAINER, engine_url, str(model_dir / "model.safetensors")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert child.stdout is not None and child.stdout.readline() == "half\n"
    finally:
        kill_family(child)
    assert greedy(engine_url) == (tokens, "7") and checksums(engine_url) == before

    with connected([engine_url], verify=True, staged=True) as sync:
        assert sync.update(changed.items(), version=9, timeout_s=UPDATE_S).verified == 38
        assert greedy(engine_url)[1] == "9" and greedy(engine_url)[0] != tokens
