"""One-sided delivery: every sender writes its part straight into the receiver's memory, whenever it likes.

A receiver opens one window per sender, once, and its card goes to that sender through the registry. From the plan both know
which message lands at which offset. During an update nobody asks anybody: senders put and mark, the receiver looks at the
marks, verifies each message and places it. A window is written again only in the next update, which the controller starts
after this one was committed on every receiver: that order, not a handshake per message, protects the memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from r3channel.errors import DeadlineExceeded, PlanInvalid, UsageError
from r3channel.weights.colocated import SharedArena
from r3channel.weights.finite import OnNonfinite, check_finite
from r3channel.weights.messages import DEFAULT_MESSAGE_BYTES, Message, longest_bytes, messages
from r3channel.weights.reshard import RankPlan
from r3channel.weights.resharder import Held, Shards

_POLL_S = 0.0005
_MARK_BYTES = 8


class Window(Protocol):
    """A receiver's memory for one sender: bytes, and one mark per message."""

    def put(self, offset: int, data_N: torch.Tensor) -> None:
        """Sender: write bytes; the memory of `data_N` may be reused on return."""
        ...

    def mark(self, number: int, update: int) -> None:
        """Sender: message `number` of this update lies there whole. Seen after its bytes."""
        ...

    def marked(self, number: int) -> int:
        """Receiver: the last update of which message `number` has arrived; 0 before the first."""
        ...

    @property
    def landing_N(self) -> torch.Tensor:
        """Receiver: the bytes."""
        ...


