"""What an earlier relay did wrong, each as the promise that it broke: receivers that die or hang, second lives, full disks."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.plan.ticket import Ticket
from r3channel.recordings.recorder import Recorder
from r3channel.recordings.recording import Recording
from r3channel.relay.relay import Relay
from r3channel.relay.send_buffers import HostPool
from r3channel.transport.connection import Connection
from r3channel.wire import row_protocol as wire
from r3channel.wire.frame import encode_frame
from tests.support.delivery import (
    MakeRelay,
    Slowly,
    assignment,
    check_rows,
    connected,
    hand,
    lives,
    receive,
    receivers_of,
    sealed,
    start,
    ticket_of,
)
from tests.support.samples import SPEC, reply_for
from tests.support.waits import SOON_S, busy, until

SHORT_S = 1.0
"""A deadline that is to pass."""


# -- a relay that was killed after some receivers had acknowledged ---------------------------------------------------------


@pytest.fixture
def second(make_relay: MakeRelay, tmp_path: Path) -> Iterator[Relay]:
    """The relay after one that was killed when dp 0 had acknowledged step 7 and dp 1 had not come; it has sealed it again."""
    first = make_relay("dp=2", journal=str(tmp_path / "first"))
    check_rows(receivers_of(first)[0].receive(sealed(first, 7)))
    assert first.status()["steps"][7]["missing"] == [(1, 0, 0)]
    config = ChannelConfig(journal=str(tmp_path / "second"), bucket_bytes=1024, step_timeout_s=SOON_S)
    (folder,) = (tmp_path / "first").iterdir()
    shutil.copytree(folder, tmp_path / "second" / folder.name)  # as a kill leaves it, unlocked
    relay, recovery = Relay.recover(SPEC, first.layout, config)
    assert recovery.steps[7].assignment == assignment() and recovery.damaged == []
    relay.seal(7, recovery.steps[7].assignment)
    yield relay
    relay.close()


def test_who_had_acknowledged_to_a_killed_relay_is_not_waited_for(second: Relay) -> None:
    assert second.status()["steps"][7]["missing"] == [(1, 0, 0)]
    check_rows(receivers_of(second)[1].receive(ticket_of(second, 7)))
    second.join_previous(timeout_s=SOON_S)
    check_rows(receive(receivers_of(second), sealed(second, 8, prefix="n-"))[0], prefix="n-")
    second.join_previous(timeout_s=SOON_S)
    until(lambda: second.status()["store"]["frames"] == 0)
    assert second.status()["steps"] == {}


def test_who_had_acknowledged_and_never_learned_of_it_gets_the_rows_again_however_late(second: Relay) -> None:
    early, late = receivers_of(second)[1], receivers_of(second)[0]
    ticket = ticket_of(second, 7)
    check_rows(early.receive(ticket))
    second.join_previous(timeout_s=SOON_S)
    check_rows(late.receive(ticket))
    until(lambda: second.status()["store"]["frames"] == 0)


# -- receivers that die or hang --------------------------------------------------------------------------------------------


BIG = RoutingSpec(num_layers=60, moe_layers=tuple(range(2, 60)), num_experts=256, top_k=8)
ROWS = 40_000
"""18 MB: more than the buffers of two sockets hold."""


def big_step(relay: Relay, step: int) -> Ticket:
    """One large sample for dp 0, a small one for dp 1."""
    first_TL1 = np.random.default_rng(0).integers(0, 256, (ROWS, BIG.num_moe_layers, 1), BIG.id_dtype)
    ids_TLK = first_TL1 + np.arange(8, dtype=BIG.id_dtype)  # of 256 experts
    for name, count in ((f"{step}-large", ROWS), (f"{step}-small", 100)):
        frame = encode_frame(BIG, expert_ids_TLK=ids_TLK[:count], codec="stored")
        relay.add_frame(name, frame, range(count + 1))
    return relay.seal(step, Assignment.given([[[f"{step}-large"]], [[f"{step}-small"]]]))


def hang(relay: Relay, ticket: Ticket) -> Connection:
    """dp 0 says that it is ready, reads what is announced, and no row."""
    link = connected(relay, (0, 0, 0))
    ready = {**wire.seal_of(ticket.identity), "group": False}
    link.send_record(wire.READY, wire.pack(**ready), timeout_s=SOON_S)
    kind, body = link.recv_record(timeout_s=SOON_S)
    assert kind == wire.ROWS and json.loads(bytes(body))["nbytes"] == ROWS * BIG.bytes_per_token
    return link


def test_a_receiver_that_hangs_in_its_rows_costs_others_nothing(make_relay: MakeRelay) -> None:
    relay = make_relay("dp=2", spec=BIG, bucket_bytes=1 << 20)
    hung = hang(relay, big_step(relay, 0))
    other = receivers_of(relay)[1]
    hand(other.receive(ticket_of(relay, 0)))
    for step in (1, 2):  # it is two steps behind, and nobody waits for it
        hand(other.receive(big_step(relay, step)))
    missing = {step: own["missing"] for step, own in relay.status()["steps"].items()}
    assert missing == {step: [(0, 0, 0)] for step in range(3)}
    hung.close()


def test_a_receiver_that_hung_beyond_its_deadline_is_let_go_and_comes_again(make_relay: MakeRelay) -> None:
    relay = make_relay("dp=2", spec=BIG, bucket_bytes=1 << 20, send_timeout_s=min(SOON_S / 2, 3 * busy()))
    ticket = big_step(relay, 0)
    hung = hang(relay, ticket)
    until(lambda: not relay.status()["receivers"]["connected"])
    hand(receivers_of(relay, ChannelConfig())[0].receive(ticket))
    hand(receivers_of(relay)[1].receive(ticket))
    relay.join_previous(timeout_s=SOON_S)
    hung.close()


# -- waits -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def slowly(make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slowly]:
    """No step is prepared until it is let go; it is before relays are closed."""
    slowly = Slowly(monkeypatch)
    yield slowly
    slowly.go_on.set()


def test_a_receiver_waits_on_one_connection_for_a_busy_relay(make_relay: MakeRelay, slowly: Slowly) -> None:
    """Longer than a peer may be silent: until its rows are prepared, and until there is a buffer to send them from."""
    silent_s = min(SOON_S / 3, SHORT_S * busy())
    relay = make_relay("pp=2", send_timeout_s=silent_s, step_timeout_s=10 * SOON_S)
    receivers, buffers = receivers_of(relay), ExitStack()
    relay.row_server.host_pool = HostPool(1)
    buffers.enter_context(relay.row_server.host_pool.turn(lambda: None, every_s=1.0))
    receiving = start(receivers, sealed(relay))
    time.sleep(1.5 * silent_s)
    slowly.go_on.set()
    time.sleep(1.5 * silent_s)
    buffers.close()
    for future in receiving:
        check_rows(future.result(SOON_S))
    assert lives(relay) == [1] * len(receivers)


@pytest.mark.parametrize("limit", ["relay", "receiver"])
def test_a_step_prepared_too_late_ends_by_name(make_relay: MakeRelay, slowly: Slowly, limit: str) -> None:
    error = errors.StepError if limit == "relay" else errors.DeadlineExceeded
    limits_s = {"relay": SOON_S, "receiver": SOON_S} | {limit: SHORT_S}
    relay = make_relay("dp=2", step_timeout_s=limits_s["relay"])
    ticket = sealed(relay, 3)
    receiver = receivers_of(relay, ChannelConfig(step_timeout_s=limits_s["receiver"], bucket_bytes=1024))[1]
    with pytest.raises(error, match=r"step 3.*(dp=1|\(1, 0, 0\))") as told:
        receiver.receive(ticket)
    assert (told.value.step, told.value.ranks) == (3, ((1, 0, 0),))
    slowly.go_on.set()
    check_rows(receivers_of(relay)[1].receive(ticket))


# -- the recorder ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["No space left", "Not a directory"])
def test_a_full_disk_or_a_folder_that_is_gone_ends_the_recording_and_costs_the_relay_nothing(
    make_relay: MakeRelay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    recorder, elsewhere = Recorder(tmp_path / "rec"), tmp_path / "moved"
    relay = make_relay("dp=2", recorder=recorder)
    for step, prefix in ((0, ""), (1, "n-"), (2, "m-")):
        for shard in receive(receivers_of(relay), sealed(relay, step, prefix=prefix)):
            check_rows(shard, prefix=prefix)
        relay.join_previous(timeout_s=SOON_S)
        if why == "No space left":
            monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_blocks=9, f_bavail=0, f_frsize=1))
        elif not elsewhere.exists():  # nothing can be made or removed below a file
            recorder.folder.rename(elsewhere).with_name("rec").touch()
    relay.add("x", reply_for("x", 9), range(9))
    assert recorder.lost == 2 and why in recorder.stopped and recorder._kept == {}
    assert relay.metrics.value("r3channel_recording_lost_steps") == 2
    recording = Recording.open(elsewhere if elsewhere.exists() else recorder.folder)
    assert recording.steps == (0,) and len(recording.step(0).rows("s1")) == 29
