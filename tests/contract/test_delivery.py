"""Relay to receivers, whole, over real sockets: exact rows, sending in the background, deadlines, connections, typed refusals.

Trainers are threads of this process here. The same path runs across processes in tests/dist and tests/e2e.
"""

from __future__ import annotations

import base64
import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from r3channel import errors
from r3channel.plan.assignment import Assignment
from r3channel.plan.ticket import Ticket
from r3channel.recordings.recorder import Recorder
from r3channel.relay.row_server import _Served
from r3channel.trainer.rank_shard import RankShard
from r3channel.trainer.receiver import Receiver
from r3channel.wire import row_protocol as wire
from r3channel.wire.frame import encode_frame
from r3channel.wire.routing import ProvenanceSpan, RowKind
from tests.delivery import (
    LIMIT_S,
    TOKENS,
    MakeRelay,
    assignment,
    check_rows,
    fill,
    lives,
    receive,
    receivers_of,
    recorded,
    relays,
    sealed,
    start,
    threads,
    ticket_of,
    until,
)
from tests.samples import SPEC, random_ids, reply_for

ROWS = 3 * sum(n - 1 for n in TOKENS.values())


@pytest.fixture(params=["tcp", "gloo"])
def make_relay_over(request: pytest.FixtureRequest) -> Iterator[MakeRelay]:
    with relays(transport=request.param) as make:
        yield make


def memory_of(receiver: Receiver) -> list[int]:
    """Where everything lies that a step received so far."""
    tensors = [*receiver._buffers.values(), *receiver._member._buckets]
    return sorted(tensor.data_ptr() for tensor in tensors)


def test_a_receiver_told_its_largest_step_makes_all_memory_when_it_joins(make_relay_over: MakeRelay) -> None:
    """On a GPU that memory is pinned, which would take its time in the step's slot at each new maximum."""
    for expected in (1 << 16, 0):
        relay = make_relay_over("dp=1", expected_shard_bytes=expected)
        (receiver,) = receivers_of(relay)
        receiver.join(timeout_s=LIMIT_S)
        before = memory_of(receiver)
        for step, rows in enumerate((8, 90, 200)):
            relay.add(f"s{rows}", reply_for(f"s{rows}", rows + 1), range(rows + 1))
            receiver.receive(relay.seal(step, Assignment.given([[[f"s{rows}"]]])))
        assert (memory_of(receiver) == before) is bool(expected)


# -- rows --------------------------------------------------------------------------------------------------------------


def test_every_rank_receives_exactly_its_rows(make_relay_over: MakeRelay) -> None:
    relay = make_relay_over("dp=2,pp=2")
    fill(relay)
    ticket = Ticket.from_bytes(relay.seal(0, assignment()).to_bytes())
    shards = receive(receivers_of(relay), ticket)
    assert sum(map(check_rows, shards)) == ROWS
    for shard in shards:
        dp, pp, cp = shard.shard.key
        assert len(shard.data_N) == ticket.plan.shard(dp=dp, pp=pp, cp=cp).slot_bytes
    relay.join_previous(timeout_s=LIMIT_S)
    assert relay.status()["steps"] == {}
    until(lambda: relay.status()["store"] == {"frames": 0, "bytes": 0})


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
    relay.join_previous(timeout_s=LIMIT_S)


def test_rows_without_routing_travel_by_name_when_the_policy_allows_them(make_relay: MakeRelay) -> None:
    valid = np.ones(29, dtype=bool)
    valid[[3, 4, 20]] = False
    relay = make_relay("dp=2", invalid_rows="live")
    for index, (name, tokens) in enumerate(TOKENS.items()):
        own = {"valid_T": valid} if name == "s1" else {}
        relay.add(name, reply_for(name, tokens, seed=index, **own), range(tokens))
    ticket = relay.seal(0, assignment())
    assert ticket.sample("s1").invalid == ((3, 5), (20, 21))
    shard = start(receivers_of(relay)[1:], ticket)[0].result(LIMIT_S)
    live = shard.live_rows(0)
    assert live is not None and int(live.sum()) == 3
    sample, position = shard.shard.row_map(0, tp=0)
    assert position[live.numpy()].tolist() == [3, 4, 20] and set(sample[live.numpy()]) == {0}
    for row in shard.layer_ids(0, 2).numpy()[live.numpy()]:
        assert len(set(row.tolist())) == 8  # placeholders that would be harmless

    strict = make_relay("dp=2")
    with pytest.raises(errors.RowsInvalid, match="3 of 29 rows"):
        strict.add("s1", reply_for("s1", 30, seed=1, valid_T=valid), range(30))


