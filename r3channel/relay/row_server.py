"""Serves receivers: one connection each, served by one thread, from `READY` to the acknowledgement.

    connected (-> GROUP: both join one) -> READY (-> WAIT: not prepared yet) -> rows and digests -> DONE -> READY ...
                                \\-> the receiver is gone, or silent beyond a deadline: its connection ends, nobody else notices

`RowServer` calls `Steps`, for a receiver's rows and with its acknowledgement, and nothing else of the relay. Rows stay in the
store until every receiver has acknowledged, so a receiver that comes back gets the same bytes again. `wire.row_protocol`
describes the messages.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_intdigest

from r3channel.errors import ConfigError, R3Error, StepError, TicketMismatch, TransportError
from r3channel.plan.shards import ShardKey
from r3channel.relay.row_stream import RowStream
from r3channel.relay.sealed_steps import Steps
from r3channel.relay.send_buffers import BUCKETS_ALIVE, Bytes, DeviceStaging, HostPool, HostStaging
from r3channel.transport.base import Pending, Rendezvous, Transport
from r3channel.transport.connection import Connection
from r3channel.transport.listener import Listener
from r3channel.transport.select import TRANSPORTS, gpu_of, join, open_store
from r3channel.typed import Json
from r3channel.wire import row_protocol as wire
from r3channel.wire.row_protocol import Seal

if TYPE_CHECKING:
    from r3channel.transport.process_group import RendezvousStore

_WAIT_S = 1.0
"""Seconds between messages to a receiver whose rows are not ready: then only a relay that hangs is silent."""
_TAKEN_S = 5.0
"""Seconds within which a receiver posts its first receive over a process group, and takes each bucket. Else its connection ends,
because all others wait for their turn meanwhile. Eight megabytes take milliseconds to move and to place."""

_ASKED = {
    wire.READY: (*wire.SEAL, "group"), wire.GROUP: ("gpu",), wire.DAMAGED: wire.SEAL, wire.DONE: wire.SEAL,
}  # fmt: skip
"""Kind of a receiver's record -> the values that it must have."""


class RowServer:
    """The listener for receivers, and their connections. States: OPEN -> CLOSED.

    Any thread may call.
    """

    def __init__(self, steps: Steps) -> None:
        """Open the listener. A receiver that asked is told what `steps` raises."""
        self.steps, self.clock, self.metrics, config = steps, steps.clock, steps.metrics, steps.config
        for name in ("r3channel_buckets_total", "r3channel_group_resets_total"):
            self.metrics.measure(name)
        self.metrics.measure("r3channel_bytes_total", leg="wire_sent")
        self._token = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._serving: dict[ShardKey, _Served] = {}
        self._lives: Counter[ShardKey] = Counter()
        self._closed = False
        self.peak_staging_bytes = 0
        """The most bytes that one receiver has had staged at once: none where rows go from where they lie, else one bucket (two
        over a process group), whatever the tokens."""
        needs_gpu = TRANSPORTS[config.transport].needs_gpu
        self.host_pool = HostPool()
        """Buckets for rows that travel over TCP: those wait for no process group's turn."""
        self.staging = DeviceStaging(config.device) if needs_gpu else self.host_pool
        self.gpu = gpu_of(config.device) if needs_gpu else ""
        self._listener = Listener(config.interface, token=self._token, on_link=self._admit)

    def hello(self, key: ShardKey) -> Json:
        """Return where and with what token this receiver connects.

        Raises:
            TicketMismatch: The layout has no such receiver.
        """
        dp, pp, cp = key
        layout = self.steps.layout
        if not (0 <= dp < layout.dp and 0 <= pp < layout.pp and 0 <= cp < layout.cp):
            text = f"hello from dp {dp} pp {pp} cp {cp}; this relay serves layout {layout}"
            raise TicketMismatch(text, ranks=[key])
        door, token = self._listener, self._token.hex()
        return {"host": door.host, "port": door.port, "token": token, "run": self.steps.run}

    def status(self) -> Json:
        """Return the connected receivers, and how many connections each has had."""
        with self._lock:
            return {"connected": sorted(self._serving), "lives": dict(self._lives)}

    def close(self, *, timeout_s: float) -> list[str]:
        """End every connection.

        Args:
            timeout_s: Seconds to wait for each thread.

        Returns:
            The names of threads that still run after that.
        """
        with self._lock:
            self._closed = True
            serving = list(self._serving.values())
        self._listener.close()
        for served in serving:
            served.abort()
        for served in serving:
            served.thread.join(timeout_s)
        return [served.thread.name for served in serving if served.thread.is_alive()]

    def _admit(self, link: Connection) -> None:
        try:
            values = wire.unpack(wire.READY, link.hello, expected=wire.READY, names=("dp", "pp", "cp"))
            key = (values["dp"], values["pp"], values["cp"])
            self.hello(key)
        except R3Error:  # it has the token, but its first message is another version's
            link.close()
            return
        served = _Served(self, key, link)
        with self._lock:
            before = self._serving.get(key)
            if self._closed:
                link.close()
                return
            self._serving[key] = served
            self._lives[key] += 1
            served.life = self._lives[key]
        if before is not None:  # the receiver was restarted, or gave that connection up
            self.metrics.inc("r3channel_group_resets_total")
            before.abort()
        served.run()  # from here on the listener's thread serves this connection

    def forget(self, served: _Served) -> None:
        with self._lock:
            if self._serving.get(served.key) is served:
                del self._serving[served.key]


