"""What a receiver tells its TP group before anything is handed on."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from r3channel.errors import PeerFailed, TicketMismatch
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.trainer.receiver import Control, Receiver
from r3channel.transport.tensor_parallel import TensorParallelFanout
from tests.samples import SPEC


class Group(TensorParallelFanout):
    """The other rank of the group can always go on; whoever hands on would wait for it."""

    def __init__(self) -> None:
        super().__init__(None, device=torch.device("cpu"))

    def scatter(self, parts: list[torch.Tensor] | None, out_N: torch.Tensor) -> None:
        raise PeerFailed("handed on")


@pytest.mark.parametrize("sp", [True, False])
def test_a_rank_without_memory_for_its_part_says_so_in_the_vote(
    monkeypatch: pytest.MonkeyPatch, sp: bool
) -> None:
    layout, voted = TrainerLayout(tp=2, sp=sp), []

    def vote(failure: BaseException | None, **_: Any) -> None:
        voted.append(failure)
        if failure is not None:
            raise failure

    def no_memory(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    group = Group()
    monkeypatch.setattr(group, "vote", vote)
    receiver = Receiver(cast(Control, None), spec=SPEC, layout=layout, coords=layout.coords(1), fanout=group)
    monkeypatch.setattr(receiver, "_buffer", no_memory)
    ticket = Ticket(
        "run", 3, SPEC, layout, Assignment.given([[["a"]]]), (TicketSample("a", 9, 7, ()),), 1 << 20
    )
    with pytest.raises(torch.OutOfMemoryError):
        receiver.receive(ticket)
    assert isinstance(voted[0], torch.OutOfMemoryError)


def test_a_failed_receive_leaves_no_cycle_that_keeps_groups_and_buffers() -> None:
    """What only a collection frees may live until the interpreter ends, and gloo's threads then end the process."""
    layout = TrainerLayout()
    group = Group()
    receiver = Receiver(cast(Control, None), spec=SPEC, layout=layout, coords=layout.coords(0), fanout=group)
    other = Ticket(
        "run", 3, SPEC, TrainerLayout(dp=2), Assignment.given([[["a"]], [["b"]]]),
        (TicketSample("a", 9, 7, ()), TicketSample("b", 9, 7, ())), 1 << 20,
    )  # fmt: skip
    gone = weakref.ref(group)
    gc.disable()
    try:
        with suppress(TicketMismatch):
            receiver.receive(other)
        del receiver, group
        assert gone() is None
    finally:
        gc.enable()


def test_a_reason_of_any_characters_reaches_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_global_rank", lambda _group, rank: rank)
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: None)
    assert Group()._share("no file \udcff", source=0) == "no file ?"
