"""Transport by one-sided writes: backend `nixl`. The sender writes into the receiver's registered memory and notifies it.

Read against nixl-cu12 1.5.1 (extra `onesided`); relied on: `nixl_agent`, `register_memory`, `get_agent_metadata`,
`add_remote_agent`, `get_xfer_descs`, `initialize_xfer`, `transfer`, `check_xfer_state`, `send_notif`, `get_new_notifs`.
It runs without a GPU and without RDMA: UCX then uses shared memory or TCP. RDMA hardware was never run. Which interfaces
UCX opens is UCX's own configuration (UCX_NET_DEVICES, UCX_TLS), not ours.

Every rank registers one inbox with a ring of chunks per sender; addresses are exchanged once, at the join, through the
relay's store. A sender registers the caller's memory for the length of a message and keeps two writes under way; only the
receiver copies. A chunk is free again when its reader says so. Who writes to a process that has died is told so by UCX; who
waits for one ends by its deadline.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from r3channel.errors import ConfigError, DeadlineExceeded, R3Error, TransportError
from r3channel.transport.base import Deferred, Pending, Rendezvous, Transport

CHUNK_BYTES = 4 << 20
CHUNKS = 4
WRITES = 2
"""Under way at once from one message, so that the wire does not wait for us to look."""
_POLL_S = 0.0001
_ABORT = b"abort"


class OneSidedTransport(Transport):
    """See `transport.base.Transport`. Moves host tensors; a message of another size than expected is an error here."""

    def __init__(self, rendezvous: Rendezvous, *, timeout_s: float) -> None:
        """Starting UCX takes 1 to 11 s, which count."""
        self.epoch, self.rank, self.world_size = rendezvous.epoch, rendezvous.rank, rendezvous.world_size
        self._name = rendezvous.name
        self._dead = False
        self._written: defaultdict[int, int] = defaultdict(int)
        """Chunks sent, by receiver."""
        self._freed: defaultdict[int, int] = defaultdict(int)
        """Of those, chunks that the receiver has read."""
        self._read: defaultdict[int, int] = defaultdict(int)
        self._arrived: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """By sender: chunk number -> size of the message that it belongs to."""
        self._aborted = False
        begin = time.monotonic()
        self._agent: Any = _new_agent(f"{self._name}/{self.rank}")
        self._inbox_N = torch.empty(self.world_size * CHUNKS * CHUNK_BYTES, dtype=torch.uint8)
        self._outbox_N = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        self._registered = [self._agent.register_memory([self._inbox_N, self._outbox_N])]
        try:
            self._inbox_of = self._meet(rendezvous, max(0.1, begin + timeout_s - time.monotonic()))
        except Exception as error:  # the store's, or nixl's, which share no base class
            self.close()
            raise DeadlineExceeded(
                f"{self._name}: rank {self.rank} of {self.world_size} could not join within {timeout_s:.1f} s: {error}"
            ) from error

    def start_send(self, dst: int, data_N: torch.Tensor) -> Pending:
        return Deferred(lambda timeout_s: self._send(dst, data_N, timeout_s))

    def start_recv(self, src: int, out_N: torch.Tensor) -> Pending:
        return Deferred(lambda timeout_s: self._recv(src, out_N, timeout_s))

    def _send(self, dst: int, data_N: torch.Tensor, timeout_s: float) -> None:
        what = f"send {len(data_N)} bytes to rank {dst}"
        wait = self._waiter(timeout_s, what)
        under_way: deque[Any] = deque()
        with self._nixl_fails_as(what):
            with self._readable(data_N, under_way) as from_N:
                for at in range(0, max(1, len(from_N)), CHUNK_BYTES):
                    wait(lambda: self._written[dst] - self._freed[dst] < CHUNKS)
                    if len(under_way) == WRITES:
                        self._finish(under_way, dst, wait)
                    self._start(dst, from_N[at : at + CHUNK_BYTES], len(from_N), under_way)
                while under_way:
                    self._finish(under_way, dst, wait)
            wait(lambda: self._written[dst] == self._freed[dst])

    def _recv(self, src: int, out_N: torch.Tensor, timeout_s: float) -> None:
        what = f"receive {len(out_N)} bytes from rank {src}"
        wait = self._waiter(timeout_s, what)
        with self._nixl_fails_as(what):
            for at in range(0, max(1, len(out_N)), CHUNK_BYTES):
                self._receive_chunk(src, out_N, at, wait)

    def _receive_chunk(
        self, src: int, out_N: torch.Tensor, at: int, wait: Callable[[Callable[[], bool]], None]
    ) -> None:
        number = self._read[src]
        wait(lambda: number in self._arrived[src])
        size = self._arrived[src].pop(number)
        if size != len(out_N):
            self.abort()
            raise TransportError(
                f"{self._name}: rank {src} sent {size} bytes, rank {self.rank} expected {len(out_N)}"
            )
        part = out_N[at : at + CHUNK_BYTES]
        start = _slot(src, number)
        part.copy_(self._inbox_N[start : start + len(part)])
        self._read[src] += 1
        self._notify(src, b"read %d" % self._read[src])

    def abort(self) -> None:
        if not self._dead:
            for peer in self._inbox_of:
                self._notify(peer, _ABORT)
        self.close()

    def close(self) -> None:
        self._dead = True
        agent, self._agent = self._agent, None
        if agent is not None:
            for registered in self._registered:
                with contextlib.suppress(Exception):  # it ends with the agent
                    agent.deregister_memory(registered)

    @contextlib.contextmanager
    def _nixl_fails_as(self, what: str) -> Iterator[None]:
        """An error of nixl (a peer that died, an agent that an abort took away) ends the group and becomes a TransportError."""
        try:
            yield
        except R3Error:
            self.abort()
            raise
        except Exception as error:  # nixl's share no base class
            self.abort()
            raise TransportError(
                f"{self._name} epoch {self.epoch}: rank {self.rank} cannot {what}: {type(error).__name__} {error}"
            ) from error

    # -- writing -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _readable(self, data_N: torch.Tensor, under_way: deque[Any]) -> Iterator[torch.Tensor]:
        """The bytes in memory that nixl may read until the end of the block: the caller's own, registered for this message.

        A message shorter than a chunk is copied, which is cheaper. A registration does not outlive its message, since the
        caller may free the memory afterwards; writes that a failure left under way are given up before it ends.
        """
        if len(data_N) < CHUNK_BYTES:
            yield self._outbox_N[: len(data_N)].copy_(data_N)
            return
        agent = self._agent
        registered = agent.register_memory([data_N])
        try:
            yield data_N
        finally:
            for handle in under_way:
                with contextlib.suppress(Exception):
                    agent.release_xfer_handle(handle)
            agent.deregister_memory(registered)

    def _start(self, dst: int, part_N: torch.Tensor, message_bytes: int, under_way: deque[Any]) -> None:
        """Begin to write one chunk into the receiver's memory."""
        number, agent = self._written[dst], self._agent
        told = b"chunk %d %d" % (number, message_bytes)
        self._written[dst] += 1
        if not len(part_N):
            self._notify(dst, told)
            return
        slot = self._inbox_of[dst] + _slot(self.rank, number)
        here = agent.get_xfer_descs([(part_N.data_ptr(), len(part_N), 0)], "DRAM")
        there = agent.get_xfer_descs([(slot, len(part_N), 0)], "DRAM")
        handle = agent.initialize_xfer("WRITE", here, there, self._peer(dst), told)
        under_way.append(handle)
        agent.transfer(handle)

    def _finish(self, under_way: deque[Any], dst: int, wait: Callable[[Callable[[], bool]], None]) -> None:
        """Wait until the oldest write has left our memory."""
        agent, handle = self._agent, under_way[0]
        wait(lambda: agent.check_xfer_state(handle) != "PROC")
        state = agent.check_xfer_state(handle)
        if state != "DONE":
            self.abort()
            raise TransportError(
                f"{self._name} epoch {self.epoch}: write to rank {dst} ended as {state} in nixl"
            )
        agent.release_xfer_handle(under_way.popleft())

    def _notify(self, peer: int, told: bytes) -> None:
        try:
            self._agent.send_notif(self._peer(peer), told)
        except Exception as error:
            if told != _ABORT:  # a peer that is gone need not be told
                raise TransportError(f"{self._name}: rank {peer} cannot be notified: {error}") from error

    def _hear(self) -> None:
        for name, told in self._agent.get_new_notifs().items():
            peer = int(name.rsplit("/", 1)[1])
            for text in told:
                self._take(peer, bytes(text))

    def _take(self, peer: int, told: bytes) -> None:
        word, *numbers = told.split()
        if word == b"chunk":
            self._arrived[peer][int(numbers[0])] = int(numbers[1])
        elif word == b"read":
            self._freed[peer] = max(self._freed[peer], int(numbers[0]))
        else:
            self._aborted = True

    def _waiter(self, timeout_s: float, what: str) -> Callable[[Callable[[], bool]], None]:
        """A wait of one call: all of its waits together last at most `timeout_s`."""
        if self._dead:
            raise TransportError(f"{self._name}: the group was abandoned; join the next epoch")
        begin = time.monotonic()
        where = f"{self._name} epoch {self.epoch}: rank {self.rank}"

        def wait(ready: Callable[[], bool]) -> None:
            while not ready():
                if self._dead or self._aborted:
                    self.close()
                    raise TransportError(f"{where} cannot {what}: the group was aborted")
                if time.monotonic() - begin > timeout_s:
                    self.abort()
                    raise DeadlineExceeded(
                        f"{where} could not {what} within {timeout_s:.1f} s; the group is abandoned"
                    )
                self._hear()
                time.sleep(_POLL_S)

        return wait

    # -- joining -------------------------------------------------------------------------------------------------------

    def _peer(self, rank: int) -> str:
        return f"{self._name}/{rank}"

    def _meet(self, rendezvous: Rendezvous, timeout_s: float) -> dict[int, int]:
        """Exchange metadata; returns the address of each peer's inbox."""
        limit = timedelta(seconds=timeout_s)
        raw = TCPStore(
            rendezvous.host, rendezvous.port, is_master=False, wait_for_workers=False, timeout=limit
        )
        store = PrefixStore(rendezvous.name, raw)
        store.set_timeout(limit)
        card = {"agent": self._agent.get_agent_metadata().hex(), "inbox": self._inbox_N.data_ptr()}
        store.set(f"card/{self.rank}", json.dumps(card))
        inboxes = {}
        for rank in range(self.world_size):
            if rank != self.rank:
                theirs = json.loads(store.get(f"card/{rank}"))
                self._agent.add_remote_agent(bytes.fromhex(theirs["agent"]))
                inboxes[rank] = int(theirs["inbox"])
        if store.add("joined", 1) == self.world_size:
            store.set("all", "1")
        store.wait(["all"], limit)
        return inboxes


def check_installed() -> Any:
    """The module of nixl's Python interface; raises ConfigError when the extra is not installed."""
    try:
        from nixl_cu12 import _api
    except ImportError as error:
        raise ConfigError(f"backend nixl needs the extra r3channel[onesided] (nixl-cu12): {error}") from error
    for handler in logging.getLogger("nixl").handlers:
        if type(handler) is logging.StreamHandler:
            handler.stream = sys.stderr  # its own choice is stdout, where a command's JSON goes
    return _api


def _new_agent(name: str) -> Any:
    api = check_installed()
    return api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))


def _slot(src: int, number: int) -> int:
    """Where in an inbox chunk `number` of sender `src` lands."""
    return (src * CHUNKS + number % CHUNKS) * CHUNK_BYTES
