"""Several relays, whole: engines deliver to the relay of their node, the coordinator seals, trainers take what each sends.

Real frames over real sockets; trainers are threads. With one relay the same code runs without a coordinator.
"""

from __future__ import annotations

import base64
import contextlib
import threading
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
from r3channel.plan.stream import serves
from r3channel.plan.ticket import Ticket
from r3channel.recordings.recorder import Recorder, segment_name
from r3channel.recordings.recording import Recording
from r3channel.relay.relay import Relay
from r3channel.relay.several import Coordinator, LocalPeer
from r3channel.trainer.receiver import Receiver
from r3channel.trainer.shard import RankShard
from r3channel.wire.frame import sample_key
from r3channel.wire.masks import encode_masks
from tests.delivery import recorded
from tests.direct import LIMIT_S, Engine, deliver, draft_of, hello_of, receipt_reply, until
from tests.samples import SPEC, frame_of, random_ids, reply_for, reply_of

TOKENS = {f"s{i}": n for i, n in enumerate((9, 30, 17, 5, 12, 40, 7, 21))}


class Gone(LocalPeer):
    """A relay whose process can be ended: then every call fails as one over Ray does."""

    gone = False

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name != "gone" and object.__getattribute__(self, "gone"):
            raise errors.TransportError("the relay's actor is gone")
        return object.__getattribute__(self, name)

    def hello(self, **coords: int) -> dict[str, Any]:
        return self._relay.hello(**coords)


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
        controls = [self.relays[0], *self.peers]
        config, layout = self.relays[0].config, self.layout
        coords = [layout.coords(rank) for rank in range(layout.world_size)]
        return [Receiver(controls, spec=SPEC, layout=layout, coords=one, config=config) for one in coords]

    def lives(self, relay: int) -> set[int]:
        """How many connections each of its receivers has had."""
        return set(self.relays[relay].status()["receivers"]["lives"].values())

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        for relay in self.relays:
            with contextlib.suppress(errors.R3Error):
                relay.close()


MakePlace = Callable[..., Place]


@pytest.fixture
def make_place(tmp_path: Path) -> Iterator[MakePlace]:
    made: list[Place] = []

    def make(
        relays: int, layout: str = "dp=2,pp=2", *, recording: Path | None = None, **changes: Any
    ) -> Place:
        config = ChannelConfig(
            **{
                "bucket_bytes": 1024, "relays": relays, "frame_timeout_s": LIMIT_S,
                "join_timeout_s": LIMIT_S, "send_timeout_s": LIMIT_S, "step_timeout_s": LIMIT_S, **changes,
            }
        )  # fmt: skip
        made.append(open_place(config, TrainerLayout.parse(layout), tmp_path / "token", recording))
        return made[-1]

    yield make
    for place in made:
        place.close()


def open_place(
    config: ChannelConfig, layout: TrainerLayout, token: Path, recording: Path | None = None
) -> Place:
    relays = [
        Relay(
            SPEC, layout, replace(config, relay=number), recorder=Recorder(recording) if recording else None
        )
        for number in range(config.relays)
    ]
    urls = [relay.serve(token_file=token) for relay in relays]
    hellos = [hello_of(f"http://e{number}:1", boot_id=100 + number) for number in range(len(relays))]
    engines = [Engine(url, token, hello=hello) for url, hello in zip(urls, hellos, strict=True)]
    peers = [Gone(relay) for relay in relays[1:]]
    front = Coordinator(relays[0], peers) if peers else relays[0]
    front.expect_engines([engine.hello.engine for engine in engines], timeout_s=LIMIT_S)
    return Place(relays, peers, engines, front, urls, token)


def assignment(prefix: str = "", *, dp: int = 2) -> Assignment:
    return Assignment.round_robin([prefix + name for name in TOKENS], dp=dp, microbatch_size=2)


