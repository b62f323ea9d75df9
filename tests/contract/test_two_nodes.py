"""Over several nodes, without engines of SGLang: each process binds its own node's address, the relay's page lists all of them as
Prometheus wants it, and the doctor names what would keep nodes apart."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.embedded.nodes import MAKE, NETWORK, NODES, TOKEN, enter
from r3channel.plan.assignment import Assignment
from r3channel.tools.run_model import urls_of
from tests.support.delivery import receivers_of, relays
from tests.support.direct import Engine, hello_of
from tests.support.nodes import DROP, NODES_NEEDED, pages_at
from tests.support.waits import PROGRAM_S, until

pytestmark = NODES_NEEDED


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs Debian's prometheus")
def test_each_process_binds_its_own_nodes_address_and_the_relay_lists_them_all(tmp_path: Path) -> None:
    command = [*MAKE, sys.executable, "-m", __spec__.name, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S)
    assert done.returncode == 0, done.stderr[-3000:]
    others = [["10.71.0.3", role, ""] for role in ("engine", "engine", "trainer")]
    assert json.loads(done.stdout) == {
        "pages": [["10.71.0.1", "relay", ""], *others], "discovered": 4, "anew": 4, "ended": 3,
    }, "an engine that starts anew takes its old page's place, and a trainer that ends takes its page away"  # fmt: skip


@pytest.mark.long
def test_the_doctor_names_a_wrong_interface_a_firewalled_port_and_a_missing_token_file() -> None:
    program = [*MAKE, sys.executable, "-m", __spec__.name]
    asked = subprocess.run(program, stdout=subprocess.PIPE, text=True, timeout=2 * PROGRAM_S).stdout
    said = [(line[:4].strip(), line[6:28].strip(), line[29:]) for line in asked.splitlines()]
    wrong = {name: text for how, name, text in said if how == "FAIL"}
    assert "no route to interface 10.72.0.0/24" in wrong.pop("interface")
    assert "nothing came back within 5 s" in wrong.pop("peer 10.71.0.1:7000")
    assert "/dev/shm/none cannot be read" in wrong.pop("token") and not wrong, "or in the second answer"
    assert {("ok", "interface"), ("ok", "peer 10.71.0.1:7001"), ("ok", "token")} <= {one[:2] for one in said}


def ask_the_doctor() -> None:
    """On the trainers' node, with three faults and with none."""
    subprocess.run(["sh", "-ec", DROP.format(port=7000)], check=True)
    for port, interface, token in ((7000, "10.72.0.0/24", "/dev/shm/none"), (7001, NETWORK, TOKEN)):
        doctor = f"-m r3channel.cli doctor --role trainer --nodes 3 --peer 10.71.0.1:{port}"
        os.environ |= {"R3CHANNEL_INTERFACE": interface, "R3CHANNEL_TOKEN_FILE": token}
        subprocess.run([*enter("trainer"), sys.executable, *doctor.split()])


def go_to(name: str) -> None:
    """Put the calling thread, and no other, on a node."""
    with open(f"/proc/{NODES[name][0]}/ns/net") as node:
        # CLONE_NEWNET of sched.h; os.setns comes with Python 3.12
        assert ctypes.CDLL(None).setns(node.fileno(), 0x40000000) == 0


def main(folder: Path) -> dict[str, Any]:
    """The relay's node is the other thread's: psutil lists the devices of the main thread's, the trainers' node."""
    token, options = folder / "token", dict[str, Any](metrics_port=0, run_name="r")
    with ThreadPoolExecutor(1) as other, relays() as make_relay:
        other.submit(go_to, "manager").result()
        go_to("trainer")
        relay = other.submit(make_relay, interface="10.71.0.1", **options).result()
        url = other.submit(relay.serve, token_file=token).result()

        def engine(number: int, boot_id: int, interface: str) -> Engine:
            hello = hello_of(f"http://e:{number}", boot_id=boot_id)
            engine = Engine(url, token, hello=hello, interface=interface, **options)
            until(lambda: engine.outlet.metrics.value("r3channel_engine_greeted"))
            return engine

        (receiver,) = receivers_of(relay, replace(relay.config, interface="auto"))
        engines = [engine(1, 11, NETWORK), engine(2, 12, relay.config.interface)]
        relay.add("a", engines[0].finish("a", 9), range(9))
        receiver.receive(relay.seal(0, Assignment.given([[["a"]]])))
        listed = relay.metrics.url.replace("/metrics", "/targets")
        seen: dict[str, Any] = {"discovered": len(discovered(folder, listed))}
        seen["pages"] = other.submit(pages_at, listed).result()
        engines.append(engine(2, 13, "eth0"))
        seen["anew"] = len(urls_of(listed))
        receiver.close()
        seen["ended"] = len(urls_of(listed))
        for each in engines:
            each.close()
        return seen


def discovered(folder: Path, url: str) -> list[dict[str, Any]]:
    """What Prometheus finds there."""
    job = {"job_name": "r3channel", "http_sd_configs": [{"url": url}]}
    (folder / "prometheus.json").write_text(json.dumps({"scrape_configs": [job]}))
    command = f"promtool check service-discovery --timeout=3s {folder}/prometheus.json r3channel".split()
    return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=PROGRAM_S).stdout)


if __name__ == "__main__":
    ask_the_doctor() if not sys.argv[1:] else print(json.dumps(main(Path(sys.argv[1]))))
