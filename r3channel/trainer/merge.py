"""A shard from several relays: one membership per relay, their parts received in the order of the relays and merged.

Stands in for `Member` where the controls of several relays are given. Where several relays hold rows of one shard it costs one
copy of the shard more than one relay does; where one relay has all of it, nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from r3channel.errors import R3Error, TicketMismatch
from r3channel.metrics import StageClock
from r3channel.plan.layout import RankCoords
from r3channel.plan.parts import Part
from r3channel.plan.shards import Shard
from r3channel.plan.ticket import Ticket
from r3channel.trainer.member import Buffer, Member


@dataclass
class _Whole:
    """One shard as it fills."""

    run: str
    step: int
    buffer: Buffer
    done: set[int] = field(default_factory=set)
    """Relays whose part is in it."""
    data_N: torch.Tensor | None = None

    def memory(self, device: torch.device) -> torch.Tensor:
        """Asked for once: what is in it must stay."""
        if self.data_N is None:
            self.data_N = self.buffer(device)
        return self.data_N


class Members:
    """CREATED -> join -> receive* -> close. One thread at a time; calls and errors as of `Member`."""

    def __init__(self, members: Sequence[Member], *, coords: RankCoords, clock: StageClock) -> None:
        """`members[r]` belongs to relay r."""
        self._members, self._coords, self._clock = members, coords, clock
        self._part_N = torch.empty(0, dtype=torch.uint8)
        self._whole: _Whole | None = None
        """Of a receive that failed: the same ticket's next one goes on from there, as what is acknowledged is not sent again."""

    def join(self, *, timeout_s: float) -> None:
        """The groups of all relays, one after another: every process in the same order."""
        deadline_s = time.monotonic() + timeout_s
        for number, member in enumerate(self._members):
            with self._named(number):
                member.join(timeout_s=max(0.1, deadline_s - time.monotonic()))

    def receive(self, ticket: Ticket, shard: Shard, buffer: Buffer) -> torch.Tensor:
        """The merged bytes of a shard; each relay's part is acknowledged when it is here and verified.

        An error names the relay and the samples that it sends. Calling again with the same ticket goes on after the parts
        that are here.
        """
        if len(ticket.runs) != len(self._members):
            raise TicketMismatch(
                f"ticket of step {ticket.step}: {len(ticket.runs)} relay(s) send it, this trainer has the controls of "
                f"{len(self._members)}"
            )
        whole = self._resumed(ticket, buffer)
        for number in range(len(self._members)):
            if number not in whole.done and ticket.parts.serves(number, shard.dp):
                with self._named(number, ticket.parts.samples_of(number, dp=shard.dp)):
                    self._receive_part(number, ticket, ticket.parts.part(shard, number), whole)
                whole.done.add(number)
        self._whole = None
        return whole.memory(torch.device("cpu"))

    def close(self) -> None:
        """Leave all groups; idempotent."""
        for member in self._members:
            member.close()

    def _resumed(self, ticket: Ticket, buffer: Buffer) -> _Whole:
        if self._whole is None or (self._whole.run, self._whole.step) != (ticket.run, ticket.step):
            self._whole = _Whole(ticket.run, ticket.step, buffer)
        return self._whole

    def _receive_part(self, number: int, ticket: Ticket, part: Part, whole: _Whole) -> None:
        of_relay = replace(ticket, run=ticket.runs[number], peers=())
        if part.whole:  # nothing else is in it: a life that falls back may ask for memory of another device
            whole.data_N = self._members[number].receive(of_relay, part, whole.buffer)
            return
        part_N = self._members[number].receive(
            of_relay, part, lambda device: self._memory(part.nbytes, device)
        )
        with self._clock.span("recv", step=ticket.step):
            whole_N = whole.memory(part_N.device)
            merge(part, part_N.to(whole_N.device), whole_N)

    def _memory(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """One reused buffer for parts: each is merged before the next comes."""
        if len(self._part_N) < nbytes or self._part_N.device != device:
            self._part_N = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._part_N[:nbytes]

    @contextmanager
    def _named(self, number: int, samples: Sequence[str] = ()) -> Iterator[None]:
        try:
            yield
        except R3Error as error:
            where = f"{self._coords}: relay {number} of {len(self._members)}"
            sends = f", which sends {len(samples)} samples here ({', '.join(samples[:5])})" if samples else ""
            raise type(error)(f"{where}{sends}: {error}") from error


def merge(part: Part, part_N: torch.Tensor, whole_N: torch.Tensor) -> None:
    """`Part.merge` for uint8 tensors of one device."""
    if whole_N.device.type == "cpu":
        part.merge(part_N.numpy(), whole_N.numpy())
        return
    merge_tensors(part, part_N, whole_N)


def merge_tensors(part: Part, part_N: torch.Tensor, whole_N: torch.Tensor) -> None:
    """The same with torch's own copies, for tensors on a GPU."""
    row_bytes = part.shard.spec.top_k * part.shard.spec.id_dtype.itemsize
    for move in part.moves():
        own = part_N[move.here].view(*move.here_LPW, row_bytes)
        every = whole_N[move.there].view(*move.there_LPW, row_bytes)
        every[:, move.to_positions, move.to_columns] = own[:, move.from_positions]
