"""Memory for rows, up to a ceiling of live bytes. It knows nothing of what lies in it, and nothing outlives the process.

Blocks are allocations of their own. So freed memory is reusable whatever its neighbours do, and no block is refused while live
bytes and its own fit the ceiling. Freed memory is kept for the next block of its size, because the first touch of fresh memory
costs more than filling it. It is given up where live bytes need the room.
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
"""Blocks below this size are not kept: the C library keeps their memory itself."""
_Memory = np.ndarray[Any, np.dtype[np.uint8]]
_Freed = list[tuple[float, _Memory]]


@dataclass(eq=False, slots=True)
class Block:
    """Memory of one frame, from `allocate` to `free`.

    Its view may not be used afterwards.
    """

    view: memoryview
    """Exactly as many bytes as were asked for, at an address that is a multiple of 16."""
    store: Store
    memory: _Memory | None
    """The allocation, which is used again; None once the block is freed."""
    counted: int

    def free(self) -> None:
        """Free the memory. Any thread may call; a second call does nothing."""
        self.store.release(self)


@dataclass(eq=False, slots=True)
class _Waiter:
    nbytes: int
    granted: bool = False


@dataclass(eq=False)
class Store:
    """Blocks up to a ceiling of live bytes. States: OPEN -> CLOSED.

    Any thread may call. The store's lock is a leaf: under it nothing else is taken or waited for.
    """

    ceiling_bytes: int
    live_bytes: int = 0
    _blocks: int = 0
    _idle: dict[int, _Freed] = field(default_factory=dict[int, _Freed])
    """Freed memory by its size, each with the time when it was freed, the longest idle first. Sizes have eight steps for each
    power of two."""
    _idle_bytes: int = 0
    _closed: bool = False
    _waiting: deque[_Waiter] = field(default_factory=deque[_Waiter])
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def allocate(self, nbytes: int, *, beside: int = 0, timeout_s: float = 0.0, what: str = "") -> Block:
        """Allocate memory of any content, after waiting for room.

        Who waits gets room in the order of arrival, and takes it at once.

        Args:
            nbytes: Bytes of the block.
            beside: Bytes that the owner keeps elsewhere as long as the block. They are counted with it.
            timeout_s: Seconds to wait for room.
            what: Whose memory it is, for the error.

        Raises:
            StoreFull: There was no room in time.
            UsageError: The store is closed.
        """
        counted, size = nbytes + beside, _round_up(nbytes)
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
        """Release memory to the system that was idle for `idle_s` seconds."""
        limit_s = time.monotonic() - idle_s
        with self._changed:
            while self._idle and self._idle[self._oldest()][0][0] <= limit_s:
                self._take_out(self._oldest(), 0)

    def close(self) -> None:
        """End every wait. The call may be repeated.

        Blocks stay memory until nobody has a view of them.
        """
        with self._changed:
            self._closed = True
            self._idle.clear()
            self._idle_bytes = 0
            self._changed.notify_all()

    def __len__(self) -> int:
        """Return how many blocks are not freed."""
        return self._blocks

    @property
    def held_bytes(self) -> int:
        """Return live bytes, and those that are kept for later use."""
        return self.live_bytes + self._idle_bytes

    # -- room ------------------------------------------------------------------------------------------------------

    def _take_room(self, nbytes: int, *, timeout_s: float, what: str) -> None:
        """Wait for room, then count it. The caller holds the lock."""
        if self._closed:
            raise UsageError("the store is closed")
        if nbytes > self.ceiling_bytes:  # it never fits, and would hold up all others
            timeout_s = 0.0
        deadline_s, mine = time.monotonic() + timeout_s, _Waiter(nbytes)
        self._waiting.append(mine)
        self._grant()
        try:
            while not (mine.granted or self._closed) and (left_s := deadline_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
        finally:  # also after a signal, whose handler raises here
            if not mine.granted:
                self._waiting.remove(mine)
                self._grant()  # there may be room for whoever waited behind this one
        if mine.granted:
            return
        if self._closed:
            raise UsageError("the store is closed")
        raise StoreFull(
            f"{what}: waited {timeout_s:.1f} s for {nbytes} bytes; {self._blocks} blocks hold {self.live_bytes} of the "
            f"{self.ceiling_bytes} that store_bytes allows. Seal and deliver steps, discard samples, or raise store_bytes"
        )

    def _grant(self) -> None:
        """Give room in the order of arrival. The caller holds the lock."""
        while self._waiting and not self._closed:
            if self._waiting[0].nbytes > self.ceiling_bytes - self.live_bytes:
                return  # the first goes first, however small the others are
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

    def release(self, block: Block) -> None:
        with self._changed:
            memory = block.memory
            if memory is None:
                return
            block.view, block.memory = memoryview(b""), None
            if len(memory) >= SMALL_BYTES and not self._closed:
                self._idle.setdefault(len(memory), []).append((time.monotonic(), memory))
                self._idle_bytes += len(memory)
            self._give_back(block.counted)  # takes the lock a second time, which a Condition allows
            self._make_way()

    def _used_before(self, size: int) -> _Memory | None:
        """Return this size's memory freed last. The caller holds the lock."""
        if size in self._idle:
            return self._take_out(size, -1)
        self._make_way()
        return None

    def _make_way(self) -> None:
        """Drop idle memory that live bytes need. The caller holds the lock."""
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


def _round_up(nbytes: int) -> int:
    """Return the size rounded up, by an eighth at most.

    So memory fits the next frame of nearly the same size.

    >>> [_round_up(n) for n in (1000, 200_000, 1_000_000)]
    [1000, 212992, 1048576]
    """
    if nbytes < SMALL_BYTES:
        return nbytes
    step = 1 << (nbytes.bit_length() - 4)
    return -(-nbytes // step) * step