@pytest.mark.parametrize("text", ["", "cp=2", "pp=2,packing=thd"])
def test_a_sample_of_several_turns_arrives_as_one(make_relay: MakeRelay, text: str) -> None:
    relay, tokens = make_relay(text), TOKENS["s1"]
    edges = (0, 7, 8, 20, tokens - 1)
    for first, end in itertools.pairwise(edges):
        rows = random_ids(tokens - 1, seed=1)[first:end]
        span = ProvenanceSpan(start=first, end=end, weight_version=first, kind=RowKind.DECODED)
        frame = encode_frame(SPEC, expert_ids_TLK=rows, provenance=[span], first_row=first)
        relay.add_frame("s1", frame, range(end + 1), append=first > 0)
        assert relay.rows_held("s1") == end
    ticket = relay.seal(0, Assignment.given([[["s1"]]]))
    assert ticket.weight_versions == (0, 7, 8, 20)
    shards = receive(receivers_of(relay), ticket)
    assert sum(map(check_rows, shards)) == 3 * (tokens - 1)


# -- when --------------------------------------------------------------------------------------------------------------


def test_the_join_with_the_previous_send_names_the_missing_rank(make_relay: MakeRelay) -> None:
    relay = make_relay("dp=2")
    ticket = sealed(relay)
    check_rows(receivers_of(relay)[0].receive(ticket))
    with pytest.raises(errors.DeadlineExceeded, match=r"\{0: \[\(1, 0, 0\)\]\}") as told:
        relay.join_previous(timeout_s=0.1)
    assert told.value.ranks == ((1, 0, 0),)


# -- connections -------------------------------------------------------------------------------------------------------


def test_a_restarted_trainer_connects_anew_and_gets_the_kept_rows(make_relay_over: MakeRelay) -> None:
    relay = make_relay_over("dp=2,pp=2")
    old = receivers_of(relay)
    for receiver in old:
        receiver.join(timeout_s=LIMIT_S)
    ticket = sealed(relay)
    old[0].close()  # dp 0 pp 0 dies and comes back; the others know nothing of it
    for shard in receive([receivers_of(relay)[0], *old[1:]], ticket):
        check_rows(shard)
    relay.join_previous(timeout_s=LIMIT_S)
    assert lives(relay) == [2, 1, 1, 1]


def test_a_receiver_that_comes_twice_is_served_on_its_newest_connection(make_relay_over: MakeRelay) -> None:
    """The older is one that it gave up, or that a process had which was killed and whose host says nothing."""
    relay = make_relay_over("dp=1")
    first, second = receivers_of(relay)[0], receivers_of(relay)[0]
    first.join(timeout_s=LIMIT_S)
    second.join(timeout_s=LIMIT_S)
    check_rows(second.receive(sealed(relay)))
    assert relay.status()["receivers"] == {"connected": [(0, 0, 0)], "lives": {(0, 0, 0): 2}}
    link = first._member._link
    assert link is not None
    with pytest.raises(errors.TransportError, match="left"):
        link.recv_record(timeout_s=LIMIT_S)
    until(lambda: [one.name for one in threading.enumerate()].count("r3channel-send-0-0-0") == 1)


def test_a_trainer_restarted_after_acknowledging_gets_rows_again_while_needed(make_relay: MakeRelay) -> None:
    relay = make_relay("dp=2")
    ticket = sealed(relay)
    check_rows(receivers_of(relay)[0].receive(ticket))
    again, other = receivers_of(relay)
    check_rows(again.receive(ticket))
    check_rows(other.receive(ticket))
    relay.join_previous(timeout_s=LIMIT_S)
    with pytest.raises(errors.TicketMismatch, match=r"\(1, 0, 0\) asks for step 0.*delivered") as told:
        receivers_of(relay)[1].receive(ticket)
    assert (told.value.step, told.value.ranks) == (0, ((1, 0, 0),))


