"""The messages of a plan: which pieces lie where in which flat buffer, and in which order a rank sends and receives them.

Both ends cut the operations of a pair by the same rule, so no header travels. A message is its pieces, each on a 256-byte
border, and a trailer: the plan's hash, the message's number within its pair, and one xxh3 per piece. Nothing here sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from r3channel.errors import ConfigError, WeightsCorrupt
from r3channel.weights.geometry import Box, split_box
from r3channel.weights.manifest import ALIGNMENT, TensorMeta
from r3channel.weights.reshard import Op, RankPlan
from r3channel.weights.schedule import round_of

DEFAULT_MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor inside a message."""

    meta: TensorMeta
    box: Box
    offset: int
    nbytes: int

    def view(self, buffer_N: torch.Tensor) -> torch.Tensor:
        """The piece inside the message's buffer, in the receiver's dtype. No copy."""
        flat = buffer_N[self.offset : self.offset + self.nbytes]
        return flat.view(self.meta.dtype).view(self.box.shape)


@dataclass(frozen=True, slots=True)
class Message:
    """What travels in one send from `src` to `dst`."""

    src: int
    dst: int
    number: int
    """Within its pair and direction, from 0."""
    pieces: tuple[Piece, ...]
    plan_hash: str

    @property
    def payload_bytes(self) -> int:
        """Up to the trailer, which begins on an 8-byte border."""
        last = self.pieces[-1]
        return -(-(last.offset + last.nbytes) // 8) * 8

    @property
    def total_bytes(self) -> int:
        return self.payload_bytes + 8 * (2 + len(self.pieces))

    def seal(self, buffer_N: torch.Tensor) -> None:
        """Write the trailer behind the packed pieces. `buffer_N`: uint8, on the host, at least `total_bytes` long."""
        words = buffer_N[self.payload_bytes : self.total_bytes].numpy().view(np.uint64)
        words[:] = [int(self.plan_hash[:16], 16), self.number, *self._digests(buffer_N)]

    def verify(self, buffer_N: torch.Tensor) -> None:
        """Raises WeightsCorrupt, naming message and tensor, unless these are the bytes that `seal` saw."""
        plan, number, *digests = (
            buffer_N[self.payload_bytes : self.total_bytes].numpy().view(np.uint64).tolist()
        )
        if (plan, number) != (int(self.plan_hash[:16], 16), self.number):
            raise WeightsCorrupt(
                f"{self}: arrived as message {number} of plan {plan:016x}, expected plan {self.plan_hash[:16]}; "
                "messages out of order, or from another plan"
            )
        for piece, sent, found in zip(self.pieces, digests, self._digests(buffer_N), strict=True):
            if sent != found:
                raise WeightsCorrupt(
                    f"{self}: tensor {piece.meta.name} {list(piece.box.start)}..{list(piece.box.stop)} has digest "
                    f"{found:016x}, sent was {sent:016x}; damaged on the way, or its memory was reused too early"
                )

    def _digests(self, buffer_N: torch.Tensor) -> list[int]:
        array = buffer_N.numpy()
        return [xxhash.xxh3_64_intdigest(array[p.offset : p.offset + p.nbytes].data) for p in self.pieces]

    def __str__(self) -> str:
        return f"bucket {self.number} from rank {self.src} to rank {self.dst}"


def messages(
    plan: RankPlan, ops: Sequence[Op], *, max_bytes: int = DEFAULT_MESSAGE_BYTES
) -> tuple[Message, ...]:
    """Cut the operations of one pair, in one direction, into messages of at most `max_bytes` of pieces.

    A box above the limit is cut into smaller boxes. Raises ConfigError when not even one element fits.
    """
    if max_bytes < ALIGNMENT:
        raise ConfigError(f"messages of {max_bytes} bytes: expected at least {ALIGNMENT}, one aligned piece")
    runs: list[list[Piece]] = []
    for meta, box in _small_boxes(plan, ops, max_bytes):
        nbytes = box.numel * meta.dtype.itemsize
        last = runs[-1][-1] if runs else None
        offset = 0 if last is None else -(-(last.offset + last.nbytes) // ALIGNMENT) * ALIGNMENT
        if last is None or offset + nbytes > max_bytes:
            runs.append([Piece(meta, box, 0, nbytes)])
        else:
            runs[-1].append(Piece(meta, box, offset, nbytes))
    return tuple(Message(ops[0].src, ops[0].dst, i, tuple(run), plan.hash) for i, run in enumerate(runs))


def in_order(plan: RankPlan, *, max_bytes: int = DEFAULT_MESSAGE_BYTES) -> list[Message]:
    """All messages of this rank, in the order in which it sends and receives them: by round, the lower rank's first."""
    peers = [*plan.sends().values(), *plan.receives().values()]
    runs = [messages(plan, ops, max_bytes=max_bytes) for ops in peers]
    return sorted((m for run in runs for m in run), key=lambda m: _turn(m, plan.world_size))


def longest_bytes(all_messages: Iterable[Message]) -> int:
    """How large a buffer must be to hold any of them."""
    return max((message.total_bytes for message in all_messages), default=0)


def _turn(message: Message, world_size: int) -> tuple[int, bool, int]:
    met = round_of(message.src, message.dst, world_size)
    return met, message.src > message.dst, message.number


def _small_boxes(plan: RankPlan, ops: Sequence[Op], max_bytes: int) -> Iterator[tuple[TensorMeta, Box]]:
    for op in ops:
        meta = plan.tensors[op.tensor]
        for box in split_box(op.box, max_numel=max_bytes // meta.dtype.itemsize):
            yield meta, box
