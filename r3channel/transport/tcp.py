"""Transport between the hosts of a run over authenticated TCP links: backend `tcp`. Moves host tensors.

Rank 0 listens at the rendezvous's address while the group forms; every other rank holds one link, to rank 0. A receiver
says how many bytes it is ready for and the sender sends after that, so neither runs ahead of the other, and two sides that
expect different sizes are told so.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from r3channel.errors import ConfigError, DeadlineExceeded, TransportError, UsageError
from r3channel.transport.base import RELAY_RANK, Deferred, Pending, Rendezvous, Transport
from r3channel.transport.link import Link
from r3channel.transport.listener import Listener, connect

if TYPE_CHECKING:
    import torch

_JOINED, _READY, _DATA = range(3)
_SIZE = struct.Struct("<Q")
_HELLO = struct.Struct("<I32s")
"""Rank, and a hash of group, epoch and world size."""
_RETRY_S = 0.05


class TcpTransport(Transport):
    """See `transport.base.Transport`. Only rank 0 talks with all others. `abort` wakes a wait under way."""

    def __init__(self, rendezvous: Rendezvous, *, timeout_s: float) -> None:
        self.epoch, self.rank, self.world_size = rendezvous.epoch, rendezvous.rank, rendezvous.world_size
        self._name = rendezvous.name
        self._links: dict[int, Link] = {}
        limit = time.monotonic() + timeout_s
        try:
            token = bytes.fromhex(rendezvous.token)
        except ValueError as error:
            raise ConfigError(f"{self._name}: the rendezvous's token is not hexadecimal") from error
        try:
            if self.rank == RELAY_RANK:
                self._gather(rendezvous, token, limit)
            else:
                self._reach(rendezvous, token, limit)
        except TransportError as error:
            self.abort()
            raise DeadlineExceeded(
                f"{self._name}: rank {self.rank} of {self.world_size} could not join within {timeout_s:.1f} s: {error}"
            ) from error

    def start_send(self, dst: int, data_N: torch.Tensor) -> Pending:
        link = self._link(dst)
        return self._deferred(
            f"send {len(data_N)} bytes to rank {dst}", lambda limit: _give(link, data_N, limit)
        )

    def start_recv(self, src: int, out_N: torch.Tensor) -> Pending:
        link = self._link(src)
        return self._deferred(
            f"receive {len(out_N)} bytes from rank {src}", lambda limit: _take(link, out_N, limit)
        )

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _link(self, peer: int) -> Link:
        if peer not in self._links:
            raise UsageError(
                f"{self._name}: tcp links rank 0 with the others, not rank {self.rank} with rank {peer}"
            )
        return self._links[peer]

    def _deferred(self, what: str, move: Callable[[float], None]) -> Deferred:
        def run(timeout_s: float) -> None:
            try:
                move(time.monotonic() + timeout_s)
            except TransportError as error:
                self.abort()
                raise type(error)(
                    f"{self._name} epoch {self.epoch}: rank {self.rank} could not {what} within {timeout_s:.1f} s: {error}; "
                    "the group is abandoned"
                ) from error

        return Deferred(run)

    # -- joining -----------------------------------------------------------------------------------------------------------

    def _gather(self, rendezvous: Rendezvous, token: bytes, limit: float) -> None:
        group = _group(rendezvous)
        with closing(Listener(rendezvous.host, token=token, port=rendezvous.port)) as listener:
            while len(self._links) < self.world_size - 1:
                link = listener.accept(limit - time.monotonic())
                rank, theirs = _HELLO.unpack(link.hello) if len(link.hello) == _HELLO.size else (0, b"")
                if theirs != group or not 0 < rank < self.world_size:
                    link.close()  # of another group or epoch
                    continue
                if rank in self._links:
                    self._links[rank].close()  # it has tried again
                self._links[rank] = link
        for link in self._links.values():
            link.send_record(_JOINED, timeout_s=limit - time.monotonic())

    def _reach(self, rendezvous: Rendezvous, token: bytes, limit: float) -> None:
        """Again and again: rank 0 may not listen yet, or still for another epoch."""
        hello = _HELLO.pack(self.rank, _group(rendezvous))
        while True:
            link = None
            try:
                link = connect(
                    rendezvous.host, rendezvous.port, token, timeout_s=limit - time.monotonic(), hello=hello
                )
                _expect(link, _JOINED, b"", limit)
                self._links[RELAY_RANK] = link
                return
            except TransportError:
                if link is not None:
                    link.close()
                if time.monotonic() + _RETRY_S > limit:
                    raise
            time.sleep(_RETRY_S)


def _give(link: Link, data_N: torch.Tensor, limit: float) -> None:
    size = _SIZE.pack(len(data_N))
    _expect(link, _READY, size, limit)
    link.send_record(_DATA, size, timeout_s=limit - time.monotonic())
    link.send((data_N.numpy().data,), timeout_s=limit - time.monotonic())


def _take(link: Link, out_N: torch.Tensor, limit: float) -> None:
    size = _SIZE.pack(len(out_N))
    link.send_record(_READY, size, timeout_s=limit - time.monotonic())
    _expect(link, _DATA, size, limit)
    link.recv_into(out_N.numpy().data, timeout_s=limit - time.monotonic())


def _expect(link: Link, kind: int, body: bytes, limit: float) -> None:
    got, said = link.recv_record(_SIZE.size, timeout_s=limit - time.monotonic())
    if (got, said) != (kind, body):
        raise TransportError(
            f"link to {link.peer}: record {got} with {said.hex()} came, expected {kind} with {body.hex()}: both sides "
            "send, both receive, or they expect different sizes"
        )


def _group(rendezvous: Rendezvous) -> bytes:
    """What all ranks of one epoch of one group share."""
    values = (rendezvous.name, rendezvous.epoch, rendezvous.world_size)
    return hashlib.sha256(repr(values).encode("utf-8", "surrogatepass")).digest()
