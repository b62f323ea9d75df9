"""Memory for rows, up to a ceiling of live bytes. Knows nothing of what lies in it, and keeps nothing over the process's end.

Blocks are allocations of their own, so what is freed is reusable whatever its neighbours do, and none is refused while live
bytes and its own fit the ceiling. Freed ones are kept for the next of their size: the first touch of fresh memory costs more
than filling it, and given up where live bytes need the room.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from r3channel.errors import StoreFull, UsageError

SMALL_BYTES = 1 << 17
"""Below it the C library keeps freed memory itself."""
_Memory = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(eq=False, slots=True)
class Block:
    """Memory of one frame, from `allocate` to `free`. Its view may not be used afterwards."""

    view: memoryview
    """Exactly as many bytes as were asked for, at a multiple of 16."""
    _store: Store
    _memory: _Memory | None
    """To be used again; None once it is freed."""
    _counted: int

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
    live_bytes: int = 0
    _blocks: int = 0
    _idle: dict[int, list[tuple[float, _Memory]]] = field(default_factory=dict)
    """Freed memory by its size, with the time since when; the longest idle first. There are eight sizes of each magnitude."""
    _idle_bytes: int = 0
    _closed: bool = False
    _waiting: deque[_Waiter] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def allocate(self, nbytes: int, *, beside: int = 0, timeout_s: float = 0.0, what: str = "") -> Block:
        """Memory of any content. Waits for room in the order of arrival; what is granted is taken at once.

        `beside`: bytes that its owner keeps elsewhere as long as the block, counted with it. Raises StoreFull after `timeout_s`.
        """
        counted, size = nbytes + beside, _rounded(nbytes)
        with self._changed:
            self._take_room(counted, timeout_s=timeout_s, what=what)
            memory = self._used_before(size)
        try:
            if memory is None:
                memory = np.empty(size, np.uint8)
            return Block(memory.data[:nbytes], self, memory, counted)
        except BaseException:
            self._give_back(counted)
            raise

    def trim(self, *, idle_s: float) -> None:
        """Give memory back to the system that nobody took for so long."""
        limit_s = time.monotonic() - idle_s
        with self._changed:
            while self._idle and self._idle[self._oldest()][0][0] <= limit_s:
                self._take_out(self._oldest(), 0)

    def close(self) -> None:
        """End every wait; blocks stay memory until nobody has a view of them. Idempotent."""
        with self._changed:
            self._closed = True
            self._idle.clear()
            self._idle_bytes = 0
            self._changed.notify_all()

    def __len__(self) -> int:
        """Blocks that are not freed."""
        return self._blocks

    @property
    def held_bytes(self) -> int:
        """Live bytes, and those that are kept for later use."""
        return self.live_bytes + self._idle_bytes

    # -- room ------------------------------------------------------------------------------------------------------

    def _take_room(self, nbytes: int, *, timeout_s: float, what: str) -> None:
        """With the lock held, which is given up while it waits."""
        if self._closed:
            raise UsageError("the store is closed")
        if not self._waiting and nbytes <= self.ceiling_bytes - self.live_bytes:
            self.live_bytes += nbytes
            self._blocks += 1
            return
        if nbytes > self.ceiling_bytes:  # it would hold up all others for nothing
            timeout_s = 0.0
        deadline_s, mine = time.monotonic() + timeout_s, _Waiter(nbytes)
        self._waiting.append(mine)
        while not (mine.granted or self._closed) and (left_s := deadline_s - time.monotonic()) > 0:
            self._changed.wait(left_s)
        if mine.granted:
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
        while self._waiting and not self._closed:
            if self._waiting[0].nbytes > self.ceiling_bytes - self.live_bytes:
                return
            waiter = self._waiting.popleft()
            waiter.granted = True
            self.live_bytes += waiter.nbytes
            self._blocks += 1
            self._changed.notify_all()

    def _give_back(self, nbytes: int) -> None:
        with self._changed:
            self.live_bytes -= nbytes
            self._blocks -= 1
            self._grant()

    # -- memory that is used again ---------------------------------------------------------------------------------

    def _free(self, block: Block) -> None:
        with self._changed:
            memory = block._memory
            if memory is None:
                return
            block.view, block._memory = memoryview(b""), None
            if len(memory) >= SMALL_BYTES and not self._closed:
                self._idle.setdefault(len(memory), []).append((time.monotonic(), memory))
                self._idle_bytes += len(memory)
            self._give_back(block._counted)  # the lock may be taken twice
            self._make_way()

    def _used_before(self, size: int) -> _Memory | None:
        """With the lock held: the memory of this size that was freed last."""
        if size in self._idle:
            return self._take_out(size, -1)
        self._make_way()
        return None

    def _make_way(self) -> None:
        """With the lock held: what is live takes the place of what is only kept."""
        while self._idle and self.held_bytes > self.ceiling_bytes:
            self._take_out(self._oldest(), 0)

    def _oldest(self) -> int:
        return min(self._idle, key=lambda size: self._idle[size][0][0])

    def _take_out(self, size: int, at: int) -> _Memory:
        _, memory = self._idle[size].pop(at)
        self._idle_bytes -= size
        if not self._idle[size]:
            del self._idle[size]
        return memory


def _rounded(nbytes: int) -> int:
    """Up to an eighth more, so that memory fits the next frame of nearly the same size.

    >>> [_rounded(n) for n in (1000, 200_000, 1_000_000)]
    [1000, 212992, 1048576]
    """
    if nbytes < SMALL_BYTES:
        return nbytes
    step = 1 << (nbytes.bit_length() - 4)
    return -(-nbytes // step) * step
