"""What a receiver checks before a byte moves, what it tells its TP group, and what a failed receive leaves."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from r3channel.errors import PayloadCorrupt, PeerFailed, TicketMismatch, TransportError, UsageError
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.stream import Stream
from r3channel.plan.ticket import Ticket, TicketSample
from r3channel.tokens import as_tokens, hash_tokens
from r3channel.trainer.member import Control, Member
from r3channel.trainer.receiver import Receiver, check_tokens
from r3channel.transport.tensor_parallel import TensorParallelFanout
from r3channel.wire.digest import fold, layer_digests
from tests.samples import SPEC, random_ids

NOBODY = cast(Control, None)


class Group(TensorParallelFanout):
    """The other rank of the group can always go on; whoever hands on would wait for it."""

    def __init__(self) -> None:
        super().__init__(None, device=torch.device("cpu"))

    def scatter(self, parts: list[torch.Tensor] | None, out_N: torch.Tensor) -> None:
        raise PeerFailed("handed on")


def sample(name: str, tokens: int = 9, *, seed: int = 0, relay: int = 0) -> TicketSample:
    """Of `random_ids(tokens - 1, seed)`; its tokens are 0, 1, 2, ..."""
    digest = fold(layer_digests(random_ids(tokens - 1, seed=seed), first_row=0))
    return TicketSample(
        name, tokens, hash_tokens(as_tokens(range(tokens))), digest, (), (), ((tokens - 1, relay),)
    )


def ticket_of(layout: TrainerLayout, *samples: TicketSample, peers: tuple[str, ...] = ()) -> Ticket:
    batches = [[[one.sample_id]] for one in samples]
    assignment = Assignment.given(
        batches if layout.dp > 1 else [[name for batch in batches for name in batch]]
    )
    return Ticket("run", 3, SPEC, layout, assignment, samples, 1 << 20, peers=peers)


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


def test_all_samples_whose_tokens_differ_are_named_and_no_other() -> None:
    names = [f"s{index}" for index in range(40)]
    ticket = ticket_of(TrainerLayout(), *map(sample, names))
    shard = ticket.plan.shard(dp=0, pp=0)
    good, bad = list(range(9)), [1, *range(1, 9)]
    check_tokens(ticket, shard, [[good]] * 40)
    with pytest.raises(TicketMismatch, match="20 samples") as told:
        check_tokens(ticket, shard, [[good], [bad]] * 20)
    assert told.value.samples == tuple(names[1::2]) and told.value.ranks == ((0, 0, 0),)


def test_pinned_memory_that_was_too_small_is_made_with_room_to_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, bool]] = []
    empty = torch.empty

    def noted(nbytes: int, *, pin_memory: bool, **_: Any) -> torch.Tensor:
        made.append((nbytes, pin_memory))
        return empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(torch, "empty", noted)
    receiver = Receiver(
        NOBODY, spec=SPEC, layout=TrainerLayout(), coords=TrainerLayout().coords(0), device=torch.device("cuda"),
        fanout=Group(),
    )  # fmt: skip
    sizes = [len(receiver._whole(nbytes, 0)) for nbytes in range(800, 1600, 20)]
    assert sizes == list(range(800, 1600, 20)), "each step gets its own size"
    assert made == [(1024, True), (2048, True)], "what torch pins for 800 and for 1040 bytes"


# -- several relays, of which some have delivered ----------------------------------------------------------------------


class Relays:
    """Stand for the connections to two relays: deliver, or fail as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[int] = []
        self.failing: dict[int, Exception] = {}
        self.rows = {"a": random_ids(8, seed=1), "b": random_ids(8, seed=2)}

        def receive(member: Member, ticket: Ticket, stream: Stream, sink: Any) -> None:
            self.asked.append(stream.relay)
            if stream.relay in self.failing:
                raise self.failing.pop(stream.relay)
            self._deliver(ticket, stream, sink())

        monkeypatch.setattr(Member, "receive", receive)

    def _deliver(self, ticket: Ticket, stream: Stream, sink: Any) -> None:
        rows = [self.rows[stream.samples[index].sample_id] for index, _, _ in stream.sends()]
        for number, rows_TLK in enumerate(rows):
            sink.rows(rows_TLK, begin=8 * number)
        engine_SL = np.zeros((len(stream.samples), SPEC.num_moe_layers), np.uint64)
        for index, one in enumerate(stream.samples):
            if one.segments[0][1] == stream.relay:
                engine_SL[index] = layer_digests(self.rows[one.sample_id], first_row=0)
        assert sink.verify(engine_SL.tobytes() * 2) == []


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> tuple[Relays, Receiver, Ticket]:
    layout = TrainerLayout()
    receiver = Receiver([NOBODY, NOBODY], spec=SPEC, layout=layout, coords=layout.coords(0))
    ticket = ticket_of(layout, sample("a", seed=1), sample("b", seed=2, relay=1), peers=("run-1",))
    return Relays(monkeypatch), receiver, ticket


