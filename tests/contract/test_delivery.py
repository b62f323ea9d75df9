"""Relay to receivers, whole, over real sockets: exact rows, sending in the background, ahead of their receive, typed refusals.

Trainers are threads of this process here. The same path runs across processes in tests/dist and tests/e2e.
"""

from __future__ import annotations

import base64
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from r3channel import errors
from r3channel.plan.assignment import Assignment
from r3channel.plan.ticket import Ticket
from r3channel.recordings.recorder import Recorder
from r3channel.relay.relay import Relay
from r3channel.trainer.rank_shard import RankShard
from r3channel.trainer.receiver import Receiver
from tests.support.delivery import (
    TOKENS,
    MakeRelay,
    Slowly,
    assignment,
    check_rows,
    fill,
    lives,
    receive,
    receivers_of,
    recorded,
    sealed,
    start,
    threads,
    ticket_of,
)
from tests.support.samples import SPEC, random_ids, reply_for
from tests.support.waits import SOON_S, until

ROWS = 3 * sum(n - 1 for n in TOKENS.values())


@pytest.fixture(params=["tcp", "gloo"])
def make_relay_over(request: pytest.FixtureRequest, make_relay: MakeRelay) -> MakeRelay:
    return partial(make_relay, transport=request.param)


def memory_of(receiver: Receiver) -> list[int]:
    """Where everything lies that a step received so far."""
    tensors = [*receiver._buffers.values(), *receiver._buckets.held]
    return sorted(tensor.data_ptr() for tensor in tensors)


def test_a_receiver_told_its_largest_step_makes_all_memory_when_it_joins(make_relay_over: MakeRelay) -> None:
    """On a GPU that memory is pinned, which would take its time in the step's slot at each new maximum."""
    for expected in (1 << 16, 0):
        relay = make_relay_over("dp=1", expected_shard_bytes=expected)
        (receiver,) = receivers_of(relay)
        receiver.join(timeout_s=SOON_S)
        before = memory_of(receiver)
        for step, rows in enumerate((8, 90, 200)):
            relay.add(f"s{rows}", reply_for(f"s{rows}", rows + 1), range(rows + 1))
            receiver.receive(relay.seal(step, Assignment.given([[[f"s{rows}"]]])))
        assert (memory_of(receiver) == before) is bool(expected)


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["dp=2,cp=2", "dp=2,pp=4,cp=2,packing=thd", "dp=2,pp=2,vpp=2", "dp=2,tp=2", "dp=2,tp=2,sp=0,cp=2"]
)
def test_every_stage_context_and_tensor_rank_receives_its_own_rows(make_relay: MakeRelay, text: str) -> None:
    relay = make_relay(text)
    layout = relay.layout
    ticket = sealed(relay)
    shards = receive(receivers_of(relay), ticket)
    assert len({(shard.shard.key, shard.tp) for shard in shards}) == layout.world_size
    assert sum(map(check_rows, shards)) == ROWS * layout.tp // layout.tp_slots
    assert sum(len(s.data_N) for s in shards) == sum(one.slot_bytes * layout.tp for one in ticket.plan.shards)
    relay.join_previous(timeout_s=SOON_S)


@pytest.mark.parametrize(("transport", "buckets"), [("tcp", 1), ("gloo", 2)])
def test_staged_bytes_do_not_grow_with_tokens(make_relay: MakeRelay, transport: str, buckets: int) -> None:
    peaks, sizes = [], []
    for tokens in (400, 2000):
        relay = make_relay("pp=2", transport=transport)
        relay.add("a", reply_for("a", tokens), range(tokens))
        ticket = relay.seal(0, Assignment.given([[["a"]]]))
        for receiver in receivers_of(relay):
            receiver.receive(ticket)
        peaks.append(relay.row_server.peak_staging_bytes)
        sizes.append(min(shard.nbytes for shard in ticket.plan.shards))
    assert sizes[1] > sizes[0] > buckets * 1024 >= peaks[0] == peaks[1] > (buckets - 1) * 1024
    relay = make_relay("dp=2")
    receive(receivers_of(relay), sealed(relay))
    assert relay.row_server.peak_staging_bytes == 0, "with one stage rows go from where they lie"


