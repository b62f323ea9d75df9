"""The groups in which weights travel to engines' ranks: a trainer rank's broadcasts to SGLang's ranks, and the joint group.

In the joint group (`wire="nccl"`) all trainer ranks send to our half in engines, from GPU to GPU. NCCL carries out a group's
calls one after another, and each call waits for its partner. All members therefore take one order: record by record, in rounds
in which no member has two partners (the circle method of round-robin tournaments).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from r3channel.errors import TransportError, UsageError, WeightsCorrupt
from r3channel.transport.base import Pending, Rendezvous
from r3channel.transport.process_group import ProcessGroupTransport, RendezvousStore, device_of, in_background
from r3channel.weights.config import SyncConfig
from r3channel.weights.manifest import Bucket, Manifest, first_nonfinite, nonfinite
from r3channel.weights.progress import GRACE_S, REPAIR_S, Deadline, Run, background
from r3channel.weights.rank_link import LANDS, LEAVES, RankLink
from r3channel.weights.ranks import TrainerRanks
from r3channel.weights.staged_copy import new_memory

_DEPTH = 2
"""How many records are under way, each with memory of its own: one is gathered or placed while another one travels."""
_SHARE = 0.8
"""The part of its time for an order that an engine waits for other members: it must still answer, or it counts as lost."""


class WeightGroup:
    """Rank 0 of a group that broadcasts to SGLang's own ranks. LISTENING -> JOINED (`join`) -> CLOSED (`close`, any number of
    times).

    >>> group = WeightGroup("doc-1", world_size=1)
    >>> group.join(timeout_s=20.0)
    >>> group.broadcast(torch.zeros(4, dtype=torch.uint8), timeout_s=5.0)
    >>> group.close()

    One thread at a time calls `join` and `broadcast`; any thread may close.
    """

    def __init__(self, name: str, *, world_size: int, host: str = "127.0.0.1", backend: str = "gloo") -> None:
        """Listen for members at a port given by the system.

        Args:
            name: The group's name.
            world_size: The number of members, this one included.
            host: An address of this machine that the engines reach.
            backend: `gloo` or `nccl`.

        Raises:
            ConfigError: `host` is a wildcard. Store and gloo have no authentication, so only the configured interface may see
                them.
        """
        self.name, self.host, self.world_size, self.backend = name, host, world_size, backend
        self._store = RendezvousStore(host)
        self.where = {"master_address": host, "master_port": self._store.port, "group_name": name}
        self.where |= {"backend": backend, "world_size": world_size}
        """What another member must know to join."""
        self._sending = threading.Lock()
        self.wire: ProcessGroupTransport | None = None
        self._stand_ins = list[ProcessGroupTransport]()
        self._closed = False

    def join(self, rank: int = 0, *, timeout_s: float) -> None:
        """Wait until all members have joined.

        Args:
            rank: With a rank other than 0, join in place of that member, until `close`.
            timeout_s: Seconds to wait.

        Raises:
            DeadlineExceeded: A member has not joined in time.
        """
        where = Rendezvous(
            backend=self.backend, name=self.name, connection=0, rank=rank, world_size=self.world_size, host=self.host,
            port=self._store.port,
        )  # fmt: skip
        wire = ProcessGroupTransport(where, timeout_s=timeout_s, members="foreign")
        if rank:  # a stand-in that left at once would fail a member that has not met it yet
            self._stand_ins.append(wire)
        else:
            self.wire = wire
        if self._closed:  # while it joined
            self.close()

    def broadcast(self, payload: torch.Tensor, *, timeout_s: float) -> None:
        """Send `payload` to every member.

        The members must expect exactly as many bytes: gloo aborts the process of a smaller receiver. After an error the group is
        dead on every side.

        Args:
            payload: uint8, contiguous; its memory may be reused on return.
            timeout_s: Seconds for the broadcast.

        Raises:
            DeadlineExceeded: The broadcast has not ended after `timeout_s`.
            TransportError: A member is gone.
            UsageError: The group is not joined, or is closed.
        """
        if self.wire is None:
            raise UsageError(f"weight group {self.name} is not joined, or is closed")
        with self._sending:
            self.wire.broadcast(0, payload, timeout_s=timeout_s)

    def close(self) -> None:
        """Leave the group; members that wait in a broadcast fail at once.

        It never blocks on a broadcast under way. Any thread may call, any number of times.
        """
        self._closed = True
        wire, self.wire = self.wire, None
        self._store.close()
        while self._stand_ins:
            in_background(self._stand_ins.pop().abort, name="weights-bury")
        if wire is not None and self.backend == "gloo" and not self._sending.locked():
            wire.abort()
        elif wire is not None:
            # gloo's group ends with the operation under way, by its deadline; NCCL's kernel waits on the device
            in_background(wire.abort, name="weights-bury")


class Source:
    """This trainer rank's end of broadcasts, for all updates of a session: packs buckets, and is rank 0 of a group of its own."""

    def __init__(self, config: SyncConfig) -> None:
        self._device = device_of(config.backend)
        self._rooms = [torch.empty(0, dtype=torch.uint8, device=self._device)] * 2
        """Two buffers, filled in turn: one leaves while the other is packed."""
        self.group: WeightGroup | None = None
        self.joining: Future[None] = Future()
        self.manifest: Manifest | None = None
        """The manifest that rank 0 was told."""
        self.buckets: dict[int, list[Bucket]] = {}
        """Each source's buckets, by its rank."""
        self.formed: tuple[Sequence[tuple[str, str]], dict[int, str]] = (), {}
        """At rank 0: the engines in the groups as (URL, boot id), and the groups' names by source."""

    def pack(self, number: int, bucket: Bucket, tensors: Sequence[torch.Tensor], run: Run) -> torch.Tensor:
        """Pack one bucket and check that its numbers are finite.

        One thread calls.

        Returns:
            Flat uint8, valid until bucket `number + 2` is packed.

        Raises:
            NonFiniteWeights: A tensor holds NaN or Inf; names bucket and tensor.
        """
        at, nbytes = number % 2, bucket.payload_bytes
        with run.stage("pack"):
            if len(self._rooms[at]) < nbytes:
                self._rooms[at] = new_memory(nbytes, self._device)
            payload_N = self._rooms[at][:nbytes]
            for view, tensor in zip(bucket.views(payload_N), tensors, strict=True):
                view.copy_(tensor.detach())
            if payload_N.is_cuda:  # another thread sends it, whose current stream is the default one
                torch.cuda.current_stream(payload_N.device).synchronize()
        with run.stage("digest"):
            if bad := first_nonfinite(bucket.placed, payload_N):
                raise nonfinite(f"bucket {number}", bad)
        return payload_N

    def leave(self) -> None:
        """Leave the group; engines that wait in it fail at once.

        Any thread may call.
        """
        group, self.group = self.group, None
        if group is not None:
            group.close()


