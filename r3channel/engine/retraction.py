"""A request's rows over a retraction: kept beside it when its slots are released, put back as it is prefilled again.

The tokens that a retracted request has answered keep their log-probabilities, which belong to the rows of the passes that made
them; the pass that prefills it again may have other weights, and other sums in any case. The row of the last answered token
alone comes from there, as its successor's log-probability does. Knows no engine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

from r3channel.engine.capture import KeptRows, SlotRows
from r3channel.wire.routing import Ids


class Kept:
    """What one request has kept, until it ends."""

    __slots__ = ("__weakref__", "_parts", "seen")

    def __init__(self) -> None:
        self._parts = list[KeptRows]()
        self.seen = 0
        """Rows before this position were kept or given up; what their slots hold since then was computed again."""

    def add(self, rows: KeptRows) -> None:
        self._parts.append(rows)

    def within(self, start: int, end: int) -> Iterator[KeptRows]:
        """The rows among positions [start, end)."""
        return (rows for part in self._parts if (rows := part.of(start, end)))


class KeptStore:
    """Bounds what all requests keep. One thread: the scheduler's."""

    def __init__(self, rows: SlotRows, *, limit_bytes: int, counted: Callable[[str, int], None]) -> None:
        """`counted` is told how many rows were kept (`kept`), and how many found no room (`given_up`)."""
        self._rows, self._limit_bytes, self._counted = rows, limit_bytes, counted
        self.nbytes = 0
        """Given back as requests end."""

    def keep(self, kept: Kept, slots_T: Ids, *, first_row: int) -> None:
        """Copy the rows of these slots, unless that exceeds the ceiling."""
        nbytes = len(slots_T) * self._rows.row_bytes
        if self.nbytes + nbytes > self._limit_bytes:
            self._counted("given_up", len(slots_T))
            return
        kept.add(self._rows.keep(slots_T, first_row=first_row))
        self.nbytes += nbytes
        weakref.finalize(kept, self._give_back, nbytes).atexit = False
        self._counted("kept", len(slots_T))

    def _give_back(self, nbytes: int) -> None:
        self.nbytes -= nbytes
