"""Receives one rank's shard: ticket checked, ready said, buckets verified, parts handed on over the TP group.

Called on the trainer's main thread in the routing slot of a step. TP0 talks to the relay; the other ranks of its TP
group only take part in the hand-on. The received bytes are acknowledged when every bucket's hash was verified.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from r3channel.config import ChannelConfig
from r3channel.errors import (
    BucketCorrupt,
    DeadlineExceeded,
    StepError,
    TicketMismatch,
    TransportError,
)
from r3channel.metrics import Metrics, StageClock
from r3channel.plan.layout import RankCoords, TrainerLayout
from r3channel.plan.shards import Shard
from r3channel.plan.ticket import Ticket
from r3channel.spec import RoutingSpec
from r3channel.trainer.shard import RankShard, slot_parts
from r3channel.transport.base import RELAY_RANK, Rendezvous, Transport, join
from r3channel.transport.tensor_parallel import TensorParallelFanout
from r3channel.wire.bucket import BUCKET_HEADER_BYTES, BucketHeader, bucket_slices, hash_bucket

_HELLO_POLL_S = 0.05
_READY_WAIT_S = 1.0
MAX_ATTEMPTS = 3
"""Lives of the group that one step may use up before its error is raised."""


class Control(Protocol):
    """The trainer's calls to its relay; `relay.Relay` itself in one process, `relay.actor.RayControl` over Ray."""

    def hello(
        self, *, dp: int, pp: int, cp: int, boot_id: str, after_epoch: int
    ) -> dict[str, Any] | None: ...

    def ready(self, *, run: str, step: int, dp: int, pp: int, cp: int, epoch: int, wait_s: float) -> bool: ...

    def ack(self, *, run: str, step: int, dp: int, pp: int, cp: int) -> None: ...


