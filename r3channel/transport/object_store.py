"""Transport through an object store: for steps whose group keeps failing, and for comparison.

The relay's process holds a `Mailbox`; members reach it over their control channel. Where Ray is up, a message is a
`ray.put` of the bytes and only its reference passes through the mailbox, so that Ray's own machinery moves it between
nodes; where it is not, the bytes themselves do. Slower than a group, but it needs no connection that the control channel
has not already.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from r3channel.errors import DeadlineExceeded, TransportError, UsageError
from r3channel.transport.base import Deferred, Pending, Rendezvous, Transport

_POLL_S = 1.0
"""Longest time that one control call may wait."""


class Mail(Protocol):
    """How a rank reaches the mailbox: `Mailbox` itself, or a control channel to the process that has it."""

    def mail(self, *, call: str, name: str, **arguments: Any) -> Any: ...


@dataclass
class _Message:
    serial: int
    content: list[Any]
    """One array or one reference; in a list, so that no control channel resolves the reference on its way."""


@dataclass
class _Box:
    """One epoch of one group."""

    joined: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    queues: dict[tuple[int, int], deque[_Message]] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    """Serials that were posted and not taken."""


class Mailbox:
    """Messages between the ranks of any number of groups. Every call may come from any thread and ends within `wait_s`.

    Raises `TransportError` for a group that was aborted, or whose other side has left.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._boxes: dict[str, _Box] = {}
        self._serial = 0
        self._closed = False

    def mail(self, *, call: str, name: str, **arguments: Any) -> Any:
        """One call by its name, as it comes over a control channel."""
        calls: dict[str, Callable[..., Any]] = {
            "enter": self.enter,
            "post": self.post,
            "taken": self.taken,
            "take": self.take,
            "leave": self.leave,
            "abort": self.abort,
        }
        if call not in calls:
            raise UsageError(f"mailbox call {call!r}, expected one of {sorted(calls)}")
        return calls[call](name, **arguments)

    def enter(self, name: str, *, rank: int, world_size: int, wait_s: float) -> bool:
        """Join; True once all ranks have."""
        with self._changed:
            box = self._boxes.setdefault(name, _Box())
            box.joined.add(rank)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or len(box.joined) == world_size, timeout=wait_s)
            if self._closed:
                raise TransportError(f"{name}: the mailbox is closed, and its relay with it")
            return len(box.joined) == world_size

    def post(self, name: str, *, src: int, dst: int, content: list[Any]) -> int:
        """Leave a message; its serial number."""
        with self._changed:
            box = self._box(name)
            self._serial += 1
            box.queues.setdefault((src, dst), deque()).append(_Message(self._serial, content))
            box.waiting.add(self._serial)
            self._changed.notify_all()
            return self._serial

    def taken(self, name: str, *, serial: int, wait_s: float) -> bool:
        """Whether the receiver has it."""
        with self._changed:
            box = self._box(name)
            self._changed.wait_for(
                lambda: serial not in box.waiting or self._boxes.get(name) is not box, timeout=wait_s
            )
            if serial in box.waiting:
                self._box(name)
            return serial not in box.waiting

    def take(self, name: str, *, src: int, dst: int, wait_s: float) -> list[Any]:
        """The content of the next message; empty when none came."""
        with self._changed:
            queue = self._box(name).queues.setdefault((src, dst), deque())
            self._changed.wait_for(
                lambda: queue or name not in self._boxes or src in self._boxes[name].left, timeout=wait_s
            )
            box = self._box(name)
            if not queue:
                if src in box.left:
                    raise TransportError(f"{name}: rank {src} has left")
                return []
            message = queue.popleft()
            box.waiting.discard(message.serial)
            self._changed.notify_all()
            return message.content

    def leave(self, name: str, *, rank: int) -> None:
        """In good order; the group is forgotten with its last rank."""
        with self._changed:
            box = self._boxes.get(name)
            if box is not None:
                box.left.add(rank)
                if box.left >= box.joined:
                    del self._boxes[name]
            self._changed.notify_all()

    def abort(self, name: str) -> None:
        """Forget the group: every rank that asks for it from now on, or waits, learns that it is over."""
        with self._changed:
            self._boxes.pop(name, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Abort every group, and let none form any more."""
        with self._changed:
            self._closed = True
            self._boxes.clear()
            self._changed.notify_all()

    def _box(self, name: str) -> _Box:
        box = self._boxes.get(name)
        if box is None:
            raise TransportError(f"{name}: this group was aborted or never joined")
        return box


class ObjectStoreTransport(Transport):
    """See `transport.base.Transport`. Moves host memory; a send copies when it is started."""

    def __init__(self, rendezvous: Rendezvous, mail: Mail, *, timeout_s: float) -> None:
        self.epoch, self.rank, self.world_size = rendezvous.epoch, rendezvous.rank, rendezvous.world_size
        self._name, self._mail, self._dead = rendezvous.name, mail, False
        self._until(
            lambda wait_s: self._call("enter", rank=self.rank, world_size=self.world_size, wait_s=wait_s),
            timeout_s,
            "the other ranks to join",
        )

    def start_send(self, dst: int, data_N: torch.Tensor) -> Pending:
        content = [_put(data_N.numpy())]
        serial = self._call("post", src=self.rank, dst=dst, content=content)
        what = f"rank {dst} to take {len(data_N)} bytes"
        return Deferred(
            lambda timeout_s: self._until(
                lambda wait_s: self._call("taken", serial=serial, wait_s=wait_s), timeout_s, what
            )
        )

    def start_recv(self, src: int, out_N: torch.Tensor) -> Pending:
        return Deferred(lambda timeout_s: self._recv(src, out_N, timeout_s))

    def _recv(self, src: int, out_N: torch.Tensor, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        content = self._until(
            lambda wait_s: self._call("take", src=src, dst=self.rank, wait_s=wait_s),
            timeout_s,
            f"{len(out_N)} bytes of rank {src}",
        )
        data_N = _get(content[0], timeout_s=max(0.1, deadline - time.monotonic()))
        if data_N.dtype != np.uint8 or data_N.shape != (len(out_N),):
            self.abort()
            raise TransportError(
                f"{self._name}: rank {src} sent {data_N.shape} {data_N.dtype}, rank {self.rank} expected {len(out_N)} bytes"
            )
        np.copyto(out_N.numpy(), data_N)

    def abort(self) -> None:
        if not self._dead:
            self._dead = True
            with contextlib.suppress(TransportError):  # the mailbox may be gone with its process
                self._mail.mail(call="abort", name=self._name)

    def close(self) -> None:
        if not self._dead:
            self._dead = True
            with contextlib.suppress(TransportError):
                self._mail.mail(call="leave", name=self._name, rank=self.rank)

    def _call(self, call: str, **arguments: Any) -> Any:
        if self._dead:
            raise TransportError(f"{self._name}: the group was abandoned; join the next epoch")
        return self._mail.mail(call=call, name=self._name, **arguments)

    def _until(self, ask: Callable[[float], Any], timeout_s: float, what: str) -> Any:
        """Ask until the answer is true."""
        deadline = time.monotonic() + timeout_s
        while not (answer := ask(max(0.0, min(_POLL_S, deadline - time.monotonic())))):
            if time.monotonic() >= deadline:
                self.abort()
                raise DeadlineExceeded(
                    f"{self._name} epoch {self.epoch}: rank {self.rank} waited {timeout_s:.1f} s for {what}; "
                    "the group is abandoned"
                )
        return answer


def _put(data_N: np.ndarray[Any, np.dtype[np.uint8]]) -> Any:
    """Into Ray's store where this process has one, else a copy."""
    ray = sys.modules.get("ray")  # who runs on Ray has imported it; nobody else pays for it
    return ray.put(data_N) if ray is not None and ray.is_initialized() else data_N.copy()


def _get(content: Any, *, timeout_s: float) -> np.ndarray[Any, np.dtype[Any]]:
    if isinstance(content, np.ndarray):
        return content
    import ray
    from ray import exceptions

    try:
        return ray.get(content, timeout=timeout_s)
    except exceptions.GetTimeoutError as error:
        raise DeadlineExceeded(f"Ray did not deliver an object within {timeout_s:.1f} s") from error
    except exceptions.RayError as error:
        raise TransportError(f"an object is lost: {error}") from error
