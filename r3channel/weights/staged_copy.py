"""A rank's staged copy: where an update lies beside the parameters, and how they become what it holds. Knows no link.

All ranks of a host look for room before the first of them takes any. What is free is the least of what the machine has and of
what each control group around this process may still take (v2 and v1); for memory that trainers map too, /dev/shm has its own
limit.

GPU memory goes by torch's handles (CUDA IPC), without its pickles; a rank makes one for each trainer. torch uses the memory for
nothing else until each has let go of it: a trainer that is late writes into nobody's. One that was killed never lets go, and its
engine keeps that memory until it ends.

Parameters on a GPU are written out of memory that CUDA has locked. What they hold then is summed there, and only the sums come
back. Two threads with a stream each keep the way to the GPU busy: one copies while the other's sums are awaited. Where the whole
copy cannot be locked, each thread has a locked buffer.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import xxhash

from r3channel.errors import WeightsCorrupt, WeightsError
from r3channel.weights.checksums import cross_sums, hashed_bytes, host_bytes, tensor_checksum, tensor_digest
from r3channel.weights.manifest import TensorMeta

Wire = Literal["tcp", "shared_memory", "cuda_ipc", "nccl", "gloo"]
JOINT = "nccl", "gloo"
"""Wires that are a group of all ranks."""
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


# -- the copy ----------------------------------------------------------------------------------------------------------


_Lane = tuple[torch.cuda.Stream, torch.Tensor | None]
"""A thread's way to the GPU: its stream, and a locked buffer where it needs one."""
_BLOCK_BYTES = 1 << 20
"""The fastest on a host (AMD EPYC, torch 2.13): a digest finds the block in the cache."""
_SLOT_BYTES = 64 << 20
_THREADS = 2
"""Threads that go over all of a rank's memory: one core does not use all of a host's bandwidth."""


class StagedCopy:
    """Memory for one update. It goes with this object and its views; shared memory, once all have unmapped it, too.

    Links' threads write `views`, each its own parts. `change_over` runs on the scheduler's thread.
    """

    def __init__(
        self, params: Sequence[TensorMeta], *, device: torch.device, wire: Wire = "tcp", summed: bool = False
    ) -> None:
        """`device`: where the parameters lie, and with `ON_GPU` the copy, too. `summed`: digests are of a GPU's sums. OSError, or
        CUDA's, without room."""
        self._params, nbytes, self.summed = params, staged_bytes(params), summed
        self.shared: Callable[[], Any] = str
        """What one trainer of this machine needs to map the copy; "" where bytes travel."""
        self.hide: Callable[[], object] = str
        """`hide` takes a path away: once all trainers have the memory, or with this object."""
        if wire == "shared_memory":
            handle, path = tempfile.mkstemp(prefix=os.path.basename(SHARED), dir=SHM)
            self.hide, self.shared = weakref.finalize(self, os.unlink, path), lambda: path
            flat = mapped(handle, nbytes)
        elif wire in ON_GPU:
            flat = new_memory(nbytes, device)
            self.shared = partial(ipc_handle, flat) if wire == "cuda_ipc" else str
        else:
            flat = new_memory(nbytes)
        self.views = staged_views(params, flat)
        """Each parameter's memory, flat, in its dtype. Of any content at first."""
        self._sealed: Sequence[str] = ()
        """What each parameter must give once it holds what was sealed: xxh3, on a GPU that of its sums."""
        self._lanes = list[_Lane]()
        if params and device.type == "cuda":
            slots: Sequence[torch.Tensor | None] = [None] * _THREADS
            if not flat.is_cuda and not _locked(self, flat):
                slots = new_memory(_THREADS * _SLOT_BYTES).split(_SLOT_BYTES)
                all(_locked(self, slot) for slot in slots)  # else CUDA copies once more: right, and slow
            self._lanes.extend((torch.cuda.Stream(device), slot) for slot in slots)

    def seal(self, *, checksums: bool = False) -> tuple[dict[str, str], dict[str, str]]:
        """Digests of what is staged by parameter, and what the engine's own checksums will be. While the engine serves."""
        names = [meta.name for meta in self._params]
        with ThreadPoolExecutor(_THREADS) as pool:
            read = pool.map(partial(hashed_bytes, summed=self.summed), self.views)
            self._sealed = digests = [*pool.map(xxhash.xxh3_64_hexdigest, read)]
            if self._lanes and not self.summed:
                self._sealed = [*pool.map(tensor_digest, pool.map(cross_sums, self.views))]
            sums = pool.map(tensor_checksum, self.views if checksums else ())
            return dict(zip(names, digests, strict=True)), dict(zip(names, sums, strict=False))

    def change_over(self, targets: Sequence[torch.Tensor]) -> None:
        """The parameters (flat) become what was sealed last. Returns when they are; WeightsError names one that holds something
        else. The copy stays as it is."""
        if self._lanes:
            torch.cuda.synchronize()  # no pass reads parameters any more
        move = partial(_into_device, [*self._lanes]) if self._lanes else _copied
        with ThreadPoolExecutor(_THREADS) as pool:
            digests = [*pool.map(move, targets, self.views)]
        for meta, holds, sealed in zip(self._params, digests, self._sealed, strict=True):
            if holds != sealed:
                raise WeightsError(f"{meta.name} holds other bytes than were staged")


