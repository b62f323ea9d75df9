"""Steps between their seal and their last acknowledgement: all or nothing when they are taken, given up and closed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch._C._distributed_c10d import TCPStore

from r3channel import errors
from r3channel.plan.assignment import Assignment
from r3channel.plan.ticket import Ticket
from r3channel.recordings.recorder import Recorder
from r3channel.relay.relay import Relay
from r3channel.relay.samples import Samples
from r3channel.relay.sealed_steps import SealedStep
from r3channel.trainer.rank_shard import RankShard
from r3channel.wire import row_protocol as wire
from tests.support.delivery import MakeRelay, Slowly, check_rows, connected, receive, receivers_of, sealed
from tests.support.direct import deliver, draft_of, hello_of, reference_reply
from tests.support.samples import SPEC, reply_for
from tests.support.waits import SOON_S, until

TOKENS = 100


@pytest.fixture
def make_relay(make_relay: MakeRelay, tmp_path: Path) -> MakeRelay:
    return partial(make_relay, journal=str(tmp_path))


def add(relay: Relay, *names: str) -> None:
    for name in names:
        relay.add(name, reply_for(name, TOKENS), range(TOKENS))


def each(*names: str) -> Assignment:
    """Each sample is a micro-batch."""
    return Assignment.given([[[name] for name in names]])


# -- all or nothing ----------------------------------------------------------------------------------------------------


def test_what_is_no_assignment_and_no_layout_is_named(make_relay: MakeRelay) -> None:
    with pytest.raises(errors.ConfigError, match=r"\['a'\] is a list, expected Assignment"):
        make_relay().seal(0, ["a"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(errors.ConfigError, match=r"'dp=2' is a str, expected TrainerLayout. .*parse\(text\)"):
        Relay(SPEC, "dp=2")  # pyright: ignore[reportArgumentType]


def test_a_sample_that_grows_is_named(make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another turn, whose frame is to come directly, is announced between the wait for frames and the taking."""
    relay = make_relay()
    add(relay, "a", "b")
    relay.samples.engines.greet(hello_of())
    wait, late = Samples.await_frames, reference_reply("r1", TOKENS + 10, serial=1, first_row=TOKENS - 1)

    def grows(samples: Samples, *arguments: Any, **options: Any) -> None:
        wait(samples, *arguments, **options)
        relay.add("a", late, range(TOKENS + 10), append=True)

    with monkeypatch.context() as patched:
        patched.setattr(Samples, "await_frames", grows)
        with pytest.raises(errors.StepError, match="frame is to come") as told:
            relay.seal(0, each("a", "b"))
    assert told.value.samples == ("a",)
    status = relay.status()
    assert (status["waiting"], status["pending"], status["steps"]) == (["a"], ["b"], {})
    deliver(relay, (1, draft_of("r1", 10, first_row=TOKENS - 1).encode().tobytes()))
    assert relay.seal(0, each("a", "b")).sample("a").tokens == TOKENS + 10


def check_delivered(relay: Relay, ticket: Ticket) -> list[RankShard]:
    shards = receive(receivers_of(relay), ticket)
    relay.join_previous(timeout_s=SOON_S)
    assert relay.status()["steps"] == {}
    return shards


# -- given up ----------------------------------------------------------------------------------------------------------