class SharedWindow:
    """A window in shared memory, for ranks of one machine. x86-64 keeps the order of bytes and mark.

    Marks lie in front of the bytes. The receiver creates it, the sender opens its card; both close it.
    """

    def __init__(self, arena: SharedArena, marks: int) -> None:
        self._arena, self._marks = arena, marks
        front = -(-marks * _MARK_BYTES // 256) * 256
        self._mark_M = arena.buffer_N[: marks * _MARK_BYTES].view(torch.int64)
        self._landing_N = arena.buffer_N[front:]

    @classmethod
    def create(cls, expected: Sequence[Message]) -> SharedWindow:
        """Room for these messages of one sender."""
        front = -(-len(expected) * _MARK_BYTES // 256) * 256
        return cls(SharedArena.create(front + sum(_room(message) for message in expected)), len(expected))

    @classmethod
    def open(cls, card: Mapping[str, Any]) -> SharedWindow:
        return cls(SharedArena.open(card["handle"]), int(card["marks"]))

    @property
    def card(self) -> dict[str, Any]:
        """Plain values for the sender."""
        return {"handle": self._arena.handle, "marks": self._marks}

    @property
    def landing_N(self) -> torch.Tensor:
        return self._landing_N

    def put(self, offset: int, data_N: torch.Tensor) -> None:
        self._landing_N[offset : offset + len(data_N)].copy_(data_N)

    def mark(self, number: int, update: int) -> None:
        self._mark_M[number] = update

    def marked(self, number: int) -> int:
        return self._mark_M[number : number + 1].tolist()[0]

    def close(self) -> None:
        self._arena.close()


class Pusher:
    """The sending end: writes this rank's part of the plan. Needs no reply from anybody."""

    def __init__(
        self,
        plan: RankPlan,
        windows: Mapping[int, Window],
        *,
        max_message_bytes: int = DEFAULT_MESSAGE_BYTES,
        on_nonfinite: OnNonfinite = "error",
    ) -> None:
        """`windows`: by receiver. Raises PlanInvalid when one of the plan's receivers has none."""
        self._plan, self._windows, self._refuse = plan, windows, on_nonfinite == "error"
        self._queues = _queues(plan, plan.sends(), windows, max_message_bytes)
        longest = longest_bytes(m for queue in self._queues.values() for m in queue)
        self._buffer_N = torch.empty(longest, dtype=torch.uint8)
        self._last = 0

    def push(self, source: Shards, *, update: int) -> int:
        """Write everything, marked as `update` (1, 2, ...); returns the bytes.

        NaN or Inf raises NonFiniteWeights before its message is marked, so no receiver places it. What a push that failed has
        marked stays marked, so its number is spent: UsageError for one that does not grow.
        """
        if update <= self._last:
            raise UsageError(
                f"update {update} after {self._last}: each push, also one that fails, needs a higher number"
            )
        self._last = update
        held, sent = Held(source, "source"), 0
        held.check()
        for peer, queue in self._queues.items():
            offset = 0
            for message in queue:
                sent += self._put(self._windows[peer], message, offset, held, update)
                offset += _room(message)
        return sent

    def _put(self, window: Window, message: Message, offset: int, held: Held, update: int) -> int:
        for piece in message.pieces:
            piece.view(self._buffer_N).copy_(held.cut(piece.meta.name, piece.box))
        if self._refuse:
            named = [(piece.meta.name, piece.view(self._buffer_N)) for piece in message.pieces]
            check_finite(named, where=str(message))
        message.seal(self._buffer_N)
        window.put(offset, self._buffer_N[: message.total_bytes])
        window.mark(message.number, update)
        return message.total_bytes


class Landing:
    """The receiving end: waits for marks, verifies, places."""

    def __init__(
        self,
        plan: RankPlan,
        windows: Mapping[int, Window],
        *,
        max_message_bytes: int = DEFAULT_MESSAGE_BYTES,
    ) -> None:
        """`windows`: by sender, made with `expected`. Raises PlanInvalid when one of the plan's senders has none."""
        self._plan, self._windows = plan, windows
        self._queues = _queues(plan, plan.receives(), windows, max_message_bytes)

    @staticmethod
    def expected(
        plan: RankPlan, *, max_message_bytes: int = DEFAULT_MESSAGE_BYTES
    ) -> dict[int, tuple[Message, ...]]:
        """The messages that this rank will receive, by sender: what windows are made for."""
        return {
            peer: messages(plan, ops, max_bytes=max_message_bytes) for peer, ops in plan.receives().items()
        }

    def take(self, target: Shards, *, update: int, timeout_s: float) -> int:
        """Fill `target` with this update, in the order of arrival; returns the messages.

        Raises WeightsCorrupt naming tensor and bucket, and DeadlineExceeded naming the sender that did not deliver;
        `target` is then undefined.
        """
        limit = time.monotonic() + timeout_s
        held, places = Held(target, "target"), self._places()
        held.check()
        waiting = places
        while waiting:
            late: list[tuple[Message, int]] = []
            for message, offset in waiting:
                if self._windows[message.src].marked(message.number) >= update:
                    self._place(message, offset, held)
                else:
                    late.append((message, offset))
            if len(late) == len(waiting):
                self._check_time(late, limit, timeout_s)
            waiting = late
        return len(places)

    def _places(self) -> list[tuple[Message, int]]:
        """Every message, and where it lands in its sender's window."""
        places: list[tuple[Message, int]] = []
        for queue in self._queues.values():
            offset = 0
            for message in queue:
                places.append((message, offset))
                offset += _room(message)
        return places

    def _place(self, message: Message, offset: int, held: Held) -> None:
        data_N = self._windows[message.src].landing_N[offset : offset + message.total_bytes]
        message.verify(data_N)
        for piece in message.pieces:
            held.cut(piece.meta.name, piece.box).copy_(piece.view(data_N))

    def _check_time(self, late: Sequence[tuple[Message, int]], limit: float, timeout_s: float) -> None:
        if time.monotonic() > limit:
            first, _ = late[0]
            raise DeadlineExceeded(
                f"{first} did not arrive within {timeout_s:.1f} s, nor did {len(late) - 1} more; did its sender die?"
            )
        time.sleep(_POLL_S)


def _queues(
    plan: RankPlan, by_peer: Mapping[int, Sequence[Any]], windows: Mapping[int, Window], max_bytes: int
) -> dict[int, tuple[Message, ...]]:
    missing = sorted(set(by_peer) - set(windows))
    if missing:
        raise PlanInvalid(
            f"rank {plan.rank} has no window for rank {missing[0]}; was its card never exchanged?"
        )
    return {peer: messages(plan, ops, max_bytes=max_bytes) for peer, ops in by_peer.items()}


def _room(message: Message) -> int:
    """Bytes in a window, so that the next message begins on a 256-byte border."""
    return -(-message.total_bytes // 256) * 256
