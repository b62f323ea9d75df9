"""One receiver's connection to the relay: says ready, receives, verifies, acknowledges, and connects again after a failure.

Knows when to give a connection up and try again, not where the rows go.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any, Protocol

from xxhash import xxh3_64_intdigest

from r3channel.config import ChannelConfig
from r3channel.errors import BackgroundFailed, BucketCorrupt, DeadlineExceeded, R3Error, TransportError
from r3channel.observe.metrics import Metrics
from r3channel.observe.stage_clock import StageClock
from r3channel.plan.layout import RankCoords
from r3channel.plan.token_tensors import length_bytes, received_tensors, tensor_bytes
from r3channel.trainer.buckets import HostBuckets
from r3channel.trainer.shard_buffer import ShardBuffer
from r3channel.transport.base import RELAY_RANK, Pending, Rendezvous, Transport
from r3channel.transport.connection import Connection
from r3channel.transport.listener import connect
from r3channel.transport.select import TRANSPORTS, gpu_of, join
from r3channel.wire import row_protocol as wire
from r3channel.wire.token_tensors import TokenTensor

_ACK_S = 10.0
_PLACE = tuple(field.name for field in fields(Rendezvous))
_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 4.0
"""Seconds between the first two attempts. Each pause is twice the one before, up to the longest."""


class Control(Protocol):
    """The trainer's call to its relay; `relay.Relay` itself in one process, `relay.ray_host.RayRelay` over Ray."""

    def hello(self, *, dp: int, pp: int, cp: int) -> dict[str, Any]:
        """Return where this receiver connects and how its rows can travel.

        Returns:
            {host, port, token, run, transport, gpu}.
        """
        ...