# -- connections -------------------------------------------------------------------------------------------------------


def test_a_receiver_that_comes_twice_is_served_on_its_newest_connection(make_relay_over: MakeRelay) -> None:
    """The older is one that it gave up, or that a process had which was killed and whose host says nothing."""
    relay = make_relay_over("dp=1")
    first, second = receivers_of(relay)[0], receivers_of(relay)[0]
    first.join(timeout_s=SOON_S)
    until(lambda: relay.status()["receivers"]["connected"], "a moment after its peer the relay knows")
    second.join(timeout_s=SOON_S)
    check_rows(second.receive(sealed(relay)))
    assert relay.status()["receivers"] == {"connected": [(0, 0, 0)], "lives": {(0, 0, 0): 2}}
    link = first._member._link
    assert link is not None
    with pytest.raises(errors.TransportError, match="left"):
        link.recv_record(timeout_s=SOON_S)
    until(lambda: [one.name for one in threading.enumerate()].count("r3channel-send-0-0-0") == 1)


def test_any_failure_of_a_receiver_is_raised_not_swallowed(make_relay: MakeRelay) -> None:
    relay, broken = make_relay("dp=1"), Mock(hello=Mock(side_effect=OSError("cable")))
    (receiver,) = receivers_of(relay, control=broken)
    with pytest.raises(OSError, match="cable"):
        receiver.receive(sealed(relay))
    check_rows(receivers_of(relay)[0].receive(ticket_of(relay, 0)))


def test_close_names_what_was_not_delivered_and_leaves_no_thread(make_relay_over: MakeRelay) -> None:
    before = threads()
    relay = make_relay_over("dp=2,pp=2")
    for receiver in receivers_of(relay):
        receiver.join(timeout_s=SOON_S)
    fill(relay)
    relay.seal(7, assignment())
    with pytest.raises(errors.StepError, match=r"7: \[\(0, 0, 0\).*still running: \[\]") as told:
        relay.close()
    assert told.value.ranks == ((0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0))
    with pytest.raises(errors.UsageError, match="closed"):
        relay.seal(8, assignment())
    with pytest.raises(errors.UsageError, match="closed"):
        relay.hello(dp=0, pp=0)
    until(lambda: threads() <= before)  # a thread may be on its last lines
    relay.close()


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["step", "run", "spec", "layout"])
def test_a_ticket_of_another_step_run_spec_or_layout_moves_no_row(make_relay: MakeRelay, change: str) -> None:
    relay = make_relay("dp=2")
    good = sealed(relay)
    other: dict[str, Any] = {
        "step": {"step": 5}, "run": {"run": "another"}, "spec": {"spec": replace(SPEC, num_layers=5)},
        "layout": {"layout": replace(relay.layout, tp=2)},
    }[change]  # fmt: skip
    receiver = receivers_of(relay)[0]
    with pytest.raises(errors.TicketMismatch, match=change):
        receiver.receive(replace(good, **other))
    assert relay.metrics.value("r3channel_buckets_total") == 0
    check_rows(receiver.receive(good))


def test_a_receiver_that_the_layout_has_not_is_refused_by_name(make_relay: MakeRelay) -> None:
    relay = make_relay("dp=2")
    with pytest.raises(errors.TicketMismatch, match="hello from dp 2 pp 0 cp 0") as told:
        relay.hello(dp=2, pp=0)
    assert told.value.ranks == ((2, 0, 0),)


# -- samples -----------------------------------------------------------------------------------------------------------


def test_an_engine_without_the_plug_in_is_noticed_at_start(make_relay: MakeRelay) -> None:
    stock = np.zeros((1, 4, 8), np.int32).tobytes()
    reply = {"meta_info": {"id": "p", "routed_experts": base64.b64encode(stock).decode()}}
    relay = make_relay()
    with pytest.raises(errors.PluginNotApplied, match=r"http://e:1.*R3CHANNEL_ENGINE"):
        relay.check_engine(reply, engine="http://e:1", tokens=2)
    relay.check_engine(reply_for("p", 2), engine="http://e:1", tokens=2)
    assert relay.status()["store"]["frames"] == 0


