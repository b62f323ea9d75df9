"""The group in which trainer ranks send to engines' ranks, from GPU to GPU: in which order, and both ends.

NCCL carries out a group's calls one after another, and each waits for its partner. All members therefore take one order: record
by record, in rounds in which nobody has two partners (the circle method of round-robin tournaments).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

import torch

from r3channel.errors import TransportError, WeightsCorrupt
from r3channel.transport.base import Pending
from r3channel.transport.process_group import ProcessGroupTransport
from r3channel.weights.memory import new_memory
from r3channel.weights.progress import Deadline
from r3channel.weights.rank_link import LANDS, RankLink

_DEPTH = 2
"""Records under way, each with memory of its own: one is gathered or placed while another one travels."""


def turns(mine: int, step: int, records: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """Yield a member's turns in the order that all members take.

    >>> [list(turns(trainer, 1, [1, 2, 1], 3)) for trainer in (0, 1)]
    [[(0, 0), (1, 0), (2, 0), (1, 1)], [(1, 0), (2, 0), (0, 0), (1, 1)]]

    Args:
        mine: The member's number on its own side.
        step: 1 for a trainer rank, -1 for an engine's.
        records: How many records there are, by partner.
        size: Members of the larger side, and so rounds.

    Yields:
        A partner's number, and which of its records.
    """
    for record in range(max(records, default=0)):
        for turn in range(size):
            partner = (mine + step * turn) % size
            if partner < len(records) and record < records[partner]:
                yield partner, record


class JointSender:
    """A trainer rank's end, for links in the order of their ranks. JOINED -> CLOSED. One thread; any may close."""

    def __init__(
        self, wire: ProcessGroupTransport, links: Sequence[RankLink], *, rank: int, ranks: int
    ) -> None:
        self._wire, self.links, self._rank, self._ranks = wire, list(links), rank, ranks
        most = max((link.record_bytes for link in links), default=0)
        self._rooms = [new_memory(most, wire.device) for _ in range(_DEPTH)]
        self.closed = False

    def send(
        self, update: int, shards: Sequence[torch.Tensor], *, deadline: Deadline, record_timeout_s: float
    ) -> int:
        """Send what each rank needs of the shards; return the bytes. After a failure the group is closed.

        Raises:
            NonFiniteWeights: A tensor holds NaN or Inf.
            TransportError: A member is gone, or silent for `record_timeout_s`: says which links ended.
        """
        try:
            return self._send(update, shards, deadline, record_timeout_s)
        except TransportError as error:
            raise named(error, self.links) from error
        finally:
            if self._under_way:
                self.close()

    def _send(
        self, update: int, shards: Sequence[torch.Tensor], deadline: Deadline, record_timeout_s: float
    ) -> int:
        sent, self._under_way = 0, True
        pending = deque[Pending]()
        for link in self.links:
            link.begin(update, len(link.buckets[0]), timeout_s=deadline.left_s())
        counts = [len(link.buckets[0]) for link in self.links]
        order = turns(self._rank, 1, counts, max(self._ranks, len(counts)))
        for turn, (to, number) in enumerate(order):
            timeout_s = min(deadline.left_s(), record_timeout_s)
            if len(pending) == _DEPTH:
                pending.popleft().wait(timeout_s=timeout_s)
            link = self.links[to]
            head, (flat,) = link.sealed(
                update, 0, link.buckets[0][number], shards, self._rooms[turn % _DEPTH]
            )
            link.link.send_record(LANDS, head, timeout_s=timeout_s)
            pending.append(self._wire.start_send(self._ranks + to, flat.view(torch.uint8)))
            sent += flat.nbytes
        while pending:
            pending.popleft().wait(timeout_s=min(deadline.left_s(), record_timeout_s))
        self._under_way = False
        return sent

    def close(self) -> None:
        """Leave the group: members that wait for this one fail. Idempotent."""
        self.closed = True
        self._wire.abort()


class JointReceiver:
    """An engine rank's end. JOINED -> CLOSED. The links' threads call, each for its trainer; any may close."""

    def __init__(self, wire: ProcessGroupTransport, *, trainers: int) -> None:
        self._wire, self._trainers = wire, trainers
        self._rooms = SimpleQueue[torch.Tensor]()
        for _ in range(_DEPTH):
            self._rooms.put(new_memory(0, wire.device))
        self._changed = threading.Condition()
        """Guards what is below."""
        self._update, self._records = -1, dict[int, int]()
        self._order = deque[int]()
        """Whose records come, once all trainers have said how many."""
        self._ended = ""

    def begin(self, update: int, trainer: int, records: int) -> None:
        """Take in how many records a trainer sends in an update."""
        with self._changed:
            if update > self._update:
                self._update, self._records, self._order = update, {}, deque()
            self._records[trainer] = records
            if len(self._records) == self._trainers:
                counts, engines = (
                    [*map(self._records.__getitem__, range(self._trainers))],
                    self._wire.world_size - self._trainers,
                )
                mine = self._wire.rank - self._trainers
                self._order.extend(who for who, _ in turns(mine, -1, counts, max(self._trainers, engines)))
            self._changed.notify_all()

    @contextmanager
    def landed(self, update: int, trainer: int, nbytes: int, *, timeout_s: float) -> Iterator[torch.Tensor]:
        """Receive a trainer's next record at its turn; its memory is used again after the block.

        WeightsCorrupt where the group has ended: of the link, which goes on, only this update is void."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or (self._update == update and self._order and self._order[0] == trainer)
            )
            if self._ended:
                raise WeightsCorrupt(f"the joint group has ended: {self._ended}")
        # At its turn, or those of later turns would hold all of them.
        room = self._rooms.get()
        try:
            room = room if len(room) >= nbytes else new_memory(nbytes, self._wire.device)
            flat = room[:nbytes]
            try:
                self._wire.recv(trainer, flat, timeout_s=timeout_s)
            except TransportError as error:
                self.close(str(error))
                raise WeightsCorrupt(f"the joint group has ended: {error}") from error
            with self._changed:
                self._order.popleft()
                self._changed.notify_all()
            yield flat
        finally:
            self._rooms.put(room)

    def close(self, why: str) -> None:
        """Leave the group, also in the middle of a call. Idempotent."""
        with self._changed:
            self._ended = self._ended or why
            self._changed.notify_all()
        self._wire.abort()


def named(error: TransportError, links: Sequence[RankLink]) -> TransportError:
    """Return the error with the engine ranks that are gone: others that waited for them fail, too."""
    gone = ", ".join(f"engine {link.engine} rank {link.rank}" for link in links if not link.link.alive)
    return TransportError(f"the joint group has ended: {error}" + (f"; gone: {gone}" if gone else ""))