def test_a_lost_acknowledgement_is_repeated_and_nothing_is_sent_again(
    make_relay_over: MakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = make_relay_over("dp=1")
    say, lost = _Served._say, []

    def cut(served: _Served, kind: int, **values: Any) -> None:
        if kind == wire.THANKS and not lost:
            lost.append(served.key)
            served.abort()
        say(served, kind, **values)

    monkeypatch.setattr(_Served, "_say", cut)
    receiver = receivers_of(relay)[0]
    check_rows(receiver.receive(sealed(relay)))
    assert lost and lives(relay) == [2]
    sent = relay.metrics.value("r3channel_bytes_total", leg="wire_sent")
    assert sent == ROWS * SPEC.top_k, "once"
    assert relay.metrics.value("r3channel_samples_total", outcome="delivered") == 4


def test_any_failure_of_a_receiver_is_raised_not_swallowed(make_relay: MakeRelay) -> None:
    relay = make_relay("dp=1")

    class Broken:
        def hello(self, **_: Any) -> dict[str, Any]:
            raise OSError("cable")

    (receiver,) = receivers_of(relay, control=Broken())
    with pytest.raises(OSError, match="cable"):
        receiver.receive(sealed(relay))
    check_rows(receivers_of(relay)[0].receive(ticket_of(relay, 0)))


def test_close_names_what_was_not_delivered_and_leaves_no_thread(make_relay_over: MakeRelay) -> None:
    before = threads()
    relay = make_relay_over("dp=2,pp=2")
    for receiver in receivers_of(relay):
        receiver.join(timeout_s=LIMIT_S)
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


def test_lengths_that_differ_from_the_ticket_are_refused_before_a_row_moves(make_relay: MakeRelay) -> None:
    relay = make_relay("dp=2")
    ticket, receiver = sealed(relay), receivers_of(relay)[0]
    with pytest.raises(errors.TicketMismatch, match=r"1 micro-batches planned, this trainer runs 2"):
        receiver.receive(ticket, lengths=[[9], [17]])
    with pytest.raises(errors.TicketMismatch, match=r"\(9, 17\) tokens planned.*\(9, 18\)"):
        receiver.receive(ticket, lengths=[[9, 18]])
    assert relay.metrics.value("r3channel_buckets_total") == 0
    check_rows(receiver.receive(ticket, lengths=[[9, 17]]))


def test_a_name_may_be_used_again_once_its_step_was_delivered_and_not_before(make_relay: MakeRelay) -> None:
    relay = make_relay("dp=1")
    ticket = sealed(relay)
    with pytest.raises(errors.SampleTwice, match="is in step 0") as told:
        fill(relay)
    assert told.value.samples == ("s0",)
    check_rows(receivers_of(relay)[0].receive(ticket))
    check_rows(receivers_of(relay)[0].receive(sealed(relay, 1)))


# -- samples -----------------------------------------------------------------------------------------------------------


def test_a_bad_sample_is_counted_by_reason_and_leaves_nothing_behind(make_relay: MakeRelay) -> None:
    relay = make_relay("dp=2")
    with pytest.raises(errors.RowCountMismatch):
        relay.add("s0", reply_for("s0", 9), range(10))
    assert relay.status()["store"]["frames"] == 0
    fill(relay)
    with pytest.raises(errors.SampleTwice):
        relay.add("s0", reply_for("s0", 9), range(9))
    with pytest.raises(errors.SampleUnknown, match="gone") as told:
        relay.seal(0, Assignment.given([[["s0"]], [["gone"]]]))
    assert told.value.samples == ("gone",) and told.value.step == 0
    assert relay.metrics.value("r3channel_rejected_total", reason="rows") == 1
    assert relay.metrics.value("r3channel_rejected_total", reason="sample_twice") == 1
    status = relay.status()
    assert len(status["pending"]) == 4 and status["store"]["frames"] == 4
    relay.seal(0, assignment())


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
    relay = make_relay("dp=2", recorder=Recorder(tmp_path))
    ticket = sealed(relay)
    shards = receive(receivers_of(relay), ticket)
    recording = recorded(tmp_path)
    assert recording.ticket == ticket
    for shard in shards:
        whole = torch.from_numpy(recording.shards(dp=shard.shard.dp)[shard.shard.key])
        again = RankShard.from_whole(ticket, shard.shard, whole, tp=0)
        assert torch.equal(again.data_N, shard.data_N)
    assert recording.tokens["s1"].tolist() == list(range(30))


def test_a_step_is_recorded_before_its_rows_may_be_given_away(
    make_relay: MakeRelay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay, write, released = make_relay(recorder=Recorder(tmp_path)), Recorder.write, threading.Event()

    def slow(*arguments: Any) -> None:
        relay.undelivered(wait_s=0.5)  # as long as it takes to deliver, if nothing prevents it
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
