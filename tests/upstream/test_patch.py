"""patches/sglang-0.5.9.patch applies to that wheel, compiles, and its capture path gives exact frames (CPU tensors)."""

from __future__ import annotations

import compileall
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r3channel.routing import RowKind
from r3channel.spec import RoutingSpec
from r3channel.wire.frame import parse_frame, sample_key
from tests.upstream.wheels import unpacked

ROOT = Path(__file__).parents[2]
PATCH = ROOT / "patches/sglang-0.5.9.patch"
SPEC = RoutingSpec(num_layers=4, moe_layers=(1, 2, 3), num_experts=128, top_k=8)


def touched() -> list[str]:
    return re.findall(r"^\+\+\+ b/(\S+)$", PATCH.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the patch touches, out of the wheel, patched."""
    folder = copied(unpacked("sglang==0.5.9"), tmp_path_factory.mktemp("patched"), "sglang-0.5.9")
    assert main(["patch", "apply", "--target", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def facts(patched: Path) -> dict[str, Any]:
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("drive_patch.py")), str(patched)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = [line for line in child.stdout.splitlines() if line.startswith("FACTS ")]
    assert lines, f"the child gave no facts:\n{child.stderr[-3000:]}"
    return json.loads(lines[0].removeprefix("FACTS "))


def test_the_patched_files_compile(patched: Path) -> None:
    assert len(touched()) == 3
    assert compileall.compile_dir(patched, quiet=1, force=True)


def test_the_patched_create_gives_our_capturer(facts: dict[str, Any]) -> None:
    assert facts["capturer"] == "StagedCapturer"


def test_the_patched_path_gives_the_ids_that_were_captured(facts: dict[str, Any]) -> None:
    frame = parse_frame(bytes.fromhex(facts["frame"]), spec=SPEC)
    assert np.array_equal(frame.routing(sample_id="r1").expert_ids_TLK, np.array(facts["ids"]))
    assert frame.sample_key == sample_key("r1")


def test_rows_after_a_weight_update_carry_its_version(facts: dict[str, Any]) -> None:
    frame = parse_frame(bytes.fromhex(facts["frame"]), spec=SPEC)
    spans = [(span.start, span.end, span.weight_version, span.kind) for span in frame.provenance]
    assert spans == [(0, 6, 0, RowKind.PREFILLED), (6, 9, 5, RowKind.DECODED)]


def test_a_request_that_did_not_ask_costs_no_gather(facts: dict[str, Any]) -> None:
    assert facts["without opt-in"] is None


def test_a_patched_engine_with_r3channel_off_is_sglangs_own(facts: dict[str, Any]) -> None:
    assert facts["off"] == "SGLang's own"