# -- the joint group: its order, and both ends -----------------------------------------------------------------------------


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


class JointGroup:
    """A trainer rank's end of the joint group, for all updates of a session. One thread calls.

    OUT -> `join` -> `send`, any number of times -> `leave` -> OUT
    """

    def __init__(self, ranks: TrainerRanks, config: SyncConfig) -> None:
        self._ranks, self._config = ranks, config
        self._links, self._name = list[RankLink](), ""
        self._store: RendezvousStore | None = None
        self._joining: Future[ProcessGroupTransport] | None = None

    def join(self, links: Sequence[RankLink], host: str, deadline: Deadline) -> dict[str, Any]:
        """Begin to join a group with these engine ranks.

        Nothing changes if all trainer ranks are in that group. The call is the same on every trainer rank.

        Args:
            links: All engine ranks, in the order in which they are numbered after the trainer ranks.
            host: The first trainer rank's address.
            deadline: The update's deadline.

        Returns:
            What engines must be told; empty where nothing changes.
        """
        ranks, most_s = self._ranks, _SHARE * min(deadline.left_s(), self._config.engine_timeout_s)
        if not any(ranks.exchange(self._joining is None or self._links != links, deadline)):
            return {}
        self.leave()
        self._store = RendezvousStore(host) if ranks.leads else None
        port = ranks.exchange(self._store and self._store.port, deadline)[0]
        self._links, self._name = list(links), f"r3channel-weights-{ranks.update}"
        where: dict[str, Any] = {"backend": self._config.wire, "name": self._name, "connection": 0}
        where |= {"host": host, "port": port, "world_size": ranks.size + len(links)}
        here = Rendezvous(**where, rank=ranks.rank)
        self._joining = background(partial(ProcessGroupTransport, here, timeout_s=most_s, members="joint"))
        return {"where": where, "timeout_s": most_s, "trainers": ranks.size}

    def send(self, update: int, shards: Sequence[torch.Tensor], deadline: Deadline) -> int:
        """Send each engine rank what it needs of the shards.

        After a failure the group is left.

        Args:
            update: The update's number.
            shards: This rank's shards.
            deadline: The update's deadline.

        Returns:
            The bytes sent.

        Raises:
            NonFiniteWeights: A tensor holds NaN or Inf.
            TransportError: A member is gone, or silent for `engine_timeout_s`. Names the engine's rank at which the group ended,
                and the reason that this rank tells.
        """
        self._partner: RankLink | None = None
        try:
            return self._send(update, shards, deadline)
        except BaseException as error:
            self.leave()  # at once: others wait for this one
            if not isinstance(error, (TransportError, TimeoutError)):
                raise
            why = "" if self._partner is None else f"; {_ask_reason(self._partner)}"
            raise TransportError(
                f"the joint group has ended{why}: {str(error) or 'no connection'}"
            ) from error

    def _send(self, update: int, shards: Sequence[torch.Tensor], deadline: Deadline) -> int:
        assert self._joining is not None
        wire, most_s, sent = self._joining.result(), self._config.engine_timeout_s, 0
        counts, pending = [len(link.buckets[0]) for link in self._links], deque[tuple[RankLink, Pending]]()

        def finish(depth: int) -> None:
            while len(pending) > depth:
                self._partner, sending = pending.popleft()
                sending.wait(timeout_s=min(deadline.left_s(), most_s))

        for link, records in zip(self._links, counts, strict=True):
            self._partner = link
            link.begin(update, records, timeout_s=deadline.left_s())
        rooms = [new_memory(self._links[0].record_bytes, wire.device) for _ in range(_DEPTH)]
        order = turns(self._ranks.rank, 1, counts, max(self._ranks.size, len(counts)))
        for turn, (to, number) in enumerate(order):
            finish(_DEPTH - 1)
            self._partner = link = self._links[to]
            head, (flat,) = link.seal(update, 0, link.buckets[0][number], shards, rooms[turn % _DEPTH])
            link.link.send_record(LANDS, head, timeout_s=min(deadline.left_s(), most_s))
            # NCCL connects in its first send, which waits for the partner and would not end without it.
            sending = background(partial(wire.start_send, self._ranks.size + to, flat.view(torch.uint8)))
            pending.append((link, sending.result(min(deadline.left_s(), most_s))))
            sent += flat.nbytes
        finish(0)
        return sent

    def leave(self) -> None:
        """Leave the group; calling again changes nothing.

        Members that wait for this one, or for its turn, fail.
        """
        joining, self._joining = self._joining, None
        if joining is not None:
            for link in self._links:
                with suppress(TransportError):
                    link.link.send_record(LEAVES, self._name.encode(), timeout_s=GRACE_S)
            joining.add_done_callback(lambda joined: joined.exception() or joined.result().abort())
        if self._store is not None:
            self._store.close()


