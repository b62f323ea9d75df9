"""What becomes of a sample between its reply and its step: it waits, expires, is given back, or left to the live router."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.plan.assignment import Assignment
from r3channel.plan.capacity import beside_bytes
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket
from r3channel.recordings.recorder import Recorder
from r3channel.relay.relay import Relay
from r3channel.trainer.rank_shard import RankShard
from r3channel.wire.frame import encode_frame
from tests.support.delivery import MakeRelay, receivers_of, threads
from tests.support.direct import deliver, draft_of, hello_of, reference_reply
from tests.support.samples import SPEC, flipped, frame_of, random_ids, reply_for, reply_of
from tests.support.waits import SOON_S, until


def one_batch(*names: str) -> Assignment:
    return Assignment.given([[list(names)]])


def ids_in(shard: RankShard, name: str) -> np.ndarray:
    """[rows, L, K] of one sample as the routers of a single rank see it."""
    names = shard.shard.microbatches[0].sample_ids
    sample_R, position_R = shard.shard.row_map(0, tp=0)
    rows = np.flatnonzero(sample_R == names.index(name))
    rows = rows[np.argsort(position_R[rows])]
    return np.stack([shard.layer_ids(0, layer).numpy()[rows] for layer in shard.shard.layers], axis=1)


# -- a relay that cannot start --------------------------------------------------------------------------------------------


def test_a_folder_that_a_relay_cannot_write_is_named_when_it_is_made(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    before = threads()
    with pytest.raises(errors.ConfigError, match=rf"^journal {file}/store cannot be written"):
        Relay(SPEC, TrainerLayout(), ChannelConfig(journal=f"{file}/store"))
    with pytest.raises(errors.ConfigError, match=rf"^recording: {file}/rec cannot be written"):
        Relay(SPEC, TrainerLayout(), recorder=Recorder(f"{file}/rec"))
    until(lambda: threads() <= before, "its threads have ended")


@pytest.mark.parametrize("interface", ["203.0.113.7", "0.0.0.0", "no such host"])
def test_a_relay_that_cannot_start_leaves_no_folder_thread_or_lock(tmp_path: Path, interface: str) -> None:
    before, files = threads(), set(os.listdir("/proc/self/fd"))
    with pytest.raises((errors.ConfigError, errors.UsageError, errors.TransportError)) as raised:
        Relay(SPEC, TrainerLayout(), ChannelConfig(journal=str(tmp_path), interface=interface))
    assert interface in str(raised.value)
    assert list(tmp_path.iterdir()) == []
    until(lambda: threads() <= before, "its threads have ended")
    until(lambda: set(os.listdir("/proc/self/fd")) <= files, "its files are closed")
    relay, recovery = Relay.recover(SPEC, TrainerLayout(), ChannelConfig(journal=str(tmp_path)))
    assert recovery.pending == [] and recovery.damaged == []
    relay.close()


# -- samples that nobody asks for ----------------------------------------------------------------------------------------


def test_samples_that_expire_are_named_once(make_relay: MakeRelay, caplog: pytest.LogCaptureFixture) -> None:
    relay = make_relay(expiry_s=1e-6, unclaimed_timeout_s=1e-6)
    relay.samples.engines.greet(hello_of())
    with caplog.at_level(logging.WARNING):
        relay.add("old", reply_for("old", 9), range(9))
        deliver(relay, (1, frame_of(9)))  # of a reply that never comes
        relay.samples.expire()
        relay.samples.expire()
    said = [record.getMessage() for record in caplog.records]
    assert ["'old'" in one for one in said] == [True, False] and "1 frames without a reply" in said[1]


def test_a_late_turn_keeps_its_sample_young_and_so_does_a_step(make_relay: MakeRelay) -> None:
    """A sample that an abandoned step gives back waits anew, however long that took."""
    relay = make_relay()
    for name in ("given back", "a", "b"):
        relay.add(name, reply_for(name, 9), range(9))
    relay.seal(0, one_batch("given back"))
    turn = draft_of("more", 4, first_row=8).encode().tobytes()
    relay.add_frame("a", turn, range(13), append=True)
    young_s = relay.samples.table.samples["a"].since_s
    assert relay.abandon(0) == 1
    samples, _ = relay.samples.table.expire(before_s=young_s, unclaimed_s=0.0)
    assert [sample.name for sample in samples] == ["b"]
    relay.samples.let_go(samples, outcome="expired")


# -- left to the live router ---------------------------------------------------------------------------------------------


def test_exactly_the_rows_that_did_not_come_are_left_to_the_live_router(make_relay: MakeRelay) -> None:
    """Five samples: whole; no routing; an empty field; a lost frame; a second turn without routing."""
    relay = make_relay(on_missing="live", on_lost="live", max_live=1.0, frame_timeout_s=0.05)
    relay.add("whole", reply_for("whole", 30, seed=1), range(30))
    assert relay.add("none", {"meta_info": {"id": "none"}}, range(12)) is None
    relay.add_body("empty", b'{"meta_info": {"id": "e", "routed_experts": ""}}', range(7))
    relay.add("lost", reference_reply("lost", 21, serial=5), range(21))
    relay.add("turns", reply_for("turns", 11, seed=2), range(11))
    relay.add("turns", {"meta_info": {"id": "t2"}}, range(16), append=True)
    third = draft_of("t3", 5, first_row=15, seed=3).encode().tobytes()
    relay.add_frame("turns", third, range(21), append=True)
    names = ["whole", "none", "empty", "lost", "turns"]
    ticket = relay.seal(0, one_batch(*names))
    left = [sample.invalid for sample in ticket.samples]
    assert left == [(), ((0, 11),), ((0, 6),), ((0, 20),), ((10, 15),)]
    shard = receivers_of(relay)[0].receive(ticket)
    sample_R, position_R = shard.shard.row_map(0, tp=0)
    live_R = shard.live_rows(0)
    assert live_R is not None
    found = {
        name: sorted(position_R[np.flatnonzero(live_R.numpy() & (sample_R == index))].tolist())
        for index, name in enumerate(names)
    }
    whole = {"whole": [], "none": [*range(11)], "empty": [*range(6)], "lost": [*range(20)]}
    assert found == whole | {"turns": [*range(10, 15)]}
    assert shard.live_counts()["invalid"] == 11 + 6 + 20 + 5
    assert np.array_equal(ids_in(shard, "whole"), random_ids(29, seed=1))
    kept = ids_in(shard, "turns")
    assert np.array_equal(kept[:10], random_ids(10, seed=2))
    assert np.array_equal(kept[15:], random_ids(20, seed=3)[15:])
    relay.join_previous(timeout_s=SOON_S)
    until(lambda: relay.metrics.value("r3channel_samples_total", outcome="live") == 4)


def test_a_frame_that_comes_too_late_for_its_rows_is_freed_with_its_sample(make_relay: MakeRelay) -> None:
    relay = make_relay(on_lost="live", max_live=1.0, frame_timeout_s=0.05)
    relay.samples.engines.greet(hello_of())
    relay.add("late", reference_reply("r", 9, serial=1), range(9))
    ticket = relay.seal(0, one_batch("late"))
    deliver(relay, (1, draft_of("r", 8).encode().tobytes()))
    assert receivers_of(relay)[0].receive(ticket).live_counts()["invalid"] == 8
    relay.join_previous(timeout_s=SOON_S)
    assert relay.status()["store"]["frames"] == 0
    assert relay.metrics.value("r3channel_samples_total", outcome="live") == 1


def test_rows_that_came_and_are_wrong_are_never_left_to_the_live_router(make_relay: MakeRelay) -> None:
    relay, good = make_relay(on_missing="live"), frame_of(9)
    short = encode_frame(SPEC, expert_ids_TLK=random_ids(5))
    replies = [reply_of(data) for data in (flipped(good, 8 * -1), good[:-2], b"<html>", short)]
    for reply in (*replies, {"choices": [{"sgl_ext": reply_of(good)["meta_info"]}]}):
        with pytest.raises(errors.RoutingError):
            relay.add("s", reply, range(9))
    assert relay.status()["pending"] == []


def test_tokens_that_the_loop_appends_are_refused_with_the_way_to_add_them(make_relay: MakeRelay) -> None:
    relay = make_relay(on_missing="live", max_live=0.5)
    with pytest.raises(errors.RowCountMismatch, match=r"add them next: `add_live\(\.\.\., append=True\)"):
        relay.add("s", reply_for("s", 9), range(10))
    relay.add("s", reply_for("s", 9), range(9))
    with pytest.raises(errors.TurnMismatch, match=r"the first 8 tokens .* or none follows"):
        relay.add_live("s", range(8), append=True)
    relay.add_live("s", range(10), append=True)
    sample = relay.seal(0, one_batch("s")).sample("s")
    assert (sample.tokens, sample.invalid) == (10, ((8, 9),))


# -- a full store: a wait with an end, an error that says what holds the room, and nothing is lost ---------------------------

TOKENS = 1000  # 24 kB of ids


@pytest.fixture
def relay(make_relay: MakeRelay) -> Relay:
    """Room for 4 samples."""
    relay = make_relay("dp=2", backpressure_timeout_s=0.1)
    frame_bytes = (TOKENS - 1) * SPEC.bytes_per_token + beside_bytes(SPEC, spans=2)
    relay.samples.store.ceiling_bytes = 4 * frame_bytes + 1000
    return relay


def add(relay: Relay, *names: str) -> None:
    for name in names:
        relay.add(name, reply_for(name, TOKENS), range(TOKENS))


def seal(relay: Relay, step: int, *names: str) -> Ticket:
    return relay.seal(step, Assignment.given([[[name] for name in names[dp::2]] for dp in range(2)]))


def receive(relay: Relay, ticket: Ticket, *ranks: int) -> None:
    receivers = receivers_of(relay)
    for dp in ranks:
        receivers[dp].receive(ticket)


def test_at_the_ceiling_add_says_so_by_name_and_keeps_what_it_holds(relay: Relay) -> None:
    add(relay, "a", "b")
    ticket = seal(relay, 7, "a", "b")
    receive(relay, ticket, 1)
    add(relay, "c", "d")
    with pytest.raises(errors.StoreFull, match=r"sample e .*waited 0\.1 s .*4 blocks hold .*store_bytes"):
        add(relay, "e")
    status = relay.status()
    assert status["pending"] == ["c", "d"] and status["store"]["frames"] == 4
    in_the_way = {"state": "PREPARED", "missing": [(0, 0, 0)], "acknowledged": [(1, 0, 0)], "samples": 2}
    assert status["steps"] == {7: in_the_way}
    receive(relay, ticket, 0)
    add(relay, "e", "f")
    assert relay.status()["pending"] == ["c", "d", "e", "f"]


def test_add_goes_on_when_a_step_is_delivered(relay: Relay) -> None:
    relay.samples.config = relay.config.__class__(backpressure_timeout_s=SOON_S)
    add(relay, "a", "b", "c", "d")
    ticket = seal(relay, 0, "a", "b")
    waiting = threading.Thread(target=add, args=(relay, "e"))
    waiting.start()
    until(lambda: relay.samples.store._waiting)
    assert relay.status()["pending"] == ["c", "d"]
    receive(relay, ticket, 0, 1)
    waiting.join(SOON_S)
    assert relay.status()["pending"] == ["c", "d", "e"]
