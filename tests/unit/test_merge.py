"""A shard from several relays whose groups do not all end on one device: where its bytes lie at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from r3channel.clock import StageClock
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.parts import Part
from r3channel.plan.place import place_samples
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.trainer.merge import Members
from tests.samples import SPEC, random_ids

TOKENS = {"a": 9, "b": 30, "c": 17}
CPU, META = torch.device("cpu"), torch.device("meta")


def ids_of(name: str) -> Any:
    return random_ids(TOKENS[name] - 1, seed=TOKENS[name])


def ticket_of(*relays: int) -> Ticket:
    samples = tuple(
        TicketSample(name, count, 0, (), relay=relay)
        for (name, count), relay in zip(TOKENS.items(), relays, strict=True)
    )
    assignment = Assignment.given([[list(TOKENS)]])
    return Ticket("run-0", 0, SPEC, TrainerLayout(), assignment, samples, 1024, peers=("run-1",))


class OnGpu:
    """A tensor of a GPU that nobody has."""

    device = META

    def __init__(self, data_N: torch.Tensor) -> None:
        self._data_N = data_N

    def to(self, device: torch.device) -> torch.Tensor:
        assert device == CPU
        return self._data_N


class FakeMember:
    """Asks for memory on each device in turn, as a `Member` does whose group fails and falls back; receives into the last."""

    def __init__(self, ticket: Ticket, relay: int, *devices: torch.device) -> None:
        self._ticket, self._relay, self._devices = ticket, relay, devices

    def receive(self, ticket: Ticket, part: Part, buffer: Callable[[torch.device], torch.Tensor]) -> Any:
        sent_N = torch.from_numpy(self._ticket.parts.place(self._relay, dp=0, ids_of=ids_of)[part.key])
        *_, data_N = [buffer(device) for device in self._devices]
        return data_N.copy_(sent_N) if data_N.device == CPU else OnGpu(sent_N)


def receive(ticket: Ticket, *members: FakeMember) -> np.ndarray:
    layout = ticket.layout
    all_ = Members(list(members), coords=layout.coords(0), clock=StageClock("trainer"))  # type: ignore[arg-type]
    shard = ticket.plan.shard(dp=0, pp=0)
    return all_.receive(
        ticket, shard, lambda device: torch.empty(shard.nbytes, dtype=torch.uint8, device=device)
    ).numpy()


def expected(ticket: Ticket) -> np.ndarray:
    return place_samples(ticket.plan, dp=0, ids_of=ids_of)[0, 0, 0]


def test_a_relay_that_has_the_whole_shard_may_fall_back_to_host_memory() -> None:
    ticket = ticket_of(1, 1, 1)
    found = receive(ticket, FakeMember(ticket, 0), FakeMember(ticket, 1, META, CPU))
    assert np.array_equal(found, expected(ticket))


def test_parts_of_different_devices_are_merged_where_the_first_one_came() -> None:
    ticket = ticket_of(0, 1, 0)
    found = receive(ticket, FakeMember(ticket, 0, META, CPU), FakeMember(ticket, 1, META))
    assert np.array_equal(found, expected(ticket))