def make_copy(
    params: Sequence[TensorMeta], *, device: torch.device, wire: Wire, room: Room, insist: bool
) -> tuple[StagedCopy, str]:
    """Return memory for one update of these parameters; where there is none, a copy of nothing, and why.

    `insist`: as `Room.lacks` has it. The copy of `nccl` lies in the host's memory where the GPU has no room for it."""
    nbytes, summed = staged_bytes(params), wire in ON_GPU
    full = gpu_lacks(nbytes, device, wire) if summed else ""
    why = room.lacks(nbytes, insist=insist, shared=wire == "shared_memory")
    if summed and (wire == "cuda_ipc" or not full or device.type != "cuda"):
        why = full
    wire = "tcp" if why or full else wire
    return StagedCopy(() if why else params, device=device, wire=wire, summed=summed), why


def _locked(owner: StagedCopy, flat: torch.Tensor) -> bool:
    """Have CUDA lock memory until `owner` goes. False where that is refused, as where memory is short.

    Not torch's own pinned memory: that is rounded up to a power of two, and stays with the process.
    """
    runtime: Any = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(flat.data_ptr(), flat.nbytes, 0)):
        with suppress(RuntimeError):  # takes the error away, for which the next kernel would be blamed
            torch.ones(1, device="cuda")
        return False
    weakref.finalize(owner, runtime.cudaHostUnregister, flat.data_ptr()).atexit = False
    return True


@torch.no_grad()
def _copied(target: torch.Tensor, staged: torch.Tensor) -> str:
    """Copy what is staged into a parameter; return the digest of what it holds then. By blocks that stay in a core's cache."""
    seen, items = xxhash.xxh3_64(), _BLOCK_BYTES // target.itemsize
    for new, kept in zip(target.split(items), staged.split(items), strict=True):
        new.copy_(kept)
        seen.update(host_bytes(new))
    return seen.hexdigest()


@torch.no_grad()
def _into_device(lanes: list[_Lane], target: torch.Tensor, staged: torch.Tensor) -> str:
    """The same on a GPU; the digest is that of its sums. There are as many lanes as threads."""
    stream, slot_N = lane = lanes.pop()
    blocks = (flat.view(torch.uint8).split(_SLOT_BYTES) for flat in (target, staged))
    with torch.cuda.stream(stream):
        for new_N, kept_N in zip(*blocks, strict=True):
            if slot_N is not None:
                stream.synchronize()  # what it held has left; the other thread fills its own meanwhile
                kept_N = slot_N[: len(kept_N)].copy_(kept_N)
            new_N.copy_(kept_N, non_blocking=True)
        digest = tensor_digest(cross_sums(target))  # waits for all of it
    lanes.append(lane)
    return digest
