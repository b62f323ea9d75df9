"""A rank's staged copy: the memory of an update beside the parameters, and the copying into the parameters. Knows no link.

All ranks of a host look for room before the first rank allocates. Free memory is the least of what the machine has and of what
each control group around this process may still take (v2 and v1). Memory that trainers map, too, has the limit of /dev/shm.

GPU memory is shared by torch's handles (CUDA IPC), without torch's pickles; a rank makes one handle for each trainer. torch uses
the memory for nothing else until every trainer has unmapped it, so a late trainer writes into nobody else's memory. A trainer
that was killed never unmaps it: its engine keeps that memory until the engine ends.

Parameters on a GPU are written from memory that CUDA has locked. Their new content is summed on the GPU, and only the sums come
back. Two threads with a stream each keep the way to the GPU busy: one copies while the other waits for sums. Where the whole
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
"""Wires whose staged copy lies on the GPU (nccl's: where there is room), and whose digests are those of the GPU's sums."""
SHM = "/dev/shm"
SHARED = f"{SHM}/r3channel-weights-"
"""The prefix of a staged copy's path in shared memory: a rank that names another file of this machine is refused."""
_V2 = "", "", "memory.max", "memory.current", "inactive_file"
_V1 = "memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
"""Controller in /proc/self/cgroup; its mount; a group's limit; its use; the name in `memory.stat` of cache that can be freed."""
ALIGNMENT = 256
"""A parameter in a staged copy begins at a multiple of this many bytes, as in checkpoint-engine: every vector width fits."""
_UUID, _HANDLES = 0, (1, 4, 6)
"""Positions in a handle: of the GPU's name, and of values that are bytes."""


class Room(NamedTuple):
    """One rank's share of what is free on its host."""

    memory_bytes: int
    shm_bytes: int

    @classmethod
    def share_of_host(cls, agree: Callable[[str], Sequence[str]], root: Path = Path("/")) -> Room:
        """Return this rank's share of the free memory on its host.

        Each rank of the engine calls it before any of them allocates.

        Args:
            agree: Gathers every rank's word, and so waits until all ranks have looked.
            root: Files are read below this folder; what the system does not tell is no limit.
        """
        # the engine needs some of the memory, too
        free = free_bytes(root) * 4 // 5, shutil.disk_usage(SHM).free if Path(SHM).is_dir() else 0
        host = _text(root / "proc/sys/kernel/random/boot_id") or "this host"
        ranks = list(agree(host)).count(host)
        return cls(*(nbytes // ranks for nbytes in free))

    def lacks(self, nbytes: int, *, insist: bool, shared: bool) -> str:
        """Return why a staged copy does not fit; empty if it does.

        Args:
            nbytes: Bytes of the copy.
            insist: Check only the room in /dev/shm.
            shared: The copy lies in /dev/shm, where a shortage of memory ends the engine.
        """
        if nbytes > self.memory_bytes and not insist:
            where, share = "the host's memory and the engine's control groups", self.memory_bytes
            remedy = "give it more memory, spread it over more hosts, or WeightSync.whole(staged=False)"
        elif nbytes > self.shm_bytes and shared:
            where, share = SHM, self.shm_bytes
            remedy = 'enlarge it (docker --shm-size), or leave out wire="shared_memory"'
        else:
            return ""
        return f"a staged copy needs {nbytes:,} bytes, a rank's share of what is free in {where} is {share:,}: {remedy}"


def free_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process can take.

    The process can take them without swapping, and without being killed at the limit of a control group.
    """
    free = [kib << 10 for kib in _values(root / "proc/meminfo", "MemAvailable:")]
    for line in _text(root / "proc/self/cgroup").splitlines():
        controllers, path = line.split(":", 2)[1:]
        for controller, mount, limit, used, cache in (_V2, _V1):
            # in a container this folder is often missing: the mount is the group itself
            group = root / "sys/fs/cgroup" / mount / path.strip("/")
            for folder in (group, *group.parents) if controller in controllers.split(",") else ():
                most, now = _text(folder / limit), _text(folder / used)
                if most.isdigit() and now.isdigit():  # "max" is no limit
                    free.append(int(most) - int(now) + sum(_values(folder / "memory.stat", cache)))
    return max(0, min(free, default=1 << 62))


def _values(path: Path, name: str) -> list[int]:
    return [int(words[1]) for words in map(str.split, _text(path).splitlines()) if words[:1] == [name]]


def _text(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""


def staged_bytes(params: Sequence[TensorMeta]) -> int:
    """Return the bytes of a staged copy of these parameters."""
    return sum(map(_aligned_bytes, params))


def staged_views(params: Sequence[TensorMeta], flat: torch.Tensor) -> list[torch.Tensor]:
    """Return each parameter's memory in a staged copy, flat, in its dtype."""
    starts = accumulate(map(_aligned_bytes, params), initial=0)
    return [flat[at : at + meta.nbytes].view(meta.dtype) for meta, at in zip(params, starts, strict=False)]


def _aligned_bytes(meta: TensorMeta) -> int:
    return -(-meta.nbytes // ALIGNMENT) * ALIGNMENT


def new_memory(nbytes: int, device: torch.device | None = None) -> torch.Tensor:
    """Return uint8 memory of any content.

    The host's memory comes from numpy, which asks Linux for huge pages: packing and hashing 64 MB took 13 % less CPU time (AMD
    EPYC, numpy 2.4.6).

    Args:
        nbytes: The number of bytes.
        device: Where the memory lies; None for the host.
    """
    if device is None or device.type == "cpu":
        return torch.from_numpy(np.empty(nbytes, dtype=np.uint8))
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


# -- shared with trainers of this machine ------------------------------------------------------------------------------


def shared_views(params: Sequence[TensorMeta], where: Any) -> list[torch.Tensor]:
    """Map a rank's staged copy; return each parameter's memory.

    Args:
        params: The rank's parameters.
        where: CUDA's handle, or a path, which the rank removes once all trainers have mapped the memory.

    Raises:
        WeightsCorrupt: The path is no staged copy of this size.
        OSError: The file cannot be opened.
        WeightsError: This process cannot map the GPU's memory.
    """
    nbytes = staged_bytes(params)
    if not isinstance(where, str):
        return staged_views(params, ipc_memory(where))
    if not where.startswith(SHARED) or "/" in where[len(SHARED) :] or os.stat(where).st_size < nbytes:
        raise WeightsCorrupt(f"{where!r} is no staged copy of {nbytes} bytes; expected {SHARED}...")
    return staged_views(params, map_shared(os.open(where, os.O_RDWR | os.O_NOFOLLOW), nbytes))


def map_shared(handle: int, nbytes: int) -> torch.Tensor:
    """Map shared memory as a tensor, made as large as needed.

    Args:
        handle: A file descriptor, which is closed in any case.
        nbytes: The bytes to map.

    Raises:
        OSError: There is no room for the memory.
    """
    try:
        os.posix_fallocate(handle, 0, max(nbytes, 1))  # shared memory that is short at its first touch kills
        return torch.from_numpy(np.frombuffer(mmap.mmap(handle, max(nbytes, 1)), dtype=np.uint8)[:nbytes])
    finally:
        os.close(handle)


def gpu_lacks(nbytes: int, device: torch.device, wire: Wire) -> str:
    """Return why the device takes no staged copy; empty if it does.

    Args:
        nbytes: Bytes of the copy.
        device: The engine's device.
        wire: The wire that asks for the copy, named in the answer.
    """
    if device.type != "cuda":
        return f'wire="{wire}" asks for a GPU, and this engine is on {device}: take "shared_memory", "gloo" or "tcp"'
    torch.cuda.ipc_collect()  # frees an earlier copy that its trainers have unmapped
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0] * 4 // 5  # the engine needs some of the memory, too
    if nbytes <= free:
        return ""
    remedy = 'lower --mem-fraction-static, release the KV cache, or take wire="shared_memory"'
    return f"a staged copy needs {nbytes:,} bytes, {free:,} are to be had on {device}: {remedy}"


def ipc_handle(flat: torch.Tensor) -> list[Any]:
    """Return what one process needs to map this memory.

    The result is plain JSON. It names the GPU by its UUID, because each process numbers the GPUs that it sees.
    """
    storage: Any = flat.untyped_storage()
    handle = list(storage._share_cuda_())
    handle[_UUID] = str(torch.cuda.get_device_properties(handle[_UUID]).uuid)
    return [value.hex() if isinstance(value, bytes) else value for value in handle]


def ipc_memory(handle: Sequence[Any]) -> torch.Tensor:
    """Return the memory behind a handle: flat, uint8.

    Raises:
        WeightsError: This process does not see the handle's GPU, or cannot map the memory.
    """
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
"""A thread's stream on the GPU, and its locked buffer if it needs one."""
_BLOCK_BYTES = 1 << 20
"""The fastest block size on a host (AMD EPYC, torch 2.13): a digest finds the block in the cache."""
_SLOT_BYTES = 64 << 20
_THREADS = 2
"""Threads that go over all of a rank's memory: one core does not use all of a host's bandwidth."""


class StagedCopy:
    """Memory for one update. It is freed with this object and its views; shared memory once all have unmapped it, too.

    Links' threads write `views`, each its own parts. `change_over` runs on the scheduler's thread.
    """

    def __init__(
        self, params: Sequence[TensorMeta], *, device: torch.device, wire: Wire = "tcp", summed: bool = False
    ) -> None:
        """Allocate the memory.

        Args:
            params: The parameters that the copy holds.
            device: Where the parameters lie; with a wire of `ON_GPU` the copy lies there, too.
            wire: How bytes reach the copy.
            summed: Whether digests are of a GPU's sums.

        Raises:
            OSError: There is no room in shared memory. CUDA raises its own error without room on the GPU.
        """
        self._params, nbytes, self.summed = params, staged_bytes(params), summed
        self.shared: Callable[[], Any] = str
        """Returns what one trainer of this machine needs to map the copy; "" where bytes travel."""
        self.hide: Callable[[], object] = str
        """Removes the path of shared memory: call it once all trainers have mapped it. It goes with this object at the latest."""
        if wire == "shared_memory":
            handle, path = tempfile.mkstemp(prefix=os.path.basename(SHARED), dir=SHM)
            self.hide, self.shared = weakref.finalize(self, os.unlink, path), lambda: path
            flat = map_shared(handle, nbytes)
        else:
            flat = new_memory(nbytes, device if wire in ON_GPU else None)
        if wire == "cuda_ipc":
            self.shared = partial(ipc_handle, flat)
        self.views = staged_views(params, flat)
        """Each parameter's memory, flat, in its dtype. At first its content is arbitrary."""
        self._sealed: Sequence[str] = ()
        """The digest of each parameter once it holds what was sealed: xxh3 of its bytes, on a GPU of its sums."""
        self._lanes = list[_Lane]()
        if params and device.type == "cuda":
            slots: Sequence[torch.Tensor | None] = [None] * _THREADS
            if not flat.is_cuda and not _lock_pages(self, flat):
                slots = new_memory(_THREADS * _SLOT_BYTES).split(_SLOT_BYTES)
                # unlocked: CUDA copies once more, which is slow
                all(_lock_pages(self, slot) for slot in slots)
            self._lanes.extend((torch.cuda.Stream(device), slot) for slot in slots)

    def seal(self, *, checksums: bool = False) -> tuple[dict[str, str], dict[str, str]]:
        """Compute digests of what is staged, while the engine serves.

        Args:
            checksums: Whether to compute also what the engine's own checksums will be.

        Returns:
            Parameter name -> digest, and parameter name -> checksum (empty without `checksums`).
        """
        names = [meta.name for meta in self._params]
        with ThreadPoolExecutor(_THREADS) as pool:
            read = pool.map(partial(hashed_bytes, summed=self.summed), self.views)
            self._sealed = digests = [*pool.map(xxhash.xxh3_64_hexdigest, read)]
            if self._lanes and not self.summed:
                self._sealed = [*pool.map(tensor_digest, pool.map(cross_sums, self.views))]
            sums = pool.map(tensor_checksum, self.views if checksums else ())
            return dict(zip(names, digests, strict=True)), dict(zip(names, sums, strict=False))

    def change_over(self, targets: Sequence[torch.Tensor]) -> None:
        """Copy what was sealed last into the parameters.

        It returns once the parameters hold it. The copy stays as it is. The scheduler's thread calls.

        Args:
            targets: The parameters, flat.

        Raises:
            WeightsError: A parameter holds something else afterwards; names it.
        """
        if self._lanes:
            torch.cuda.synchronize()  # no pass reads parameters any more
        move = partial(_into_device, [*self._lanes]) if self._lanes else _copy
        with ThreadPoolExecutor(_THREADS) as pool:
            digests = [*pool.map(move, targets, self.views)]
        for meta, holds, sealed in zip(self._params, digests, self._sealed, strict=True):
            if holds != sealed:
                raise WeightsError(f"{meta.name} holds other bytes than were staged")


def make_copy(
    params: Sequence[TensorMeta], *, device: torch.device, wire: Wire, room: Room, insist: bool
) -> tuple[StagedCopy, str]:
    """Return memory for one update of these parameters.

    The copy of `nccl` lies in the host's memory if the GPU has no room for it.

    Args:
        params: The parameters that the copy holds.
        device: Where the parameters lie.
        wire: How bytes reach the copy.
        room: This rank's share of the free memory on its host.
        insist: As in `Room.lacks`.

    Returns:
        The copy, and an empty text. Without room: a copy of nothing, and the reason.
    """
    nbytes, summed = staged_bytes(params), wire in ON_GPU
    full = gpu_lacks(nbytes, device, wire) if summed else ""
    why = room.lacks(nbytes, insist=insist, shared=wire == "shared_memory")
    if summed and (wire == "cuda_ipc" or not full or device.type != "cuda"):
        why = full
    wire = "tcp" if why or full else wire
    return StagedCopy(() if why else params, device=device, wire=wire, summed=summed), why


def _lock_pages(owner: StagedCopy, flat: torch.Tensor) -> bool:
    """Have CUDA lock memory until `owner` goes; return whether it does.

    torch's own pinned memory is not used: it is rounded up to a power of two, and stays with the process.
    """
    runtime: Any = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(flat.data_ptr(), flat.nbytes, 0)):
        with suppress(RuntimeError):  # takes the error away, for which the next kernel would be blamed
            torch.ones(1, device="cuda")
        return False
    weakref.finalize(owner, runtime.cudaHostUnregister, flat.data_ptr()).atexit = False
    return True


@torch.no_grad()
def _copy(target: torch.Tensor, staged: torch.Tensor) -> str:
    seen, items = xxhash.xxh3_64(), _BLOCK_BYTES // target.itemsize
    for new, kept in zip(target.split(items), staged.split(items), strict=True):
        new.copy_(kept)
        seen.update(host_bytes(new))
    return seen.hexdigest()


@torch.no_grad()
def _into_device(lanes: list[_Lane], target: torch.Tensor, staged: torch.Tensor) -> str:
    stream, slot_N = lane = lanes.pop()  # there are as many as threads
    blocks = (flat.view(torch.uint8).split(_SLOT_BYTES) for flat in (target, staged))
    # A pool's thread begins on GPU 0; `stream` alone would go back there, and make a context on somebody else's GPU.
    with torch.cuda.device(target.device), torch.cuda.stream(stream):
        for new_N, kept_N in zip(*blocks, strict=True):
            if slot_N is not None:
                stream.synchronize()  # what it held has left; the other thread fills its own meanwhile
                kept_N = slot_N[: len(kept_N)].copy_(kept_N)
            new_N.copy_(kept_N, non_blocking=True)
        digest = tensor_digest(cross_sums(target))  # waits for all of it
    lanes.append(lane)
    return digest
