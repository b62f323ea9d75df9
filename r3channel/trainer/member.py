"""One receiving process's side of a routing group: join, say ready, receive bucket by bucket, acknowledge.

Belongs to one relay. Knows when to give a group up and try again, not what becomes of the bytes.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol

import torch

from r3channel.config import ChannelConfig
from r3channel.errors import DeadlineExceeded, EpochEnded, StepError, TransportError
from r3channel.metrics import Metrics, StageClock
from r3channel.plan.layout import RankCoords, TrainerLayout
from r3channel.plan.parts import Part
from r3channel.plan.shards import Shard
from r3channel.plan.ticket import Ticket
from r3channel.trainer.inflow import Awaited, Inflow
from r3channel.transport.base import Rendezvous, Transport, join

_HELLO_POLL_S = 0.05
_READY_WAIT_S = 1.0
_ACK_ATTEMPTS = 3
_FALLBACK_LIVES = 2
"""Lives that a step may use up after it fell back to the object store."""

Buffer = Callable[[torch.device], torch.Tensor]


class Control(Protocol):
    """The trainer's calls to its relay; `relay.Relay` itself in one process, `relay.actor.RayControl` over Ray."""

    def hello(
        self, *, dp: int, pp: int, cp: int, boot_id: str, after_epoch: int
    ) -> dict[str, Any] | None: ...

    def ready(self, *, run: str, step: int, dp: int, pp: int, cp: int, epoch: int, wait_s: float) -> bool: ...

    def ack(self, *, run: str, step: int, dp: int, pp: int, cp: int) -> None: ...

    def mail(self, *, call: str, name: str, **arguments: Any) -> Any:
        """See `transport.object_store`; only a step that falls back needs it."""
        ...


class Member:
    """CREATED -> join -> receive* -> close. One thread at a time."""

    def __init__(
        self,
        control: Control,
        *,
        layout: TrainerLayout,
        coords: RankCoords,
        config: ChannelConfig,
        device: torch.device,
        clock: StageClock,
        metrics: Metrics,
    ) -> None:
        """`device` is where NCCL receives; gloo receives in host memory."""
        self._control, self._layout, self._coords, self._config = control, layout, coords, config
        self._device, self._clock, self._metrics = device, clock, metrics
        self._boot_id = uuid.uuid4().hex[:12]
        self._transport: Transport | None = None
        self._epoch, self._backend = 0, ""
        self._inflow = Inflow(clock=clock, metrics=metrics, timeout_s=config.send_timeout_s)

    def join(self, *, timeout_s: float) -> None:
        """Join the current epoch of the group. Raises `DeadlineExceeded` when it does not form in time."""
        deadline = time.monotonic() + timeout_s
        while (found := self._hello()) is None:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{self._coords}: waited {timeout_s:.1f} s for the other members of the group of dp {self._coords.dp}; "
                    f"expected hello from the TP0 of {self._layout.pp} pipeline stage(s) x {self._layout.cp} CP rank(s)"
                )
            time.sleep(_HELLO_POLL_S)
        rendezvous = Rendezvous(**found)
        self._epoch, self._backend = rendezvous.epoch, rendezvous.backend
        left_s = max(0.1, deadline - time.monotonic())
        self._transport = join(rendezvous, timeout_s=left_s, mail=self._control)
        self._metrics.set("r3channel_epoch", self._epoch)

    def receive(self, ticket: Ticket, shard: Shard | Part, buffer: Buffer) -> torch.Tensor:
        """The verified, acknowledged bytes of a shard, in the memory that `buffer` gives for a device.

        Ends within `step_timeout_s` plus one bucket. Raises a `TransportError` after `max_group_failures` lives of the group
        and two more of the fallback, `StepError` when the relay does not place the shard in time.
        """
        attempts = self._config.max_group_failures + (_FALLBACK_LIVES if self._config.fallback else 0)
        deadline = time.monotonic() + self._config.step_timeout_s
        if self._device.type == "cuda" and self._config.backend == "nccl":
            torch.cuda.synchronize(self._device)  # nothing of the framework may be in flight beside our group
        while True:
            try:
                data_N = self._attempt(ticket, shard, buffer, deadline)
                break
            except (
                EpochEnded
            ):  # before a byte moved: somebody else's failure, or the end of a life that was for one step
                self._leave()
                if time.monotonic() > deadline:
                    raise
            except TransportError:  # BucketCorrupt among them
                self._leave()
                self._metrics.inc("r3channel_group_resets_total")
                attempts -= 1
                if not attempts or time.monotonic() > deadline:
                    raise
        self._acknowledge(ticket)
        return data_N

    def close(self) -> None:
        """Leave the group; idempotent."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    # -- control -----------------------------------------------------------------------------------------------------

    @property
    def _at(self) -> dict[str, int]:
        return {"dp": self._coords.dp, "pp": self._coords.pp, "cp": self._coords.cp}

    def _hello(self) -> dict[str, Any] | None:
        return self._control.hello(**self._at, boot_id=self._boot_id, after_epoch=self._epoch)

    def _attempt(self, ticket: Ticket, shard: Shard | Part, buffer: Buffer, deadline: float) -> torch.Tensor:
        if self._transport is None:
            self.join(timeout_s=min(self._config.join_timeout_s, max(0.1, deadline - time.monotonic())))
        with self._clock.span("wait_relay", step=ticket.step):
            self._wait_ready(ticket, deadline)
        return self._receive_buckets(ticket, shard, buffer, deadline)

    def _wait_ready(self, ticket: Ticket, deadline: float) -> None:
        """A relay that is late is not a broken group: the error is not one that opens the next epoch."""
        while not self._control.ready(
            run=ticket.run, step=ticket.step, epoch=self._epoch, wait_s=_READY_WAIT_S, **self._at
        ):
            if time.monotonic() > deadline:
                raise StepError(
                    f"step {ticket.step}: the relay did not place the shard of {self._coords} within "
                    f"{self._config.step_timeout_s:.1f} s; is it out of cores?"
                )

    def _acknowledge(self, ticket: Ticket) -> None:
        """The bytes are here and verified, whatever becomes of the call: repeat it, never the transfer."""
        for attempt in range(1, _ACK_ATTEMPTS + 1):
            try:
                return self._control.ack(run=ticket.run, step=ticket.step, **self._at)
            except TransportError:
                if attempt == _ACK_ATTEMPTS:
                    raise
        return None

    def _leave(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # -- the wire ----------------------------------------------------------------------------------------------------

    def _receive_buckets(
        self, ticket: Ticket, shard: Shard | Part, buffer: Buffer, deadline: float
    ) -> torch.Tensor:
        assert self._transport is not None
        data_N = buffer(self._device if self._backend == "nccl" else torch.device("cpu"))
        awaited = Awaited(
            step=ticket.step,
            dp=self._coords.dp,
            member=self._layout.member(pp=self._coords.pp, cp=self._coords.cp),
            nbytes=shard.nbytes,
            bucket_bytes=ticket.bucket_bytes,
        )
        self._inflow.receive(self._transport, awaited, data_N, deadline_s=deadline)
        return data_N
