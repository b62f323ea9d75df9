"""Transport between processes of one machine through shared memory: backend `shm`. Linux on x86-64 only.

Every rank owns an inbox, a file under /dev/shm that holds one small ring of chunks per sender. A sender copies a chunk in
and counts it as written; the receiver copies it out and counts it as read. Each counter has one writer, and x86-64 keeps
stores in order, so there are no locks. The owner of an inbox holds a lock on it: the kernel drops that when the process
ends, in whatever way, and a peer that waits sees so.

The name is random enough to be a secret of the rendezvous, the file is readable by its user only, and it is unlinked as
soon as everybody has mapped it, so a crash leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import platform
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from r3channel.errors import ConfigError, DeadlineExceeded, TransportError
from r3channel.transport.base import Deferred, Pending, Rendezvous, Transport

if TYPE_CHECKING:
    import torch

FOLDER = "/dev/shm"
CHUNK_BYTES = 1 << 20
"""Half of a core's second-level cache, so that the receiver's copy reads from cache."""
CHUNKS = 4
_HEADER_BYTES = 64
_WRITTEN, _READ, _MESSAGE_BYTES, _JOINED, _ABORTED = range(5)
_LOOK_AT_PEER_S = 0.05
_SPINS = 200


class _Ring:
    """One direction of a pair: header words and chunks inside the receiver's inbox."""

    def __init__(self, inbox: mmap.mmap, index: int) -> None:
        at = index * _ring_bytes()
        self.words = np.frombuffer(inbox, dtype=np.int64, count=8, offset=at)
        self.chunks = np.frombuffer(
            inbox, dtype=np.uint8, count=CHUNKS * CHUNK_BYTES, offset=at + _HEADER_BYTES
        )

    def chunk(self, number: int, nbytes: int) -> np.ndarray:
        at = number % CHUNKS * CHUNK_BYTES
        return self.chunks[at : at + nbytes]


