"""Counts the committed weight updates between each row and the trainer that trains on it. Knows tickets, no ranks."""

from __future__ import annotations

import logging
from collections import Counter
from functools import cached_property

import numpy as np

from r3channel.errors import RowsStale, UsageError
from r3channel.plan.ticket import Ticket
from r3channel.wire.routing import Ids, RowKind

log = logging.getLogger(__name__)

UNKNOWN = np.iinfo(np.int64).min
"""The lag of a row that no engine recorded; never stale, because nothing is known of it."""
_LARGEST = np.iinfo(np.int64).max
"""The largest lag. A frame may name any 64-bit version, so a difference may need one bit more than int64 has."""

_MANY = 4


class Staleness:
    """The staleness of one step's rows, seen from the trainer's version.

    `lag` is the trainer's committed weight version minus the one that made the row: 0 is fresh, 1 is one update behind.
    It is negative where an engine is ahead, for instance of a trainer that was restarted from an older checkpoint.
    """

    def __init__(
        self, ticket: Ticket, *, version: int, max_staleness: int = -1, on_stale: str = "accept"
    ) -> None:
        """Take a step's rows and the trainer's version.

        Args:
            ticket: The step's ticket.
            version: The trainer's committed weight version, 0 or more.
            max_staleness: The largest lag that is not stale; -1: no bound. With a bound, rows ahead of the trainer count as stale
                too.
            on_stale: `accept`, `mask` or `reject`, as `ChannelConfig` checks it.
        """
        if version < 0:
            raise UsageError(f"weight version {version}: expected 0 or more")
        self.version, self.max_staleness, self.on_stale = version, max_staleness, on_stale
        self._ticket = ticket

    def lags(self, sample_id: str) -> Ids:
        """Return the lag of each row of a sample.

        Returns:
            [rows of the sample] int64, by position; UNKNOWN where the engine recorded nothing.
        """
        sample = self._ticket.sample(sample_id)
        lags_T = np.full(max(sample.tokens - 1, 0), UNKNOWN, dtype=np.int64)
        for span in sample.provenance:
            if span.kind is not RowKind.MISSING:
                lags_T[span.start : span.end] = min(self.version - span.weight_version, _LARGEST)
        return lags_T

    def stale(self, sample_id: str) -> Ids:
        """Return which rows of a sample are stale.

        Returns:
            [rows] bool: True where a row is recorded, and outside 0 .. `max_staleness`.
        """
        lags_T = self.lags(sample_id)
        if self.max_staleness < 0:
            return np.zeros(len(lags_T), dtype=bool)
        return (lags_T != UNKNOWN) & ((lags_T > self.max_staleness) | (lags_T < 0))

    @property
    def masks(self) -> bool:
        """Return whether stale tokens leave the loss."""
        return self.on_stale == "mask" and bool(self.stale_samples)

    @cached_property
    def stale_samples(self) -> dict[str, int]:
        """Return the number of stale rows of each sample that has any.

        Where a bound holds for all rows, no row is looked at.
        """
        bound = self.max_staleness
        if bound < 0 or all(0 <= self.version - found <= bound for found in self._ticket.weight_versions):
            return {}
        counts = {
            sample.sample_id: int(self.stale(sample.sample_id).sum()) for sample in self._ticket.samples
        }
        return {name: count for name, count in counts.items() if count}

    def check(self) -> None:
        """Check the rows against the policy.

        Rows ahead of the trainer are a warning in the log.

        Raises:
            RowsStale: There are stale rows and the policy is `reject`. Names samples.
        """
        if max(self._ticket.weight_versions, default=0) > self.version:
            log.warning(
                "r3channel: step %d: its rows say weight versions %s, the trainer committed %d: versions one off, stamped before "
                "their update? Or was the trainer restarted from an older checkpoint?",
                self._ticket.step, list(self._ticket.weight_versions), self.version,
            )  # fmt: skip
        if self.on_stale != "reject" or not self.stale_samples:
            return
        first = ", ".join(f"{name} ({count} rows)" for name, count in list(self.stale_samples.items())[:4])
        raise RowsStale(
            f"step {self._ticket.step}: {len(self.stale_samples)} samples have rows that are not 0 to {self.max_staleness} "
            f"versions behind the trainer's {self.version}: {first}; the step's rows were made by versions "
            f"{list(self._ticket.weight_versions)} (policy: reject). Does the loop run further ahead than the bound allows?",
            samples=self.stale_samples,
            step=self._ticket.step,
        )

    def counts(self, sample_ids: tuple[str, ...]) -> Counter[int]:
        """Count the recorded rows of these samples by lag."""
        found: Counter[int] = Counter()
        for name in sample_ids:
            for span in self._ticket.sample(name).provenance:
                if span.kind is not RowKind.MISSING:
                    found[self.version - span.weight_version] += span.end - span.start
        return found


def label(lag: int) -> str:
    """Return the word for a lag, one of a closed set.

    The words are the labels of `r3channel_rows_by_staleness_total`.

    >>> [label(lag) for lag in (-2, 0, 3, 4, 9)]
    ['ahead', '0', '3', '4_or_more', '4_or_more']
    """
    if lag < 0:
        return "ahead"
    return str(lag) if lag < _MANY else f"{_MANY}_or_more"
