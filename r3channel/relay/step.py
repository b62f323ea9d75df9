"""One sealed step on its way: which shards are placed, sent and acknowledged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from r3channel.plan.shards import ShardKey
from r3channel.plan.ticket import Ticket


@dataclass
class SealedStep:
    """SEALED -> PLACED (all shards in host memory) -> DELIVERED (every rank acknowledged)

    Guarded by the relay's condition; `buffers` are written by the placement thread only, before they are published here.
    """

    ticket: Ticket
    keys_by_sample: dict[str, str]
    """Where each sample's frame lies in the store, until every rank has acknowledged."""
    nbytes: int
    """Of all shards."""
    sealed_s: float
    """time.monotonic seconds."""
    memory: dict[ShardKey, np.ndarray[Any, np.dtype[np.uint8]]] = field(default_factory=dict)
    """Of shards that are not placed yet."""
    buffers: dict[ShardKey, np.ndarray[Any, np.dtype[np.uint8]]] = field(default_factory=dict)
    acknowledged: set[ShardKey] = field(default_factory=set)

    @property
    def keys(self) -> tuple[ShardKey, ...]:
        return tuple(shard.key for shard in self.ticket.plan.shards)

    def buffer_of(self, dp: int, member: int) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        """The placed shard of the `member`-th receiving process of a DP rank; None when it is not there (any more)."""
        return self.buffers.get((dp, *divmod(member, self.ticket.layout.cp)))

    @property
    def missing(self) -> tuple[ShardKey, ...]:
        """Shards that no rank has acknowledged yet."""
        return tuple(key for key in self.keys if key not in self.acknowledged)

    def ranks(self) -> dict[int, dict[str, Any]]:
        """By DP rank: its samples, and of its shards those that are placed and those that were acknowledged."""
        assignment = self.ticket.assignment
        return {
            dp: {
                "samples": [name for batch in batches for name in batch],
                "placed": sorted(key for key in self.buffers if key[0] == dp),
                "acknowledged": sorted(key for key in self.acknowledged if key[0] == dp),
            }
            for dp, batches in enumerate(assignment.ranks)
        }

    @property
    def state(self) -> str:
        if not self.missing:
            return "DELIVERED"
        placed = all(key in self.buffers or key in self.acknowledged for key in self.keys)
        return "PLACED" if placed else "SEALED"
