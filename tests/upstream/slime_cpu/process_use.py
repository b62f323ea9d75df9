"""What a job of slime takes: CPU, memory and Ray's store, read from outside its processes twice a second."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Self

import psutil

_PERIOD_S = 0.5
_ROLES = {
    "ray::RolloutManager": "manager",
    "ray::ChannelActor": "trainers",
    "ray::MegatronTrainRayActor": "trainers",
    "sglang::scheduler": "engines",
}
"""By how the title of a process begins."""


class ProcessUse:
    """Watch the processes below this one while the context is open; Ray's own folder is `ray_dir`.

    CPU counts from the first look at which `warm()` is true: what a process takes to start is no cost of a step.
    """

    def __init__(self, ray_dir: Path, warm: Callable[[], bool]) -> None:
        self._ray_dir, self._warm, self._ended = ray_dir, warm, Event()
        self._cpu_s: dict[int, float] = {}
        self._from_s: dict[int, float] | None = None
        self._roles: dict[int, str] = {}
        self._peak_mb: dict[int, float] = {}
        self._store_mb = 0.0
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def found(self) -> dict[str, float]:
        """Return by role CPU seconds of all its processes and the largest peak memory of one, and the most in the store."""
        use = {"store_mb": self._store_mb}
        for role in sorted(set(self._roles.values())):
            pids = [pid for pid, name in self._roles.items() if name == role]
            use[f"{role}_cpu_s"] = sum(self._cpu_s[pid] - (self._from_s or {}).get(pid, 0.0) for pid in pids)
            use[f"{role}_peak_mb"] = max(self._peak_mb[pid] for pid in pids)
        return use

    def _watch(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error, OSError):
                    self._look_at(process)
            if self._from_s is None and self._warm():
                self._from_s = dict(self._cpu_s)
            for page in self._ray_dir.glob("session_2*/logs/debug_state.txt"):
                pinned = re.findall(r"pinned objects size: (\d+)", page.read_text())
                self._store_mb = max(self._store_mb, *(int(each) / 1e6 for each in pinned), 0.0)

    def _look_at(self, process: psutil.Process) -> None:
        title = " ".join(process.cmdline())
        role = next((role for start, role in _ROLES.items() if title.startswith(start)), None)
        if role is not None:
            times, status = process.cpu_times(), Path(f"/proc/{process.pid}/status").read_text()
            self._roles[process.pid], self._cpu_s[process.pid] = role, times.user + times.system
            self._peak_mb[process.pid] = int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1e3
