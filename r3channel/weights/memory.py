"""Memory for a rank's staged copy: whether there is room, how parameters lie in it, and how trainers of its machine map it.

All ranks of a host look for room before the first of them takes any. What is free is the least of what the machine has and of
what each control group around this process may still take (v2 and v1); for memory that trainers map too, /dev/shm has its own
limit.

GPU memory goes by torch's handles (CUDA IPC), without its pickles; a rank makes one for each trainer. torch uses the memory for
nothing else until each has let go of it: a trainer that is late writes into nobody's. One that was killed never lets go, and its
engine keeps that memory until it ends.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from r3channel.errors import WeightsCorrupt, WeightsError
from r3channel.weights.manifest import TensorMeta

Wire = Literal["tcp", "shared_memory", "cuda_ipc", "nccl", "gloo"]
ON_GPU = "cuda_ipc", "nccl"
"""Wires whose staged copy lies on the GPU (nccl's: where there is room), and whose digests are those of its sums."""
SHM = "/dev/shm"
SHARED = f"{SHM}/r3channel-weights-"
"""How the path of a staged copy in shared memory begins: a rank that names another file of this machine is refused."""
_V2 = "", "", "memory.max", "memory.current", "inactive_file"
_V1 = "memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
"""Controller in /proc/self/cgroup, its mount, a group's limit and use, and in `memory.stat` the file cache that is given back."""
ALIGNMENT = 256
"""A parameter in a staged copy begins at a multiple of this many bytes, as in checkpoint-engine: every vector width fits."""
_UUID, _HANDLES = 0, (1, 4, 6)
"""Where a handle names its GPU, and where it has bytes."""


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


def staged_bytes(params: Sequence[TensorMeta]) -> int:
    """Bytes of a staged copy of these parameters."""
    return sum(map(_aligned, params))


def staged_views(params: Sequence[TensorMeta], flat: torch.Tensor) -> list[torch.Tensor]:
    """Each parameter's memory in a staged copy, flat, in its dtype."""
    starts = accumulate(map(_aligned, params), initial=0)
    return [flat[at : at + meta.nbytes].view(meta.dtype) for meta, at in zip(params, starts, strict=False)]


def _aligned(meta: TensorMeta) -> int:
    return -(-meta.nbytes // ALIGNMENT) * ALIGNMENT


def new_memory(nbytes: int, device: torch.device | None = None) -> torch.Tensor:
    """uint8 of any content. The host's comes from numpy, which asks Linux for huge pages: packing and hashing 64 MB took 13 %
    less CPU time (AMD EPYC, numpy 2.4.6)."""
    if device is None or device.type == "cpu":
        return torch.from_numpy(np.empty(nbytes, dtype=np.uint8))
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


# -- shared with trainers of this machine ------------------------------------------------------------------------------


def shared_views(params: Sequence[TensorMeta], where: Any) -> list[torch.Tensor]:
    """A rank's staged copy by parameter: behind CUDA's handle, or a path, which the rank takes away once all trainers have it.
    WeightsCorrupt, or OSError, for another file."""
    nbytes = staged_bytes(params)
    if not isinstance(where, str):
        return staged_views(params, ipc_memory(where))
    if not where.startswith(SHARED) or "/" in where[len(SHARED) :] or os.stat(where).st_size < nbytes:
        raise WeightsCorrupt(f"{where!r} is no staged copy of {nbytes} bytes; expected {SHARED}...")
    return staged_views(params, mapped(os.open(where, os.O_RDWR | os.O_NOFOLLOW), nbytes))


def mapped(handle: int, nbytes: int) -> torch.Tensor:
    """Shared memory as a tensor, made as large as needed; OSError without room for it. The descriptor is closed in any case."""
    try:
        os.posix_fallocate(handle, 0, max(nbytes, 1))  # shared memory that is short at its first touch kills
        return torch.from_numpy(np.frombuffer(mmap.mmap(handle, max(nbytes, 1)), dtype=np.uint8)[:nbytes])
    finally:
        os.close(handle)


def gpu_lacks(nbytes: int, device: torch.device, wire: Wire) -> str:
    """Why a copy of so many bytes cannot lie on this device; empty if it can."""
    if device.type != "cuda":
        return f'wire="{wire}" asks for a GPU, and this engine is on {device}: take "shared_memory", "gloo" or "tcp"'
    torch.cuda.ipc_collect()  # of an earlier copy that its trainers have left
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    if nbytes <= free:
        return ""
    remedy = 'lower --mem-fraction-static, release the KV cache, or take wire="shared_memory"'
    return f"a staged copy needs {nbytes:,} bytes, {free:,} are free on {device}: {remedy}"


def ipc_handle(flat: torch.Tensor) -> list[Any]:
    """What one process needs to map this memory, as JSON. The GPU goes by its UUID: each process numbers those that it sees."""
    storage: Any = flat.untyped_storage()
    handle = list(storage._share_cuda_())
    handle[_UUID] = str(torch.cuda.get_device_properties(handle[_UUID]).uuid)
    return [value.hex() if isinstance(value, bytes) else value for value in handle]


def ipc_memory(handle: Sequence[Any]) -> torch.Tensor:
    """The memory behind a handle: flat, uint8. WeightsError where this process does not see its GPU."""
    seen = [str(torch.cuda.get_device_properties(at).uuid) for at in range(torch.cuda.device_count())]
    if handle[_UUID] not in seen:
        raise WeightsError(
            f"an engine stages on GPU {handle[_UUID]}, this trainer sees {seen}: let CUDA_VISIBLE_DEVICES show it all that its "
            'engines use (Ray: RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1), or take wire="shared_memory"'
        )
    torch.cuda.init()
    local = [bytes.fromhex(value) if at in _HANDLES else value for at, value in enumerate(handle)]
    local[_UUID] = seen.index(handle[_UUID])
    try:
        storage = torch.UntypedStorage._new_shared_cuda(*local)
    except RuntimeError as error:
        raise WeightsError(f"the memory that an engine stages in could not be mapped: {error}") from error
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