def test_who_waits_is_told_of_an_abandon(make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its rows are prepared. They may be written over: another sample lies there before that ends."""
    relay, slowly, long = make_relay("cp=2"), Slowly(monkeypatch), range(6000)
    relay.add("a", reply_for("a", len(long)), long)
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receivers_of(relay)[0].receive, relay.seal(0, each("a")))
        assert slowly.entered.wait(SOON_S)
        waiting(relay, 1)
        (event,) = relay.steps._steps[0]._waiting.values()
        assert relay.abandon(0) == 1 and event.is_set()
        with pytest.raises(errors.TicketMismatch, match="abandoned"):
            receiving.result(SOON_S)
        relay.discard(["a"])
        relay.add("b", reply_for("b", len(long), seed=1), long)
        slowly.go_on.set()
    check_delivered(relay, relay.seal(1, each("b")))
    assert relay.metrics.value("r3channel_rejected_total", reason="corrupt") == 0


@pytest.mark.parametrize("broken", ["prepare", "write"])
def test_whatever_breaks_a_step_is_that_steps_error_and_the_relay_goes_on(
    make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str
) -> None:
    def breaks(*_: Any) -> Any:
        raise MemoryError("no room for an index")

    relay = make_relay(recorder=Recorder(tmp_path))
    add(relay, "a", "b")
    with monkeypatch.context() as patch:
        patch.setattr(SealedStep if broken == "prepare" else Recorder, broken, breaks)
        ticket = relay.seal(np.int64(0), each("a"))  # pyright: ignore[reportArgumentType]
        until(lambda: relay.status()["steps"][0]["state"] == "FAILED")
        (receiver,) = receivers_of(relay)
        with pytest.raises(errors.StepError, match=r"step 0: .*MemoryError\('no room for an index'\)"):
            receiver.receive(ticket)
    with pytest.raises(errors.DeadlineExceeded, match=r"step 0: .*MemoryError\('no room for an index'\)"):
        relay.join_previous(timeout_s=0)
    assert relay.abandon(0) == 1
    check_delivered(relay, relay.seal(0, each("a", "b")))


CUTS = {
    "dp=2": [[["a"], ["b", "c"]]],  # of another number of DP ranks
    "pp=2": [[["a"], ["b", "c"]]],  # uneven padded micro-batches
    "pp=5,uniform=0": [[["a", "b", "c"]]],  # layers that do not divide
    "mtp=99": [[["a", "b", "c"]]],  # MTP to a dense layer
}


@pytest.mark.parametrize("layout", CUTS)
def test_what_cannot_be_cut_is_refused_before_a_sample_is_taken(
    make_relay: MakeRelay, tmp_path: Path, layout: str
) -> None:
    relay = make_relay(layout)
    add(relay, *"abc")
    with pytest.raises(errors.ConfigError):
        relay.seal(0, Assignment.given(CUTS[layout]))
    status, files = relay.status(), sorted(path.suffix for path in tmp_path.glob("*/*.*"))
    assert (status["pending"], status["steps"], files) == ([*"abc"], {}, [".frame"] * 3)
    assert status["store"]["frames"] == 3
    assert relay.discard([*"abc"]) == 3 and relay.status()["store"]["bytes"] == 0


def test_of_two_seals_at_once_one_wins(make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch) -> None:
    relay = make_relay()
    add(relay, "a", "b")
    first, go_on = threading.Event(), threading.Event()

    def slow(*_: Any, **__: Any) -> None:
        first.set()
        assert go_on.wait(SOON_S)

    monkeypatch.setattr(relay.samples, "await_frames", slow)
    with ThreadPoolExecutor(1) as pool:
        winner = pool.submit(relay.seal, 5, each("a"))
        assert first.wait(SOON_S)
        with pytest.raises(errors.StepError, match="is being sealed"):
            relay.seal(5, each("b"))
        go_on.set()
        assert winner.result(SOON_S).assignment == each("a")
    assert relay.discard(["a", "b"]) == 1 and relay.abandon(5) == 1 and relay.discard(["a"]) == 1


@pytest.mark.parametrize(
    "error", [ValueError, KeyboardInterrupt, SystemExit]
)  # Ctrl-C, and what a SIGTERM is made
def test_the_users_error_notes_undelivered_steps(make_relay: MakeRelay, error: type[BaseException]) -> None:
    with pytest.raises(error, match="the user's") as told, make_relay() as relay:
        add(relay, "a")
        relay.seal(7, each("a"))
        raise error("the user's")
    assert "closed with undelivered steps {7: [(0, 0, 0)]}" in told.value.__notes__[0]


def test_an_error_that_names_thousands_reaches_its_receiver(make_relay: MakeRelay) -> None:
    relay = make_relay()
    add(relay, "a")
    ticket, (receiver,) = relay.seal(0, each("a")), receivers_of(relay)
    names = [f"rollout-{number:08d}-{'x' * 24}" for number in range(26_000)]
    said = "step 0: " + "ids at rest " * 9_000
    relay.steps._steps[0].error = errors.FrameCorrupt(said, samples=names, step=0)
    with pytest.raises(errors.FrameCorrupt, match=r"step 0: ids at rest .*26000 samples in all") as told:
        receiver.receive(ticket)
    assert 0 < len(told.value.samples) < len(names)
    assert len(wire.pack(**wire.values_of(told.value))) < 64_000


def waiting(relay: Relay, count: int) -> None:
    """Until so many wait: receivers that asked for rows, and callers."""

    def conditions() -> Iterator[Any]:
        yield relay.samples.changed
        steps: Any = relay.steps._steps.values()
        yield from (event._cond for step in steps for event in step._waiting.values())

    until(lambda: sum(len(condition._waiters) for condition in conditions()) == count)


# -- in the background -------------------------------------------------------------------------------------------------


def test_all_go_on_while_a_step_is_prepared(make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Receivers of an earlier step, who adds samples, who seals the next, and who looks."""
    relay = make_relay("dp=1")
    first = sealed(relay, 0)
    until(lambda: relay.status()["steps"][0]["state"] == "PREPARED")
    slowly = Slowly(monkeypatch)
    second = sealed(relay, 1, prefix="n-")
    assert slowly.entered.wait(SOON_S)
    receiver = receivers_of(relay)[0]
    check_rows(receiver.receive(first))
    third = sealed(relay, 2, prefix="m-")
    steps = relay.status()["steps"]
    assert {step: one["state"] for step, one in steps.items()} == {1: "SEALED", 2: "SEALED"}
    assert slowly.prepared == []
    slowly.go_on.set()
    check_rows(receiver.receive(second), prefix="n-")
    check_rows(receiver.receive(third), prefix="m-")
    assert slowly.prepared == [1, 2]


def test_a_dp_rank_waits_for_its_own_rows(make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch) -> None:
    relay, slowly = make_relay("dp=2"), Slowly(monkeypatch, dp=1)
    ticket, (first, second) = sealed(relay), receivers_of(relay)
    assert relay.steps.outgoing(ticket.identity, (1, 0, 0), timeout_s=0) is None
    other = relay.steps._steps[0].event(1)
    check_rows(first.receive(ticket))
    assert relay.status()["steps"][0]["state"] == "SEALED" and not other.is_set(), "who waits is woken alone"
    slowly.go_on.set()
    check_rows(second.receive(ticket))


# -- closed ------------------------------------------------------------------------------------------------------------


def test_closing_ends_waits_and_frees_memory(make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch) -> None:
    relay, slowly = make_relay("dp=2", frame_timeout_s=10 * SOON_S), Slowly(monkeypatch)
    ticket = sealed(relay)
    relay.add("late", reference_reply("late", TOKENS, serial=1), range(TOKENS))
    assert slowly.entered.wait(SOON_S)
    with ThreadPoolExecutor(4) as pool:
        receiving = pool.submit(receivers_of(relay)[1].receive, ticket)
        joining = pool.submit(relay.join_previous, timeout_s=10 * SOON_S)
        sealing = pool.submit(relay.seal, 1, Assignment.given([[["late"]], [["other"]]]))
        waiting(relay, 3)
        closing = pool.submit(relay.close, timeout_s=SOON_S)
        for ended in (receiving, joining, sealing):
            with pytest.raises(errors.R3Error) as told:
                ended.result(SOON_S)
        assert isinstance(told.value, errors.UsageError) and "closed" in str(told.value)
        slowly.go_on.set()
        with pytest.raises(errors.StepError, match=r"\{0: \[\(0, 0, 0\), \(1, 0, 0\)\]\}.*running: \[\]"):
            closing.result(SOON_S)
    assert relay.samples.store.held_bytes == relay.samples.store.live_bytes
    assert relay.samples.journal is not None and not relay.samples.journal.folder.exists()
    with pytest.raises(errors.UsageError, match="closed"):
        relay.find_undelivered(wait_s=10 * SOON_S)


def test_a_seal_beside_a_close_is_refused(make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay is closed when the seal has taken its samples."""
    relay = make_relay(journal="")
    add(relay, "a")
    take, table = relay.samples.table.take, relay.samples.table
    monkeypatch.setattr(table, "take", lambda *given, **more: (take(*given, **more), relay.close())[0])
    with pytest.raises(errors.UsageError, match="closed"):
        relay.seal(0, each("a"))


def test_closing_ends_a_group_whose_receiver_asked_for_it_and_never_joined(make_relay: MakeRelay) -> None:
    relay = make_relay(transport="gloo", join_timeout_s=10 * SOON_S)
    add(relay, "a")
    relay.seal(0, each("a"))
    with closing(connected(relay, (0, 0, 0))) as link:
        link.send_record(wire.GROUP, wire.pack(gpu=""), timeout_s=SOON_S)
        kind, body = link.recv_record(timeout_s=SOON_S)
        where = wire.unpack(kind, body, expected=wire.GROUP)  # and nobody comes
        store = TCPStore(where["host"], where["port"], is_master=False, wait_for_workers=False)
        until(lambda: store.num_keys() > 0, "the relay waits for it there")
        with pytest.raises(errors.StepError, match=r"still running: \[\]"):
            relay.close(timeout_s=SOON_S)
