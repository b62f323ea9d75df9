"""`r3channel slime` on a stand-in of slime 0.4.0: its signatures are those that were read, or the launcher refuses it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from examples.embedded.model import ModelShape, config_of
from examples.embedded.sglang import free_port
from r3channel.integrations.slime.api_check import nearest
from tests import slime_checkout
from tests.children import ROOT, run

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]


def test_engines_that_start_first_deliver_a_split_is_sealed_and_a_lost_conversion_is_named(
    tmp_path: Path,
) -> None:
    stand_in = Path(__file__).with_name("slime_040")
    slime = slime_checkout.write(tmp_path / "slime", "0.4.0")
    shutil.copytree(stand_in, slime, dirs_exist_ok=True)
    assert nearest(slime) == ("0.4.0", [])
    (tmp_path / "config.json").write_text(json.dumps(config_of(ModelShape())))
    given = f"--hf-checkpoint {tmp_path} --use-r3-channel --r3-delivery direct --r3-ingest-port {free_port()}"
    given += f" --r3-token-file {tmp_path / 'token'}"
    paths = os.pathsep.join([str(slime), str(ROOT)])
    child = run(
        "-m", "r3channel.cli", "slime", str(slime / "train.py"), *given.split(), PYTHONPATH=paths, RAY_AUTH_MODE="disabled"
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-4000:]
    told = json.loads(child.stdout.splitlines()[-1])
    assert told.pop("direct") >= 1
    assert told == {}