def start(receivers: list[Receiver], ticket: Ticket) -> list[Future[RankShard]]:
    pool = ThreadPoolExecutor(len(receivers))
    return [pool.submit(receiver.receive, ticket) for receiver in receivers]


def receive(place: Place, ticket: Ticket) -> list[RankShard]:
    return [future.result(LIMIT_S) for future in start(place.receivers(), ticket)]


def ids_of(prefix: str = "") -> dict[str, np.ndarray]:
    return {prefix + name: random_ids(n - 1, seed=index) for index, (name, n) in enumerate(TOKENS.items())}


def check(
    place: Place, ticket: Ticket, shards: list[RankShard], ids: dict[str, np.ndarray] | None = None
) -> None:
    """Every rank holds, byte for byte, what one relay would have sent."""
    ids = ids_of() if ids is None else ids
    whole: dict[Any, np.ndarray] = {}
    for dp in range(place.layout.dp):
        whole |= place_samples(ticket.plan, dp=dp, ids_of=ids.__getitem__)
    assert {shard.shard.key for shard in shards} == set(whole)
    for shard in shards:
        assert shard.data_N.numpy().tobytes() == whole[shard.shard.key].tobytes(), shard.shard.key


def relays_of(ticket: Ticket) -> set[int]:
    return {relay for sample in ticket.samples for _, relay in sample.segments}


