"""Three nodes on one machine, as nodes.sh makes them: what is run on which, and at what address."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from r3channel.errors import ConfigError

NETWORK = "10.71.0.0/24"
TOKEN = "/dev/shm/token"
"""On each node a file of its own."""
MAKE = ("sh", str(Path(__file__).with_name("nodes.sh")))
NODES: dict[str, Any] = json.loads(os.environ.get("R3DEMO_NODES", "{}"))
"""Name -> a process on that node, and its address; empty in a run without nodes."""


def become_nodes() -> None:
    """Run this program again on the manager's node, unless it is there. Raises ConfigError where there can be no nodes."""
    if not NODES:
        tried = subprocess.run([*MAKE, "true"], capture_output=True, text=True)
        if tried.returncode:
            raise ConfigError(f"--nodes 3 needs network namespaces, and iproute2: {tried.stderr.strip()}")
        os.execvp(MAKE[0], [*MAKE, *sys.orig_argv])


def address(name: str) -> str:
    return NODES[name][1] if NODES else "127.0.0.1"


def enter(name: str) -> tuple[str, ...]:
    """Return what a command that is to run on a node begins with."""
    return ("nsenter", f"--target={NODES[name][0]}", "--net", "--mount", "--uts", "--wd") if NODES else ()


def start_raylet(head: str, store_bytes: int) -> None:
    """Start one on the trainers' node, where there is one. It ends when its head has."""
    where = (f"--address={head}", f"--node-ip-address={address('trainer')}", "--num-cpus=16")
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        *where,
        f"--object-store-memory={store_bytes}",
    ]
    if NODES:
        subprocess.run([*enter("trainer"), *command], stdout=subprocess.DEVNULL, check=True)
