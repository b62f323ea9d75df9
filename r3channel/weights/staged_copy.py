"""A rank's staged copy: where an update lies beside the parameters, and how they become what it holds.

Parameters on a GPU are written out of memory that CUDA has locked. What they hold then is summed there, and only the sums come
back. Two threads with a stream each keep the way to the GPU busy: one copies while the other's sums are awaited. Where the whole
copy cannot be locked, each thread has a locked buffer. Knows no link.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import xxhash

from r3channel.errors import WeightsError
from r3channel.weights import memory
from r3channel.weights.checksums import cross_sums, hashed_bytes, host_bytes, tensor_checksum, tensor_digest
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.memory import ON_GPU, Wire

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
        self._params, nbytes, self.summed = params, memory.staged_bytes(params), summed
        self.shared: Callable[[], Any] = str
        """What one trainer of this machine needs to map the copy; "" where bytes travel."""
        self.hide: Callable[[], object] = str
        """`hide` takes a path away: once all trainers have the memory, or with this object."""
        if wire == "shared_memory":
            handle, path = tempfile.mkstemp(prefix=os.path.basename(memory.SHARED), dir=memory.SHM)
            self.hide, self.shared = weakref.finalize(self, os.unlink, path), lambda: path
            flat = memory.mapped(handle, nbytes)
        elif wire in ON_GPU:
            flat = memory.new_memory(nbytes, device)
            self.shared = partial(memory.ipc_handle, flat) if wire == "cuda_ipc" else str
        else:
            flat = memory.new_memory(nbytes)
        self.views = memory.staged_views(params, flat)
        """Each parameter's memory, flat, in its dtype. Of any content at first."""
        self._sealed: Sequence[str] = ()
        """What each parameter must give once it holds what was sealed: xxh3, on a GPU that of its sums."""
        self._lanes = list[_Lane]()
        if params and device.type == "cuda":
            slots: Sequence[torch.Tensor | None] = [None] * _THREADS
            if not flat.is_cuda and not _locked(self, flat):
                slots = memory.new_memory(_THREADS * _SLOT_BYTES).split(_SLOT_BYTES)
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


def _locked(owner: StagedCopy, memory: torch.Tensor) -> bool:
    """Have CUDA lock memory until `owner` goes. False where that is refused, as where memory is short.

    Not torch's own pinned memory: that is rounded up to a power of two, and stays with the process.
    """
    runtime: Any = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
        with suppress(RuntimeError):  # takes the error away, for which the next kernel would be blamed
            torch.ones(1, device="cuda")
        return False
    weakref.finalize(owner, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
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