def _ask_reason(link: RankLink) -> str:
    where, why = f"engine {link.engine} rank {link.rank}: ", "it has left"
    try:
        link.end(timeout_s=REPAIR_S)
    except (TransportError, WeightsCorrupt) as error:
        why = str(error).removeprefix(where)
    return where + why


class JointReceiver:
    """An engine rank's end of the joint group. NEW -> JOINED -> CLOSED.

    The links' threads call, each for its trainer. Any thread may close.
    """

    def __init__(self, **order: Any) -> None:
        """Make the end of one group.

        Args:
            **order: What `JointGroup.join` returns, and this rank's `rank`. Without an order nothing can be received.
        """
        self._told, self.name = order, order["where"]["name"] if order else ""
        self._wire: ProcessGroupTransport | None = None
        self._rooms = SimpleQueue[torch.Tensor]()
        self._changed = threading.Condition()
        """Guards the attributes below."""
        self._update, self._records = -1, dict[int, int]()
        self._order = deque[int]()
        """The trainers whose records come next, in order; known once all trainers have said how many they send."""
        self._ended = "" if order else "there is none"

    def join(self) -> None:
        """Wait until all members have joined.

        Raises:
            DeadlineExceeded: A member has not joined in time.
        """
        where = Rendezvous(**self._told["where"], rank=self._told["rank"])
        wire = ProcessGroupTransport(where, timeout_s=self._told["timeout_s"], members="joint")
        for _ in range(_DEPTH):
            self._rooms.put(new_memory(0, wire.device))
        with self._changed:
            self._wire = wire
            self._changed.notify_all()
        if self._ended:  # while it joined
            wire.abort()

    def begin(self, update: int, trainer: int, records: int) -> None:
        """Note how many records a trainer sends in an update."""
        with self._changed:
            if update > self._update:
                self._update, self._records, self._order = update, {}, deque()
            # a late trainer may tell of an update that was given up
            self._records |= {trainer: records} if update == self._update else {}
            if len(self._records) == (trainers := self._told.get("trainers", 0)):
                mine, size = self._told["rank"] - trainers, self._told["where"]["world_size"] - trainers
                counts = [count for _, count in sorted(self._records.items())]
                self._order.extend(who for who, _ in turns(mine, -1, counts, max(trainers, size)))
            self._changed.notify_all()

    @contextmanager
    def receive(self, update: int, trainer: int, nbytes: int, *, timeout_s: float) -> Iterator[torch.Tensor]:
        """Receive a trainer's next record at its turn.

        Args:
            update: The update's number.
            trainer: The trainer's rank.
            nbytes: Bytes of the record.
            timeout_s: Seconds for the record, from its turn on.

        Yields:
            The bytes, flat uint8; the memory is used again after the block.

        Raises:
            WeightsCorrupt: The group has ended. Only this update is void: the link goes on.
        """
        wire = self._at_turn(update, trainer)
        room = self._rooms.get()  # taken at the turn: records of later turns could hold all of them
        try:
            room = room if len(room) >= nbytes else new_memory(nbytes, wire.device)
            wire.recv(trainer, room[:nbytes], timeout_s=timeout_s)
            with self._changed:
                self._order.popleft()
                self._changed.notify_all()
            yield room[:nbytes]
        except TransportError as error:
            self.close(f"from trainer rank {trainer}: {error}")
            raise WeightsCorrupt(f"the joint group has ended: {self._ended}") from error
        finally:
            self._rooms.put(room)

    def _at_turn(self, update: int, trainer: int) -> ProcessGroupTransport:
        with self._changed:
            # A late thread may come with a record of an earlier update.
            while not self._ended and update == self._update and trainer in self._records:
                if self._wire is not None and self._order and self._order[0] == trainer:
                    return self._wire
                self._changed.wait()
            raise WeightsCorrupt(f"the joint group has ended: {self._ended or 'the update was given up'}")

    def close(self, why: str) -> None:
        """Leave the group, also in the middle of a call.

        Calling again changes nothing.

        Args:
            why: The reason; the first one is kept for errors.
        """
        with self._changed:
            self._ended, wire = self._ended or why, self._wire
            self._changed.notify_all()
        if wire is not None:
            wire.abort()