class Receiver:
    """CREATED -> join -> receive* -> close. One thread."""

    def __init__(
        self,
        control: Control,
        *,
        spec: RoutingSpec,
        layout: TrainerLayout,
        coords: RankCoords,
        config: ChannelConfig | None = None,
        fanout: TensorParallelFanout | None = None,
        device: torch.device | None = None,
        clock: StageClock | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """`fanout` hands the shard to the other TP ranks (None when tp = 1); `device` is where the routers run."""
        self._control, self._spec, self._layout, self._coords = control, spec, layout, coords
        self._config = config or ChannelConfig()
        self._device = device or torch.device("cpu")
        self._fanout = fanout or TensorParallelFanout(None, device=self._device)
        self.clock = clock or StageClock("trainer")
        self.metrics = metrics or Metrics("trainer", clock=self.clock)
        self._boot_id = uuid.uuid4().hex[:12]
        self._transport: Transport | None = None
        self._epoch, self._backend = 0, ""
        self._buffers: dict[str, torch.Tensor] = {}
        self._last_step = -1

    def join(self, *, timeout_s: float | None = None) -> None:
        """TP0 joins the current epoch of its group; returns at once on the other ranks."""
        if self._coords.tp != 0:
            return
        limit = self._config.join_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        while (found := self._hello()) is None:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{self._coords}: waited {limit:.1f} s for the other members of the group of dp {self._coords.dp}; expected "
                    f"hello from the TP0 of {self._layout.pp} pipeline stage(s) x {self._layout.cp} CP rank(s)"
                )
            time.sleep(_HELLO_POLL_S)
        rendezvous = Rendezvous(**found)
        self._epoch, self._backend = rendezvous.epoch, rendezvous.backend
        self._transport = join(rendezvous, timeout_s=limit)
        self.metrics.set("r3channel_epoch", self._epoch)

    def receive(self, ticket: Ticket, *, lengths: Sequence[Sequence[int]] | None = None) -> RankShard:
        """This rank's ids of the ticket's step. All ranks of a TP group call it together.

        `lengths`: tokens of each sample of each micro-batch that this trainer is about to run, to be held against the ticket.

        The memory is reused by the next call. Ends within `step_timeout_s` plus one bucket. Raises `TicketMismatch` before a
        byte moves, a `TransportError` after `MAX_ATTEMPTS` lives of the group, `PeerFailed` where another rank of the TP group
        failed.
        """
        where = f"step {ticket.step}, {self._coords}"
        whole_N, failure, shard = None, None, None
        try:
            shard = self._check(ticket, lengths)
            if self._coords.tp == 0:
                whole_N = self._receive_whole(ticket, shard)
        except Exception as error:  # whatever it is: the other ranks of the group must learn it
            failure = error
        with self.clock.span("rebroadcast" if self._coords.tp == 0 else "wait_wire", step=ticket.step):
            self._fanout.vote(failure, what=where)
        assert shard is not None  # else the vote has raised
        with self.clock.span("rebroadcast", step=ticket.step):
            part_N = self._hand_on(shard, whole_N)
        self._last_step = ticket.step
        self.metrics.inc("r3channel_bytes_total", len(part_N), leg="landed")
        return RankShard(ticket, shard, part_N, tp=self._coords.tp, invalid_rows=self._config.invalid_rows)

    def close(self) -> None:
        """Leave the group; idempotent."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    # -- before a byte moves -----------------------------------------------------------------------------------------

    def _check(self, ticket: Ticket, lengths: Sequence[Sequence[int]] | None) -> Shard:
        for what, seen, expected in (
            ("spec", ticket.spec, self._spec),
            ("layout", ticket.layout, self._layout),
        ):
            if seen != expected:
                raise TicketMismatch(
                    f"ticket of step {ticket.step}: {what} {seen}, this trainer has {expected}"
                )
        if ticket.step <= self._last_step:
            raise TicketMismatch(
                f"ticket of step {ticket.step} after step {self._last_step} was received; a stale ticket?"
            )
        shard = ticket.plan.shard(dp=self._coords.dp, pp=self._coords.pp, cp=self._coords.cp)
        if lengths is not None:
            check_lengths(ticket, shard, lengths)
        return shard

    def _hello(self) -> dict[str, Any] | None:
        return self._control.hello(**self._at, boot_id=self._boot_id, after_epoch=self._epoch)

    @property
    def _at(self) -> dict[str, int]:
        return {"dp": self._coords.dp, "pp": self._coords.pp, "cp": self._coords.cp}

    # -- TP0 ---------------------------------------------------------------------------------------------------------

    def _receive_whole(self, ticket: Ticket, shard: Shard) -> torch.Tensor:
        deadline = time.monotonic() + self._config.step_timeout_s
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # nothing of the framework may be in flight beside our group
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                data_N = self._attempt(ticket, shard, deadline)
                break
            except TransportError:  # EpochEnded and BucketCorrupt among them
                self._abandon()
                if attempt == MAX_ATTEMPTS or time.monotonic() > deadline:
                    raise
        else:
            raise AssertionError("unreachable: the last attempt ends the loop or raises")
        self._acknowledge(ticket)
        return data_N

    def _attempt(self, ticket: Ticket, shard: Shard, deadline: float) -> torch.Tensor:
        if self._transport is None:
            self.join(timeout_s=min(self._config.join_timeout_s, max(0.1, deadline - time.monotonic())))
        with self.clock.span("wait_relay", step=ticket.step):
            self._wait_ready(ticket, deadline)
        return self._receive_buckets(ticket, shard, deadline)

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
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return self._control.ack(run=ticket.run, step=ticket.step, **self._at)
            except TransportError:
                if attempt == MAX_ATTEMPTS:
                    raise
        return None

    def _receive_buckets(self, ticket: Ticket, shard: Shard, deadline: float) -> torch.Tensor:
        data_N = self._buffer("whole", shard.nbytes)
        header_N = torch.empty(BUCKET_HEADER_BYTES, dtype=torch.uint8)
        slices = bucket_slices(shard.nbytes, bucket_bytes=ticket.bucket_bytes)
        for index, part in enumerate(slices):
            self._wire(header_N, step=ticket.step, deadline=deadline)
            header = BucketHeader.from_bytes(header_N.numpy())
            self._check_header(header, ticket, index=index, count=len(slices), part=part)
            self._wire(data_N[part], step=ticket.step, deadline=deadline)
            with self.clock.span("verify", step=ticket.step):
                self._check_bytes(header, data_N[part])
            self.metrics.inc("r3channel_buckets_total")
            self.metrics.inc("r3channel_bytes_total", header.nbytes, leg="wire_received")
        return data_N

    def _wire(self, out_N: torch.Tensor, *, step: int, deadline: float) -> None:
        """Fill host memory from the relay; under NCCL through a device buffer of one bucket."""
        assert self._transport is not None
        limit = min(self._config.send_timeout_s, max(0.1, deadline - time.monotonic()))
        with self.clock.span("wait_wire", step=step):
            if self._backend != "nccl":
                self._transport.recv(RELAY_RANK, out_N, timeout_s=limit)
                return
            bucket_N = self._buffer("bucket", len(out_N), device=self._device)
            self._transport.recv(RELAY_RANK, bucket_N, timeout_s=limit)
            out_N.copy_(bucket_N)

    def _check_header(
        self, header: BucketHeader, ticket: Ticket, *, index: int, count: int, part: slice
    ) -> None:
        seen = (
            header.epoch,
            header.step,
            header.dp,
            header.pp,
            header.index,
            header.count,
            header.offset,
            header.nbytes,
        )
        expected = (
            self._epoch,
            ticket.step,
            self._coords.dp,
            self._layout.member(pp=self._coords.pp, cp=self._coords.cp),
            index,
            count,
            part.start,
            part.stop - part.start,
        )
        if seen != expected:
            raise BucketCorrupt(
                f"{self._coords}: bucket (epoch, step, dp, member, index, count, offset, bytes) is {seen}, "
                f"the ticket announces {expected}"
            )

    def _check_bytes(self, header: BucketHeader, data_N: torch.Tensor) -> None:
        found = hash_bucket(data_N.numpy())
        if found != header.payload_hash:
            raise BucketCorrupt(
                f"{self._coords}: step {header.step} bucket {header.index} of {header.count} has hash {found:#x}, expected "
                f"{header.payload_hash:#x}; damaged on the way"
            )

    def _abandon(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        self.metrics.inc("r3channel_group_resets_total")

    # -- over the TP group -------------------------------------------------------------------------------------------

    def _hand_on(self, shard: Shard, whole_N: torch.Tensor | None) -> torch.Tensor:
        """[slot_bytes] on the routers' device: rebroadcast without sequence parallelism, else scatter per micro-batch."""
        part_N = self._buffer("part", shard.slot_bytes, device=self._device)
        if shard.tp_slots == 1:
            if whole_N is not None:
                part_N.copy_(whole_N)
            self._fanout.rebroadcast(part_N)
            return part_N
        parts, at = None if whole_N is None else slot_parts(shard, whole_N), 0
        for index in range(len(shard.microbatches)):
            size = shard.microbatch_bytes(index) // shard.tp_slots
            chunks = None if parts is None else [part.to(self._device) for part in parts[index]]
            self._fanout.scatter(chunks, part_N[at : at + size])
            at += size
        return part_N

    def _buffer(self, name: str, nbytes: int, *, device: torch.device | None = None) -> torch.Tensor:
        """A reused uint8 buffer of at least `nbytes`, cut to size."""
        held = self._buffers.get(name)
        if held is None or len(held) < nbytes:
            held = self._buffers[name] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return held[:nbytes]


def check_lengths(ticket: Ticket, shard: Shard, lengths: Sequence[Sequence[int]]) -> None:
    """Raise `TicketMismatch` unless the ticket plans these micro-batches of samples of these lengths for this rank."""
    where = f"ticket of step {ticket.step}, dp {shard.dp}"
    planned = [batch.tokens for batch in shard.microbatches]
    if len(lengths) != len(planned):
        raise TicketMismatch(
            f"{where}: {len(planned)} micro-batches planned, this trainer runs {len(lengths)}. Is micro-batch size or token "
            "budget another on the two sides?"
        )
    for index, (theirs, ours) in enumerate(zip(planned, map(tuple, lengths), strict=True)):
        if theirs != ours:
            raise TicketMismatch(
                f"{where}, micro-batch {index}: samples of {theirs} tokens planned, this trainer has {ours}. Was the batch "
                "sorted, trimmed or padded after it was sealed?"
            )
