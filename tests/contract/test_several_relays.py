"""Several relays, whole: engines deliver to the relay of their node, the coordinator seals, trainers merge what all send.

Real frames over real sockets; trainers are threads. With one relay the same code runs without a coordinator.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.place import place_samples
from r3channel.plan.ticket import Ticket
from r3channel.recording import Recorder
from r3channel.relay.coordinator import Coordinator
from r3channel.relay.peer import LocalPeer
from r3channel.relay.relay import Relay
from r3channel.trainer.receiver import Receiver
from r3channel.trainer.shard import RankShard
from r3channel.wire.frame import sample_key
from r3channel.wire.receipt import Receipt
from tests.direct import Engine, hello_of
from tests.samples import SPEC, frame_of, random_ids, reply_for, reply_of

LIMIT_S = 20.0
TOKENS = {f"s{i}": n for i, n in enumerate((9, 30, 17, 5, 12, 40, 7, 21))}


class Gone(LocalPeer):
    """A relay whose process can be ended: then every call fails as one over Ray does."""

    gone = False

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name != "gone" and object.__getattribute__(self, "gone"):
            raise errors.TransportError("the relay's actor is gone")
        return object.__getattribute__(self, name)


@dataclass
class Place:
    """Relays with an engine each, and what stands in front of them."""

    relays: list[Relay]
    peers: list[Gone]
    engines: list[Engine]
    front: Any
    """The coordinator; with one relay, the relay."""
    urls: list[str]
    token: Path

    def add(self, prefix: str = "", *, number_of: Callable[[int], int] | None = None) -> None:
        """Every sample from one engine after another."""
        for index, (name, tokens) in enumerate(TOKENS.items()):
            engine = self.engines[(number_of(index) if number_of else index) % len(self.engines)]
            self.add_one(prefix + name, tokens, engine, seed=index)

    def add_one(self, name: str, tokens: int, engine: Engine, **options: Any) -> None:
        append = options.pop("append", False)
        reply = engine.finish(f"request-{name}-{tokens}", tokens, **options)
        self.front.add(name, reply, range(tokens), engine=engine.hello.engine, append=append)

    @property
    def layout(self) -> TrainerLayout:
        return self.relays[0].layout

    def receivers(self) -> list[Receiver]:
        controls = self.relays if len(self.relays) > 1 else self.relays[0]
        config, layout = self.relays[0].config, self.layout
        coords = [layout.coords(rank) for rank in range(layout.world_size)]
        return [Receiver(controls, spec=SPEC, layout=layout, coords=one, config=config) for one in coords]

    def close(self) -> None:
        for engine in self.engines:
            engine.__exit__()
        for relay in self.relays:
            with contextlib.suppress(errors.R3Error):
                relay.close()


MakePlace = Callable[..., Place]


@pytest.fixture(params=["loopback", "gloo", "object_store"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_place(backend: str, tmp_path: Path) -> Iterator[MakePlace]:
    made: list[Place] = []

    def make(relays: int, layout: str = "dp=2,pp=2", **changes: Any) -> Place:
        config = ChannelConfig(
            **{
                "backend": backend, "bucket_bytes": 1024, "relays": relays, "frame_timeout_s": LIMIT_S,
                "join_timeout_s": LIMIT_S, "send_timeout_s": LIMIT_S, "step_timeout_s": LIMIT_S, **changes,
            }
        )  # fmt: skip
        made.append(open_place(config, TrainerLayout.parse(layout), tmp_path / "token"))
        return made[-1]

    yield make
    for place in made:
        place.close()


def open_place(config: ChannelConfig, layout: TrainerLayout, token: Path) -> Place:
    relays = [Relay(SPEC, layout, replace(config, relay=number)) for number in range(config.relays)]
    urls = [relay.serve(token_file=token) for relay in relays]
    hellos = [hello_of(f"http://e{number}:1", boot_id=100 + number) for number in range(len(relays))]
    engines = [Engine(url, token, hello=hello) for url, hello in zip(urls, hellos, strict=True)]
    peers = [Gone(relay) for relay in relays[1:]]
    front = Coordinator(relays[0], peers) if peers else relays[0]
    front.expect_engines([engine.hello.engine for engine in engines], timeout_s=LIMIT_S)
    return Place(relays, peers, engines, front, urls, token)


def until(condition: Callable[[], Any], what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {LIMIT_S:g} s: {what}"
        time.sleep(0.01)


def assignment(prefix: str = "", *, dp: int = 2) -> Assignment:
    return Assignment.round_robin([prefix + name for name in TOKENS], dp=dp, microbatch_size=2)


def start(receivers: list[Receiver], ticket: Ticket) -> list[Future[RankShard]]:
    pool = ThreadPoolExecutor(len(receivers))
    return [pool.submit(receiver.receive, ticket) for receiver in receivers]


def check(place: Place, ticket: Ticket, shards: list[RankShard], *, prefix: str = "") -> None:
    """Every rank holds, byte for byte, what one relay would have sent."""
    ids = {prefix + name: random_ids(n - 1, seed=index) for index, (name, n) in enumerate(TOKENS.items())}
    whole: dict[Any, np.ndarray] = {}
    for dp in range(place.layout.dp):
        whole |= place_samples(ticket.plan, dp=dp, ids_of=ids.__getitem__)
    assert {shard.shard.key for shard in shards} == set(whole)
    for shard in shards:
        assert shard.data_N.numpy().tobytes() == whole[shard.shard.key].tobytes(), shard.shard.key


@pytest.mark.parametrize("relays", [1, 2, 3])
@pytest.mark.parametrize("layout", ["dp=2,pp=2", "dp=2,cp=2,packing=thd"])
def test_every_rank_holds_what_one_relay_would_have_sent(
    make_place: MakePlace, relays: int, layout: str
) -> None:
    place = make_place(relays, layout)
    receivers = place.receivers()
    for step in range(2):
        place.add(f"{step}-", number_of=lambda index: index // 2)
        ticket = Ticket.from_bytes(place.front.seal(step, assignment(f"{step}-")).to_bytes())
        assert len(ticket.runs) == relays and {sample.relay for sample in ticket.samples} == set(
            range(relays)
        )
        shards = [future.result(LIMIT_S) for future in start(receivers, ticket)]
        check(place, ticket, shards, prefix=f"{step}-")
        place.front.join_previous(timeout_s=LIMIT_S)
    for relay in place.relays:
        assert relay.status()["steps"] == {} and relay.status()["pending"] == []
        assert {group["epoch"] for group in relay.status()["groups"].values()} == {1}


@pytest.mark.parametrize("relays", [2, 3])
def test_a_dp_rank_whose_samples_are_at_one_relay_needs_no_other(make_place: MakePlace, relays: int) -> None:
    place = make_place(relays, "dp=2")
    place.add(number_of=lambda index: index % 2)  # round robin over dp too: relay r has all of dp r
    ticket = place.front.seal(0, assignment())
    assert [ticket.parts.serves(number, 0) for number in range(relays)] == [True, False, False][:relays]
    first, second = place.receivers()
    for receiver in (first, second):
        receiver._member._members[1 - receiver._coords.dp].receive = None  # type: ignore[assignment, union-attr]
    check(place, ticket, [future.result(LIMIT_S) for future in start([first, second], ticket)])
    place.front.join_previous(timeout_s=LIMIT_S)


def test_a_lost_relay_is_named_with_its_samples_and_the_others_go_on(make_place: MakePlace) -> None:
    place = make_place(2, "dp=2")
    place.add(number_of=lambda index: index % 2)
    place.peers[0].gone = True
    with pytest.raises(
        errors.RelayLost, match=r"relay 1 of 2 does not answer; it holds 4 samples of step 0: \['s1'"
    ):
        place.front.seal(0, assignment())
    rest = Assignment.given([[["s0", "s2"]], [["s4", "s6"]]])
    ticket = place.front.seal(0, rest)  # nothing of relay 0's was taken by the attempt
    receivers = place.receivers()
    shards = [future.result(LIMIT_S) for future in start(receivers, ticket)]
    check(place, ticket, shards)
    place.front.join_previous(timeout_s=LIMIT_S)
    assert "gone" in place.front.status()["relays"][1]["lost"]


def test_a_relay_lost_after_the_seal_stops_only_the_ranks_that_need_it(make_place: MakePlace) -> None:
    place = make_place(2, "dp=2")
    place.add(number_of=lambda index: index % 2)
    ticket = place.front.seal(0, assignment())
    good, bad = place.receivers()
    place.peers[0].gone = True
    bad._member._members[1]._control = place.peers[0]  # type: ignore[union-attr, assignment]
    futures = start([good, bad], ticket)
    futures[0].result(LIMIT_S)
    with pytest.raises(
        errors.TransportError, match=r"relay 1 of 2, which sends 4 samples here \(s1, s3, s5, s7\)"
    ):
        futures[1].result(LIMIT_S)
    with pytest.raises(errors.RelayLost, match=r"relay 1 of 2.*\{0: \['s1', 's3', 's5', 's7'\]\}"):
        place.front.join_previous(timeout_s=LIMIT_S)
    place.front.join_previous(timeout_s=LIMIT_S)  # given up, and relay 0 has delivered


def test_a_receive_that_failed_goes_on_after_the_parts_that_are_here(make_place: MakePlace) -> None:
    place = make_place(2, "dp=1")
    place.add()
    ticket = place.front.seal(0, assignment(dp=1))
    (receiver,) = place.receivers()
    member = receiver._member._members[1]  # type: ignore[union-attr]
    original, member.receive = member.receive, broken  # type: ignore[assignment]
    with pytest.raises(errors.TransportError, match="relay 1 of 2"):
        receiver.receive(ticket)
    assert place.relays[0].status()["steps"] == {}  # acknowledged, and sent no second time
    member.receive = original
    check(place, ticket, [receiver.receive(ticket)])
    place.front.join_previous(timeout_s=LIMIT_S)


def broken(*_: object) -> Any:
    raise errors.TransportError("cut")


def sealed_steps(place: Place, count: int) -> list[Ticket]:
    """Of one DP rank; the samples of step n are named `n-...`."""
    tickets = []
    for step in range(count):
        place.add(f"{step}-")
        tickets.append(place.front.seal(step, assignment(f"{step}-", dp=1)))
    return tickets


def test_the_next_steps_parts_are_received_ahead(tmp_path: Path) -> None:
    config = ChannelConfig(backend="gloo", relays=2, prefetch=True, bucket_bytes=1024)
    place = open_place(config, TrainerLayout(), tmp_path / "token")
    with contextlib.closing(place):
        (receiver,) = place.receivers()
        tickets = sealed_steps(place, 2)
        first = receiver.receive(tickets[0])
        receiver.prefetch(tickets[1])
        check(place, tickets[0], [first], prefix="0-")
        check(place, tickets[1], [receiver.receive(tickets[1])], prefix="1-")
        place.front.join_previous(timeout_s=LIMIT_S)


def test_what_a_second_try_received_is_not_overwritten_by_the_step_after_it(tmp_path: Path) -> None:
    config = ChannelConfig(backend="gloo", relays=2, prefetch=True, bucket_bytes=1024)
    place = open_place(config, TrainerLayout(), tmp_path / "token")
    with contextlib.closing(place):
        (receiver,) = place.receivers()
        tickets = sealed_steps(place, 3)
        receiver.receive(tickets[0])
        member = receiver._member._members[1]  # type: ignore[union-attr]
        original, member.receive = member.receive, broken  # type: ignore[assignment]
        receiver.prefetch(tickets[1])
        with pytest.raises(errors.TransportError, match="relay 1 of 2"):
            receiver.receive(tickets[1])
        member.receive = original
        second = receiver.receive(tickets[1])
        receiver.prefetch(tickets[2])
        third = receiver.receive(tickets[2])
        check(place, tickets[2], [third], prefix="2-")
        assert second.data_N.data_ptr() != third.data_N.data_ptr()  # the step before was in use while it came


def test_a_broken_group_of_one_relay_starts_its_own_next_epoch(make_place: MakePlace) -> None:
    place = make_place(2, "dp=1")
    place.add()
    (old,) = place.receivers()
    old.join(timeout_s=LIMIT_S)
    ticket = place.front.seal(0, assignment(dp=1))
    old._member._members[1]._transport.abort()  # type: ignore[union-attr]
    check(place, ticket, [old.receive(ticket)])
    place.front.join_previous(timeout_s=LIMIT_S)
    assert [relay.status()["groups"][0]["epoch"] for relay in place.relays] == [1, 2]


# -- claims --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Place]:
    """Two relays and one trainer; no wire in it."""
    config = ChannelConfig(backend="loopback", relays=2, frame_timeout_s=LIMIT_S)
    place = open_place(config, TrainerLayout(), tmp_path / "token")
    yield place
    place.close()


def seal(place: Place, *names: str, step: int = 0) -> Ticket:
    return place.front.seal(step, Assignment.given([[list(names)]]))


def hurry(place: Place) -> None:
    """What has not come by now does not come."""
    place.relays[0].config = replace(place.relays[0].config, frame_timeout_s=0.5)


def receipt_reply(request: str, tokens: int, *, boot_id: int, serial: int = 1) -> dict[str, Any]:
    receipt = Receipt(
        sample_key=sample_key(request), boot_id=boot_id, serial=serial, first_row=0, rows=tokens - 1
    )
    return reply_of(receipt.to_bytes(), request_id=request)


def test_a_frame_that_never_comes_is_named_with_its_relay(two: Place) -> None:
    two.add()
    until(lambda: not two.relays[1].status()["waiting"], "the other frames are there")
    hurry(two)
    two.front.add("late", receipt_reply("r", 9, boot_id=101, serial=77), range(9), engine="http://e1:1")
    with pytest.raises(
        errors.FrameMissing, match=r"relay 1 of 2: step 0.*sample late from engine http://e1:1"
    ):
        seal(two, *TOKENS, "late")
    assert {sample.relay for sample in seal(two, *TOKENS).samples} == {0, 1}


def test_a_receipt_may_come_before_its_engine_has_said_hello(two: Place) -> None:
    two.front.add("early", receipt_reply("r", 9, boot_id=900), range(9))
    assert two.front.status()["waiting"] == ["early"]
    with Engine(two.urls[1], two.token, hello=hello_of("http://late:1", boot_id=900)) as engine:
        engine.finish("r", 9)
        assert seal(two, "early").samples[0].relay == 1
    assert two.front.status()["waiting"] == []


def test_an_engine_that_never_says_hello_is_named_and_so_is_a_relay_that_cannot_be_asked(two: Place) -> None:
    hurry(two)
    two.front.add("s", receipt_reply("r", 9, boot_id=901), range(9), engine="http://stray:1")
    with pytest.raises(errors.FrameMissing, match=r"sample s from engine http://stray:1.*any of 2 relays"):
        seal(two, "s")
    two.peers[0].gone = True
    with pytest.raises(errors.FrameMissing, match=r"sample s from .*relays \[1\] do not answer"):
        seal(two, "s")
    assert two.front.discard(["s"]) == 1 and two.front.status()["waiting"] == []


def test_expected_engines_may_say_hello_to_any_relay(two: Place) -> None:
    two.front.expect_engines(["http://nobody:1"], timeout_s=1.0)
    two.add_one("s", 9, two.engines[1])
    with pytest.raises(errors.EngineSilent, match="http://nobody:1"):
        two.front.add("t", receipt_reply("r", 9, boot_id=5), range(9), engine="http://nobody:1")


def test_frames_in_replies_are_refused_by_name(two: Place) -> None:
    with pytest.raises(
        errors.InbandRefused, match=r"engine http://x:1: its reply for sample s.*2 relays share"
    ):
        two.front.add("s", reply_for("s", 9), range(9), engine="http://x:1")
    hello = replace(hello_of("http://x:1", boot_id=7), delivery="inband")
    reply = reply_of(hello.to_bytes() + frame_of(3), request_id="probe")
    with pytest.raises(errors.InbandRefused, match="engine http://x:1: its hello"):
        two.front.check_engine(reply, engine="http://x:1", tokens=3)


def test_what_a_direct_engine_with_a_full_queue_answers_is_kept_here(two: Place) -> None:
    two.add_one("s", 9, two.engines[1])
    two.front.add("t", reply_for("t", 12, seed=4), range(12), engine="http://e1:1")
    assert [sample.relay for sample in seal(two, "s", "t").samples] == [1, 0]


def test_a_sample_is_added_once_whatever_relay_has_it(two: Place) -> None:
    two.add_one("s", 9, two.engines[1])
    for engine in two.engines:
        with pytest.raises(errors.SampleTwice, match="sample s was added twice"):
            two.add_one("s", 10, engine)
    assert two.front.discard(["s", "unknown"]) == 1
    two.add_one("s", 11, two.engines[0])
    assert seal(two, "s").samples[0].relay == 0


@pytest.mark.parametrize("taken", [True, False])
def test_a_reply_whose_relay_did_not_answer_in_time_can_be_told_again_or_discarded(
    two: Place, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    reply = two.engines[1].finish("r", 9)

    def late(self: LocalPeer, **claim: Any) -> None:
        if taken:
            original(self, **claim)
        raise errors.DeadlineExceeded("no answer to claim within 60.0 s")

    for name in ("s0", "s1"):
        with monkeypatch.context() as patch, pytest.raises(errors.RelayLost, match="relay 1 of 2"):
            original = LocalPeer.claim
            patch.setattr(LocalPeer, "claim", late)
            two.front.add(name, reply, range(9), engine=two.engines[1].hello.engine)
        if name == "s0":
            assert two.front.discard([name]) == int(taken)
    with contextlib.nullcontext() if not taken else pytest.raises(errors.SampleTwice):
        two.front.add("s1", reply, range(9), engine=two.engines[1].hello.engine)
    assert two.relays[1].holds("s1") and two.front.discard(["s1"]) == 1


def test_later_turns_go_to_the_relay_of_the_first(two: Place) -> None:
    near, far = two.engines[1], two.engines[0]
    two.add_one("s", 9, near, seed=3)
    two.add_one("s", 20, near, seed=3, first_row=8, append=True)
    until(lambda: two.front.rows_held("s") == 19, "both turns are there")
    with pytest.raises(errors.TurnElsewhere, match=r"delivered to relay 0, rows 0..19 are at relay 1"):
        two.add_one("s", 30, far, seed=3, first_row=19, append=True)
    with pytest.raises(errors.TokensChanged, match="first 19 tokens differ"):
        reply = near.finish("r9", 30, seed=3, first_row=19)
        two.front.add("s", reply, [7] * 30, engine="http://e1:1", append=True)
    ticket = seal(two, "s")
    assert ticket.samples[0].tokens == 20 and ticket.samples[0].relay == 1


def test_a_step_is_sealed_at_every_relay_or_at_none(two: Place) -> None:
    two.add()
    other = two.relays[1]
    room, other.config = other.config, replace(other.config, shard_bytes=1)
    with pytest.raises(errors.StoreFull, match="relay 1 of 2"):
        seal(two, *TOKENS)
    for relay in two.relays:
        assert len(relay.status()["pending"]) == 4 and relay.status()["steps"] == {}
    other.config = room
    seal(two, *TOKENS)
    with pytest.raises(errors.StepError, match="step 0 is not newer than step 0"):
        seal(two, *TOKENS)


def test_samples_that_are_not_here_are_named(two: Place) -> None:
    two.add_one("s", 9, two.engines[0])
    with pytest.raises(errors.SampleUnknown, match=r"1 of 2 assigned samples are not here: \['ghost'\]"):
        seal(two, "s", "ghost")


def test_the_join_names_relay_step_and_rank(two: Place) -> None:
    two.add_one("s", 9, two.engines[1])
    seal(two, "s")
    with pytest.raises(errors.DeadlineExceeded, match=r"step\(s\) \[0\].*\{1: \{0: \[\(0, 0, 0\)\]\}\}"):
        two.front.join_previous(timeout_s=0.3)


# -- who is who ----------------------------------------------------------------------------------------------------------


def test_relays_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    config = ChannelConfig(backend="loopback", relays=2)
    zero, same = Relay(SPEC, TrainerLayout(), config), Relay(SPEC, TrainerLayout(), config)
    other = Relay(SPEC, TrainerLayout(dp=2), replace(config, relay=1))
    try:
        with pytest.raises(errors.ConfigError, match="relay 1 of 2: relay is 0, expected 1"):
            Coordinator(zero, [LocalPeer(same)])
        with pytest.raises(errors.ConfigError, match="relay 1 of 2: layout is"):
            Coordinator(zero, [LocalPeer(other)])
        with pytest.raises(errors.UsageError, match="relay 0 of 2 is asked to seal alone"):
            zero.seal(0, Assignment.given([[["s"]]]))
        with pytest.raises(errors.UsageError, match="recording"):
            Relay(SPEC, TrainerLayout(), config, recorder=Recorder(tmp_path))
    finally:
        for relay in (zero, same, other):
            relay.close()
    with pytest.raises(errors.ConfigError, match=r"relay 2 of 2, expected 0\.\.1"):
        ChannelConfig(relays=2, relay=2)
