"""Relay to receivers, whole, on every transport: exact rows, background sending, deadlines, epochs, typed refusals.

Trainers are threads of this process here; gloo's sockets are real. The same path runs across processes in tests/e2e.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket
from r3channel.recording import Recorder, Recording, step_folder
from r3channel.relay.placer import Placer
from r3channel.relay.relay import Relay
from r3channel.relay.staging import InPlace
from r3channel.trainer.receiver import Receiver
from r3channel.trainer.shard import RankShard
from tests.delivery import LIMIT_S, TOKENS, assignment, check_rows, fill, receivers_of, start
from tests.samples import SPEC, reply_for


@pytest.fixture(params=["loopback", "gloo", "object_store"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> ChannelConfig:
    return ChannelConfig(
        backend=request.param,
        bucket_bytes=1024,  # several buckets even for tiny shards
        store_dir=str(tmp_path / "store"),
        join_timeout_s=LIMIT_S,
        send_timeout_s=LIMIT_S,
        step_timeout_s=LIMIT_S,
    )


MakeRelay = Callable[..., Relay]


@pytest.fixture
def make_relay(config: ChannelConfig) -> Iterator[MakeRelay]:
    made: list[Relay] = []

    def make(
        layout: TrainerLayout | None = None, recorder: Recorder | None = None, **changes: object
    ) -> Relay:
        changed = replace(config, **changes)  # type: ignore[arg-type]
        made.append(Relay(SPEC, layout or TrainerLayout(dp=2, pp=2), changed, recorder=recorder))
        return made[-1]

    yield make
    for relay in made:
        with contextlib.suppress(errors.StepError):  # a test that leaves a step undelivered
            relay.close()


def test_every_rank_receives_exactly_its_rows(make_relay: MakeRelay) -> None:
    relay = make_relay()
    fill(relay)
    ticket = Ticket.from_bytes(relay.seal(0, assignment()).to_bytes())
    shards = [future.result(LIMIT_S) for future in start(receivers_of(relay), ticket)]
    assert sum(check_rows(shard) for shard in shards) == 3 * sum(n - 1 for n in TOKENS.values())
    for shard in shards:
        assert (
            len(shard.data_N)
            == ticket.plan.shard(dp=shard.shard.dp, pp=shard.shard.pp, cp=shard.shard.cp).slot_bytes
        )
    relay.join_previous(timeout_s=LIMIT_S)
    assert relay.status()["steps"] == {}
    deadline = time.monotonic() + LIMIT_S
    while relay.status()["store"]["frames"] and time.monotonic() < deadline:
        time.sleep(0.01)  # released in the background, after the last shard was published
    assert relay.status()["store"]["frames"] == 0


@pytest.mark.parametrize("text", ["dp=2,cp=2", "dp=2,pp=4,cp=2,packing=thd", "dp=2,pp=2,vpp=2"])
def test_every_stage_and_context_rank_receives_its_own_rows(make_relay: MakeRelay, text: str) -> None:
    relay = make_relay(TrainerLayout.parse(text))
    fill(relay)
    ticket = relay.seal(0, assignment())
    shards = [future.result(LIMIT_S) for future in start(receivers_of(relay), ticket)]
    assert len({shard.shard.key for shard in shards}) == relay.layout.world_size
    assert sum(check_rows(shard) for shard in shards) == sum(n - 1 for n in TOKENS.values()) * 3
    assert sum(len(shard.data_N) for shard in shards) == sum(shard.nbytes for shard in ticket.plan.shards)
    relay.join_previous(timeout_s=LIMIT_S)


def test_several_steps_reuse_the_group(make_relay: MakeRelay) -> None:
    relay = make_relay()
    receivers = receivers_of(relay)
    for step in range(3):
        fill(relay, prefix=f"{step}-")
        ticket = relay.seal(step, assignment(prefix=f"{step}-"))
        for future in start(receivers, ticket):
            check_rows(future.result(LIMIT_S), prefix=f"{step}-")
        relay.join_previous(timeout_s=LIMIT_S)
    assert {group["epoch"] for group in relay.status()["groups"].values()} == {1}


def run_step(relay: Relay, *, blocking: bool) -> list[RankShard]:
    """One step as a framework drives it: trainers post their receives only after `generate()` has returned."""
    returned, pool, tickets = threading.Event(), ThreadPoolExecutor(relay.layout.world_size), []

    def train(receiver: Receiver) -> RankShard:
        assert returned.wait(LIMIT_S) and tickets, "generate() did not return"
        return receiver.receive(tickets[0])

    def generate() -> None:
        fill(relay)
        ticket = relay.seal(0, assignment())
        if blocking:  # a send that must be finished before `generate` returns
            relay.join_previous(timeout_s=1.5)
        tickets.append(ticket)

    trainers = [pool.submit(train, receiver) for receiver in receivers_of(relay)]
    try:
        generate()
    finally:
        returned.set()
    return [trainer.result(LIMIT_S) for trainer in trainers]


def test_receives_that_are_posted_after_generate_returned_complete(make_relay: MakeRelay) -> None:
    relay = make_relay()
    for shard in run_step(relay, blocking=False):
        check_rows(shard)
    relay.join_previous(timeout_s=LIMIT_S)


def test_a_blocking_send_in_its_place_hits_the_named_deadline(make_relay: MakeRelay) -> None:
    with pytest.raises(
        errors.DeadlineExceeded, match=r"step\(s\) \[0\].*\(0, 0, 0\), \(0, 1, 0\), \(1, 0, 0\), \(1, 1, 0\)"
    ):
        run_step(make_relay(), blocking=True)


def test_the_join_with_the_previous_send_names_the_missing_rank(make_relay: MakeRelay) -> None:
    relay = make_relay(TrainerLayout(dp=2))
    fill(relay)
    ticket = relay.seal(0, assignment())
    receivers = receivers_of(relay)
    check_rows(start(receivers[:1], ticket)[0].result(LIMIT_S))
    with pytest.raises(errors.DeadlineExceeded, match=r"\{0: \[\(1, 0, 0\)\]\}"):
        relay.join_previous(timeout_s=0.5)


def test_one_late_rank_does_not_stop_another_dp_rank_nor_the_next_seal(make_relay: MakeRelay) -> None:
    relay = make_relay(TrainerLayout(dp=2))
    fill(relay)
    first = relay.seal(0, assignment())
    fill(relay, prefix="n-")
    second = relay.seal(1, assignment(prefix="n-"))
    early, late = receivers_of(relay)
    for ticket, prefix in ((first, ""), (second, "n-")):
        check_rows(start([early], ticket)[0].result(LIMIT_S), prefix=prefix)
    for ticket, prefix in ((first, ""), (second, "n-")):
        check_rows(start([late], ticket)[0].result(LIMIT_S), prefix=prefix)
    relay.join_previous(timeout_s=LIMIT_S)


def test_a_restarted_trainer_joins_the_next_epoch_and_gets_the_kept_shard(make_relay: MakeRelay) -> None:
    relay = make_relay()
    old = receivers_of(relay)
    for future in [ThreadPoolExecutor(1).submit(receiver.join, timeout_s=LIMIT_S) for receiver in old]:
        future.result(LIMIT_S)
    fill(relay)
    ticket = relay.seal(0, assignment())
    old[0].close()  # dp 0 pp 0 dies and comes back; its neighbour dp 0 pp 1 still holds the old group
    fresh = receivers_of(relay)[0]
    for future in start([fresh, *old[1:]], ticket):
        check_rows(future.result(LIMIT_S))
    relay.join_previous(timeout_s=LIMIT_S)
    groups = relay.status()["groups"]
    assert groups[0]["epoch"] > 1 and groups[1]["epoch"] == 1


def test_a_bucket_that_is_damaged_on_the_way_is_noticed_and_sent_again(
    make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay, damaged, original = make_relay(TrainerLayout(dp=2)), [], InPlace.stage

    def stage(self: InPlace, slot: int, part_N: np.ndarray) -> torch.Tensor:
        if not damaged:
            part_N = part_N.copy()
            part_N[100] ^= 1
            damaged.append(slot)
        return original(self, slot, part_N)

    monkeypatch.setattr(InPlace, "stage", stage)
    fill(relay)
    for future in start(receivers_of(relay), relay.seal(0, assignment())):
        check_rows(future.result(LIMIT_S))
    assert damaged and sorted(group["epoch"] for group in relay.status()["groups"].values()) == [1, 2]


def test_a_dead_background_thread_is_raised_by_the_next_call(
    make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = make_relay()

    def broken(*_: object, **__: object) -> None:
        raise OSError("disk is gone")

    monkeypatch.setattr(Placer, "_decode", broken)
    fill(relay)
    relay.seal(0, assignment())
    with pytest.raises(errors.BackgroundFailed, match="disk is gone"):
        relay.join_previous(timeout_s=LIMIT_S)
    with pytest.raises(errors.BackgroundFailed, match="disk is gone"):
        relay.add("x", reply_for("x", 9), range(9))


@pytest.mark.parametrize("change", ["step", "run", "spec", "layout"])
def test_a_ticket_of_another_step_run_spec_or_layout_is_refused_before_a_byte_moves(
    make_relay: MakeRelay, change: str
) -> None:
    relay = make_relay(TrainerLayout(dp=2), step_timeout_s=3.0)
    fill(relay)
    good = relay.seal(0, assignment())
    other = {
        "step": {"step": 5},
        "run": {"run": "another"},
        "spec": {"spec": replace(SPEC, num_layers=5)},
        "layout": {"layout": replace(relay.layout, tp=2)},
    }[change]
    receiver = receivers_of(relay)[0]
    with pytest.raises(errors.TicketMismatch, match=change):
        receiver.receive(replace(good, **other))
    assert relay.metrics.value("r3channel_buckets_total") == 0


def test_lengths_that_differ_from_the_ticket_are_refused_before_a_byte_moves(make_relay: MakeRelay) -> None:
    relay = make_relay(TrainerLayout(dp=2))
    fill(relay)
    ticket = relay.seal(0, assignment())
    receiver = receivers_of(relay)[0]
    with pytest.raises(errors.TicketMismatch, match=r"1 micro-batches planned, this trainer runs 2"):
        receiver.receive(ticket, lengths=[[9], [17]])
    with pytest.raises(errors.TicketMismatch, match=r"\(9, 17\) tokens planned.*\(9, 18\)"):
        receiver.receive(ticket, lengths=[[9, 18]])
    assert relay.metrics.value("r3channel_buckets_total") == 0
    receiver.receive(ticket, lengths=[[9, 17]])


def test_rows_without_routing_travel_by_name_when_the_policy_allows_them(make_relay: MakeRelay) -> None:
    valid = np.ones(29, dtype=bool)
    valid[[3, 4, 20]] = False
    relay = make_relay(TrainerLayout(dp=2), invalid_rows="native")
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

    strict = make_relay(TrainerLayout(dp=2))
    with pytest.raises(errors.RowsInvalid, match="3 of 29 rows"):
        strict.add("s1", reply_for("s1", 30, seed=1, valid_T=valid), range(30))


def test_a_step_is_received_once(make_relay: MakeRelay) -> None:
    relay = make_relay(TrainerLayout(dp=2))
    fill(relay)
    ticket = relay.seal(0, assignment())
    receiver = receivers_of(relay)[0]
    receiver.receive(ticket)
    with pytest.raises(errors.TicketMismatch, match="stale"):
        receiver.receive(ticket)


def test_unassigned_samples_leave_by_discard_or_expiry_and_are_counted(make_relay: MakeRelay) -> None:
    relay = make_relay(expiry_s=0.2)
    fill(relay)
    assert relay.discard(["s0", "s1", "never-seen"]) == 2
    time.sleep(0.3)
    fill(relay, prefix="n-")
    count = {
        o: relay.metrics.value("r3channel_samples_total", outcome=o)
        for o in ("discarded", "expired", "received")
    }
    assert count == {"discarded": 2, "expired": 2, "received": 8}
    assert relay.status()["store"]["frames"] == 4


class LosesTheFirstAck:
    """A control channel whose first acknowledgement arrives but whose answer does not."""

    def __init__(self, relay: Relay) -> None:
        self.relay, self.acks = relay, 0

    def hello(self, **arguments: Any) -> dict[str, Any] | None:
        return self.relay.hello(**arguments)

    def ready(self, **arguments: Any) -> bool:
        return self.relay.ready(**arguments)

    def mail(self, **arguments: Any) -> Any:
        return self.relay.mail(**arguments)

    def ack(self, **arguments: Any) -> None:
        self.relay.ack(**arguments)
        self.acks += 1
        if self.acks == 1:
            raise errors.DeadlineExceeded("no answer")


def test_a_lost_acknowledgement_is_repeated_and_nothing_is_sent_again(make_relay: MakeRelay) -> None:
    relay = make_relay(TrainerLayout(dp=1))
    fill(relay)
    ticket = relay.seal(0, assignment(dp=1))
    control = LosesTheFirstAck(relay)
    receiver = Receiver(
        control, spec=SPEC, layout=relay.layout, coords=relay.layout.coords(0), config=relay.config
    )
    check_rows(receiver.receive(ticket))
    assert control.acks == 2 and relay.status()["groups"][0]["epoch"] == 1
    assert relay.metrics.value("r3channel_samples_total", outcome="delivered") == 4


def test_an_acknowledged_shard_is_refused_at_once_to_a_trainer_that_restarted(make_relay: MakeRelay) -> None:
    relay = make_relay(TrainerLayout(dp=2))
    fill(relay)
    ticket = relay.seal(0, assignment())
    start(receivers_of(relay)[:1], ticket)[0].result(LIMIT_S)
    begin = time.monotonic()
    with pytest.raises(errors.TicketMismatch, match="already acknowledged"):
        receivers_of(relay)[0].receive(ticket)
    assert time.monotonic() - begin < LIMIT_S / 2


def test_acknowledgements_that_cannot_be_true_are_refused(make_relay: MakeRelay) -> None:
    relay = make_relay(TrainerLayout(dp=1))
    fill(relay)
    relay.seal(0, assignment(dp=1))
    with pytest.raises(errors.TicketMismatch, match="run"):
        relay.ack(run="another", step=0, dp=0, pp=0)
    with pytest.raises(errors.TicketMismatch, match="acknowledges step 0"):
        relay.ack(run=relay.run, step=0, dp=5, pp=0)
    assert relay.status()["steps"][0]["missing"] == [(0, 0, 0)]


def test_a_name_may_be_used_again_once_its_step_was_delivered_and_not_before(make_relay: MakeRelay) -> None:
    relay = make_relay(TrainerLayout(dp=1))
    fill(relay)
    ticket = relay.seal(0, assignment(dp=1))
    with pytest.raises(errors.SampleTwice, match="not delivered yet"):
        fill(relay)
    check_rows(start(receivers_of(relay), ticket)[0].result(LIMIT_S))
    fill(relay)


def test_shards_in_host_memory_have_a_ceiling(make_relay: MakeRelay) -> None:
    relay = make_relay(shard_bytes=4096)
    fill(relay)
    relay.seal(0, assignment())
    fill(relay, prefix="n-")
    with pytest.raises(errors.StoreFull, match="shard_bytes"):
        relay.seal(1, assignment(prefix="n-"))


def test_any_failure_of_a_receiver_is_raised_not_swallowed(make_relay: MakeRelay) -> None:
    relay = make_relay(TrainerLayout(dp=1))

    class Broken(LosesTheFirstAck):
        def hello(self, **arguments: Any) -> dict[str, Any] | None:
            raise OSError("cable")

    receiver = Receiver(
        Broken(relay), spec=SPEC, layout=relay.layout, coords=relay.layout.coords(0), config=relay.config
    )
    fill(relay)
    with pytest.raises(OSError, match="cable"):
        receiver.receive(relay.seal(0, assignment(dp=1)))


def recorded(root: Path) -> Recording:
    """Step 0, once the background has written it."""
    deadline = time.monotonic() + LIMIT_S
    while not step_folder(root, 0).is_dir() and time.monotonic() < deadline:
        time.sleep(0.01)
    return Recording.load(step_folder(root, 0))


def test_a_recording_of_swapped_frames_is_refused(make_relay: MakeRelay, tmp_path: Path) -> None:
    relay = make_relay(TrainerLayout(dp=1), recorder=Recorder(tmp_path))
    for index, name in enumerate("ab"):
        relay.add(name, reply_for(name, 9, seed=index), range(9))
    ticket = relay.seal(0, Assignment.given([[["a", "b"]]]))
    start(receivers_of(relay), ticket)[0].result(LIMIT_S)
    relay.join_previous(timeout_s=LIMIT_S)
    good = recorded(tmp_path)
    swapped = replace(good, frames={"a": good.frames["b"], "b": good.frames["a"]})
    with pytest.raises(errors.TicketMismatch, match="sample a"):
        swapped.shards(dp=0)


def test_a_bad_sample_is_counted_by_reason_and_leaves_nothing_behind(make_relay: MakeRelay) -> None:
    relay = make_relay()
    with pytest.raises(errors.RowCountMismatch):
        relay.add("s0", reply_for("s0", 9), range(10))
    fill(relay)
    with pytest.raises(errors.SampleTwice):
        relay.add("s0", reply_for("s0", 9), range(9))
    with pytest.raises(errors.SampleUnknown, match="gone"):
        relay.seal(0, Assignment.given([[["s0"]], [["gone"]]]))
    assert relay.metrics.value("r3channel_rejected_total", reason="rows") == 1
    assert relay.metrics.value("r3channel_rejected_total", reason="sample_twice") == 1
    assert len(relay.status()["pending"]) == 4
    relay.seal(0, assignment())


def test_a_step_is_sealed_once(make_relay: MakeRelay) -> None:
    relay = make_relay()
    fill(relay)
    relay.seal(3, assignment())
    fill(relay, prefix="n-")
    with pytest.raises(errors.StepError, match="step 3 is not newer"):
        relay.seal(3, assignment(prefix="n-"))


def test_close_names_what_was_not_delivered(make_relay: MakeRelay) -> None:
    before = set(threading.enumerate())
    relay = make_relay()
    fill(relay)
    relay.seal(7, assignment())
    with pytest.raises(errors.StepError, match=r"7: \[\(0, 0, 0\)"):
        relay.close()
    with pytest.raises(errors.UsageError, match="closed"):
        relay.seal(8, assignment())
    assert not {t for t in threading.enumerate() if t.name.startswith("r3channel-")} - before


def test_an_engine_without_the_plug_in_is_noticed_at_start(make_relay: MakeRelay) -> None:
    import base64

    stock = np.zeros((1, 4, 8), np.int32).tobytes()
    reply = {"meta_info": {"id": "p", "routed_experts": base64.b64encode(stock).decode()}}
    relay = make_relay()
    with pytest.raises(errors.PluginNotApplied, match=r"http://e:1.*R3CHANNEL_ENGINE"):
        relay.check_engine(reply, engine="http://e:1", tokens=2)
    relay.check_engine(reply_for("p", 2), engine="http://e:1", tokens=2)


def test_a_recording_holds_the_step_as_it_was_sent(make_relay: MakeRelay, tmp_path: Path) -> None:
    relay = make_relay(TrainerLayout(dp=2), recorder=Recorder(tmp_path / "rec"))
    fill(relay)
    ticket = relay.seal(0, assignment())
    shards = [future.result(LIMIT_S) for future in start(receivers_of(relay), ticket)]
    recording = recorded(tmp_path / "rec")
    assert recording.ticket == ticket
    for shard in shards:
        whole = torch.from_numpy(recording.shards(dp=shard.shard.dp)[shard.shard.key])
        again = RankShard.from_whole(ticket, shard.shard, whole, tp=0)
        assert torch.equal(again.data_N, shard.data_N)
    assert recording.tokens["s1"].tolist() == list(range(30))
