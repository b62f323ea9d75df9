"""Keeps a request's rows when its slots are released on retraction, and puts them back as the request is prefilled again.

The tokens that a retracted request has answered keep their log-probabilities, which belong to the rows of the passes that made
them. The pass that prefills the request again may have other weights, and has other sums in any case. Only the row of the last
answered token comes from that pass, as its successor's log-probability does. This module knows no engine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

from r3channel.engine.capture import KeptRows, SlotRows
from r3channel.wire.routing import Ids


class Kept:
    """The rows that one request has kept, until it ends."""

    __slots__ = ("__weakref__", "_parts", "seen")

    def __init__(self) -> None:
        self._parts = list[KeptRows]()
        self.seen = 0
        """Rows before this position were kept or given up. Rows that their slots hold since then were computed again."""

    def add(self, rows: KeptRows) -> None:
        self._parts.append(rows)

    def rows_between(self, start: int, end: int) -> Iterator[KeptRows]:
        """Return the kept rows among positions [start, end)."""
        return (rows for part in self._parts if (rows := part.rows_between(start, end)))


class KeptStore:
    """Bounds the memory of what all requests keep. One thread at a time: the scheduler's."""

    def __init__(self, rows: SlotRows, *, limit_bytes: int, counted: Callable[[str, int], None]) -> None:
        """Start with nothing kept.

        Args:
            rows: The slots that rows are copied from.
            limit_bytes: Ceiling of all kept rows, in bytes.
            counted: Called with "kept" and the number of rows, or with "given_up" and the number of rows that found no room.
        """
        self._rows, self._limit_bytes, self._counted = rows, limit_bytes, counted
        self.nbytes = 0
        """Bytes of all kept rows. They shrink as requests end."""

    def keep(self, kept: Kept, slots_T: Ids, *, first_row: int) -> None:
        """Copy these slots' rows, unless they exceed the ceiling.

        Args:
            kept: The request's kept rows, to which these are added. Its memory counts until it is garbage-collected.
            slots_T: The slots of the rows.
            first_row: Position of the first row.
        """
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
