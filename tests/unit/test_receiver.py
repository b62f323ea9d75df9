"""What a receiver tells its TP group, the memory that it makes, and what a failed receive leaves."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from r3channel.errors import PeerFailed, TicketMismatch, UsageError
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.trainer.receiver import Receiver
from r3channel.trainer.relay_connection import Control, RelayConnection
from r3channel.trainer.shard_buffer import ShardBuffer
from r3channel.transport.tp_fanout import TensorParallelFanout
from r3channel.wire.digest import fold, layer_digests
from r3channel.wire.routing import as_tokens, hash_tokens
from tests.support.samples import SPEC, random_ids

NOBODY = cast(Control, None)


class Group(TensorParallelFanout):
    """The other rank of the group can always go on; whoever hands on would wait for it."""

    def __init__(self) -> None:
        super().__init__(None, device=torch.device("cpu"))

    def scatter(self, parts: list[torch.Tensor] | None, out_N: torch.Tensor) -> None:
        raise PeerFailed("handed on")


def sample(name: str, tokens: int = 9, *, seed: int = 0) -> TicketSample:
    """A sample with the ids of `random_ids(tokens - 1, seed)`; its tokens are 0, 1, 2, ..."""
    digest = fold(layer_digests(random_ids(tokens - 1, seed=seed), first_row=0))
    return TicketSample(name, tokens, hash_tokens(as_tokens(range(tokens))), digest, ())


def ticket_of(layout: TrainerLayout, *samples: TicketSample) -> Ticket:
    names = [[one.sample_id] for one in samples]
    assignment = Assignment.given([[name] for name in names] if layout.dp > 1 else [names])
    return Ticket("run", 3, SPEC, layout, assignment, samples, 1 << 20)


@pytest.mark.parametrize("sp", [True, False])
def test_a_rank_without_memory_says_so_in_the_vote(monkeypatch: pytest.MonkeyPatch, sp: bool) -> None:
    layout, voted = TrainerLayout(tp=2, sp=sp), []

    def vote(failure: BaseException | None, **_: Any) -> None:
        voted.append(failure)
        if failure is not None:
            raise failure

    def no_memory(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    group = Group()
    monkeypatch.setattr(group, "vote", vote)
    receiver = Receiver(NOBODY, spec=SPEC, layout=layout, coords=layout.coords(1), fanout=group)
    monkeypatch.setattr(receiver, "_buffer", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        receiver.receive(ticket_of(layout, sample("a")))
    assert isinstance(voted[0], torch.OutOfMemoryError)


def test_a_failed_receive_leaves_no_cycle_that_keeps_groups_and_buffers() -> None:
    """What only a collection frees may live until the interpreter ends, and gloo's threads then end the process."""
    layout = TrainerLayout()
    group = Group()
    receiver = Receiver(NOBODY, spec=SPEC, layout=layout, coords=layout.coords(0), fanout=group)
    other = ticket_of(TrainerLayout(dp=2), sample("a"), sample("b"))
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


def test_a_shard_that_is_handed_on_without_a_group_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """TP with sequence parallelism and no fan-out given."""
    layout = TrainerLayout(tp=2)
    receiver = Receiver(NOBODY, spec=SPEC, layout=layout, coords=layout.coords(0))
    rows_TLK, asked = random_ids(8, seed=1), list[str]()

    def arrive(_: RelayConnection, landed: ShardBuffer) -> None:
        asked.append(landed.ticket.run)
        landed.begin()
        landed.rows(rows_TLK, begin=0)
        assert landed.verify(layer_digests(rows_TLK, first_row=0).tobytes() * 2) == []

    monkeypatch.setattr(RelayConnection, "receive", arrive)
    with pytest.raises(UsageError, match="scatter over 1 TP ranks got 2 parts"):
        receiver.receive(ticket_of(layout, sample("a", seed=1)))
    assert asked == ["run"]
