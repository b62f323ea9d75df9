"""Large buffers that are used again: their pages stay, because the first touch of fresh memory costs as much as filling it.

Anonymous memory up to one ceiling, files in a folder (mapped, and unlinked at once) beyond it. Knows nothing of shards.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from r3channel.errors import StoreFull

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_PAGE_BYTES = 4096


@dataclass(eq=False)
class _Block:
    memory: mmap.mmap
    on_file: bool
    idle_since_s: float = 0.0

    @property
    def nbytes(self) -> int:
        return len(self.memory)


@dataclass
class BufferPool:
    """`take` gives a buffer; it comes back by itself when nothing refers to it or to a part of it any more. Thread safe."""

    memory_bytes: int
    """Ceiling of anonymous memory, idle buffers included; what is in use goes first."""
    folder: Path | None = None
    """Of the files beyond `memory_bytes`; None: there are none."""
    _idle: list[_Block] = field(default_factory=list)
    _used: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    """Bytes in use, anonymous (False) and in files (True)."""
    _returned: deque[_Block] = field(default_factory=deque)
    """Filled by finalizers, on whatever thread: they must not wait for the lock."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, nbytes: int) -> _Bytes:
        """`nbytes` of any content, page aligned. Raises `StoreFull` where neither ceiling nor disk has room."""
        if not nbytes:
            return np.empty(0, np.uint8)
        with self._lock:
            self._collect()
            block = self._idle_block(nbytes) or self._fresh_block(_rounded(nbytes))
            self._used[block.on_file] += block.nbytes
        whole = np.frombuffer(block.memory, np.uint8)
        buffer = np.frombuffer(whole.data[:nbytes], np.uint8)
        weakref.finalize(buffer, self._returned.append, block).atexit = False
        return buffer

    def trim(self, *, idle_s: float) -> None:
        """Give buffers back to the system that nobody took for so long."""
        with self._lock:
            self._collect()
            limit_s = time.monotonic() - idle_s
            self._idle = [block for block in self._idle if block.idle_since_s > limit_s]

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes in `use` and `idle`, and of both those in `memory` and in a `file`."""
        with self._lock:
            self._collect()
            used, idle = sum(self._used.values()), sum(block.nbytes for block in self._idle)
            on_file = self._used[True] + sum(block.nbytes for block in self._idle if block.on_file)
        return {"use": used, "idle": idle, "memory": used + idle - on_file, "file": on_file}

    # -- with the lock held ----------------------------------------------------------------------------------------

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            block.idle_since_s = time.monotonic()
            self._used[block.on_file] -= block.nbytes
            self._idle.append(block)

    def _idle_block(self, nbytes: int) -> _Block | None:
        """The smallest that fits and wastes at most half of itself; memory before files."""
        fitting = [block for block in self._idle if nbytes <= block.nbytes <= max(2 * nbytes, _PAGE_BYTES)]
        if not fitting:
            return None
        block = min(fitting, key=lambda block: (block.on_file, block.nbytes))
        if block.on_file and self._memory_left() >= _rounded(nbytes):
            return None
        self._idle.remove(block)
        return block

    def _memory_left(self) -> int:
        return self.memory_bytes - self._used[False]

    def _fresh_block(self, nbytes: int) -> _Block:
        on_file = nbytes > self._memory_left()
        if not on_file:
            self._make_room(nbytes)
        return _Block(self._file(nbytes) if on_file else _anonymous(nbytes), on_file)

    def _make_room(self, nbytes: int) -> None:
        """Idle anonymous buffers of the wrong size go, the oldest first."""
        idle = [block for block in self._idle if not block.on_file]
        held = self._used[False] + sum(block.nbytes for block in idle)
        for block in sorted(idle, key=lambda block: block.idle_since_s):
            if held + nbytes <= self.memory_bytes:
                return
            self._idle.remove(block)
            held -= block.nbytes

    def _file(self, nbytes: int) -> mmap.mmap:
        if self.folder is None:
            raise StoreFull(
                f"{nbytes} bytes are needed, {self._used[False]} of {self.memory_bytes} are in use"
            )
        with tempfile.TemporaryFile(dir=self.folder, prefix="shard-") as file:
            try:  # not sparse: a write into a hole on a full disk would end the process
                os.posix_fallocate(file.fileno(), 0, nbytes)
            except OSError as error:
                raise StoreFull(f"no room for a shard of {nbytes} bytes in {self.folder}: {error}") from error
            return mmap.mmap(file.fileno(), nbytes)


def _anonymous(nbytes: int) -> mmap.mmap:
    """Private, not shared (Python's default): only then does the kernel count it as anonymous, and use huge pages as asked."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _rounded(nbytes: int) -> int:
    """Up to an eighth more, so that the buffers of steps of nearly equal size fit one another."""
    step = max(_PAGE_BYTES, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step
