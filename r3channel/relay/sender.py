"""One DP rank's group on the relay side: its members, its epochs, and the thread that sends.

    WAITING (for every member's hello) -> JOINING -> OPEN -> ... -> CLOSED
       ^                                    |          |
       +------- any failure: epoch + 1 -----+----------+

Nothing is sent before a member said that it is ready for that step; a failed group is abandoned and the same bytes are
sent again in the next epoch, because a shard is kept until it is acknowledged.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from r3channel.config import ChannelConfig
from r3channel.errors import EpochEnded, TransportError
from r3channel.metrics import Metrics, StageClock
from r3channel.relay.staging import BucketSender, InPlace, device_staging
from r3channel.relay.step import SealedStep
from r3channel.transport.base import Rendezvous, Transport, join
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
    rendezvous: Callable[[str, int, int], Rendezvous]
    """(group name, epoch, rank) -> where to join."""
    changed: threading.Condition
    steps: dict[int, SealedStep]
    clock: StageClock
    metrics: Metrics
    state: str = "WAITING"
    epoch: int = 1
    error: BaseException | None = None
    _members: dict[int, str] = field(default_factory=dict)
    _wanted: deque[tuple[int, int]] = field(default_factory=deque)
    """(step, pp) that a member is ready for and whose shard is placed."""
    _transport: Transport | None = None
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"r3channel-send-dp{self.dp}", daemon=True)
        self._thread.start()

    # -- control ---------------------------------------------------------------------------------------------------

    def hello(self, *, pp: int, boot_id: str, after_epoch: int) -> Rendezvous | None:
        """A member wants to join an epoch newer than `after_epoch`. None until all members have said hello.

        A member that restarted (another boot id) or that gave up the current epoch starts the next one.
        """
        stale = None
        with self.changed:
            known = self._members.get(pp)
            if after_epoch >= self.epoch or (self.state != "WAITING" and known != boot_id):
                stale = self._next_epoch()
            self._members[pp] = boot_id
            if self.state == "WAITING" and len(self._members) == self.stages:
                self.state = "JOINING"
                self.changed.notify_all()
            found = None if self.state == "WAITING" else self._rendezvous(rank=pp + 1, epoch=self.epoch)
        _abort(stale)
        return found

    def ready(self, *, pp: int, step: int, epoch: int) -> None:
        """The member has posted, or is about to post, its receives for a placed shard."""
        with self.changed:
            if epoch != self.epoch:
                raise EpochEnded(
                    f"dp {self.dp} pp {pp} is ready for step {step} in epoch {epoch}, the group is in "
                    f"epoch {self.epoch}; join again"
                )
            if (step, pp) not in self._wanted:
                self._wanted.append((step, pp))
            self.changed.notify_all()

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
        try:
            if wanted is None:
                self._join(epoch)
            else:
                self._send(*wanted, epoch=epoch)
        except TransportError:
            with self.changed:
                stale = self._next_epoch() if self.epoch == epoch else None
            _abort(stale)
        return True

    def _join(self, epoch: int) -> None:
        transport = join(self._rendezvous(rank=0, epoch=epoch), timeout_s=self.config.join_timeout_s)
        with self.changed:
            current = self.epoch == epoch and self.state == "JOINING"  # else a member gave up meanwhile
            if current:
                self._transport, self.state = transport, "OPEN"
                self.changed.notify_all()
        if not current:
            transport.abort()

    def _send(self, step: int, pp: int, *, epoch: int) -> None:
        with self.changed:
            sealed, transport = self.steps.get(step), self._transport
            shard_N = sealed.buffer_of(self.dp, pp) if sealed is not None else None
        if sealed is None or shard_N is None or transport is None or transport.epoch != epoch:
            return  # acknowledged or abandoned meanwhile
        headers = bucket_headers(
            shard_N, bucket_bytes=sealed.ticket.bucket_bytes, epoch=epoch, step=step, dp=self.dp, pp=pp
        )
        with self.clock.span("send", step=step):
            self._buckets.send(transport, shard_N, headers, dst=pp + 1)

    @cached_property
    def _buckets(self) -> BucketSender:
        """Made by the thread that sends, when it first does: a GPU's memory is taken no earlier."""
        staging = device_staging(self.config.device) if self.config.backend == "nccl" else InPlace()
        return BucketSender(
            staging, clock=self.clock, metrics=self.metrics, timeout_s=self.config.send_timeout_s
        )

    @property
    def peak_staging_bytes(self) -> int:
        """The most bytes of this group that were staged at once; two buckets at any number of tokens."""
        return self._buckets.peak_bytes if "_buckets" in self.__dict__ else 0

    # -- epochs (with the condition held) --------------------------------------------------------------------------

    def _next_epoch(self) -> Transport | None:
        """The transport to abort, once the condition is free: NCCL's abort may take its time."""
        stale, self._transport = self._transport, None
        self.epoch += 1
        self.state = "WAITING" if self.state != "CLOSED" else "CLOSED"
        self._members.clear()
        self._wanted.clear()
        self.metrics.inc("r3channel_group_resets_total")
        self.changed.notify_all()
        return stale

    def _rendezvous(self, *, rank: int, epoch: int) -> Rendezvous:
        return self.rendezvous(f"dp{self.dp}", epoch, rank)


def _abort(transport: Transport | None) -> None:
    if transport is not None:
        transport.abort()