class RelayConnection:
    """One receiver's connection to the relay.

    CREATED -> join -> receive* -> close. One thread at a time; `close` from any.
    """

    def __init__(
        self, control: Control, *, coords: RankCoords, config: ChannelConfig, buckets: HostBuckets, clock: StageClock,
        metrics: Metrics,
    ) -> None:  # fmt: skip
        self._control, self._coords, self._config = control, coords, config
        self._buckets, self._clock, self._metrics = buckets, clock, metrics
        self._link: Connection | None = None
        self._group: Transport | None = None
        self._closed = threading.Event()
        self.announced = threading.Event()
        """Set once the relay sends rows. Until then a step waits for the relay, from then on for the wire."""
        self._lives = 0
        for name in ("r3channel_buckets_total", "r3channel_group_resets_total"):
            metrics.measure(name)
        metrics.measure("r3channel_bytes_total", leg="wire_received")

    def join(self, *, timeout_s: float) -> None:
        """Connect, and make the process group where there is one.

        The group is made here so that no step waits for it.

        Args:
            timeout_s: Seconds for connection and group.

        Raises:
            TransportError: The connection or the group could not be made. The relay may also answer with another error about this
                receiver, which is raised as it is.
        """
        deadline_s = time.monotonic() + timeout_s
        self._connect(timeout_s=timeout_s)
        self._buckets.reserve(self._config.bucket_bytes, transport=self._config.transport)
        if self._config.grouped:
            try:
                self._join_group(deadline_s)
            except R3Error:
                self._leave()
                raise

    def _connect(self, *, timeout_s: float) -> None:
        if self._link is not None:
            return
        where = self._control.hello(dp=self._coords.dp, pp=self._coords.pp, cp=self._coords.cp)
        if self._config.grouped and self._config.fallback:
            self._metrics.measure("r3channel_fallback_shards_total")
        token = bytes.fromhex(where["token"])
        hello = wire.pack(dp=self._coords.dp, pp=self._coords.pp, cp=self._coords.cp)
        self._link = connect(where["host"], where["port"], token, timeout_s=timeout_s, hello=hello)
        self._lives += 1
        self._metrics.set("r3channel_connection", self._lives)
        self.list_page()
        if self._closed.is_set():
            self._leave()

    def list_page(self, *, ended: bool = False) -> None:
        """List this process's /metrics page at the relay.

        A relay that was started anew does not know the page. A control of one's own may lack the call (`Relay.list_page`): then
        the page is not listed.

        Args:
            ended: Takes the page off the list.
        """
        call = getattr(self._control, "list_page", None)
        if self._metrics.target and call is not None:
            call(f"trainer {self._coords}", "" if ended else self._metrics.target)

    def receive(self, landed: ShardBuffer) -> None:
        """Receive a step's rows, verified and acknowledged, in one or more attempts.

        Between attempts there are pauses that grow. A connection that is cut, or silent for `send_timeout_s`, or not to be had,
        is made again until `step_timeout_s` has passed. Damaged rows are asked for `max_group_failures` times. After
        `max_group_failures` connections with a process group rows come over TCP alone, or without a `fallback` not at all. The
        relay's own error ends the attempts at once. The acknowledgement may take ten seconds more.

        Args:
            landed: Takes the rows.

        Raises:
            TransportError: The error of the last attempt.
        """
        config, failures, damaged = self._config, 0, 0
        limit, deadline_s = config.max_group_failures, time.monotonic() + config.step_timeout_s
        for pause_s in _pauses():
            group = config.grouped and failures < limit
            landed.begin()
            try:
                self._attempt(landed, group=group, deadline_s=deadline_s)
                break
            except TransportError as error:
                # without a connection the failure says nothing about process groups
                failures += self._link is not None or isinstance(error, DeadlineExceeded)
                damaged += not group and isinstance(error, BucketCorrupt)
                fell = group and failures == limit
                self._metrics.inc("r3channel_group_resets_total")
                over = damaged == limit or (fell and not config.fallback)
                self._pause(error, landed, pause_s, deadline_s=0.0 if over else deadline_s)
                if fell:
                    self._metrics.inc("r3channel_fallback_shards_total")
        with self._clock.span("wait_relay", step=landed.ticket.step):
            self._acknowledge(landed, max(deadline_s, time.monotonic() + _ACK_S))

    def close(self) -> None:
        """Leave for good and end a receive on another thread; idempotent."""
        self._closed.set()
        group, self._group = self._group, None
        self._leave()  # first: then the relay leaves the group, too, and NCCL's shutdown waits for both
        if group is not None:
            group.close()
        with suppress(Exception):  # the relay may have ended before; a control may raise anything
            self.list_page(ended=True)

    # -- one attempt -------------------------------------------------------------------------------------------------

    def _attempt(self, landed: ShardBuffer, *, group: bool, deadline_s: float) -> None:
        join_by_s = min(time.monotonic() + self._config.join_timeout_s, deadline_s)
        self._connect(timeout_s=_seconds_left(join_by_s))
        step, clock, seal = landed.ticket.step, self._clock, wire.seal_of(landed.ticket.identity)
        if group and self._group is None:
            with clock.span("wait_join", step=step):
                self._join_group(join_by_s)
        with clock.span("wait_relay", step=step):
            self._say(wire.READY, **seal, group=group)
            announced = self._hear(wire.ROWS, deadline_s, names=("nbytes", "digests", "hash"))
        self.announced.set()
        expected = landed.stream.nbytes, landed.table_bytes
        if (announced["nbytes"], announced["digests"]) != expected:
            raise BucketCorrupt(
                f"the relay announces {announced}, the ticket says {expected[0]} bytes of rows and {expected[1]} of digests. "
                "Do both sides run the same r3channel version?"
            )
        self._receive_rows(landed, group=group, deadline_s=deadline_s)
        table = bytearray(landed.table_bytes)
        self._recv(memoryview(table), deadline_s)
        if xxh3_64_intdigest(table) != announced["hash"]:
            raise BucketCorrupt("the digests came damaged from the relay")
        tensors = received_tensors(landed.ticket, landed.shard)
        for tensor, told in zip(tensors, announced.get("tensors", ()), strict=True):
            landed.tensor(tensor, self._receive_tensor(tensor, told, landed, deadline_s))
        with clock.span("verify", step=step):
            damaged = landed.verify(bytes(table))
        if damaged:
            self._say(wire.DAMAGED, **seal)
            self._hear(wire.AGAIN, deadline_s)  # raises the relay's own error if damaged there
            said = f"rows of {len(damaged)} samples came damaged from the relay: {damaged[:5]}"
            raise BucketCorrupt(said, samples=damaged)

    def _receive_tensor(
        self, tensor: TokenTensor, told: Any, landed: ShardBuffer, deadline_s: float
    ) -> bytearray:
        """Receive a tensor as bytes.

        Its row lengths come first, and must add up to the announced bytes before memory is taken.
        """
        data, piece = bytearray(length_bytes(landed.shard)), landed.ticket.bucket_bytes
        self._recv_all(data, 0, piece, deadline_s)
        edge, nbytes = len(data), tensor_bytes(tensor, data)
        if not isinstance(told, list) or len(told) != 2 or told[0] != nbytes:
            said = f"[bytes, hash]; the lengths of {edge // 2} rows say {nbytes} bytes"
            raise BucketCorrupt(f"the relay announces {told} for {tensor.name}, {said}")
        data += bytes(nbytes - edge)
        self._recv_all(data, edge, piece, deadline_s)
        if xxh3_64_intdigest(data) != told[1]:
            raise BucketCorrupt(f"the {tensor.name} came damaged from the relay")
        self._metrics.inc("r3channel_bytes_total", nbytes, leg="wire_received")
        self._metrics.inc("r3channel_tensor_bytes_total", nbytes, tensor=tensor.name)
        return data

    def _recv_all(self, out: bytearray, begin: int, piece: int, deadline_s: float) -> None:
        """Receive bytes from `begin` on, in pieces; each has a bucket's deadline."""
        for at in range(begin, len(out), piece):
            self._recv(memoryview(out)[at : at + piece], deadline_s)

    def _receive_rows(self, landed: ShardBuffer, *, group: bool, deadline_s: float) -> None:
        """Receive the rows by bucket; place each while the next comes."""
        ticket, stream, buckets = landed.ticket, landed.stream, self._buckets
        step, row_bytes = ticket.step, max(stream.row_bytes, 1)
        rows, total = max(ticket.bucket_bytes // row_bytes, 1), stream.nbytes // row_bytes
        buckets.reserve(min(rows, total) * row_bytes, transport=self._config.transport if group else "tcp")
        spans = [(at, min(at + rows, total)) for at in range(0, total, rows)]
        pending = self._post(spans, 0, row_bytes) if group else None
        if group:
            self._say(wire.POSTED)
        for number, (begin, end) in enumerate(spans):
            nbytes = (end - begin) * row_bytes
            with self._clock.span("recv" if number else "wait_wire", step=step):
                if pending is not None:
                    pending.wait(timeout_s=self._limit(deadline_s))
                    pending = self._post(spans, number + 1, row_bytes)
                else:
                    self._recv(buckets.free(number)[:nbytes].numpy().data, deadline_s)
            with self._clock.span("place", step=step):
                landed.rows(buckets.take_rows(number, nbytes, stream), begin=begin)
            self._metrics.inc("r3channel_buckets_total")
            self._metrics.inc("r3channel_bytes_total", nbytes, leg="wire_received")

    def _post(self, spans: list[tuple[int, int]], number: int, row_bytes: int) -> Pending | None:
        """Start to receive bucket `number`; return None after the last."""
        if number >= len(spans):
            return None
        assert self._group is not None
        begin, end = spans[number]
        return self._group.start_recv(RELAY_RANK, self._buckets.free(number)[: (end - begin) * row_bytes])

    # -- the connection ----------------------------------------------------------------------------------------------

    def _acknowledge(self, landed: ShardBuffer, deadline_s: float) -> None:
        # If the connection fails, the acknowledgement is repeated, never the transfer.
        for pause_s in _pauses():
            try:
                self._connect(timeout_s=min(self._config.join_timeout_s, _seconds_left(deadline_s)))
                self._say(wire.DONE, **wire.seal_of(landed.ticket.identity))
                self._hear(wire.THANKS, deadline_s)
                return
            except BackgroundFailed:  # the rows are here, and a relay that has died needs no acknowledgement
                return
            except TransportError as error:
                self._pause(error, landed, pause_s, deadline_s=deadline_s)

    def _pause(
        self, error: TransportError, landed: ShardBuffer, pause_s: float, *, deadline_s: float
    ) -> None:
        """Leave and wait for the next attempt.

        The error is raised if the deadline comes first, and after `close`.
        """
        self._leave()
        if time.monotonic() + pause_s <= deadline_s and not self._closed.wait(pause_s):
            return
        if error.step is not None:  # raised by the relay, which named the step
            raise error
        step, ranks = landed.ticket.step, error.ranks or [landed.shard.key]
        raise type(error)(
            f"step {step}, {self._coords}: {error}", samples=error.samples, ranks=ranks, step=step
        )

    def _say(self, kind: int, **values: Any) -> None:
        self._open().send_record(kind, wire.pack(**values), timeout_s=self._config.send_timeout_s)

    def _hear(self, expected: int, deadline_s: float, *, names: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the next record that is not WAIT.

        Each record comes within `send_timeout_s`.
        """
        kind, body = wire.WAIT, b""
        while kind == wire.WAIT:
            kind, body = self._open().recv_record(timeout_s=self._limit(deadline_s))
        return wire.unpack(kind, bytes(body), expected=expected, names=names)

    def _join_group(self, deadline_s: float) -> None:
        # The group has two members: this rank and the relay.
        self._say(wire.GROUP, gpu=gpu_of() if TRANSPORTS[self._config.transport].needs_gpu else "")
        values = self._hear(wire.GROUP, deadline_s, names=_PLACE)
        where = {name: values[name] for name in _PLACE}
        self._group = join(Rendezvous(**where), timeout_s=_seconds_left(deadline_s))
        self._group.alive = partial(getattr, self._open(), "alive")

    def _recv(self, out_N: memoryview, deadline_s: float) -> None:
        self._open().recv_into(out_N, timeout_s=self._limit(deadline_s))

    def _open(self) -> Connection:
        if (link := self._link) is None:
            raise TransportError("this receiver was closed")
        return link

    def _leave(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _limit(self, deadline_s: float) -> float:
        return min(self._config.send_timeout_s, _seconds_left(deadline_s))


def _pauses() -> Iterator[float]:
    pause_s = _PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _seconds_left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise DeadlineExceeded("its time is over: step_timeout_s, or join_timeout_s for a connection")
    return left_s
