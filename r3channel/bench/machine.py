"""What a benchmark ran on: every result is stamped with it, so that no figure travels without its machine."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import time
from collections.abc import Callable, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np

_COPY_BYTES = 256 << 20
_PACKAGES = ("numpy", "torch", "sglang", "megatron-core", "ray", "numba")


def show(
    argv: Sequence[str],
    measure: Callable[[], dict[str, Any]],
    text: Callable[[dict[str, Any]], str],
    *,
    as_json: bool,
) -> dict[str, Any]:
    """Measure, then print the result as one JSON object or as `text` has it, and return it.

    To the result come `command` (`argv` is what stood behind `r3channel bench`) and `machine`.
    """
    load_before = os.getloadavg()[0]
    result = measure()
    machine = stamp(load_before)
    result |= {"command": shlex.join(["r3channel", "bench", *argv]), "machine": machine}
    line = f"{described(machine)}, memcpy {machine['memcpy_gbps']} GB/s"
    print(json.dumps(result) if as_json else f"{text(result)}\n{line}")
    return result


def stamp(load_before: float) -> dict[str, Any]:
    """Plain values. `load` is the system's of one minute, before and after; the second counts the benchmark itself."""
    versions = {found.name: found.version for found in distributions() if found.name in _PACKAGES}
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load": [round(load_before, 1), round(os.getloadavg()[0], 1)],
        "memcpy_gbps": round(_memcpy_gbps(), 1),
        "versions": {"python": platform.python_version(), **versions},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def described(machine: dict[str, Any]) -> str:
    """
    >>> described({"cpu": "Intel Xeon", "cores": 2, "load": [0.3, 2.0]}), described({"cpu": "AMD EPYC", "cores": 2, "load": []})
    ('2 x Intel Xeon, load 0.3 to 2.0', '2 x AMD EPYC, load unknown')
    """
    load = " to ".join(f"{value:.1f}" for value in machine["load"]) or "unknown"
    return f"{machine['cores']} x {machine['cpu']}, load {load}"


def _cpu() -> str:
    """The processor's own name; where the kernel does not tell it, as on ARM, the architecture."""
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def _memcpy_gbps() -> float:
    """Bytes copied per second of wall time between two touched buffers far larger than the cache, one thread."""
    source, target = np.ones(_COPY_BYTES, np.uint8), np.zeros(_COPY_BYTES, np.uint8)

    def once_s() -> float:
        begin_s = time.monotonic()
        np.copyto(target, source)
        return time.monotonic() - begin_s

    return source.nbytes / 1e9 / min(once_s() for _ in range(7))
