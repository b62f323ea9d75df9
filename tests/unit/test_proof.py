"""The note that NCCL ran here: what it says, and what it does not speak for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from r3channel.config import ChannelConfig
from r3channel.relay import proof
from r3channel.report.doctor import check_transport

HERE: dict[str, Any] = {"torch": "2.13.0+cu130", "nccl": "2.28.9", "gpus": ["one", "two"]}


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(proof, "NOTE", tmp_path / "cache/nccl.json")
    monkeypatch.setattr(proof, "_now", lambda: HERE)
    return proof.NOTE


def test_nccl_is_known_to_work_on_the_gpus_and_with_the_versions_that_it_ran_with(
    note: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "never ran" in proof.why_not(0) and str(note) in proof.why_not(0)
    assert proof.write() == note
    assert [proof.why_not(device) for device in (0, 1)] == ["", ""]
    assert "no CUDA device 2" in proof.why_not(2)
    for other, why in (
        ({"torch": "2.14.0"}, "torch 2.13.0"),
        ({"nccl": "3"}, "nccl 2.28"),
        ({"gpus": ["x"]}, "other GPUs"),
    ):
        monkeypatch.setattr(proof, "_now", lambda other=other: {**HERE, **other})
        assert why in proof.why_not(0)


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"torch": 1}', "no json"])
def test_a_note_that_cannot_be_read_is_none(note: Path, text: str) -> None:
    note.parent.mkdir()
    note.write_text(text)
    assert proof.read() is None and "never ran" in proof.why_not(0)


def test_the_doctor_says_which_transport_has_run_here(note: Path) -> None:
    assert "never ran on this machine" in check_transport(ChannelConfig()).line()
    proof.write()
    assert (
        "NCCL ran between two GPUs of this machine with torch 2.13.0+cu130"
        in check_transport(ChannelConfig()).line()
    )
