"""The demo's loop over three nodes: engines, manager and trainers each in a network namespace, rows delivered directly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.nodes import DROP, NODES_NEEDED, Nodes
from tests.support.waits import PROGRAM_S

pytestmark = [pytest.mark.e2e, NODES_NEEDED]
FAULTS = {"--r3-token-file=/dev/shm/none": "token file /dev/shm/none", "--r3-ingest-port=7000": "10.71.0.1:7000"}  # fmt: skip
ROLES = ("relay", "engine", "trainer", "trainer")
SPOIL = (sys.executable, "-m", "tests.support.nodes")


def assert_nothing_differs(nodes: Nodes, *, steps: int) -> None:
    code, last = nodes.end()
    assert code == 0, last
    result = json.loads(last)
    # of samples, layers, passes
    assert result["digests_checked"] == steps * 8 * 3 * 3 and not result["digests_different"]
    assert result["steps"] == steps and not result["samples_lost"] and result["weights_verified"] >= 30
    assert result["engines_routable"] == [[version, 1] for version in range(steps + 1)]


@pytest.mark.long
def test_three_nodes_train_without_a_difference_and_every_node_sees_all_pages(tmp_path: Path) -> None:
    with closing(Nodes(tmp_path, "--steps", "3")) as nodes:
        nodes.await_word("all parts are up")
        page = json.loads((tmp_path / "report/endpoints.json").read_text())["metrics"]["relay"]
        look = nodes.on("engine", *SPOIL, page.replace("/metrics", "/targets"))
        seen = json.loads(subprocess.run(look, capture_output=True, check=True, timeout=PROGRAM_S).stdout)
        assert_nothing_differs(nodes, steps=3)
    assert seen == [[f"10.71.0.{at}", role, ""] for at, role in zip((1, 2, 3, 3), ROLES, strict=True)]


@pytest.mark.full
@pytest.mark.skipif(not os.access("/dev/net/tun", os.W_OK), reason="needs /dev/net/tun")
def test_a_network_that_is_late_and_loses_frames_changes_no_row(tmp_path: Path) -> None:
    with closing(Nodes(tmp_path, "--steps", "2")) as nodes:
        nodes.await_word("engines and trainers start")
        spoil = nodes.on("manager", *SPOIL, "engine", "trainer")
        spoiling = subprocess.Popen(spoil, stdout=subprocess.PIPE, text=True)
        assert_nothing_differs(nodes, steps=2)
        spoiling.kill()
        assert spoiling.communicate()[0].count("lost") > 10


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_what_keeps_nodes_apart_is_in_the_last_line(tmp_path: Path, fault: str) -> None:
    with closing(Nodes(tmp_path, "--steps", "1", fault)) as nodes:
        nodes.await_word("Ray starts")
        subprocess.run(nodes.on("manager", "sh", "-ec", DROP.format(port=7000)), check=True)
        code, last = nodes.end()
    assert code and FAULTS[fault] in last


@pytest.mark.full
def test_a_cable_that_is_pulled_for_ten_seconds_costs_no_step(tmp_path: Path) -> None:
    with closing(Nodes(tmp_path, "--steps", "4")) as nodes:
        for step, name in enumerate(("engine", "trainer", "manager")):
            nodes.await_word(f"step {step}:")
            nodes.pull(name, for_s=10.0)
        assert_nothing_differs(nodes, steps=4)
