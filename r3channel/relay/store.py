"""Memory for rows, up to a ceiling of live bytes. Knows nothing of what lies in it, and keeps nothing over the process's end.

Blocks come from the C library's allocator: what is freed is reused whatever its neighbours do, and a block is never refused while
live bytes and its own fit the ceiling. Beyond `memory_bytes` a block is a mapped temporary file of its own, which has no name.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from r3channel.errors import StoreFull, UsageError

_TRIM_SHARE = 0.1
"""Of the ceiling: so much is freed before the C library is asked to give free pages back. They are warm: touching fresh ones costs as
much as filling them, so it is asked seldom."""
_KEPT_MAPS = 16_000
"""Mapped files; a process may have 65,530 mappings (vm.max_map_count), and others need theirs."""


@dataclass(eq=False, slots=True)
class Block:
    """Memory of one frame. `free` gives it back; a view that somebody still has stays memory, and is nobody else's."""

    view: memoryview
    """Exactly as many bytes as were asked for, at a multiple of 16."""
    _store: Store
    _on_file: bool = False

    def free(self) -> None:
        """Any thread; idempotent."""
        self._store._free(self)


@dataclass(eq=False, slots=True)
class _Waiter:
    nbytes: int
    granted: bool = False


@dataclass(eq=False)
class Store:
    """OPEN -> CLOSED. Any thread. Its lock is a leaf: nothing else is taken or waited for under it."""

    ceiling_bytes: int
    memory_bytes: int
    """Of the live bytes, what lies in anonymous memory."""
    live_bytes: int = 0
    _in_memory: int = 0
    _files: int = 0
    _blocks: int = 0
    _freed: int = 0
    """Bytes since the C library was last asked to give pages back."""
    _closed: bool = False
    _waiting: deque[_Waiter] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def allocate(self, nbytes: int, *, timeout_s: float = 0.0, what: str = "") -> Block:
        """Memory of any content. Waits for room in the order of arrival; what is granted is taken at once.

        Raises StoreFull after `timeout_s`, or where a disk has no room for what is beyond `memory_bytes`.
        """
        return self._block(nbytes, None, timeout_s=timeout_s, what=what)

    def adopt(self, data: bytes, *, timeout_s: float = 0.0, what: str = "") -> Block:
        """These bytes as they are, counted like any block; copied only where memory has no room. Raises as `allocate`."""
        return self._block(len(data), data, timeout_s=timeout_s, what=what)

    def trim(self) -> None:
        """Give free memory back to the system."""
        with self._changed:
            self._freed = 0
        _give_pages_back()

    def close(self) -> None:
        """End every wait; blocks stay memory until nobody has a view of them. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        """Blocks that are not freed."""
        return self._blocks

    def _block(self, nbytes: int, data: bytes | None, *, timeout_s: float, what: str) -> Block:
        self._take_room(nbytes, timeout_s=timeout_s, what=what)
        with self._changed:
            on_file = self._in_memory + nbytes > self.memory_bytes and self._files < _KEPT_MAPS
            self._in_memory += 0 if on_file else nbytes
            self._files += on_file
        try:
            return Block(self._memory(nbytes, data, on_file=on_file, what=what), self, on_file)
        except BaseException:
            self._give_back(nbytes, on_file=on_file)
            raise

    def _memory(self, nbytes: int, data: bytes | None, *, on_file: bool, what: str) -> memoryview:
        if not on_file:
            return memoryview(data) if data is not None else np.empty(nbytes, np.uint8).data
        try:
            view = _temporary(nbytes)
        except OSError as error:
            raise StoreFull(f"{what}: no room for {nbytes} bytes in a temporary file: {error}") from error
        if data is not None:
            view[:] = data
        return view

    def _take_room(self, nbytes: int, *, timeout_s: float, what: str) -> None:
        deadline_s, mine = time.monotonic() + timeout_s, _Waiter(nbytes)
        with self._changed:
            self._waiting.append(mine)
            self._grant()
            while not (mine.granted or self._closed) and (left_s := deadline_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            if mine.granted:
                self._blocks += 1
                return
            self._waiting.remove(mine)
            self._grant()  # whoever waited behind this one
            if self._closed:
                raise UsageError("the store is closed")
            raise StoreFull(
                f"{what}: waited {timeout_s:.1f} s for {nbytes} bytes; {self._blocks} blocks hold {self.live_bytes} of the "
                f"{self.ceiling_bytes} that store_bytes allows. Seal and deliver steps, discard samples, or raise store_bytes"
            )

    def _grant(self) -> None:
        """With the lock held: the first of those who wait goes first, however small the others are."""
        while self._waiting and self.live_bytes + self._waiting[0].nbytes <= self.ceiling_bytes:
            waiter = self._waiting.popleft()
            waiter.granted = True
            self.live_bytes += waiter.nbytes
            self._changed.notify_all()

    def _free(self, block: Block) -> None:
        with self._changed:
            nbytes, block.view = len(block.view), memoryview(b"")
        if nbytes:
            self._give_back(nbytes, on_file=block._on_file)

    def _give_back(self, nbytes: int, *, on_file: bool) -> None:
        with self._changed:
            self.live_bytes -= nbytes
            self._blocks -= 1
            self._in_memory -= 0 if on_file else nbytes
            self._files -= on_file
            self._freed += nbytes
            much = self._freed > _TRIM_SHARE * self.ceiling_bytes
            self._grant()
        if much:
            self.trim()


def _temporary(nbytes: int) -> memoryview:
    """A mapped file that is gone with the last view. Allocated, not sparse: a write into a hole on a full disk ends the process."""
    if not nbytes:
        return memoryview(bytearray())
    with tempfile.TemporaryFile(prefix="r3channel-") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return memoryview(mmap.mmap(file.fileno(), nbytes))


def _give_pages_back() -> None:
    library: Any = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # glibc
        library.malloc_trim(0)
