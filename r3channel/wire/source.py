"""Byte sources of known length, read front to back, from memory or a socket.

Whoever reads a frame takes its few numbers first, and lets the rows be written where they are to stay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

_SKIPPED_BYTES = 1 << 16


class Source(ABC):
    """A source of bytes, for one thread at a time."""

    left: int
    """Bytes that were not taken yet."""

    @abstractmethod
    def fill(self, out_N: memoryview) -> None:
        """Write the next `len(out_N)` bytes into memory of the caller.

        Args:
            out_N: Contiguous bytes, at most `left`.
        """

    def take(self, nbytes: int) -> memoryview:
        """Return the next `nbytes` bytes.

        Args:
            nbytes: At most `left`.

        Returns:
            Fresh memory, or the bytes as they lie where they are in memory already.
        """
        out_N = memoryview(bytearray(nbytes))
        self.fill(out_N)
        return out_N

    def skip(self) -> None:
        """Read what is left and forget it."""
        scratch_N = memoryview(bytearray(min(self.left, _SKIPPED_BYTES)))
        while self.left:
            self.fill(scratch_N[: self.left])


class Pieces(Source):
    """A source whose bytes come in pieces of its own size: what was not asked for yet lies ahead."""

    _ahead = memoryview(b"")

    @abstractmethod
    def receive(self, out_N: memoryview) -> int:
        """Receive some of the next bytes, one at least.

        Args:
            out_N: Where they may be written.

        Returns:
            How many were written there; 0 where they lie ahead instead.
        """

    def fill(self, out_N: memoryview) -> None:
        while out_N:
            if count := min(len(self._ahead), len(out_N)):
                out_N[:count], self._ahead = self._ahead[:count], self._ahead[count:]
            else:
                count = self.receive(out_N)
            out_N = out_N[count:]
            self.left -= count


class InHand(Source):
    """Bytes in memory; they must not change while they are read.

    >>> source = InHand(b"abcdef")
    >>> bytes(source.take(2)), source.left, bytes(Part(source, 3).take(3)), source.left
    (b'ab', 4, b'cde', 1)
    """

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._rest = memoryview(data).cast("B")
        self.left = len(self._rest)

    def take(self, nbytes: int) -> memoryview:
        taken, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        self.left = len(self._rest)
        return taken

    def fill(self, out_N: memoryview) -> None:
        out_N[:] = self.take(len(out_N))


class Part(Source):
    """The next `nbytes` of another source, as a source of their own."""

    def __init__(self, source: Source, nbytes: int) -> None:
        self._source, self.left = source, nbytes

    def take(self, nbytes: int) -> memoryview:
        self.left -= nbytes
        return self._source.take(nbytes)

    def fill(self, out_N: memoryview) -> None:
        self.left -= len(out_N)
        self._source.fill(out_N)