# -- recordings --------------------------------------------------------------------------------------------------------


def test_a_recording_holds_the_step_as_it_was_sent(make_relay: MakeRelay, tmp_path: Path) -> None:
    """Also one that was given up when it had been recorded, and sealed again."""
    relay = make_relay("dp=2", recorder=Recorder(tmp_path))
    given_up = sealed(relay)
    until(lambda: not relay.steps._steps[0].in_use)
    relay.abandon(0)
    ticket = relay.seal(0, given_up.assignment)
    shards = receive(receivers_of(relay), ticket)
    until(lambda: relay.status()["store"]["frames"] == 0, "it is recorded, and freed")
    recording = recorded(tmp_path)
    assert recording.ticket == ticket
    for shard in shards:
        whole = torch.from_numpy(recording.shards(dp=shard.shard.dp)[shard.shard.key])
        again = RankShard.from_whole(ticket, shard.shard, whole, tp=0)
        assert torch.equal(again.data_N, shard.data_N)
    assert recording.tokens["s1"].tolist() == list(range(30))


def test_a_step_is_recorded_first(
    make_relay: MakeRelay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay, write, released = make_relay(recorder=Recorder(tmp_path)), Recorder.write, threading.Event()

    def slow(*arguments: Any) -> None:
        relay.find_undelivered(wait_s=0.5)  # as long as it takes to deliver, if nothing prevents it
        if not relay.steps._steps:
            released.set()
        return write(*arguments)

    monkeypatch.setattr(Recorder, "write", slow)
    check_rows(receivers_of(relay)[0].receive(sealed(relay)))
    recording = recorded(tmp_path)
    assert not released.is_set()
    for index, (name, tokens) in enumerate(TOKENS.items()):
        assert np.array_equal(recording.rows(name), random_ids(tokens - 1, seed=index))


def test_a_recording_of_swapped_frames_is_refused(make_relay: MakeRelay, tmp_path: Path) -> None:
    relay = make_relay("dp=1", recorder=Recorder(tmp_path))
    for index, name in enumerate("ab"):
        relay.add(name, reply_for(name, 9, seed=index), range(9))
    receivers_of(relay)[0].receive(relay.seal(0, Assignment.given([[["a", "b"]]])))
    good = recorded(tmp_path)
    swapped = replace(good, frames={"a": good.frames["b"], "b": good.frames["a"]})
    with pytest.raises(errors.TicketMismatch, match="sample a"):
        swapped.shards(dp=0)


# -- ahead: a step's rows come as soon as its ticket is known, while the step before trains; never over a group ---------------


@pytest.fixture
def relay(make_relay: MakeRelay) -> Relay:
    return make_relay("dp=1")


def sealed_as(relay: Relay, step: int) -> Ticket:
    return sealed(relay, step, prefix=f"{step}-")


def test_the_next_shard_arrives_beside_the_one_in_use(relay: Relay) -> None:
    (receiver,) = receivers_of(relay)
    shard = receiver.receive(sealed_as(relay, 0))
    assert len(receiver._buffers) == 1, "there is no memory for a second one until it is needed"
    for step in range(1, 4):
        ticket = sealed_as(relay, step)
        receiver.prefetch(ticket)
        relay.join_previous(timeout_s=SOON_S)  # it was received and acknowledged before anybody asked for it
        check_rows(shard, prefix=f"{step - 1}-")
        shard = receiver.receive(ticket)
        check_rows(shard, prefix=f"{step}-")
    assert len(receiver._buffers) == 2 and lives(relay) == [1]


def test_a_shard_that_is_handed_on_leaves_its_memory_to_the_next(make_relay: MakeRelay) -> None:
    relay = make_relay("tp=2")
    first, second = receivers_of(relay)
    for step in range(2):
        ticket = sealed_as(relay, step)
        first.prefetch(ticket)
        second.prefetch(ticket)
        for shard in receive([first, second], ticket):
            check_rows(shard, prefix=f"{step}-")
    assert sorted(first._buffers) == ["part", "whole0"]


def test_an_error_of_the_transfer_surfaces_at_the_receive(relay: Relay) -> None:
    (receiver,) = receivers_of(relay)
    ticket = sealed_as(relay, 0)
    assert relay.abandon(0) == 4
    receiver.prefetch(ticket)
    with pytest.raises(errors.TicketMismatch, match="abandoned"):
        receiver.receive(ticket)
    check_rows(receiver.receive(sealed_as(relay, 1)), prefix="1-")


def test_a_new_seal_replaces_a_prefetch(make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch) -> None:
    relay, slowly = make_relay("dp=1"), Slowly(monkeypatch)
    (receiver,) = receivers_of(relay)
    receiver.prefetch(old := sealed_as(relay, 0))
    assert slowly.entered.wait(SOON_S)
    relay.abandon(0)
    new = relay.seal(0, old.assignment)
    receiver.prefetch(new)
    slowly.go_on.set()
    shard = receiver.receive(new)
    assert shard.ticket.seal == 1
    check_rows(shard, prefix="0-")


def test_a_receive_asks_again_where_a_prefetch_failed(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    (receiver,) = receivers_of(relay, replace(relay.config, step_timeout_s=0.4))
    ticket = sealed_as(relay, 0)
    with monkeypatch.context() as patch:
        patch.setattr("r3channel.trainer.relay_connection.connect", Mock(side_effect=errors.TransportError))
        receiver.prefetch(ticket)
        assert receiver._ahead is not None
        with pytest.raises(errors.TransportError):
            receiver._ahead[1].result(SOON_S)
    check_rows(receiver.receive(ticket), prefix="0-")


def test_only_the_prefetched_step_may_be_received_next(relay: Relay) -> None:
    (receiver,) = receivers_of(relay)
    first, second = sealed_as(relay, 0), sealed_as(relay, 1)
    receiver.prefetch(first)
    for call in (receiver.prefetch, receiver.receive):
        with pytest.raises(errors.UsageError, match="step 1 while step 0"):
            call(second)
        until(lambda: 0 not in relay.status()["steps"])
    # the relay has its acknowledgement and sends it no second time
    check_rows(receiver.receive(first), prefix="0-")
    check_rows(receiver.receive(second), prefix="1-")
    receiver.prefetch(third := sealed_as(relay, 2))
    with pytest.raises(errors.TicketMismatch, match="named"):
        receiver.receive(third, samples=[["another"]])
    check_rows(receiver.receive(sealed_as(relay, 3)), prefix="3-")


def test_a_step_that_one_tp_rank_refused_comes_no_second_time(
    make_relay_over: MakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = make_relay_over("tp=2")
    ranks, ticket = receivers_of(relay), sealed_as(relay, 0)
    with monkeypatch.context() as patch:
        patch.setattr(ranks[1], "_buffer", Mock(side_effect=MemoryError))
        refused = [type(rank.exception(SOON_S)) for rank in start(ranks, ticket)]
    assert refused == [errors.PeerFailed, MemoryError] and relay.status()["steps"] == {}
    for shard in receive(ranks, ticket):
        check_rows(shard, prefix="0-")


def test_a_closed_receiver_ends_its_transfer(make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch) -> None:
    relay, slowly = make_relay("dp=1", step_timeout_s=10 * SOON_S), Slowly(monkeypatch)
    (receiver,) = receivers_of(relay)
    receiver.prefetch(sealed_as(relay, 0))
    assert slowly.entered.wait(SOON_S)
    receiver.close()
    assert receiver._ahead is not None
    with pytest.raises(errors.TransportError):
        receiver._ahead[1].result(SOON_S / 2)
    slowly.go_on.set()