@pytest.mark.parametrize("relays", [1, 2, 3])
@pytest.mark.parametrize("transport", ["tcp", "gloo"])
@pytest.mark.parametrize("layout", ["dp=2,pp=2", "dp=2,cp=2,packing=thd"])
def test_every_rank_holds_what_one_relay_would_have_sent(
    make_place: MakePlace, relays: int, layout: str, transport: str
) -> None:
    place = make_place(relays, layout, transport=transport)
    receivers = place.receivers()
    for step in range(2):
        place.add(f"{step}-", number_of=lambda index: index // 2)
        ticket = Ticket.from_bytes(place.front.seal(step, assignment(f"{step}-")).to_bytes())
        assert len(ticket.runs) == relays and relays_of(ticket) == set(range(relays))
        shards = [future.result(LIMIT_S) for future in start(receivers, ticket)]
        check(place, ticket, shards, ids_of(f"{step}-"))
        place.front.join_previous(timeout_s=LIMIT_S)
    for number, relay in enumerate(place.relays):
        status = relay.status()
        assert status["steps"] == {} and status["pending"] == [] and status["store"]["frames"] == 0
        assert place.lives(number) == {1}
    for receiver in receivers:
        receiver.close()


def test_every_relay_records_its_part_and_together_they_are_the_step(
    make_place: MakePlace, tmp_path: Path
) -> None:
    folder, ids = tmp_path / "recording", random_ids(49, seed=3)
    place = make_place(3, "dp=1,cp=2,packing=thd", recording=folder)
    place.front.add("s", in_band("r", ids[:4]), range(5), engine="http://e0:1")
    for end, engine in ((19, place.engines[2]), (29, place.engines[0]), (49, place.engines[1])):
        first = place.front.rows_held("s")
        place.add_one("s", end + 1, engine, first_row=first, ids_TLK=ids[first:end], append=True)
    receive(place, seal(place, "s"))
    step = recorded(folder, relays=3)
    assert np.array_equal(step.rows("s"), ids) and step.tokens["s"].tolist() == list(range(50))
    (folder / segment_name(0, 2)).unlink()  # a node's disk is gone
    assert Recording.open(folder).step(0).cut == ("s",)


@pytest.mark.parametrize("relays", [2, 3])
def test_a_dp_rank_whose_samples_are_at_one_relay_needs_no_other(make_place: MakePlace, relays: int) -> None:
    place = make_place(relays, "dp=2")
    place.add(number_of=lambda index: index % 2)  # round robin over dp too: relay r has all of dp r
    ticket = place.front.seal(0, assignment())
    assert [serves(ticket, dp=0, relay=number) for number in range(relays)] == [True, False, False][:relays]
    first, second = place.receivers()
    first._members[1].receive = None  # type: ignore[assignment]
    check(place, ticket, [future.result(LIMIT_S) for future in start([first, second], ticket)])
    place.front.join_previous(timeout_s=LIMIT_S)


def test_sampling_masks_come_with_the_first_relays_rows_wherever_the_others_lie(
    make_place: MakePlace,
) -> None:
    place = make_place(2, "dp=2", sampling_masks=True)
    ids = {name: np.arange(tokens - 1) + 100 * seed for seed, (name, tokens) in enumerate(TOKENS.items())}
    for index, (name, tokens) in enumerate(TOKENS.items()):
        engine, ones = place.engines[index // 2 % 2], np.ones(tokens - 1, int)
        reply = engine.finish(name, tokens, seed=index)
        masks = encode_masks(first_row=0, lengths_T=ones, token_ids_N=ids[name], sample_key=sample_key(name))
        data = base64.b64decode(reply["meta_info"]["routed_experts"]) + masks
        place.front.add(name, reply_of(data, request_id=name), range(tokens), engine=engine.hello.engine)
    ticket = place.front.seal(0, assignment())
    assert relays_of(ticket) == {0, 1}
    shards = receive(place, ticket)
    check(place, ticket, shards)
    for shard in shards:
        for number, batch in enumerate(shard.shard.microbatches):
            expected = np.concatenate([ids[name] for name in batch.sample_ids])
            assert shard.sampling_mask(number)[1].tolist() == expected.tolist()


# -- turns at several relays ---------------------------------------------------------------------------------------------


def test_turns_of_one_sample_may_come_to_any_relay(make_place: MakePlace) -> None:
    place = make_place(3, "dp=1,cp=2,packing=thd")
    ids = random_ids(49, seed=3)
    place.front.add("s", in_band("r", ids[:4]), range(5), engine="http://e0:1")
    for end, engine in ((19, place.engines[2]), (29, place.engines[0]), (49, place.engines[1])):
        first = place.front.rows_held("s")
        place.add_one("s", end + 1, engine, first_row=first, ids_TLK=ids[first:end], append=True)
    with pytest.raises(errors.TokensChanged, match="first 49 tokens differ"):
        reply = place.engines[2].finish("r9", 60, seed=3, first_row=49)
        place.front.add("s", reply, [7] * 60, engine="http://e2:1", append=True)
    ticket = seal(place, "s")
    assert ticket.sample("s").segments == ((4, 0), (19, 2), (29, 0), (49, 1))
    check(place, ticket, receive(place, ticket), {"s": ids})
    place.front.join_previous(timeout_s=LIMIT_S)


def in_band(request: str, ids_TLK: np.ndarray) -> dict[str, Any]:
    draft = draft_of(request, len(ids_TLK))
    draft.ids_TLK[:] = ids_TLK
    return reply_of(draft.encode().tobytes(), request_id=request)


# -- a relay is lost -----------------------------------------------------------------------------------------------------


def test_a_lost_relay_is_named_with_its_samples_and_the_others_go_on(make_place: MakePlace) -> None:
    place = make_place(2, "dp=2")
    place.add(number_of=lambda index: index % 2)
    place.peers[0].gone = True
    with pytest.raises(
        errors.RelayLost, match=r"relay 1 of 2 does not answer; it holds 4 samples: \['s1'"
    ) as raised:
        place.front.seal(0, assignment())
    assert raised.value.samples == ("s1", "s3", "s5", "s7")
    ticket = place.front.seal(
        0, Assignment.given([[["s0", "s2"]], [["s4", "s6"]]])
    )  # the attempt took nothing
    check(place, ticket, receive(place, ticket))
    place.front.join_previous(timeout_s=LIMIT_S)
    assert place.front.discard(raised.value.samples) == 4
    assert "gone" in place.front.status()["relays"][1]["lost"]


def test_a_relay_lost_after_the_seal_stops_only_the_ranks_that_need_it(make_place: MakePlace) -> None:
    place = make_place(2, "dp=2", max_group_failures=1)
    place.add(number_of=lambda index: index % 2)
    ticket = place.front.seal(0, assignment())
    good, bad = place.receivers()
    place.peers[0].gone = True
    futures = start([good, bad], ticket)
    futures[0].result(LIMIT_S)
    with pytest.raises(errors.TransportError, match=r"relay 1 of 2"):
        futures[1].result(LIMIT_S)
    with pytest.raises(errors.RelayLost, match="relay 1 of 2") as raised:
        place.front.join_previous(timeout_s=0.1)
    assert raised.value.samples == ("s1", "s3", "s5", "s7")
    place.front.join_previous(timeout_s=LIMIT_S)  # given up, and relay 0 has delivered


def test_a_lost_relay_that_had_something_to_send_is_told_once_with_its_samples(make_place: MakePlace) -> None:
    place = make_place(2, "dp=1")
    place.add(number_of=lambda index: index % 2)
    ticket = place.front.seal(0, assignment(dp=1))
    (receiver,) = place.receivers()
    receiver._members[1].receive = broken  # type: ignore[assignment]
    with pytest.raises(errors.TransportError):
        receiver.receive(ticket)  # relay 0's part is here, and acknowledged
    place.peers[0].gone = True
    with pytest.raises(errors.RelayLost, match="relay 1 of 2") as raised:
        place.front.join_previous(timeout_s=LIMIT_S)
    assert raised.value.samples == ("s1", "s3", "s5", "s7") and raised.value.step == 0
    place.front.join_previous(timeout_s=LIMIT_S)  # given up


def test_a_receive_that_failed_goes_on_after_the_parts_that_are_here(make_place: MakePlace) -> None:
    place = make_place(2, "dp=1")
    place.add()
    ticket = place.front.seal(0, assignment(dp=1))
    (receiver,) = place.receivers()
    original, receiver._members[1].receive = receiver._members[1].receive, broken  # type: ignore[assignment]
    with pytest.raises(errors.TransportError, match="relay 1 of 2"):
        receiver.receive(ticket)
    assert place.relays[0].status()["steps"] == {}  # acknowledged, and sent no second time
    receiver._members[1].receive = original
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


def test_the_next_steps_parts_are_received_ahead(make_place: MakePlace) -> None:
    place = make_place(2, "dp=1", prefetch=True)
    (receiver,) = place.receivers()
    tickets = sealed_steps(place, 2)
    first = receiver.receive(tickets[0])
    receiver.prefetch(tickets[1])
    check(place, tickets[0], [first], ids_of("0-"))
    check(place, tickets[1], [receiver.receive(tickets[1])], ids_of("1-"))
    place.front.join_previous(timeout_s=LIMIT_S)


def test_what_a_second_try_received_is_not_overwritten_by_the_step_after_it(make_place: MakePlace) -> None:
    place = make_place(2, "dp=1", prefetch=True)
    (receiver,) = place.receivers()
    tickets = sealed_steps(place, 3)
    receiver.receive(tickets[0])
    original, receiver._members[1].receive = receiver._members[1].receive, broken  # type: ignore[assignment]
    receiver.prefetch(tickets[1])
    with pytest.raises(errors.TransportError, match="relay 1 of 2"):
        receiver.receive(tickets[1])
    receiver._members[1].receive = original
    second = receiver.receive(tickets[1])
    receiver.prefetch(tickets[2])
    third = receiver.receive(tickets[2])
    check(place, tickets[2], [third], ids_of("2-"))
    assert second.data_N.data_ptr() != third.data_N.data_ptr()  # the step before was in use while it came


def test_a_broken_connection_to_one_relay_is_made_anew_and_the_others_stay(make_place: MakePlace) -> None:
    place = make_place(2, "dp=1")
    place.add()
    (receiver,) = place.receivers()
    receiver.join(timeout_s=LIMIT_S)
    ticket = place.front.seal(0, assignment(dp=1))
    link = receiver._members[1]._link
    assert link is not None
    link.abort()
    check(place, ticket, [receiver.receive(ticket)])
    place.front.join_previous(timeout_s=LIMIT_S)
    assert [place.lives(0), place.lives(1)] == [{1}, {2}]


# -- samples -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(make_place: MakePlace) -> Place:
    """Two relays and one trainer."""
    return make_place(2, "dp=1")


def seal(place: Place, *names: str, step: int = 0) -> Ticket:
    return place.front.seal(step, Assignment.given([[list(names)]]))


def hurry(place: Place) -> None:
    """What has not come by now does not come."""
    place.relays[0].config = replace(place.relays[0].config, frame_timeout_s=0.2)


def test_a_frame_that_never_comes_is_named(two: Place) -> None:
    two.add()
    two.front.add("late", receipt_reply("r", 9, boot_id=101, serial=77), range(9), engine="http://e1:1")
    until(lambda: two.relays[1].status()["unclaimed"]["frames"] == 4, "the other frames are there")
    hurry(two)
    with pytest.raises(errors.FrameMissing, match=r"step 0.*sample late from engine http://e1:1") as raised:
        seal(two, *TOKENS, "late")
    assert raised.value.samples == ("late",)
    assert relays_of(seal(two, *TOKENS)) == {0, 1}


def test_a_receipt_may_come_before_its_engine_has_said_hello(two: Place) -> None:
    two.front.add("early", receipt_reply("r", 9, boot_id=900, serial=1), range(9))
    assert two.front.status()["waiting"] == ["early"]
    with Engine(two.urls[1], two.token, hello=hello_of("http://late:1", boot_id=900)) as engine:
        engine.finish("r", 9)
        assert relays_of(seal(two, "early")) == {1}
    assert two.front.status()["waiting"] == []


def test_an_engine_that_never_says_hello_to_any_relay_is_named(two: Place) -> None:
    hurry(two)
    two.front.add("s", receipt_reply("r", 9, boot_id=901, serial=1), range(9), engine="http://stray:1")
    with pytest.raises(errors.FrameMissing, match=r"sample s from engine http://stray:1.*never said hello"):
        seal(two, "s")
    assert two.front.discard(["s"]) == 1 and two.front.status()["waiting"] == []


def test_expected_engines_may_say_hello_to_any_relay(two: Place) -> None:
    two.front.expect_engines(["http://nobody:1"], timeout_s=0.2)
    two.add_one("s", 9, two.engines[1])
    with pytest.raises(errors.EngineSilent, match="http://nobody:1"):
        two.front.add("t", receipt_reply("r", 9, boot_id=5, serial=1), range(9), engine="http://nobody:1")


def test_frames_in_replies_are_kept_by_relay_0(two: Place) -> None:
    """As those of a direct engine whose queue is full."""
    two.add_one("s", 9, two.engines[1])
    two.front.add("t", reply_for("t", 12, seed=4), range(12), engine="http://e1:1")
    ticket = seal(two, "s", "t")
    assert [sample.segments for sample in ticket.samples] == [((8, 1),), ((11, 0),)]
    two.front.check_engine(reply_of(frame_of(3), request_id="probe"), engine="http://x:1", tokens=3)


def test_a_sample_is_added_once_whatever_relay_has_it(two: Place) -> None:
    two.add_one("s", 9, two.engines[1])
    for engine in two.engines:
        with pytest.raises(errors.SampleTwice, match="sample s was added twice"):
            two.add_one("s", 10, engine)
    assert two.front.discard(["s", "unknown"]) == 1
    two.add_one("s", 11, two.engines[0])
    assert relays_of(seal(two, "s")) == {0}


def test_a_discarded_sample_frees_its_rows_at_every_relay(two: Place) -> None:
    two.add()
    until(lambda: two.relays[1].status()["unclaimed"]["frames"] == 4, "the frames of relay 1 are there")
    until(lambda: not two.relays[0].status()["unclaimed"]["frames"], "those of relay 0 have their replies")
    assert two.front.discard(list(TOKENS)) == len(TOKENS)
    assert [relay.status()["store"]["bytes"] for relay in two.relays] == [0, 0]


def test_frames_that_no_step_takes_expire_at_every_relay(make_place: MakePlace) -> None:
    two = make_place(2, "dp=1", expiry_s=1e-3)
    two.relays[1].intake.greet(two.engines[1].hello)
    for serial in (1, 2, 3):
        deliver(two.relays[1], (serial, frame_of(9)), boot_id=101)
    until(lambda: _expire(two.relays[1]) and not len(two.relays[1]._store), "all of them are gone")


def _expire(relay: Relay) -> bool:
    """A parcel comes, with nothing in it."""
    deliver(relay, boot_id=101)
    return True


def test_a_damaged_frame_at_another_relay_is_named_and_its_good_copy_is_used(two: Place) -> None:
    peer, good = two.relays[1], draft_of("r", 8, seed=5).encode().tobytes()
    two.engines[1].finish("hello", 3)
    until(lambda: peer.bound, "the engine has said hello")
    with pytest.raises(errors.PayloadCorrupt):
        deliver(peer, (50, good[:-1] + bytes([good[-1] ^ 1])), boot_id=101)
    two.front.add("s", receipt_reply("r", 9, boot_id=101, serial=50), range(9), engine="http://e1:1")
    with pytest.raises(errors.PayloadCorrupt, match="relay 1") as raised:
        seal(two, "s")
    assert raised.value.samples == ("s",)
    deliver(peer, (50, good), boot_id=101)
    ticket = seal(two, "s")
    check(two, ticket, receive(two, ticket), {"s": random_ids(8, seed=5)})


# -- steps ---------------------------------------------------------------------------------------------------------------


def test_a_step_is_sealed_at_every_relay_or_at_none(make_place: MakePlace, tmp_path: Path) -> None:
    two = make_place(2, "dp=1", store_dir=str(tmp_path / "store"))
    two.add()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two.relays[1]._durable, "sealed", full)
        with pytest.raises(errors.StoreFull, match="relay 1 of 2"):
            seal(two, *TOKENS)
    for relay in two.relays:
        assert relay.status()["steps"] == {}
    ticket = seal(two, *TOKENS)  # by the same number: nobody has the ticket of the attempt
    check(two, ticket, receive(two, ticket))
    two.front.join_previous(timeout_s=LIMIT_S)
    with pytest.raises(errors.StepError, match="step 0 is not newer than step 0"):
        seal(two, *TOKENS)
    assert [relay.status()["store"]["frames"] for relay in two.relays] == [0, 0]


def full(*_: object) -> None:
    raise errors.StoreFull("no room for a ticket")


@pytest.mark.parametrize("taken", [True, False])
def test_a_relay_that_did_not_answer_in_time_leaves_no_part_of_the_step(two: Place, taken: bool) -> None:
    two.add()
    hold = two.peers[0].hold

    def late(**its: Any) -> None:
        if taken:
            hold(**its)
        raise errors.DeadlineExceeded("no answer to hold within 60.0 s")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two.peers[0], "hold", late)
        with pytest.raises(errors.RelayLost, match="relay 1 of 2") as raised:
            seal(two, *TOKENS)
    assert raised.value.samples == ("s1", "s3", "s5", "s7") and raised.value.step == 0
    assert [relay.status()["steps"] for relay in two.relays] == [{}, {}]
    ticket = seal(two, *TOKENS)
    check(two, ticket, receive(two, ticket))
    two.front.join_previous(timeout_s=LIMIT_S)


