"""Host memory that a rank may take for its staged copy. All ranks of a host look before the first of them takes any.

What is free is the least of what the machine has and of what each control group around this process may still take (v2 and v1);
for memory that trainers map too, /dev/shm has its own limit.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

SHM = "/dev/shm"
_V2 = "", "", "memory.max", "memory.current", "inactive_file"
_V1 = "memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
"""Controller in /proc/self/cgroup, its mount, a group's limit and use, and in `memory.stat` the file cache that is given back."""


class Room(NamedTuple):
    """One rank's share of what is free on its host."""

    memory_bytes: int
    shm_bytes: int

    @classmethod
    def shared(cls, agree: Callable[[str], Sequence[str]], root: Path = Path("/")) -> Room:
        """Each rank of the engine calls it before any of them allocates: `agree` gathers their words, and so waits until all have
        looked. Reads files below `root`; what the system does not tell is no limit."""
        # of memory the engine takes some, too
        free = free_bytes(root) * 4 // 5, shutil.disk_usage(SHM).free if Path(SHM).is_dir() else 0
        host = _text(root / "proc/sys/kernel/random/boot_id") or "this host"
        ranks = list(agree(host)).count(host)
        return cls(*(nbytes // ranks for nbytes in free))

    def lacks(self, nbytes: int, *, insist: bool, shared: bool) -> str:
        """Why a staged copy of so many bytes does not fit; empty if it does. `shared`: in /dev/shm, where memory that is short
        ends the engine. `insist`: only that counts."""
        if nbytes > self.memory_bytes and not insist:
            where, share = "the host's memory and the engine's control groups", self.memory_bytes
            remedy = "give it more memory, spread it over more hosts, or staged=False"
        elif nbytes > self.shm_bytes and shared:
            where, share = SHM, self.shm_bytes
            remedy = 'enlarge it (docker --shm-size), or leave out wire="shared_memory"'
        else:
            return ""
        return f"a staged copy needs {nbytes:,} bytes, a rank's share of what is free in {where} is {share:,}: {remedy}"


def free_bytes(root: Path = Path("/")) -> int:
    """What this process can take without swapping, and without being killed at the limit of a control group."""
    free = [kib << 10 for kib in _values(root / "proc/meminfo", "MemAvailable:")]
    for line in _text(root / "proc/self/cgroup").splitlines():
        controllers, path = line.split(":", 2)[1:]
        for controller, mount, limit, used, cache in (_V2, _V1):
            # in a container often not there: the mount is the group itself
            group = root / "sys/fs/cgroup" / mount / path.strip("/")
            for folder in (group, *group.parents) if controller in controllers.split(",") else ():
                most, now = _text(folder / limit), _text(folder / used)
                if most.isdigit() and now.isdigit():  # "max" is no limit
                    free.append(int(most) - int(now) + sum(_values(folder / "memory.stat", cache)))
    return max(0, min(free, default=1 << 62))


def _values(path: Path, name: str) -> list[int]:
    lines = map(str.split, _text(path).splitlines())
    return [int(words[1]) for words in lines if words[:1] == [name]]


def _text(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""
