"""`r3channel patch` on SGLang 0.5.9, which its patch is for; patched, it gives exact frames (CPU tensors)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r3channel.cli import main
from r3channel.model.spec import RoutingSpec
from r3channel.tools.patch import known
from r3channel.wire.frame import parse_frame, sample_key
from r3channel.wire.routing import RowKind
from tests.upstream.wheels import unpacked

ROOT = Path(__file__).parents[2]
SPEC = RoutingSpec(num_layers=4, moe_layers=(1, 2, 3), num_experts=128, top_k=8)


NAME = "sglang-0.5.9"


def touched() -> list[str]:
    (patch,) = (patch for patch in known() if patch.name == NAME)
    return [change.file for change in patch.changes]


def copied(folder: Path) -> Path:
    """The files that the patch touches, in a folder that may be changed."""
    for file in touched():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(unpacked("sglang==0.5.9") / file, folder / file)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(action: str, folder: Path) -> int:
    return main(["patch", action, "--target", str(folder)])


def test_the_patch_is_found_applied_and_reversed_to_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(copied(tmp_path))
    for action, says in (
        ("check", "applicable"),
        ("apply", "applied"),
        ("check", "applied"),
        ("reverse", "applicable"),
    ):
        assert run(action, tmp_path) == 0
        assert f"{NAME} is {says}:" in capsys.readouterr().out
        now = content(tmp_path)
        assert now.keys() == before.keys()
        different = {file for file in now if now[file] != before[file]}
        assert different == (set(touched()) if says == "applied" else set())


def test_one_changed_or_half_patched_file_is_refused_and_nothing_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied(tmp_path)
    first, *_, last = touched()
    clean = (tmp_path / last).read_bytes()
    (tmp_path / last).write_bytes(clean + b"# another release\n")
    found = content(tmp_path)
    assert [run(action, tmp_path) for action in ("check", "apply", "reverse")] == [2, 2, 2]
    assert content(tmp_path) == found and f"changed: {last}" in capsys.readouterr().err
    (tmp_path / last).write_bytes(clean)
    assert run("apply", tmp_path) == 0
    (tmp_path / last).write_bytes(clean)
    capsys.readouterr()
    assert run("apply", tmp_path) == 2
    told = capsys.readouterr().err
    assert "half applied" in told and f"clean: {last}; patched: {first}" in told


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the patch touches, out of the wheel, patched."""
    folder = copied(tmp_path_factory.mktemp("patched"))
    assert main(["patch", "apply", "--target", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def facts(patched: Path) -> dict[str, Any]:
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("drive_patch.py")), str(patched)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    lines = [line for line in child.stdout.splitlines() if line.startswith("FACTS ")]
    assert lines, f"the child gave no facts:\n{child.stderr[-3000:]}"
    return json.loads(lines[0].removeprefix("FACTS "))


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