def test_what_a_relay_has_delivered_is_not_asked_for_again_when_another_fails(
    two: tuple[Relays, Receiver, Ticket],
) -> None:
    relays, receiver, ticket = two
    relays.failing[1] = TransportError("cable", samples=["b"])
    with pytest.raises(TransportError, match="relay 1 of 2: cable") as told:
        receiver.receive(ticket)
    assert told.value.samples == ("b",)
    shard = receiver.receive(ticket)
    assert relays.asked == [0, 1, 1]
    for microbatch, name in enumerate("ab"):
        for layer in SPEC.moe_layers:
            found = shard.layer_ids(microbatch, layer)
            shard.handed(microbatch, layer, found)
            assert found[:8].tolist() == relays.rows[name][:, SPEC.moe_index(layer)].tolist()


def test_another_step_in_between_begins_anew(two: tuple[Relays, Receiver, Ticket]) -> None:
    relays, receiver, ticket = two
    relays.failing[1] = PayloadCorrupt("damaged")
    with pytest.raises(PayloadCorrupt):
        receiver.receive(ticket)
    later = replace(ticket, step=4)
    receiver.receive(later)
    assert relays.asked == [0, 1, 0, 1], "the memory of the first was given to it"
    with pytest.raises(TicketMismatch, match="stale"):
        receiver.receive(ticket)


def test_rows_that_are_not_the_tickets_are_named_once_all_relays_are_done(
    two: tuple[Relays, Receiver, Ticket],
) -> None:
    relays, receiver, ticket = two
    whole, relays.rows["b"] = relays.rows["b"], random_ids(8, seed=3)  # whole, and another sample's
    with pytest.raises(
        TicketMismatch, match=r"1 samples have other rows than their ticket says: \['b'\]"
    ) as told:
        receiver.receive(ticket)
    assert told.value.samples == ("b",) and told.value.ranks == ((0, 0, 0),) and told.value.step == 3
    relays.rows["b"] = whole
    receiver.receive(ticket)
    assert relays.asked == [0, 1, 1], "what relay 0 sent was right"


def test_a_ticket_of_more_relays_than_the_trainer_knows_is_refused() -> None:
    layout = TrainerLayout()
    receiver = Receiver(NOBODY, spec=SPEC, layout=layout, coords=layout.coords(0))
    with pytest.raises(TicketMismatch, match=r"2 relay\(s\) send it, this trainer has the controls of 1"):
        receiver.receive(ticket_of(layout, sample("a"), peers=("run-1",)))


def test_a_shard_that_is_handed_on_without_a_group_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """TP with sequence parallelism and no fan-out given."""
    layout = TrainerLayout(tp=2)
    receiver = Receiver(NOBODY, spec=SPEC, layout=layout, coords=layout.coords(0))
    relays = Relays(monkeypatch)
    with pytest.raises(UsageError, match="scatter over 1 TP ranks got 2 parts"):
        receiver.receive(ticket_of(layout, sample("a", seed=1)))
    assert relays.asked == [0]
