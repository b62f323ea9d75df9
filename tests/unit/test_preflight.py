"""What is wrong on this machine is said before any process starts: the option, what was seen, what to give instead."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.async_grpo.options import packages
from examples.embedded.model import ModelShape, config_of
from r3channel.config import ChannelConfig
from r3channel.integrations import preflight
from r3channel.plan.layout import TrainerLayout
from tests.support.children import run


def faults_of(config: ChannelConfig, *, ranks: int = 4) -> str:
    return "\n".join(filter(None, preflight.of_channel(config, ranks=ranks)))


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as held:
        yield held.getsockname()[1]


def test_the_demo_says_all_that_is_wrong_at_once_and_starts_nothing(tmp_path: Path, taken: int) -> None:
    (file := tmp_path / "file").touch()
    options = f"--layout dp=3,tp=5 --samples 12 --report {file}/report --record {file}/record --r3-journal {file}/store"
    asked = f"-m examples.demo {options} --r3-metrics-port {taken - 2}"
    done = run(*asked.split(), TMPDIR=str(tmp_path), PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 2 and not done.stdout and "Traceback" not in done.stderr
    said = done.stderr
    assert "--layout dp=3,tp=5: tp=5 does not divide the model's 4 attention heads" in said
    metrics_port = "--r3-metrics-port (R3CHANNEL_METRICS_PORT), of trainer rank 1"
    assert f"{metrics_port}: port {taken} cannot be bound" in said
    assert f"--r3-journal (R3CHANNEL_JOURNAL): {file} cannot be written (Not a directory)" in said
    for option in ("--report", "--record", "--r3-trace (R3CHANNEL_TRACE)"):
        assert f"{option}: {file} cannot be written (Not a directory); give a folder that can" in said
    assert list(tmp_path.iterdir()) == [file]
    lines = (line for line in said.splitlines() if line.startswith("import time:"))
    imported = {line.rpartition("|")[2].strip() for line in lines}
    assert "r3channel.integrations.preflight" in imported
    assert not imported & {"ray", "torch", "sglang"}  # they take several seconds


def test_every_process_that_serves_a_page_needs_its_port(taken: int) -> None:
    config = ChannelConfig(metrics_port=taken - 4)  # its neighbours may be held by others
    named = f"of trainer rank 3: port {taken} cannot be bound"
    assert faults_of(config).count(named) == 1 == faults_of(config).count(f"port {taken} ")
    assert f"port {taken} " not in faults_of(config, ranks=3)
    assert "--r3-ingest-port (R3CHANNEL_INGEST_PORT): port" in faults_of(ChannelConfig(ingest_port=taken))


def test_a_folder_is_written_in_earnest_and_nothing_stays(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    new = tmp_path / "new" / "deeper"
    assert preflight.folder("--report", new) == "" == preflight.folder("--report", "")
    assert "cannot be written" in preflight.folder("--report", file / "below")
    # though a superuser may be told that it can
    assert "cannot be written" in preflight.folder("--report", "/proc/1/x")
    assert "needed; give a folder with more room" in preflight.folder("--report", new, room_bytes=1 << 60)
    assert list(tmp_path.iterdir()) == [file]
    config = ChannelConfig(journal=str(file), metrics_dir=f"{file}/a", token_file=f"{file}/b/token")
    named = [line.split()[0] for line in faults_of(config).splitlines()]
    assert named == ["--r3-journal", "--r3-metrics-dir", "--r3-token-file"]


def test_a_package_in_a_version_that_was_not_read_is_named() -> None:
    assert list(packages(["numpy"], {})) == []
    (said,) = packages(["numpy"], {"numpy": ("0.1",)})
    assert said.startswith("numpy ") and said.endswith("was not read, only 0.1; pip install numpy==0.1")


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("dp=2,tp=2", ""),
        ("tp=4", ""),
        ("tp=3", "tp=3 does not divide the model's 4 attention heads in 2 groups; give a tp that does"),
        ("dp=3,ep=3", "ep=3 does not divide the model's 128 experts"),
        ("pp=3", "4 layers do not divide into pp=3 stages"),
    ],
)
def test_a_layout_is_held_against_its_model(layout: str, said: str) -> None:
    found = preflight.layout("--layout", TrainerLayout.parse(layout), config_of(ModelShape()))
    assert found.startswith(f"--layout: {said}" if said else "") and bool(found) == bool(said)
