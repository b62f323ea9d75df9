"""Memory for rows, up to a ceiling of live bytes. Knows nothing of what lies in it, and keeps nothing over the process's end.

Blocks are allocations of their own, so what is freed is reusable whatever its neighbours do, and none is refused while live
bytes and its own fit the ceiling. Freed ones are kept for the next of their size: the first touch of fresh memory costs more
than filling it, and given up where live bytes need the room.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from r3channel.errors import StoreFull, UsageError

SMALL_BYTES = 1 << 17
"""Below it the C library keeps freed memory itself, and bytes that are adopted stay where they are."""
_Memory = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(eq=False, slots=True)
class Block:
    """Memory of one frame, from `allocate` or `adopt` to `free`. Its view may not be used afterwards."""

    view: memoryview
    """Exactly as many bytes as were asked for, at a multiple of 16."""
    _store: Store
    _memory: _Memory | None
    """To be used again; None where it is somebody else's."""
    _freed: bool = False

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
    _idle: OrderedDict[int, tuple[float, _Memory]] = field(default_factory=OrderedDict)
    """Freed memory by its number, with the time since when; the longest idle first."""
    _idle_bytes: int = 0
    _of_size: dict[int, list[int]] = field(default_factory=dict)
    """Size -> numbers of idle memory, the one freed last at the end."""
    _serial: int = 0
    _closed: bool = False
    _waiting: deque[_Waiter] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def allocate(self, nbytes: int, *, timeout_s: float = 0.0, what: str = "") -> Block:
        """Memory of any content. Waits for room in the order of arrival; what is granted is taken at once.

        Raises StoreFull after `timeout_s`.
        """
        self._take_room(nbytes, timeout_s=timeout_s, what=what)
        size = _rounded(nbytes)
        with self._changed:
            memory = self._used_before(size)
        try:
            if memory is None:
                memory = np.empty(size, np.uint8)
            return Block(memory.data[:nbytes], self, memory)
        except BaseException:
            self._give_back(nbytes)
            raise

    def adopt(self, data: bytes, *, timeout_s: float = 0.0, what: str = "") -> Block:
        """These bytes, counted like any block: as they are where they are few, else a copy in memory that was used before.
        Raises as `allocate`."""
        if len(data) < SMALL_BYTES:
            self._take_room(len(data), timeout_s=timeout_s, what=what)
            with self._changed:
                self._make_way()
            return Block(memoryview(data), self, None)
        block = self.allocate(len(data), timeout_s=timeout_s, what=what)
        np.copyto(np.frombuffer(block.view, np.uint8), np.frombuffer(data, np.uint8))  # other threads go on
        return block

    def trim(self, *, idle_s: float) -> None:
        """Give memory back to the system that nobody took for so long."""
        limit_s = time.monotonic() - idle_s
        with self._changed:
            while self._idle and next(iter(self._idle.values()))[0] <= limit_s:
                self._drop_oldest()

    def close(self) -> None:
        """End every wait; blocks stay memory until nobody has a view of them. Idempotent."""
        with self._changed:
            self._closed = True
            self._idle.clear()
            self._of_size.clear()
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
        timeout_s = (
            timeout_s if nbytes <= self.ceiling_bytes else 0.0
        )  # it would hold up all others for nothing
        deadline_s, mine = time.monotonic() + timeout_s, _Waiter(nbytes)
        with self._changed:
            if self._closed:
                raise UsageError("the store is closed")
            self._waiting.append(mine)
            self._grant()
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
        fits = self.ceiling_bytes - self.live_bytes
        while self._waiting and not self._closed and self._waiting[0].nbytes <= fits:
            waiter = self._waiting.popleft()
            waiter.granted = True
            self.live_bytes += waiter.nbytes
            fits -= waiter.nbytes
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
            if block._freed:
                return
            nbytes, memory = len(block.view), block._memory
            block.view, block._memory, block._freed = memoryview(b""), None, True
            if memory is not None and len(memory) >= SMALL_BYTES and not self._closed:
                self._serial += 1
                self._idle[self._serial] = time.monotonic(), memory
                self._of_size.setdefault(len(memory), []).append(self._serial)
                self._idle_bytes += len(memory)
            self._give_back(nbytes)  # the lock may be taken twice
            self._make_way()

    def _used_before(self, size: int) -> _Memory | None:
        """With the lock held: the memory of this size that was freed last."""
        numbers = self._of_size.get(size)
        if not numbers:
            self._make_way()
            return None
        number = numbers.pop()
        self._idle_bytes -= size
        return self._idle.pop(number)[1]

    def _make_way(self) -> None:
        """With the lock held: what is live takes the place of what is only kept."""
        while self._idle and self.held_bytes > self.ceiling_bytes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        number, (_, memory) = self._idle.popitem(last=False)
        self._of_size[len(memory)].remove(number)
        self._idle_bytes -= len(memory)


def _rounded(nbytes: int) -> int:
    """Up to an eighth more, so that memory fits the next frame of nearly the same size.

    >>> [_rounded(n) for n in (1000, 200_000, 1_000_000)]
    [1000, 212992, 1048576]
    """
    if nbytes < SMALL_BYTES:
        return nbytes
    step = 1 << (nbytes.bit_length() - 4)
    return -(-nbytes // step) * step