def test_an_abandoned_step_gives_its_samples_back_at_every_relay(two: Place) -> None:
    two.add()
    first = seal(two, *TOKENS)
    assert two.front.abandon(0) == len(TOKENS)
    (receiver,) = two.receivers()
    with pytest.raises(errors.TicketMismatch, match="abandoned"):
        receiver.receive(first)
    ticket = seal(two, *TOKENS, step=1)
    check(two, ticket, [receiver.receive(ticket)])
    two.front.join_previous(timeout_s=LIMIT_S)
    assert [relay.status()["store"]["frames"] for relay in two.relays] == [0, 0]


def test_no_lock_is_held_while_a_relay_is_asked(two: Place) -> None:
    """Others add, ask, discard and report while a call to relay 1 has no answer."""
    asked, answered = threading.Event(), threading.Event()
    two.add_one("far", 9, two.engines[1])
    two.add_one("near", 9, two.engines[0])
    for call in ("frames", "hold"):
        original = getattr(two.peers[0], call)

        def wait(original: Callable[..., Any] = original, **its: Any) -> Any:
            asked.set()
            assert answered.wait(LIMIT_S)
            return original(**its)

        setattr(two.peers[0], call, wait)

    def others(number: int) -> None:
        two.add_one(f"new{number}", 9, two.engines[0])
        two.add_one(f"new{number}", 20, two.engines[1], first_row=8, append=True)
        two.front.add(f"in-band{number}", reply_for(f"in-band{number}", 9), range(9), engine="http://e0:1")
        assert two.front.rows_held(f"new{number}") == 19
        assert two.relays[0].discard([f"new{number}"]) == 1
        assert two.relays[0].status()["steps"].keys() == ({0} if number else set())

    with ThreadPoolExecutor(2) as pool:
        try:
            sealing = pool.submit(seal, two, "far", "near")
            for number in range(2):  # while frames are asked for, and while the step is handed out
                assert asked.wait(LIMIT_S)
                asked.clear()
                pool.submit(others, number).result(LIMIT_S)
                answered.set()
                until(lambda number=number: asked.is_set() or number, "the next call")
                answered.clear() if not number else None
        finally:
            answered.set()
        assert relays_of(sealing.result(LIMIT_S)) == {0, 1}


