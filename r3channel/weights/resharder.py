"""Runs a plan: packs, sends, receives, verifies and places this rank's part. Knows neither engines nor versions.

Two buffers, allocated once, are used in turn: while one is on the wire the next is packed, or the one before is verified
and placed. What is wrong with the *values* (NaN, a digest) does not stop the exchange, because the other ranks wait in it:
it is kept, and all ranks raise together in the vote at the end. What is wrong with the *wire* ends the group.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from r3channel.errors import PeerFailed, PlanInvalid, UsageError, WeightsError
from r3channel.transport.base import Transport
from r3channel.weights.agreement import agree_on_plan, agree_on_smallest, vote
from r3channel.weights.finite import OnNonfinite, check_finite
from r3channel.weights.geometry import Box
from r3channel.weights.messages import DEFAULT_MESSAGE_BYTES, Message, Piece, in_order, longest_bytes
from r3channel.weights.reshard import RankPlan

Shards = Mapping[str, Sequence[tuple[Box, torch.Tensor]]]
"""What a rank holds, by tensor name: boxes that do not overlap, each with a tensor of exactly its shape (any strides)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardReport:
    """What one exchange did on this rank."""

    sent_bytes: int
    received_bytes: int
    copied_bytes: int
    messages: int
    wall_s: float


class Resharder:
    """One rank of a plan over one transport. NEW -> AGREED (`agree`) -> `run` any number of times.

    Every rank of the transport makes the same calls in the same order, from one thread. After a TransportError the
    transport is dead; after any other error the next `run` may follow.
    """

    def __init__(
        self,
        plan: RankPlan,
        transport: Transport,
        *,
        max_message_bytes: int = DEFAULT_MESSAGE_BYTES,
        on_nonfinite: OnNonfinite = "error",
    ) -> None:
        """`max_message_bytes`: what this rank can spare for each of two buffers on the host; the smallest of all ranks counts."""
        if (plan.rank, plan.world_size) != (transport.rank, transport.world_size):
            raise UsageError(
                f"plan of rank {plan.rank} of {plan.world_size}, transport of rank {transport.rank} of "
                f"{transport.world_size}"
            )
        self._plan, self._transport, self._on_nonfinite = plan, transport, on_nonfinite
        self._max_bytes = max_message_bytes
        self._messages: list[Message] = []
        self._buffers: list[torch.Tensor] = []
        self._agreed = False

    def agree(self, *, timeout_s: float) -> None:
        """Compare the plan's hash with all ranks before a byte moves, settle the size of a message, and allocate the buffers.

        Raises PlanMismatch with both hashes.
        """
        agree_on_plan(self._transport, self._plan.hash, timeout_s=timeout_s / 2)
        max_bytes = agree_on_smallest(self._transport, self._max_bytes, timeout_s=timeout_s / 2)
        self._messages = in_order(self._plan, max_bytes=max_bytes)
        size = longest_bytes(self._messages)
        self._buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
        self._agreed = True

    def run(self, source: Shards, target: Shards, *, timeout_s: float) -> ReshardReport:
        """Fill this rank's `target` tensors. On return every rank has verified every byte that it received.

        After an error the target's contents are undefined, on this rank and on all others. Raises PlanInvalid when the
        tensors are not those of the plan, NonFiniteWeights, WeightsCorrupt (all naming tensor and bucket), PeerFailed when
        another rank raised one of these, TransportError and DeadlineExceeded.
        """
        if not self._agreed:
            raise UsageError("Resharder.run() before agree(): plans were not compared")
        begin = time.monotonic()
        exchange = _Exchange(self, source, target, begin + timeout_s)
        exchange.walk()
        plan = self._plan
        return ReshardReport(
            sent_bytes=sum(op.nbytes for op in plan.ops if op.src == plan.rank != op.dst),
            received_bytes=sum(op.nbytes for op in plan.ops if op.dst == plan.rank != op.src),
            copied_bytes=sum(op.nbytes for op in plan.copies()),
            messages=len(self._messages),
            wall_s=time.monotonic() - begin,
        )


@dataclass(slots=True)
class _Pending:
    message: Message
    buffer_N: torch.Tensor
    done: Future[None]


