"""The demo's loop over three nodes: engines, manager and trainers each in a network namespace, rows delivered directly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.nodes import DROP, DROP_ALL, NODES_NEEDED, Nodes
from tests.support.waits import PROGRAM_S

pytestmark = [pytest.mark.e2e, NODES_NEEDED]
_IMPATIENT = "--r3-step-timeout-s=15 --r3-send-timeout-s=5"
FAULTS = {
    "no token file": ("--r3-token-file=/dev/shm/none", "token file /dev/shm/none", ""),
    "network without a node": ("--r3-interface=10.99.0.0/24", "interface 10.99.0.0/24", ""),
    "interface of one node": ("--r3-interface=127.0.0.1", "no other node reaches it", ""),
    "firewall before frames": ("--r3-ingest-port=7000", "10.71.0.1:7000", DROP),
    "firewall before rows": (_IMPATIENT, "{rows} did not answer", DROP),
    "firewall before weights": ("", "10.71.0.3:", DROP_ALL),
}
"""Options, what the last line has, and a firewall that comes up once all parts are, or Ray where they never will be."""
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
    options, wanted, firewall = FAULTS[fault]
    said, file = {"rows": ":7000", "engines": [""]}, tmp_path / "report/endpoints.json"
    with closing(Nodes(tmp_path, "--steps", "1", *options.split())) as nodes:
        nodes.await_word("Ray starts" if "7000" in options else "all parts are up")
        if file.exists():
            said = json.loads(file.read_text())
        ports = {"port": said["rows"].rpartition(":")[2], "other": said["engines"][0].rpartition(":")[2]}
        if firewall:
            node = "manager" if firewall is DROP else "trainer"
            subprocess.run(nodes.on(node, "sh", "-ec", firewall.format(**ports)), check=True)
        code, last = nodes.end()
    assert code and wanted.format(**said) in last


@pytest.mark.full
def test_a_cable_that_is_pulled_for_ten_seconds_costs_no_step(tmp_path: Path) -> None:
    with closing(Nodes(tmp_path, "--steps", "4")) as nodes:
        for step, name in enumerate(("engine", "trainer", "manager")):
            nodes.await_word(f"step {step}:")
            nodes.pull(name, for_s=10.0)
        assert_nothing_differs(nodes, steps=4)
