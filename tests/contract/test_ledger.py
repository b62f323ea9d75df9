"""Steps between their seal and their last acknowledgement: all or nothing when they are taken, cancelled and closed."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.metrics import Metrics, StageClock
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket
from r3channel.relay.memory import BufferPool
from r3channel.relay.placer import Placer
from r3channel.relay.relay import Relay
from r3channel.relay.staging import BucketSender, InPlace
from r3channel.routing import ProvenanceSpan, RowKind
from r3channel.transport.base import Rendezvous
from r3channel.transport.joining import join
from r3channel.transport.process_group import RendezvousStore
from r3channel.wire.bucket import bucket_headers
from r3channel.wire.frame import encode_frame
from tests.delivery import LIMIT_S, fill
from tests.delivery import assignment as assignment_of
from tests.samples import SPEC, random_ids, reply_for

TOKENS = 100
MakeRelay = Callable[..., Relay]


@pytest.fixture
def make_relay(tmp_path: Path) -> Iterator[MakeRelay]:
    made: list[Relay] = []

    def make(dp: int = 1, **changes: Any) -> Relay:
        values = {"backend": "loopback", "store_dir": str(tmp_path), "place_threads": 1} | changes
        made.append(Relay(SPEC, TrainerLayout(dp=dp), ChannelConfig(**values)))
        return made[-1]

    yield make
    for relay in made:
        with contextlib.suppress(errors.StepError):  # the tests leave steps undelivered
            relay.close()


def add(relay: Relay, *names: str) -> None:
    for name in names:
        relay.add(name, reply_for(name, TOKENS), range(TOKENS))


def ticket_of(relay: Relay, step: int, *names: str) -> Ticket:
    """Each sample is a micro-batch; the ticket as the stages of `seal` make it."""
    samples = relay.look(names, step=step, timeout_s=LIMIT_S)
    assignment = Assignment.given([[[name] for name in names]])
    return Ticket(relay.run, step, SPEC, relay.layout, assignment, samples, 1024)


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert condition()


def check_untouched(relay: Relay, *names: str) -> None:
    status = relay.status()
    assert status["pending"] == list(names) and status["steps"] == {}
    assert status["shards"]["use"] == 0
    assert list(relay._store.folder.glob("*.ticket")) == []


def test_a_sample_that_grew_after_its_ticket_was_made_is_refused_by_name(make_relay: MakeRelay) -> None:
    relay = make_relay()
    add(relay, "a", "b")
    ticket = ticket_of(relay, 0, "a", "b")
    rows = random_ids(TOKENS + 9, seed=1)[TOKENS - 1 :]
    span = ProvenanceSpan(start=TOKENS - 1, end=TOKENS + 9, weight_version=0, kind=RowKind.DECODED)
    turn = encode_frame(SPEC, expert_ids_TLK=rows, provenance=[span], first_row=TOKENS - 1)
    relay.add_frame("a", turn, range(TOKENS + 10), append=True)
    with pytest.raises(errors.SampleChanged, match=rf"sample a has {TOKENS + 10} tokens.*says {TOKENS}"):
        relay.reserve(ticket)
    check_untouched(relay, "a", "b")
    relay.reserve(ticket_of(relay, 0, "a", "b"))
    relay.start(0)
    until(lambda: relay.status()["steps"][0]["state"] == "PLACED")


def test_a_step_that_cannot_be_taken_leaves_nothing_behind(make_relay: MakeRelay) -> None:
    relay = make_relay()
    add(relay, "a", "b")
    ticket = ticket_of(relay, 0, "a", "b")
    relay.discard(["b"])
    try:
        relay.reserve(ticket)
    except errors.SampleUnknown:
        check_untouched(relay, "a")  # while the error, and what its traceback refers to, is in hand


def test_a_ceiling_or_a_disk_that_is_reached_between_two_shards_leaves_nothing_behind(
    make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = make_relay(dp=2, shard_memory_bytes=4096)
    fill(relay)

    def full(*_: Any) -> Any:
        raise errors.StoreFull("no room for a shard in a file")  # where the second shard has to go

    with monkeypatch.context() as patched:
        patched.setattr(BufferPool, "_file", full)
        try:
            relay.seal(0, assignment_of())
        except errors.StoreFull:
            check_untouched(relay, "s0", "s1", "s2", "s3")
        else:
            raise AssertionError("the second shard had room")
    relay.seal(0, assignment_of())


def test_a_step_is_cancelled_although_it_is_still_being_reserved(
    make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator's call that takes too long is given up and cancelled; it goes on at the relay all the same."""
    relay = make_relay()
    add(relay, "a", "b")
    take, entered, goes_on = BufferPool.take, threading.Event(), threading.Event()

    def slow(pool: BufferPool, nbytes: int) -> Any:
        entered.set()
        assert goes_on.wait(LIMIT_S)
        return take(pool, nbytes)

    monkeypatch.setattr(BufferPool, "take", slow)
    with ThreadPoolExecutor(2) as pool:
        reserved = pool.submit(relay.reserve, ticket_of(relay, 0, "a", "b"))
        assert entered.wait(LIMIT_S)
        cancelled = pool.submit(relay.cancel, 0)
        time.sleep(0.1)
        goes_on.set()
        reserved.result(LIMIT_S)
        cancelled.result(LIMIT_S)
    check_untouched(relay, "a", "b")
    relay.reserve(ticket_of(relay, 0, "a", "b"))


