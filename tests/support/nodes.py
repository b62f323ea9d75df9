"""The three nodes of a demo that runs, from outside: what is run on them, cables that are pulled, and cables that lose frames."""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import pytest

from examples.embedded.nodes import MAKE
from examples.embedded.sglang import kill_family
from r3channel.tools.run_model import Look, urls_of
from tests.support.waits import RUN_S, SOON_S, await_memory, until

_TRIED = subprocess.run([*MAKE, "true"], capture_output=True)
NODES_NEEDED = pytest.mark.skipif(_TRIED.returncode != 0, reason="needs iproute2, and network namespaces")
DROP = "ip rule add pref 9 lookup local; ip rule del pref 0; ip rule add pref 1 ipproto tcp dport {port} blackhole"
"""A firewall that drops what comes for a port, without a packet filter: kernels and images may lack those."""
DROP_ALL = (
    "ip rule add pref 9 lookup local; ip rule del pref 0; ip rule add pref 2 from 10.71.0.2 ipproto tcp blackhole; "
    "ip rule add pref 1 from 10.71.0.2 ipproto tcp sport {other} lookup local"
)
"""The same of all that the engines' node sends of itself; its answers as a server of this port pass."""
_LOSS, _DELAY_S = 0.01, 0.03


class Nodes:
    """A run of the demo over three nodes."""

    def __init__(self, folder: Path, *options: str) -> None:
        await_memory(6, "a run of the demo")
        words = "-m examples.demo --nodes 3 --samples 8 --layout dp=2,tp=1,pp=1,cp=1 --json --report report"
        self._log = folder / "said"
        with self._log.open("w") as log:
            command = [sys.executable, *words.split(), *options]
            self.child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)

    def await_word(self, text: str) -> None:
        """Wait until the run has said so."""
        until(lambda: text in self._log.read_text() or self.child.poll(), text, limit_s=RUN_S, log=self._log)

    def on(self, name: str, *command: str) -> list[str]:
        """Return a command line that runs on a node."""
        there = ("--user", "--preserve-credentials", "--net", "--mount", "--wd")
        said = self._log.read_text().partition("nodes: ")[2].splitlines()[0]
        return ["nsenter", f"--target={json.loads(said)[name][0]}", *there, *command]

    def pull(self, name: str, *, for_s: float) -> None:
        """Pull a node's cable out of the switch, and plug it in again."""
        program = f"ip link set {name} down; sleep {for_s}; ip link set {name} up"
        subprocess.run(self.on("manager", "sh", "-ec", program), check=True)

    def end(self) -> tuple[int, str]:
        """Return the exit status, and the last line that is not empty."""
        until(lambda: self.child.poll() is not None, "the run's end", limit_s=RUN_S, log=self._log)
        return self.child.returncode, list(filter(str.strip, self._log.read_text().splitlines()))[-1]

    def close(self) -> None:
        kill_family(self.child)


def pages_at(url: str) -> list[list[str]]:
    """Return address, role and fault of each page that a relay's /targets lists, as this node sees them."""
    looks = [Look.read(page, timeout_s=SOON_S) for page in urls_of(url)]
    return sorted([look.place.partition(":")[0], look.role, look.fault] for look in looks)


def spoil(names: list[str]) -> None:
    """Let frames of these cables come late, and some not at all, for ever. Kernels may lack netem: two taps and this loop.

    A line is said for each frame that is lost.
    """
    other, late, chance = dict[int, int](), deque[tuple[float, int, bytes]](), random.Random(7)
    for name in names:
        near, far = (_tap(f"{name}{side}") for side in "ab")
        other |= {near: far, far: near}
        joined = f"set {name} master {name}c; set {name}a master {name}c; set {name}b master switch"
        for command in (
            f"add {name}c type bridge; {joined}; " + "; ".join(f"set {name}{each} up" for each in "abc")
        ).split("; "):
            subprocess.run(["ip", "link", *command.split()], check=True)
    while True:
        wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
        for tap in select.select([*other], [], [], wait_s)[0]:
            frame = os.read(tap, 1 << 16)
            if chance.random() < _LOSS:
                print("lost", flush=True)
            else:
                late.append((time.monotonic() + _DELAY_S, other[tap], frame))
        while late and late[0][0] <= time.monotonic():
            os.write(*late.popleft()[1:])


def _tap(name: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR)
    # TUNSETIFF, and IFF_TAP | IFF_NO_PI, of linux/if_tun.h
    fcntl.ioctl(tap, 0x400454CA, struct.pack("16sH22x", name.encode(), 0x1002))
    return tap


if __name__ == "__main__":
    print(json.dumps(pages_at(sys.argv[1]))) if sys.argv[2:] == [] else spoil(sys.argv[1:])
