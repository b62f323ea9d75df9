"""One sealed step on its way: which shards are placed, sent and acknowledged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from r3channel.plan.parts import Part
from r3channel.plan.place import Jobs, place_samples
from r3channel.plan.shards import Shard, ShardKey
from r3channel.plan.ticket import Ticket
from r3channel.routing import Ids

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass
class SealedStep:
    """SEALED -> PLACED (all shards in host memory) -> DELIVERED (every rank acknowledged)

    Guarded by the relay's condition; `buffers` are written by the placement thread only, before they are published here.
    """

    ticket: Ticket
    keys_by_sample: dict[str, str]
    """Where each sample's frame lies in the store, until every rank has acknowledged."""
    nbytes: int
    """Of all shards (of this relay's parts of them, with several relays)."""
    sealed_s: float
    """time.monotonic seconds."""
    relay: int = 0
    """Which of the ticket's relays this is."""
    memory: dict[ShardKey, _Bytes] = field(default_factory=dict)
    """Of shards, or this relay's parts of them, that are not placed yet."""
    buffers: dict[ShardKey, _Bytes] = field(default_factory=dict)
    acknowledged: set[ShardKey] = field(default_factory=set)

    @cached_property
    def keys(self) -> tuple[ShardKey, ...]:
        """The shards that this relay sends, or sends a part of."""
        return tuple(part.key for part in self.ticket.parts.of_relay(self.relay))

    def place(self, dp: int, *, ids_of: Callable[[str], Ids], run: Jobs) -> dict[ShardKey, _Bytes]:
        """The shards, or this relay's parts of them, of one DP rank; see `place_samples`."""
        if len(self.ticket.runs) == 1:
            return place_samples(self.ticket.plan, dp=dp, ids_of=ids_of, buffer_of=self._memory_of, run=run)
        return self.ticket.parts.place(self.relay, dp=dp, ids_of=ids_of, buffer_of=self._memory_of)

    def _memory_of(self, piece: Shard | Part) -> _Bytes:
        return self.memory.pop(piece.key)

    def buffer_of(self, dp: int, member: int) -> _Bytes | None:
        """The placed shard of the `member`-th receiving process of a DP rank; None when it is not there (any more)."""
        return self.buffers.get((dp, *divmod(member, self.ticket.layout.cp)))

    @property
    def missing(self) -> tuple[ShardKey, ...]:
        """Shards that no rank has acknowledged yet."""
        return tuple(key for key in self.keys if key not in self.acknowledged)

    @property
    def state(self) -> str:
        if not self.missing:
            return "DELIVERED"
        placed = all(key in self.buffers or key in self.acknowledged for key in self.keys)
        return "PLACED" if placed else "SEALED"