def test_steps_may_be_cancelled_in_any_order_and_sealed_again(make_relay: MakeRelay) -> None:
    relay = make_relay()
    add(relay, "a", "b")
    first, second = ticket_of(relay, 5, "a"), ticket_of(relay, 6, "b")
    for ticket in (first, second):
        relay.reserve(ticket)
    for step in (5, 6, 7):
        relay.cancel(step)
    check_untouched(relay, "a", "b")
    for ticket in (first, second):
        relay.reserve(ticket)
        relay.start(ticket.step)
    relay.cancel(5)  # too late: it is the background's
    assert relay.status()["steps"].keys() == {5, 6}
    with pytest.raises(errors.StepError, match="not newer than step 6"):
        relay.reserve(first)
    with pytest.raises(errors.UsageError, match="was not reserved"):
        relay.start(5)


def test_trainers_go_on_while_memory_for_a_step_is_allocated(
    make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = make_relay()
    add(relay, "a")
    asked, go_on = threading.Event(), threading.Event()
    take = BufferPool.take

    def slow(pool: BufferPool, nbytes: int) -> Any:
        asked.set()
        assert go_on.wait(LIMIT_S)
        return take(pool, nbytes)

    monkeypatch.setattr(BufferPool, "take", slow)
    sealing = threading.Thread(target=relay.seal, args=(0, Assignment.given([[["a"]]])), daemon=True)
    sealing.start()
    assert asked.wait(LIMIT_S)
    trainer = threading.Thread(
        target=relay.ack, kwargs={"run": relay.run, "step": 9, "dp": 0, "pp": 0}, daemon=True
    )
    trainer.start()
    trainer.join(LIMIT_S / 4)
    waited = trainer.is_alive()
    go_on.set()
    sealing.join(LIMIT_S)
    assert not waited and relay.status()["steps"].keys() == {0}


def test_closing_ends_waits_and_placement_and_lets_memory_go(
    make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = make_relay(dp=2)
    fill(relay)
    decoding, go_on, decoded = threading.Event(), threading.Event(), []
    decode = Placer._decode

    def slow(placer: Placer, sealed: Any, sample_id: str) -> Any:
        decoded.append(sample_id)
        decoding.set()
        assert go_on.wait(LIMIT_S)
        return decode(placer, sealed, sample_id)

    monkeypatch.setattr(Placer, "_decode", slow)
    ticket = relay.seal(0, assignment_of())
    assert decoding.wait(LIMIT_S)
    told: list[type[BaseException]] = []

    def ready() -> None:
        try:
            relay.ready(run=relay.run, step=0, dp=1, pp=0, epoch=1, wait_s=10 * LIMIT_S)
        except errors.R3Error as error:
            told.append(type(error))

    threads = [threading.Thread(target=ready, daemon=True)]
    threads.append(threading.Thread(target=lambda: told.append(_closed(relay)), daemon=True))
    threads[0].start()
    until(lambda: relay._ledger.changed._waiters)  # type: ignore[attr-defined]
    threads[1].start()
    threads[0].join(LIMIT_S)
    go_on.set()
    threads[1].join(LIMIT_S)
    assert told == [errors.UsageError, errors.StepError]
    ranks = ticket.assignment.ranks
    assert set(decoded) == {name for batch in ranks[0] for name in batch}, "the second rank's were not begun"
    until(lambda: relay._memory.nbytes["use"] == 0)
    with pytest.raises(errors.UsageError, match="closed"):
        relay.undelivered(wait_s=10 * LIMIT_S)


def _closed(relay: Relay) -> type[BaseException]:
    with pytest.raises(
        errors.StepError, match=r"\{0: \[\(0, 0, 0\), \(1, 0, 0\)\]\}.*still running: \[\]"
    ) as e:
        relay.close(timeout_s=LIMIT_S)
    return type(e.value)


@pytest.mark.parametrize("backend", ["gloo", "object_store"])
def test_closing_ends_a_group_that_waits_for_a_member_who_said_hello_and_never_joined(
    make_relay: MakeRelay, backend: str
) -> None:
    relay = make_relay(backend=backend, join_timeout_s=10 * LIMIT_S)
    store: Any = relay._groups._store
    before = store._store.num_keys() if store else 0
    relay.hello(dp=0, pp=0, boot_id="dead since", after_epoch=0)
    until(lambda: store._store.num_keys() > before if store else relay._groups.mailbox._boxes)
    relay.close(timeout_s=LIMIT_S)  # raises when a thread is still running


@pytest.mark.parametrize("backend", ["loopback", "gloo"])
def test_a_send_that_failed_lets_the_shards_memory_go(backend: str) -> None:
    store = RendezvousStore("127.0.0.1")
    pool, shard_bytes = BufferPool(1 << 20), 256 << 10
    places = [
        Rendezvous(
            backend=backend,
            name=uuid.uuid4().hex,
            epoch=1,
            rank=rank,
            world_size=2,
            host=store.host,
            port=store.port,
        )
        for rank in range(2)
    ]
    places[1] = replace(places[1], name=places[0].name)
    with ThreadPoolExecutor(2) as threads:
        ours, silent = threads.map(lambda place: join(place, timeout_s=LIMIT_S), places)
    sender = BucketSender(InPlace(), clock=StageClock("relay"), metrics=Metrics("relay"), timeout_s=0.2)
    shard_N = pool.take(shard_bytes)
    headers = bucket_headers(shard_N, bucket_bytes=100 << 10, epoch=1, step=0, dp=0, pp=0)
    try:
        sender.send(ours, shard_N, headers, dst=1)
    except errors.TransportError:
        pass
    else:
        raise AssertionError("nobody received, and the send ended")
    del shard_N, headers
    assert pool.nbytes["use"] == 0
    silent.abort()
    store.close()
