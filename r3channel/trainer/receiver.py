"""Receives one rank's shard: checks the ticket, receives rows by a `RelayConnection`, hands parts on over the TP group.

All calls are on the trainer's main thread. TP0 talks to the relay; the other ranks of its TP group only take part in the hand-on.
Over TCP rows come on a thread of their own, which `prefetch` starts, or else `receive`. Rows are placed on the routers' device
(`buckets`). Rows are acknowledged when they have the digests that their engines made.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from r3channel.config import ChannelConfig
from r3channel.errors import DeadlineExceeded, TicketMismatch, TransportError, UsageError
from r3channel.model.spec import RoutingSpec
from r3channel.observe.metrics import Metrics
from r3channel.observe.stage_clock import StageClock
from r3channel.plan.layout import RankCoords, TrainerLayout
from r3channel.plan.placement import warm
from r3channel.plan.shards import Shard
from r3channel.plan.ticket import Ticket
from r3channel.plan.token_tensors import received_tensors, slot_bytes
from r3channel.trainer.buckets import buckets_for
from r3channel.trainer.model_tokens import Batches, check_batches
from r3channel.trainer.rank_shard import RankShard, slot_parts
from r3channel.trainer.relay_connection import Control, RelayConnection
from r3channel.trainer.shard_buffer import ShardBuffer
from r3channel.transport.collective_lock import PROCESS_SLOT
from r3channel.transport.network import local_address
from r3channel.transport.process_group import in_background
from r3channel.transport.tp_fanout import TensorParallelFanout
from r3channel.wire.token_tensors import TokenTensor

_WARMING = threading.Lock()
"""Held while a receiver compiles. Without it each receiver of a process would compile the same code."""


class Receiver:
    """Receives one rank's shard of each step, on one thread.

    CREATED -> join -> (prefetch -> receive)* -> close.
    """

    def __init__(
        self, control: Control, *, spec: RoutingSpec, layout: TrainerLayout, coords: RankCoords,
        config: ChannelConfig | None = None, fanout: TensorParallelFanout | None = None,
        device: torch.device | None = None, clock: StageClock | None = None, metrics: Metrics | None = None,
    ) -> None:  # fmt: skip
        """Make the receiver of one rank.

        Args:
            control: The call to the relay.
            spec: The model's routing shape, which every ticket must have.
            layout: The trainer's layout, which every ticket must have.
            coords: This rank's place in the layout.
            config: The channel's settings; the defaults without it.
            fanout: Hands the shard to the other TP ranks; None when tp = 1.
            device: Where the routers run; the CPU without it.
            clock: Takes the times of the stages; a new one without it.
            metrics: Takes the counts; without it this receiver makes and serves its own.
        """
        self._spec, self._layout, self._coords = spec, layout, coords
        self._config = config or ChannelConfig()
        self._device = device or torch.device("cpu")
        self._fanout = fanout or TensorParallelFanout(None, device=self._device)
        self.clock = clock or StageClock("trainer")
        self.clock.keep(self._config.trace, f"trainer{layout.rank(coords)}")
        if self._device.type == "cuda":
            self.clock.mark(torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)
        self._own_page = metrics is None

        def find_address(interface: str) -> str:
            relay = control.hello(dp=coords.dp, pp=coords.pp, cp=coords.cp)
            return local_address(interface, towards=relay["host"])

        page: dict[str, Any] = {"offset": 1 + layout.rank(coords), "address": find_address}
        self.metrics = metrics or Metrics.of("trainer", self._config, clock=self.clock, **page)
        self.metrics.measure("r3channel_steps_total")
        self.metrics.measure("r3channel_bytes_total", leg="landed")
        self._buckets = buckets_for(self._device)
        self._member = RelayConnection(
            control, coords=coords, config=self._config, buckets=self._buckets, clock=self.clock, metrics=self.metrics,
        )  # fmt: skip
        self._buffers: dict[str, torch.Tensor] = {}
        self._last = ("", -1, 0)
        """Run and step that were received last."""
        self._ahead: tuple[Ticket, Future[ShardBuffer]] | None = None
        """The prefetched step: still coming on another thread, or complete and not received yet."""
        self._asked = self._last
        """The step of the `receive` that ended last: if it failed, it keeps no other back."""
        self._stays = layout.tp_slots == 1 and not self._config.grouped
        """Whether routers use a shard in the memory into which it came. If so, the next shard comes into other memory."""
        self._turn = 0

    def join(self, *, timeout_s: float | None = None) -> None:
        """Make this rank ready to receive.

        TP rank 0 takes its memory and connects to the relay. The other ranks tell the relay where their /metrics is. A rank with
        its routers on a CPU compiles its kernels first.

        Args:
            timeout_s: Seconds for TP rank 0 to connect; `join_timeout_s` without it.
        """
        if self._device.type == "cpu":  # else the device places and hashes
            with _WARMING:
                warm(self._spec)
        if self._coords.tp == 0:
            nbytes = self._config.expected_shard_bytes
            # Now, so that no step waits or fails for memory.
            for turn in range(1 + self._stays) if nbytes else ():
                self._buffer(f"whole{turn}", nbytes)
            self._member.join(timeout_s=self._config.join_timeout_s if timeout_s is None else timeout_s)
        else:
            self._member.list_page()

    def receive(
        self, ticket: Ticket, *, tokens: Batches | None = None, samples: Sequence[Sequence[str]] | None = None,
    ) -> RankShard:  # fmt: skip
        """Return this rank's ids of the ticket's step.

        All ranks of a TP group call it together. The shard may be used until the next call. The call ends within `step_timeout_s`
        plus one bucket, or plus ten seconds to acknowledge. It may be called again after each of the errors below.

        All ranks of the TP group hold the routing slot (`transport/collective_lock.py`) from here to the end of the hand-on, so
        that no weight update of this process runs during the hand-on. Over TCP the transfer itself needs no slot and runs beside
        an update. Over a process group the transfer lies within the slot, too.

        Args:
            ticket: The step's ticket.
            tokens: Token ids of each sample of each micro-batch that this trainer is about to run, compared with the ticket.
            samples: Names of those samples, which tell samples of equal tokens apart.

        Raises:
            TicketMismatch: The ticket is not for this trainer or its batch. Raised before a row is handed on, and before one
                moves where nothing was prefetched.
            TransportError: The rows were not to be had (see `RelayConnection.receive`).
            PeerFailed: Another rank of the TP group failed.
            DeadlineExceeded: A weight update takes longer than `step_timeout_s`.
        """
        where, tp0 = f"step {ticket.step}, {self._coords}", self._coords.tp == 0
        with ExitStack() as slot:
            slot.callback(setattr, self, "_asked", ticket.identity)
            with self._raise_together(where, step=ticket.step):
                shard = self._check(ticket, tokens, samples)
                self._begin(ticket, shard)
                slot.enter_context(PROCESS_SLOT.use("routing", where, timeout_s=self._config.step_timeout_s))
                landed = self._receive_whole(ticket, shard) if tp0 else None
                cut = shard.tp_slots > 1
                # Uncut, TP0's part is its whole shard itself. Lack of memory is a failure that all ranks learn.
                part_N = self._buffer("part", shard.slot_bytes) if landed is None or cut else landed.rows_N
                tables = self._tables(shard, landed)
                digests_N = self._own(tables, 8 * _samples(shard) * len(shard.layers), cut=cut)
                beside = {
                    tensor: slot_bytes(shard, tensor, landed.tensors[tensor.name]) if landed else None
                    for tensor in received_tensors(ticket, shard)
                }
            with self.clock.span("rebroadcast", step=ticket.step):
                self._hand_on(shard, landed, part_N)
                self._share(tables, digests_N, cut=cut)
                tensors = {
                    tensor.name: self._hand_on_tensor(tensor, ticket, parts)
                    for tensor, parts in beside.items()
                }
        self._last, self._ahead = ticket.identity, None
        self._turn = (self._turn + 1) % (1 + self._stays)
        self.metrics.inc("r3channel_bytes_total", len(part_N), leg="landed")
        self.metrics.inc("r3channel_steps_total")
        self.metrics.set("r3channel_step", ticket.step)
        self.metrics.set("r3channel_shard_bytes", len(part_N))
        return RankShard(
            ticket, shard, part_N, tp=self._coords.tp, invalid_rows=self._config.policy,
            digests_SL=digests_N.view(torch.int64).view(_samples(shard), len(shard.layers)), tensors=tensors,
        )  # fmt: skip

    def prefetch(self, ticket: Ticket) -> None:
        """Start to receive a step's rows on another thread.

        `receive` of the same ticket waits for them. Call it as soon as the ticket is known, once `receive` of the step before has
        returned; that step's shard may still be in use. Errors of the transfer are raised by `receive`, which tries again first
        where the relay was not to be had.

        On TP ranks other than 0, and where rows travel over a process group, this call only checks the ticket: a receive that is
        pending on a trainer's GPU can deadlock with the framework's own communicators.

        Args:
            ticket: The step's ticket.

        Raises:
            UsageError: Another step waits for its `receive`.
            TicketMismatch: The ticket is not for this trainer, or is stale.
        """
        self._begin(ticket, self._check(ticket))

    def _begin(self, ticket: Ticket, shard: Shard) -> None:
        """Start the transfer over TCP, unless it was started before.

        An earlier transfer gives way if it failed, or belongs to another run, an older seal or a step whose `receive` failed.
        """
        if self._coords.tp or self._config.grouped:
            return
        other, before = self._ahead or (ticket, None)
        if before is not None:
            error = before.exception() if before.done() else None
            if other.identity == ticket.identity and not isinstance(error, TransportError):
                return
            kept = error is None and other.identity != self._asked
            if kept and other.run == ticket.run and other.step != ticket.step:
                raise UsageError(
                    f"step {ticket.step} while step {other.step} was prefetched; receive that one first"
                )
        self._member.announced.clear()
        call = partial(self._receive_ahead, ticket, shard, self._free(shard), after=before)
        self._ahead = ticket, in_background(call, name="receive")

    def _receive_ahead(
        self, ticket: Ticket, shard: Shard, whole_N: torch.Tensor, *, after: Future[ShardBuffer] | None
    ) -> ShardBuffer:
        self.clock.mark_ahead()
        if after is not None:
            # The earlier receive uses connection and memory until the relay refuses its ticket.
            wait([after], 2 * self._config.step_timeout_s)
        try:
            return self._receive_now(ticket, shard, whole_N)
        finally:
            self._member.announced.set()

    def _receive_whole(self, ticket: Ticket, shard: Shard) -> ShardBuffer:
        if self._ahead is None or self._ahead[0].identity != ticket.identity:  # over a process group
            self._ahead, came = None, Future[ShardBuffer]()
            came.set_result(self._receive_now(ticket, shard, self._free(shard)))
            self._ahead = ticket, came  # kept if another TP rank fails: the relay has freed the rows
        landed, limit_s = self._ahead[1], self._config.step_timeout_s
        try:
            with self.clock.span("wait_relay", step=ticket.step):
                self._member.announced.wait(limit_s)
            with self.clock.span("wait_wire", step=ticket.step):
                if not wait([landed], limit_s).done:
                    said = f"the rows of step {ticket.step} did not come within {limit_s:.1f} s"
                    raise DeadlineExceeded(said, step=ticket.step)
            if landed.exception() is not None:
                # A receive that goes on, or has acknowledged its rows, stays: the next call asks for it again.
                self._ahead = None
            return landed.result()
        finally:
            del landed  # the future holds the error, whose traceback holds this frame

    def _free(self, shard: Shard) -> torch.Tensor:
        """Return memory for a shard on the routers' device.

        Rows are written there after the work that this thread gave to the device so far.
        """
        whole_N = self._buffer(f"whole{self._turn}", shard.nbytes)
        self._buckets.mark()
        return whole_N

    def _receive_now(self, ticket: Ticket, shard: Shard, whole_N: torch.Tensor) -> ShardBuffer:
        with self._buckets.placing():
            with self.clock.span("place", step=ticket.step):
                landed = ShardBuffer(ticket, shard, whole_N, place=self._buckets.placement)
            self._member.receive(landed)
        return landed

    def close(self) -> None:
        """Leave the relay, and stop serving /metrics; idempotent."""
        self._member.close()
        if self._own_page:
            self.metrics.close()

    # -- before a byte moves -----------------------------------------------------------------------------------------

    def _check(
        self, ticket: Ticket, tokens: Batches | None = None, samples: Sequence[Sequence[str]] | None = None,
    ) -> Shard:  # fmt: skip
        sides = ("spec", ticket.spec, self._spec), ("layout", ticket.layout, self._layout)
        for what, seen, expected in sides:
            if seen != expected:
                raise TicketMismatch(
                    f"ticket of step {ticket.step}: {what} {seen}, this trainer has {expected}",
                    step=ticket.step,
                )
        run, last, seal = self._last
        # Another run may begin at any step: it may have been resumed.
        if ticket.run == run and (ticket.step, ticket.seal) <= (last, seal):
            raise TicketMismatch(
                f"ticket of step {ticket.step} after step {last} was received; a stale ticket?",
                step=ticket.step,
            )
        shard = ticket.plan.shard(dp=self._coords.dp, pp=self._coords.pp, cp=self._coords.cp)
        check_batches(ticket, shard, tokens, samples)
        return shard

    # -- over the TP group -------------------------------------------------------------------------------------------

    @contextmanager
    def _raise_together(self, what: str, *, step: int) -> Iterator[None]:
        """Run the block on every TP rank; all raise if one does."""
        failure = None
        try:
            yield
        except Exception as error:  # of any kind: the other ranks of the group must learn it
            failure = error
        try:
            with self.clock.span("rebroadcast" if self._coords.tp == 0 else "wait_wire", step=step):
                self._fanout.vote(failure, what=what)
        finally:
            failure = None  # its traceback holds the caller's frame, and with it buffers and groups

    def _tables(self, shard: Shard, landed: ShardBuffer | None) -> list[torch.Tensor] | None:
        if landed is None:
            return None
        tables = landed.digests_CSL
        if tables.is_cuda:  # made on another stream; kept until this stream has used it
            tables.record_stream(torch.cuda.current_stream())
        return list(tables.view(shard.tp_slots, -1).view(torch.uint8))

    def _own(self, parts: list[torch.Tensor] | None, nbytes: int, *, cut: bool) -> torch.Tensor:
        if parts is not None and not cut:
            return parts[0]
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _share(self, parts: list[torch.Tensor] | None, own_N: torch.Tensor, *, cut: bool) -> None:
        if cut:
            self._fanout.scatter(parts, own_N)
        else:
            self._fanout.rebroadcast(own_N)

    def _hand_on_tensor(self, tensor: TokenTensor, ticket: Ticket, parts: list[Any] | None) -> torch.Tensor:
        """Return this rank's part of a tensor, which TP0 hands on.

        The part is bytes in host memory. `parts` are TP0's, one for each slot.
        """
        size = torch.tensor([len(parts[0]) if parts else 0], device=self._device)
        self._fanout.rebroadcast(size.view(torch.uint8))
        cut, slots = tensor.by_layer and self._layout.tp_slots > 1, None
        with self._raise_together(f"step {ticket.step}, {self._coords}: {tensor.name}", step=ticket.step):
            if parts:
                slots = [torch.from_numpy(part).to(self._device) for part in (parts if cut else parts[:1])]
            own_N = self._own(slots, int(size), cut=cut)
        self._share(slots, own_N, cut=cut)
        return own_N.cpu()

    def _hand_on(self, shard: Shard, landed: ShardBuffer | None, part_N: torch.Tensor) -> None:
        """Fill `part_N` on every rank of the TP group.

        Under sequence parallelism each call hands on a bucket's bytes. A call waits for all ranks, so small micro-batches go
        together.
        """
        if shard.tp_slots == 1:
            self._fanout.rebroadcast(part_N)
            return
        parts, first, begin, end = landed and slot_parts(shard, landed.rows_N), 0, 0, 0
        for after in range(1, len(shard.microbatches) + 1):
            end += shard.microbatch_bytes(after - 1) // shard.tp_slots
            if after < len(shard.microbatches) and (end - begin) * shard.tp_slots < self._config.bucket_bytes:
                continue
            slots = None if parts is None else [*map(torch.cat, zip(*parts[first:after], strict=True))]
            self._fanout.scatter(slots, part_N[begin:end])
            first, begin = after, end

    def _buffer(self, name: str, nbytes: int) -> torch.Tensor:
        held = self._buffers.get(name)
        if held is None or len(held) < nbytes:
            held = self._buffers[name] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return held[:nbytes]


def _samples(shard: Shard) -> int:
    return sum(len(batch.sample_ids) for batch in shard.microbatches)
