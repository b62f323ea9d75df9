"""One DP rank's group on the relay side: its members, its epochs, and the thread that sends.

    WAITING (for every member's hello) -> JOINING -> OPEN -> ... -> CLOSED
       ^                                    |          |
       +------- any failure: epoch + 1 -----+----------+

Nothing is sent before a member said that it is ready for that step; a failed group is abandoned and the same bytes are
sent again in the next epoch, because a shard is kept until it is acknowledged. Once `max_group_failures` lives have failed
a step, the next life moves it through the object store, and ends when the step is acknowledged: the step after it tries
the group again. A life that begins when some members have acknowledged a step and others have not is for those others.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from r3channel.config import ChannelConfig
from r3channel.errors import EpochEnded, TransportError
from r3channel.metrics import Metrics, StageClock
from r3channel.relay.staging import BucketSender, InPlace, device_staging
from r3channel.relay.step import SealedStep
from r3channel.transport.base import Rendezvous, Transport, join
from r3channel.transport.object_store import Mailbox
from r3channel.wire.bucket import bucket_headers


@dataclass
class DeliveryGroup:
    """Relay (rank 0) and the receiving processes of DP rank `dp`: member m (`layout.member`, pp * cp_size + cp) is rank m + 1.

    `pp` below is that member number; without context parallelism it is the pipeline stage.

    All public methods may be called from any thread. `changed` is the relay's condition: it guards this object and the
    steps, and is notified on every change.
    """

    dp: int
    stages: int
    config: ChannelConfig
    rendezvous: Callable[..., Rendezvous]
    """(backend, name, epoch, rank, world_size) -> where to join."""
    mailbox: Mailbox
    """Of groups that use the object store."""
    changed: threading.Condition
    steps: dict[int, SealedStep]
    clock: StageClock
    metrics: Metrics
    state: str = "WAITING"
    epoch: int = 1
    backend: str = ""
    """Of this life: `config.backend`, or the fallback."""
    failed_lives: Counter[int] = field(default_factory=Counter)
    """By step that is not delivered."""
    error: BaseException | None = None
    _step: int | None = None
    """The only step of this life; None: any."""
    _needed: list[int] = field(default_factory=list)
    """Members of this life, ascending; rank 1 is the first."""
    _finished: Transport | None = None
    _tried: set[int] = field(default_factory=set)
    """Steps for which a member was ready in this life."""
    _members: dict[int, str] = field(default_factory=dict)
    _wanted: deque[tuple[int, int]] = field(default_factory=deque)
    """(step, pp) that a member is ready for and whose shard is placed."""
    _transport: Transport | None = None
    _thread: threading.Thread | None = None
    _senders: dict[str, BucketSender] = field(default_factory=dict)

    def start(self) -> None:
        self.backend, self._needed = self.config.backend, self._everybody()
        self._thread = threading.Thread(target=self._run, name=f"r3channel-send-dp{self.dp}", daemon=True)
        self._thread.start()

    # -- control ---------------------------------------------------------------------------------------------------

    def hello(self, *, pp: int, boot_id: str, after_epoch: int) -> Rendezvous | None:
        """A member wants to join an epoch newer than `after_epoch`. None until all that this life needs have said hello.

        A member that restarted (another boot id) or that gave up the current epoch starts the next one. One that this life does
        not need waits for the next.
        """
        stale = None
        with self.changed:
            known = self._members.get(pp)
            if pp not in self._needed:
                return None
            if after_epoch >= self.epoch or (self.state != "WAITING" and known != boot_id):
                stale = self._next_epoch()
            found = self._welcome(pp, boot_id) if pp in self._needed else None
        _abort(stale)
        return found

    def _welcome(self, pp: int, boot_id: str) -> Rendezvous | None:
        self._members[pp] = boot_id
        if self.state == "WAITING" and len(self._members) == len(self._needed):
            self.state = "JOINING"
            self.changed.notify_all()
        return None if self.state == "WAITING" else self._rendezvous(rank=self._rank(pp), epoch=self.epoch)

    def ready(self, *, pp: int, step: int, epoch: int, wait_s: float = 0.0) -> bool:
        """The member has posted, or is about to post, its receives for a placed shard. False: ask again, this life is for
        another step. Raises `EpochEnded` for a member of another life."""
        with self.changed:
            if self._step is not None and step != self._step:
                self.changed.wait_for(lambda: self.epoch != epoch, timeout=wait_s)
            if epoch != self.epoch:
                raise EpochEnded(
                    f"dp {self.dp} pp {pp} is ready for step {step} in epoch {epoch}, the group is in "
                    f"epoch {self.epoch}; join again"
                )
            if self._step is not None and step != self._step:
                return False
            if (step, pp) not in self._wanted:
                self._wanted.append((step, pp))
            self._tried.add(step)
            self.changed.notify_all()
            return True

    def acknowledged(self) -> None:
        """A member has acknowledged a shard. With `changed` held."""
        kept = self._outstanding()
        for step in [step for step in self.failed_lives if step not in kept]:
            del self.failed_lives[step]
        if self._step is not None and self._step not in kept:
            self._finished = self._transport  # the thread closes it: it may still be in its last send
            self._open_next()

    def status(self) -> dict[str, Any]:
        """With `changed` held."""
        return {
            "state": self.state,
            "epoch": self.epoch,
            "backend": self.backend,
            "failed_lives": dict(self.failed_lives),
            "peak_staging_bytes": self.peak_staging_bytes,
        }

    def stop(self) -> threading.Thread:
        """Ask the thread to end, and return it to be joined; idempotent. A send under way ends by its own deadline."""
        with self.changed:
            self.state = "CLOSED"
            transport, self._transport = self._transport, None
            self.changed.notify_all()
        _abort(transport)
        assert self._thread is not None, "start() comes first"
        return self._thread

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._next():
                pass
        except BaseException as error:
            with self.changed:
                self.error = error  # the next public call of the relay raises it
                self.changed.notify_all()

    def _next(self) -> bool:
        with self.changed:
            self.changed.wait_for(
                lambda: self.state in ("JOINING", "CLOSED") or (self.state == "OPEN" and self._wanted)
            )
            if self.state == "CLOSED":
                return False
            epoch, joining = self.epoch, self.state == "JOINING"
            wanted = None if joining else self._wanted.popleft()
            rendezvous = self._rendezvous(rank=0, epoch=epoch)
            finished, self._finished = self._finished, None
        if finished is not None:
            finished.close()
        try:
            if wanted is None:
                self._join(rendezvous)
            else:
                self._send(*wanted, epoch=epoch)
        except TransportError:
            with self.changed:
                stale = self._next_epoch() if self.epoch == epoch else None
            _abort(stale)
        return True

    def _join(self, rendezvous: Rendezvous) -> None:
        transport = join(rendezvous, timeout_s=self.config.join_timeout_s, mail=self.mailbox)
        with self.changed:
            current = (
                self.epoch == rendezvous.epoch and self.state == "JOINING"
            )  # else a member gave up meanwhile
            if current:
                self._transport, self.state = transport, "OPEN"
                self.changed.notify_all()
        if not current:
            transport.abort()

    def _send(self, step: int, pp: int, *, epoch: int) -> None:
        with self.changed:
            sealed, transport = self.steps.get(step), self._transport
            shard_N = sealed.buffer_of(self.dp, pp) if sealed is not None else None
            backend, dst = self.backend, self._rank(pp) if pp in self._needed else 0
        if sealed is None or shard_N is None or transport is None or transport.epoch != epoch:
            return  # acknowledged or abandoned meanwhile
        headers = bucket_headers(
            shard_N, bucket_bytes=sealed.ticket.bucket_bytes, epoch=epoch, step=step, dp=self.dp, pp=pp
        )
        if backend != self.config.backend:
            self.metrics.inc("r3channel_fallback_shards_total")
        with self.clock.span("send", step=step):
            self._sender(backend).send(transport, shard_N, headers, dst=dst)

    def _sender(self, backend: str) -> BucketSender:
        """Made by the thread that sends, when it first does: a GPU's memory is taken no earlier."""
        if backend not in self._senders:
            staging = device_staging(self.config.device) if backend == "nccl" else InPlace()
            self._senders[backend] = BucketSender(
                staging, clock=self.clock, metrics=self.metrics, timeout_s=self.config.send_timeout_s
            )
        return self._senders[backend]

    @property
    def peak_staging_bytes(self) -> int:
        """The most bytes of this group that were staged at once; two buckets at any number of tokens."""
        return max((sender.peak_bytes for sender in self._senders.values()), default=0)

    # -- epochs (with the condition held) --------------------------------------------------------------------------

    def _next_epoch(self) -> Transport | None:
        """The transport to abort, once the condition is free: NCCL's abort may take its time."""
        stale = self._transport
        self.failed_lives.update(self._tried or self._outstanding()[: self.state == "JOINING"])
        self._open_next()
        self.metrics.inc("r3channel_group_resets_total")
        return stale

    def _open_next(self) -> None:
        """Choose what the next life is for: one step, if that has to fall back, or if some members have it already and would
        not come before the others have it too; else any step."""
        self._transport = None
        self.epoch += 1
        self.state = "WAITING" if self.state != "CLOSED" else "CLOSED"
        for held in (self._members, self._wanted, self._tried):
            held.clear()
        oldest = next(iter(self._outstanding()), None)
        self._needed = self._everybody() if oldest is None else self._owed(oldest)
        falls_back = oldest is not None and self._hopeless(oldest)
        self.backend = self.config.fallback if falls_back else self.config.backend
        self._step = oldest if falls_back or self._needed != self._everybody() else None
        self.changed.notify_all()

    def _hopeless(self, step: int) -> bool:
        return bool(self.config.fallback) and self.failed_lives[step] >= self.config.max_group_failures

    def _everybody(self) -> list[int]:
        return list(range(self.stages))

    def _outstanding(self) -> list[int]:
        """Steps with a shard of this DP rank that is not acknowledged, oldest first."""
        return sorted(step for step in self.steps if self._owed(step))

    def _owed(self, step: int) -> list[int]:
        """The members that have not acknowledged their shard of a step."""
        missing, cp = self.steps[step].missing, self.steps[step].ticket.layout.cp
        return [pp for pp in self._everybody() if (self.dp, *divmod(pp, cp)) in missing]

    def _rank(self, pp: int) -> int:
        return self._needed.index(pp) + 1

    def _rendezvous(self, *, rank: int, epoch: int) -> Rendezvous:
        """With `changed` held."""
        return self.rendezvous(
            backend=self.backend,
            name=f"dp{self.dp}",
            epoch=epoch,
            rank=rank,
            world_size=len(self._needed) + 1,
        )


def _abort(transport: Transport | None) -> None:
    if transport is not None:
        transport.abort()