def test_samples_that_are_not_here_are_named(two: Place) -> None:
    two.add_one("s", 9, two.engines[0])
    with pytest.raises(errors.SampleUnknown, match=r"1 of 2 assigned samples are not here: \['ghost'\]"):
        seal(two, "s", "ghost")


def test_the_join_names_relay_step_and_rank(two: Place) -> None:
    two.add_one("s", 9, two.engines[1])
    seal(two, "s")
    with pytest.raises(errors.DeadlineExceeded, match=r"1: \{0: \[\(0, 0, 0\)\]\}") as raised:
        two.front.join_previous(timeout_s=0.1)
    assert set(raised.value.ranks) == {(0, 0, 0)}


# -- who is who ----------------------------------------------------------------------------------------------------------


def test_relays_that_do_not_fit_together_are_refused() -> None:
    config = ChannelConfig(relays=2)
    zero, same = Relay(SPEC, TrainerLayout(), config), Relay(SPEC, TrainerLayout(), config)
    other = Relay(SPEC, TrainerLayout(dp=2), replace(config, relay=1))
    try:
        with pytest.raises(errors.ConfigError, match="relay 1 of 2: relay is 0, expected 1"):
            Coordinator(zero, [LocalPeer(same)])
        with pytest.raises(errors.ConfigError, match="relay 1 of 2: layout is"):
            Coordinator(zero, [LocalPeer(other)])
        with pytest.raises(errors.UsageError, match="relay 0 of 2 is asked to seal alone"):
            zero.seal(0, Assignment.given([[["s"]]]))
        with pytest.raises(errors.UsageError, match="no coordinator"):
            Coordinator(zero, [])
    finally:
        for relay in (zero, same, other):
            relay.close()
    with pytest.raises(errors.ConfigError, match=r"relay 2 of 2, expected 0\.\.1"):
        ChannelConfig(relays=2, relay=2)