class _Exchange:
    """One walk through the messages."""

    def __init__(self, owner: Resharder, source: Shards, target: Shards, limit: float) -> None:
        self._plan, self._transport = owner._plan, owner._transport
        self._messages, self._free = owner._messages, list(owner._buffers)
        self._refuse = owner._on_nonfinite == "error"
        self._source, self._target = Held(source, "source"), Held(target, "target")
        self._limit = limit
        self._failure: WeightsError | None = None
        self._pending: deque[_Pending] = deque()

    def walk(self) -> None:
        with ThreadPoolExecutor(1, thread_name_prefix="r3channel-reshard") as wire:
            try:
                for check in (self._source.check, self._target.check, self._copy_local):
                    self._guarded(check)
                for message in self._messages:
                    self._start(message, wire)
                while self._pending:
                    self._finish(self._pending.popleft())
                wire.submit(self._vote).result()
            except BaseException as error:
                if not isinstance(error, (WeightsError, PeerFailed)):
                    self._transport.abort()
                raise

    def _vote(self) -> None:
        vote(self._transport, self._failure, what="weights were not taken over", timeout_s=self._left_s())

    def _start(self, message: Message, wire: ThreadPoolExecutor) -> None:
        if not self._free:
            self._finish(self._pending.popleft())
        buffer_N = self._free.pop()
        if message.src == self._plan.rank:
            self._guarded(lambda: self._pack(message, buffer_N))
            message.seal(buffer_N)
        self._pending.append(_Pending(message, buffer_N, wire.submit(self._move, message, buffer_N)))

    def _move(self, message: Message, buffer_N: torch.Tensor) -> None:
        data_N = buffer_N[: message.total_bytes]
        if message.src == self._plan.rank:
            self._transport.send(message.dst, data_N, timeout_s=self._left_s())
        else:
            self._transport.recv(message.src, data_N, timeout_s=self._left_s())

    def _finish(self, pending: _Pending) -> None:
        pending.done.result()
        if pending.message.dst == self._plan.rank:
            self._guarded(lambda: self._place(pending.message, pending.buffer_N))
        self._free.append(pending.buffer_N)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Keep the first failure of the values; the exchange goes on."""
        try:
            step()
        except WeightsError as error:
            self._failure = self._failure or error

    def _pack(self, message: Message, buffer_N: torch.Tensor) -> None:
        for piece in message.pieces:
            piece.view(buffer_N).copy_(self._source.cut(piece.meta.name, piece.box))
        if self._refuse:
            named = [(piece.meta.name, piece.view(buffer_N)) for piece in message.pieces]
            check_finite(named, where=str(message))

    def _place(self, message: Message, buffer_N: torch.Tensor) -> None:
        message.verify(buffer_N)
        for piece in message.pieces:
            self._target_of(piece).copy_(piece.view(buffer_N))

    def _target_of(self, piece: Piece) -> torch.Tensor:
        out = self._target.cut(piece.meta.name, piece.box)
        if out.dtype != piece.meta.dtype:
            raise PlanInvalid(
                f"target tensor {piece.meta.name} is {out.dtype}; the map says {piece.meta.dtype}"
            )
        return out

    def _copy_local(self) -> None:
        for op in self._plan.copies():
            meta = self._plan.tensors[op.tensor]
            out = self._target.cut(meta.name, op.box)
            out.copy_(self._source.cut(meta.name, op.box))
            if self._refuse:
                check_finite([(meta.name, out)], where="local copy")

    def _left_s(self) -> float:
        return max(0.001, self._limit - time.monotonic())


class Held:
    """A rank's tensors, found by name and box."""

    def __init__(self, shards: Shards, side: str) -> None:
        self._shards, self._side = shards, side

    def check(self) -> None:
        for name, held in self._shards.items():
            for number, (box, tensor) in enumerate(held):
                if tuple(tensor.shape) != box.shape:
                    raise PlanInvalid(
                        f"{self._side} tensor {name}: shape {list(tensor.shape)}, box of shape {list(box.shape)}"
                    )
                if any(box.intersect(other) for other, _ in held[:number]):
                    raise PlanInvalid(f"{self._side} tensor {name}: this rank holds overlapping boxes")

    def cut(self, name: str, box: Box) -> torch.Tensor:
        """A view of the part `box` of the tensor; PlanInvalid when this rank holds no such part."""
        for outer, tensor in self._shards.get(name, ()):
            if outer.intersect(box) == box:
                return tensor.detach()[box.within(outer)]
        raise PlanInvalid(
            f"{self._side} tensor {name}: the plan needs {box} of this rank, which does not hold it"
        )
