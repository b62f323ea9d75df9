"""Memory that a trainer process and an engine process of one device both see: only a name travels, no byte is copied.

On the CPU it is a file under /dev/shm, mapped by both. On a CUDA device it is one allocation, shared by a CUDA IPC handle;
that half is written against torch 2.13.0 (`UntypedStorage._share_cuda_`, `_new_shared_cuda`) and was never run. One arena
holds all tensors of a bucket, because opening a handle is dear and models have thousands of tensors.

The owner holds a lock on its file, which the kernel drops when the process ends in whatever way; what a killed one left is
removed by the next process that makes an arena.

The rule of use: the owner writes; the other side reads, and says when it has finished; only then does the owner write
again. Before its last word the reader drops its views and closes. Nothing here enforces it: see `refit`.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch

from r3channel.errors import ConfigError, TransportError

FOLDER = "/dev/shm"
_PREFIX = "r3channel-locked-arena-"
_NAME = re.compile(_PREFIX + "[0-9a-f]{32}")


class Arena(Protocol):
    """Flat uint8 memory with a handle."""

    @property
    def buffer_N(self) -> torch.Tensor:
        """The memory; invalid after `close`."""
        ...

    @property
    def handle(self) -> dict[str, Any]:
        """Plain values from which `open_arena` maps the same memory in another process."""
        ...

    def close(self) -> None:
        """Give it up; idempotent. On the owner's side the handle ends too; mappings that exist go on."""
        ...


class SharedArena:
    """Host memory, shared by name. Readable by this user's processes only.

    >>> with contextlib.closing(SharedArena.create(16)) as mine, contextlib.closing(open_arena(mine.handle)) as theirs:
    ...     mine.buffer_N[3] = 7
    ...     theirs.buffer_N.tolist()[:4]
    [0, 0, 0, 7]
    """

    def __init__(self, name: str, nbytes: int, descriptor: int, *, owner: bool) -> None:
        """`descriptor` is ours from now on; the owner's holds the lock."""
        self._name, self._nbytes, self._owner = name, nbytes, owner
        self._descriptor = descriptor
        try:
            self._map = mmap.mmap(descriptor, max(1, nbytes))
        finally:
            if not owner:
                os.close(descriptor)
        # Through numpy, which holds on to the mapping: `torch.frombuffer` lets it be closed under living tensors.
        flat_N = np.frombuffer(self._map, dtype=np.uint8)
        self._buffer_N: torch.Tensor | None = torch.from_numpy(flat_N)[:nbytes]

    @classmethod
    def create(cls, nbytes: int) -> SharedArena:
        """New zeroed memory; raises OSError when /dev/shm has not that much left."""
        _remove_left_behind()
        name = f"{_PREFIX}{secrets.token_hex(16)}"
        path = hidden = f"{FOLDER}/{name}.new"
        descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Allocated, not sparse: a write into a hole of a full file system ends the process with a signal.
            os.posix_fallocate(descriptor, 0, max(1, nbytes))
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            path = f"{FOLDER}/{name}"
            os.rename(hidden, path)
            return cls(name, nbytes, descriptor, owner=True)
        except OSError:
            os.close(descriptor)
            os.unlink(path)
            raise

    @classmethod
    def open(cls, handle: Mapping[str, Any]) -> SharedArena:
        """Map another process's memory. Raises ConfigError for a handle that none of ours gave, TransportError when gone."""
        name, nbytes = str(handle.get("name")), handle.get("nbytes")
        if not _NAME.fullmatch(name) or type(nbytes) is not int or nbytes < 0:
            raise ConfigError(f"shared memory handle {str(handle)[:200]}: expected the one of a SharedArena")
        try:
            descriptor = os.open(f"{FOLDER}/{name}", os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise TransportError(
                f"shared memory {name} is gone ({error}); did its owner close it, or die?"
            ) from error
        held = os.fstat(descriptor).st_size
        if held < nbytes:
            os.close(descriptor)
            raise TransportError(f"shared memory {name} holds {held} bytes, the handle says {nbytes}")
        return cls(name, nbytes, descriptor, owner=False)

    @property
    def buffer_N(self) -> torch.Tensor:
        if self._buffer_N is None:
            raise TransportError(f"shared memory {self._name} is closed here")
        return self._buffer_N

    @property
    def handle(self) -> dict[str, Any]:
        return {"kind": "shm", "name": self._name, "nbytes": self._nbytes}

    def close(self) -> None:
        self._buffer_N = None
        with contextlib.suppress(BufferError):  # a view is alive: the mapping goes with it
            self._map.close()
        if self._owner:
            self._owner = False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{FOLDER}/{self._name}")
            os.close(self._descriptor)


class CudaArena:
    """Device memory, shared by a CUDA IPC handle. Not run: needs two processes on one GPU.

    The reader finds its own number for the device by UUID, because processes may see devices in another order. CUDA IPC
    does not cover memory of CUDA's virtual memory calls (`expandable_segments`).
    """

    def __init__(self, buffer_N: torch.Tensor, shared: tuple[Any, ...] | None) -> None:
        self._buffer_N: torch.Tensor | None = buffer_N
        self._shared = shared

    @classmethod
    def create(cls, nbytes: int, device: torch.device) -> CudaArena:
        buffer_N = torch.empty(nbytes, dtype=torch.uint8, device=device)
        storage: Any = buffer_N.untyped_storage()
        return cls(buffer_N, storage._share_cuda_())

    @classmethod
    def open(cls, handle: Mapping[str, Any]) -> CudaArena:
        """Map another process's memory. Raises ConfigError when this process does not see the device."""
        device = next((i for i in range(torch.cuda.device_count()) if _uuid(i) == handle["uuid"]), None)
        if device is None:
            raise ConfigError(f"CUDA memory on device {handle['uuid']}, which this process does not see")
        words = [bytes.fromhex(w["hex"]) if isinstance(w, dict) else w for w in handle["words"]]
        storage_type: Any = torch.UntypedStorage
        storage = storage_type._new_shared_cuda(device, *words)
        flat_N = torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}").set_(storage)
        return cls(flat_N[: handle["nbytes"]], None)

    @property
    def buffer_N(self) -> torch.Tensor:
        if self._buffer_N is None:
            raise TransportError("CUDA memory is closed here")
        return self._buffer_N

    @property
    def handle(self) -> dict[str, Any]:
        if self._shared is None:
            raise TransportError("only the owner of CUDA memory has its handle")
        device, *words = self._shared
        plain = [{"hex": word.hex()} if isinstance(word, bytes) else word for word in words]
        return {"kind": "cuda", "uuid": _uuid(device), "nbytes": self.buffer_N.numel(), "words": plain}

    def close(self) -> None:
        """The device must have finished with it: the caller synchronises first."""
        self._buffer_N = None


def create_arena(nbytes: int, device: torch.device) -> Arena:
    """Memory on `device` that another process of this machine may map."""
    return CudaArena.create(nbytes, device) if device.type == "cuda" else SharedArena.create(nbytes)


def open_arena(handle: Mapping[str, Any]) -> Arena:
    """Map the memory of another process by its handle."""
    return CudaArena.open(handle) if handle.get("kind") == "cuda" else SharedArena.open(handle)


@cache
def _remove_left_behind() -> None:
    """Once per process: this user's arenas whose owner has ended without a close. One that is visible is locked as long
    as its owner lives."""
    for name in filter(_NAME.fullmatch, os.listdir(FOLDER)):
        with contextlib.suppress(OSError):
            descriptor = os.open(f"{FOLDER}/{name}", os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(f"{FOLDER}/{name}")
            finally:
                os.close(descriptor)


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