class SharedMemoryTransport(Transport):
    """See `transport.base.Transport`. Moves host tensors; a message of another size than expected is an error here."""

    def __init__(self, rendezvous: Rendezvous, *, timeout_s: float) -> None:
        if platform.machine() not in ("x86_64", "AMD64"):
            raise ConfigError(
                f"backend shm relies on the store order of x86-64, not {platform.machine()}: use gloo"
            )
        self.epoch, self.rank, self.world_size = rendezvous.epoch, rendezvous.rank, rendezvous.world_size
        self._name = rendezvous.name
        self._dead = False
        self._inboxes: dict[int, int] = {}
        """Descriptor of every rank's inbox; our own is locked. Guarded by `_descriptors`: once closed, its number may be
        another file's, so it is closed once and by nobody while another thread uses it."""
        self._descriptors = threading.Lock()
        self._roomy: set[int] = set()
        """Ranks whose ring for us is allocated: those that we have sent to."""
        limit = time.monotonic() + timeout_s
        try:
            self._create(rendezvous.rank)
            mine = self._map(self.rank)
            self._in = {src: _Ring(mine, src) for src in self._peers()}
            self._out = {dst: _Ring(self._open(dst, limit), self.rank) for dst in self._peers()}
            for ring in self._out.values():
                ring.words[_JOINED] = 1
            self._wait_joined(limit)
        except BaseException:
            self.close()
            raise
        finally:
            self._unlink()

    def start_send(self, dst: int, data_N: torch.Tensor) -> Pending:
        return Deferred(lambda timeout_s: self._send(dst, data_N, timeout_s))

    def start_recv(self, src: int, out_N: torch.Tensor) -> Pending:
        return Deferred(lambda timeout_s: self._recv(src, out_N, timeout_s))

    def _send(self, dst: int, data_N: torch.Tensor, timeout_s: float) -> None:
        self._check_alive()
        wait = self._waiter(dst, timeout_s, f"send {len(data_N)} bytes to rank {dst}")
        ring, words, data = self._out[dst], self._out[dst].words, data_N.numpy()
        self._make_room(dst)
        words[_MESSAGE_BYTES] = len(data)
        for at in range(0, max(1, len(data)), CHUNK_BYTES):
            wait(lambda: int(words[_WRITTEN] - words[_READ]) < CHUNKS)
            part = data[at : at + CHUNK_BYTES]
            ring.chunk(int(words[_WRITTEN]), len(part))[:] = part
            words[_WRITTEN] += 1
        wait(lambda: bool(words[_WRITTEN] == words[_READ]))

    def _recv(self, src: int, out_N: torch.Tensor, timeout_s: float) -> None:
        self._check_alive()
        wait = self._waiter(src, timeout_s, f"receive {len(out_N)} bytes from rank {src}")
        ring, words, out = self._in[src], self._in[src].words, out_N.numpy()
        for at in range(0, max(1, len(out)), CHUNK_BYTES):
            wait(lambda: bool(words[_WRITTEN] > words[_READ]))
            if words[_MESSAGE_BYTES] != len(out):
                self.abort()
                raise TransportError(
                    f"{self._name}: rank {src} sent {words[_MESSAGE_BYTES]} bytes, rank {self.rank} expected {len(out)}"
                )
            part = out[at : at + CHUNK_BYTES]
            part[:] = ring.chunk(int(words[_READ]), len(part))
            words[_READ] += 1

    def abort(self) -> None:
        if not self._dead:
            for ring in (*self._in.values(), *self._out.values()):
                ring.words[_ABORTED] = 1
        self.close()

    def close(self) -> None:
        self._dead = True
        with self._descriptors:
            while self._inboxes:
                os.close(self._inboxes.popitem()[1])

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def _check_alive(self) -> None:
        if self._dead:
            raise TransportError(f"{self._name}: the group was abandoned; join the next epoch")

    # -- inboxes -------------------------------------------------------------------------------------------------------

    def _path(self, rank: int) -> str:
        key = hashlib.sha256(self._name.encode()).hexdigest()[:32]
        return f"{FOLDER}/r3channel-{key}-{rank}"

    def _create(self, rank: int) -> None:
        """Sized before it is visible under its name, so that nobody maps a short file."""
        hidden = f"{self._path(rank)}.new"
        descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._inboxes[rank] = descriptor
        try:
            os.ftruncate(descriptor, self.world_size * _ring_bytes())
            for sender in range(self.world_size):
                self._allocate(descriptor, sender * _ring_bytes(), _HEADER_BYTES)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.link(hidden, self._path(rank))
        finally:
            os.unlink(hidden)

    def _make_room(self, dst: int) -> None:
        """Our ring in that inbox is allocated before the first byte: a write into a hole of a full file system ends the
        process with a signal. Pairs that never talk cost nothing."""
        if dst not in self._roomy:
            try:
                with self._descriptors:
                    self._check_alive()
                    self._allocate(self._inboxes[dst], self.rank * _ring_bytes(), _ring_bytes())
            except TransportError:
                self.abort()
                raise
            self._roomy.add(dst)

    def _allocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        try:
            os.posix_fallocate(descriptor, offset, nbytes)
        except OSError as error:
            raise TransportError(
                f"{self._name}: rank {self.rank} of {self.world_size} finds no {nbytes} bytes in {FOLDER} ({error}); a pair "
                f"of ranks that talks needs {2 * _ring_bytes()} there"
            ) from error

    def _open(self, rank: int, limit: float) -> mmap.mmap:
        while True:
            with contextlib.suppress(FileNotFoundError):
                self._inboxes[rank] = os.open(self._path(rank), os.O_RDWR | os.O_NOFOLLOW)
                return self._map(rank)
            self._sleep_until(limit, f"rank {rank} to open its inbox")

    def _map(self, rank: int) -> mmap.mmap:
        return mmap.mmap(self._inboxes[rank], self.world_size * _ring_bytes())

    def _wait_joined(self, limit: float) -> None:
        while not all(ring.words[_JOINED] for ring in self._in.values()):
            self._sleep_until(limit, "the other ranks to join")

    def _sleep_until(self, limit: float, what: str) -> None:
        if time.monotonic() > limit:
            raise DeadlineExceeded(
                f"{self._name}: rank {self.rank} of {self.world_size} waited for {what} in vain"
            )
        time.sleep(0.001)

    def _unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(self.rank))

    # -- waits ---------------------------------------------------------------------------------------------------------

    def _waiter(self, peer: int, timeout_s: float, what: str) -> Callable[[Callable[[], bool]], None]:
        """A wait of one call: all of its waits together last at most `timeout_s`."""
        begin = time.monotonic()

        def wait(ready: Callable[[], bool]) -> None:
            spins, looked_s = 0, time.monotonic()
            while not ready():
                spins += 1
                time.sleep(0 if spins < _SPINS else 0.0002)
                now = time.monotonic()
                if self._gone(peer, look=now - looked_s > _LOOK_AT_PEER_S) and not ready():
                    self.abort()
                    raise TransportError(
                        f"{self._name} epoch {self.epoch}: rank {self.rank} cannot {what}: peer left"
                    )
                looked_s = now if now - looked_s > _LOOK_AT_PEER_S else looked_s
                if now - begin > timeout_s:
                    self.abort()
                    raise DeadlineExceeded(
                        f"{self._name} epoch {self.epoch}: rank {self.rank} could not {what} within {timeout_s:.1f} s; "
                        "the group is abandoned"
                    )

        return wait

    def _gone(self, peer: int, *, look: bool) -> bool:
        if self._dead or self._in[peer].words[_ABORTED] or self._out[peer].words[_ABORTED]:
            return True
        return look and self._left(peer)

    def _left(self, peer: int) -> bool:
        """Whether the owner of this inbox has closed it, or has ended."""
        with self._descriptors:
            if self._dead:
                return True
            try:
                fcntl.flock(self._inboxes[peer], fcntl.LOCK_SH | fcntl.LOCK_NB)
                fcntl.flock(self._inboxes[peer], fcntl.LOCK_UN)
            except BlockingIOError:
                return False
            return True


def _ring_bytes() -> int:
    return _HEADER_BYTES + CHUNKS * CHUNK_BYTES