class _Served:
    """A connection of a receiver, and the thread that serves it."""

    def __init__(self, delivery: RowServer, key: ShardKey, link: Connection) -> None:
        self.key, self.life = key, 0
        self._delivery, self._link = delivery, link
        self._config = delivery.steps.config
        self._every_s = min(_WAIT_S, self._config.send_timeout_s / 4)
        self._taken_s = min(_TAKEN_S, self._config.send_timeout_s)
        self._group: Transport | None = None
        self._store: RendezvousStore | None = None
        """This group's own store. A store that all groups shared would keep the keys of every connection."""
        self.thread = threading.current_thread()
        self.thread.name = "r3channel-send-" + "-".join(map(str, key))

    def abort(self) -> None:
        """End at once every wait on the connection. Any thread may call."""
        self._link.abort()
        self._leave_group()

    def run(self) -> None:
        try:
            while True:
                self._answer(*self._link.recv_record(timeout_s=None))
        except TransportError:
            pass  # the receiver is gone, or took too long; it will connect again
        finally:
            self._link.close()
            self._leave_group()
            self._delivery.forget(self)

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.abort()
        if self._store is not None:
            self._store.close()  # ends the wait for a receiver that never joined

    def _answer(self, kind: int, body: bytes) -> None:
        try:
            expected = kind if kind in _ASKED else wire.DONE
            values = wire.unpack(kind, body, expected=expected, names=_ASKED[expected])
            if kind == wire.READY:
                if values["group"] and self._group is None:
                    raise TicketMismatch(f"receiver {self.key} uses a process group and never asked for one")
                out = self._outgoing(wire.seal_in(values))
                self._send(out, values["step"], group=bool(values["group"]))
            elif kind == wire.GROUP:
                self._join_group(values["gpu"])
            elif kind == wire.DAMAGED:
                self._delivery.steps.verify_again(wire.seal_in(values), self.key)
                self._say(wire.AGAIN)
            else:
                self._delivery.steps.acknowledge(wire.seal_in(values), self.key)
                self._say(wire.THANKS)
        except TransportError:
            raise
        except R3Error as error:
            self._say(wire.ERROR, **wire.values_of(error))

    def _outgoing(self, seal: Seal) -> RowStream:
        steps, deadline_s = self._delivery.steps, time.monotonic() + self._config.step_timeout_s
        while (out := steps.outgoing(seal, self.key, timeout_s=self._every_s)) is None:
            if time.monotonic() > deadline_s:
                text = f"the rows of {self.key} are not prepared in {self._config.step_timeout_s:.0f} s; out of cores?"
                raise StepError(f"step {seal[1]}: {text}", step=seal[1], ranks=[self.key])
            self._say(wire.WAIT)
        return out

    def _say(self, kind: int, **values: Any) -> None:
        self._link.send_record(kind, wire.pack(**values), timeout_s=self._config.send_timeout_s)

    def _send(self, out: RowStream, step: int, *, group: bool) -> None:
        delivery, stream, limit_s = self._delivery, out.stream, self._config.send_timeout_s
        found = xxh3_64_intdigest(out.digests)
        tensors = out.tensors()
        told = {"tensors": [[len(data), xxh3_64_intdigest(data)] for data in tensors]} if tensors else {}
        # Take the turn before ROWS is sent: after ROWS the receiver posts receives, which occupy its GPU until the rows come.
        pool = delivery.staging if group else delivery.host_pool
        turn = pool.turn(partial(self._say, wire.WAIT), every_s=self._every_s)
        with nullcontext() if out.travels_whole() and not group else turn as staging:
            self._say(wire.ROWS, nbytes=stream.nbytes, digests=len(out.digests), hash=found, **told)
            with delivery.clock.span("send", step=step):
                if group:
                    wire.unpack(*self._link.recv_record(timeout_s=self._taken_s), expected=wire.POSTED)
                    self._send_over_group(out, staging)
                else:
                    self._send_plain(out, staging)
                self._link.send([out.digests], timeout_s=limit_s)
                for data in tensors:
                    for at in range(0, len(data), out.bucket_bytes):
                        self._link.send([data[at : at + out.bucket_bytes]], timeout_s=limit_s)
        delivery.metrics.inc("r3channel_bytes_total", stream.nbytes + sum(map(len, tensors)), leg="wire_sent")
        delivery.metrics.inc("r3channel_buckets_total", -(-stream.nbytes // out.bucket_bytes))

    def _send_plain(self, out: RowStream, staging: HostStaging | None) -> None:
        limit_s = self._config.send_timeout_s
        if staging is None:  # rows with all their layers go from where they lie
            for batch in out.batches(out.bucket_bytes):
                self._link.send(batch, timeout_s=limit_s)
            return
        (buffer_N,) = self._buffers(out, staging, 1)
        for _, nbytes in out.fill([buffer_N]):
            self._link.send([buffer_N[:nbytes].data], timeout_s=limit_s)

    def _buffers(self, out: RowStream, staging: HostStaging, count: int) -> Sequence[Bytes]:
        row_bytes, delivery = max(out.stream.row_bytes, 1), self._delivery
        nbytes = max(out.bucket_bytes // row_bytes, 1) * row_bytes
        delivery.peak_staging_bytes = max(delivery.peak_staging_bytes, count * nbytes)
        return staging.buffers(nbytes)[:count]

    def _send_over_group(self, out: RowStream, staging: HostStaging | None) -> None:
        group, under_way = self._group, list[Pending]()
        assert group is not None and staging is not None
        buffers = self._buffers(out, staging, BUCKETS_ALIVE)
        for slot, nbytes in out.fill(buffers):
            under_way.append(group.start_send(1, staging.stage(slot, nbytes)))
            if len(under_way) == len(buffers):  # the next bucket overwrites the oldest one
                under_way.pop(0).wait(timeout_s=self._taken_s)
        for pending in under_way:
            pending.wait(timeout_s=self._taken_s)

    def _join_group(self, gpu: str) -> None:
        config = self._config
        if not config.grouped:
            text = f"a receiver asks for a process group; this relay's transport is {config.transport}"
            raise TicketMismatch(text)
        if gpu and gpu == self._delivery.gpu:
            raise ConfigError(
                f"receiver (dp, pp, cp) {self.key} uses GPU {gpu}, and so does this relay: NCCL refuses two ranks on one. Give "
                "the relay a GPU of its own, or set transport='tcp', which colocated jobs use",
                ranks=[self.key],
            )
        name = f"{self._delivery.steps.run}/{'-'.join(map(str, self.key))}/life{self.life}"
        store = self._store = open_store(config.interface)
        # a group of two, so that a receiver that dies or hangs costs nobody else anything
        ours = Rendezvous(
            backend=config.transport, name=name, connection=self.life, rank=0, world_size=2, host=store.host, port=store.port
        )  # fmt: skip
        self._say(wire.GROUP, **asdict(replace(ours, rank=1)))
        with self._delivery.staging.on_device():
            self._group = join(ours, timeout_s=config.join_timeout_s)
        self._group.alive = partial(getattr, self._link, "alive")
