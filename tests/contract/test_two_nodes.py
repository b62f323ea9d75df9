"""Pages over two nodes: a relay's, and one with a trainer and engines, which are network namespaces of two threads. Each process
binds its own node's address, and the relay's page lists all of them as Prometheus wants it."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from r3channel.plan.assignment import Assignment
from r3channel.tools.run_model import Look, urls_of
from tests.support.delivery import receivers_of, relays
from tests.support.direct import Engine, hello_of
from tests.support.waits import PROGRAM_S, SOON_S, until

_NEWNET = 0x40000000
"""CLONE_NEWNET of sched.h."""
UNSHARE = ["unshare", "--map-root-user", "--net"]
TOOLS = all(map(shutil.which, ("unshare", "ip", "promtool")))
MAY = TOOLS and subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not MAY, reason="needs iproute2, Debian's prometheus, and user namespaces")
def test_each_process_binds_its_own_nodes_address_and_the_relay_lists_them_all(tmp_path: Path) -> None:
    command = [*UNSHARE, sys.executable, "-m", __spec__.name, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {
        "pages": [["10.7.0.1", "relay", ""], *[["10.7.0.2", role, ""] for role in ("engine", "engine", "trainer")]],
        "discovered": 4, "anew": 4, "ended": 3,
    }, "an engine that starts anew takes its old page's place, and a trainer that ends takes its page away"  # fmt: skip


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)


def enter_a_node() -> int:
    """Gives the calling thread, and no other, a node of its own."""
    assert ctypes.CDLL(None).unshare(_NEWNET) == 0  # os.unshare comes with Python 3.12
    return threading.get_native_id()


def main(folder: Path) -> dict[str, Any]:
    """The relay's node is the other thread's: psutil lists the devices of the main thread's."""
    token, options = folder / "token", dict[str, Any](metrics_port=0, run_name="r")
    ip("link add here type veth peer name there")
    with ThreadPoolExecutor(1) as other, relays() as make_relay:
        ip(f"link set there netns {other.submit(enter_a_node).result()}")
        for node, device, address in ((map, "here", "10.7.0.2"), (other.map, "there", "10.7.0.1")):
            up = (f"link set {name} up" for name in (device, "lo"))
            list(node(ip, (f"address add {address}/24 dev {device}", *up)))
        relay = other.submit(make_relay, interface="10.7.0.1", **options).result()
        url = other.submit(relay.serve, token_file=token).result()

        def engine(number: int, boot_id: int, interface: str) -> Engine:
            hello = hello_of(f"http://e:{number}", boot_id=boot_id)
            engine = Engine(url, token, hello=hello, interface=interface, **options)
            until(lambda: engine.outlet.metrics.value("r3channel_engine_greeted"))
            return engine

        (receiver,) = receivers_of(relay, replace(relay.config, interface="auto"))
        engines = [engine(1, 11, "10.7.0.0/24"), engine(2, 12, relay.config.interface)]
        relay.add("a", engines[0].finish("a", 9), range(9))
        receiver.receive(relay.seal(0, Assignment.given([[["a"]]])))
        listed = relay.metrics.url.replace("/metrics", "/targets")
        looks = other.map(lambda page: Look.at(page, timeout_s=SOON_S), urls_of(listed))
        seen: dict[str, Any] = {"discovered": len(discovered(folder, listed))}
        seen["pages"] = sorted([look.place.partition(":")[0], look.role, look.fault] for look in looks)
        engines.append(engine(2, 13, "here"))
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
    print(json.dumps(main(Path(sys.argv[1]))))
