"""One digest from the engine to the router: whatever is changed or exchanged on the way is named before a router uses it.

What is changed or exchanged in the shard itself: tests/unit/test_rank_shard.py. Which known misalignments the channel notices so,
without a recording, and which it cannot, is listed at the end, as the recordings' README lists it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.placement import place_samples
from r3channel.plan.ticket import Ticket
from r3channel.recordings.step import RecordedStep
from r3channel.relay.relay import Relay
from r3channel.relay.row_stream import RowStream
from r3channel.relay.sealed_steps import SealedStep, Steps
from r3channel.trainer import receiver as receiver_module
from r3channel.trainer.buckets import DeviceBuckets, buckets_for
from r3channel.trainer.rank_shard import RankShard
from r3channel.trainer.relay_connection import RelayConnection
from r3channel.trainer.staleness import Staleness
from r3channel.transport.process_group import ProcessGroupTransport
from r3channel.wire.digest import layer_digests
from r3channel.wire.frame import encode_frame
from r3channel.wire.kernels import column_sums, place_runs
from r3channel.wire.routing import Ids
from r3channel.wire.row_protocol import Seal
from tests.support.delivery import Fanout, MakeRelay, compare, hand, receive, receivers_of
from tests.support.misaligned import CASES, PLAIN, Rows, engine_step, rows_of
from tests.support.samples import SPEC, WIDE, random_ids, reply_for
from tests.support.waits import until

SPECS = {
    "uint8 top-8": SPEC,
    "int16 top-8": WIDE,
    "int16 top-10": replace(WIDE, num_experts=512, top_k=10),
    "uint8 top-4": replace(SPEC, top_k=4),
    "uint8 top-10": replace(SPEC, top_k=10),
    "uint8 top-3": replace(SPEC, top_k=3),
}
"""Rows whose items have 8, 8, 4, 4, 2 and 1 bytes."""
TOKENS = {"a": 33, "b": 33, "c": 17, "d": 17}
"""Two pairs of equal length: what is exchanged has the same shape everywhere."""
NAMES = tuple(TOKENS)
LAYOUTS = ["", "dp=2,pp=2,cp=2,packing=thd", "tp=2,cp=2", "tp=2,packing=thd"]


@pytest.fixture(params=[*SPECS, *(f"{name}, by a device" for name in SPECS)])
def spec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RoutingSpec:
    """A model; rows are placed as on a host, or as on a GPU, for which the CPU stands."""
    name, *device = request.param.split(", ")
    if device:
        monkeypatch.setattr(receiver_module, "buckets_for", DeviceBuckets)
    return SPECS[name]


def originals(spec: RoutingSpec) -> dict[str, Ids]:
    return {name: random_ids(TOKENS[name] - 1, spec=spec, seed=seed) for seed, name in enumerate(NAMES)}


def add(relay: Relay, *names: str) -> None:
    for name in names:
        seed, tokens = NAMES.index(name), TOKENS[name]
        reply = reply_for(name, tokens, seed=seed, spec=relay.spec)
        relay.add(name, reply, range(1000 * seed, 1000 * seed + tokens))


def sealed(relay: Relay) -> Ticket:
    """The ticket of a step in which each of two DP ranks gets two samples, one of each length."""
    add(relay, *NAMES)
    dp = relay.layout.dp
    return relay.seal(0, Assignment.round_robin(NAMES, dp=dp, microbatch_size=len(NAMES) // dp))


def wrong_rows(shards: list[RankShard]) -> int:
    return sum(compare(shard, originals(shard.ticket.spec))[0] for shard in shards)


def prepared(relay: Relay) -> None:
    until(lambda: relay.status()["steps"][0]["state"] != "SEALED")


def poke(array: Ids, offset: int) -> None:
    """Change one byte of memory that nobody may write."""
    address = np.ascontiguousarray(array).ctypes.data + offset
    ctypes.c_uint8.from_address(address).value ^= 1 << offset % 8


# -- the way as it is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_honest_step_is_never_refused(make_relay: MakeRelay, spec: RoutingSpec, layout: str) -> None:
    relay = make_relay(layout, spec=spec)
    shards = receive(receivers_of(relay), sealed(relay))
    for shard in shards:
        hand(shard)
        shard.digests._host_SL = None  # as on a GPU: what is wrong is noted, and looked at once
        hand(shard)
    assert wrong_rows(shards) == 0


def test_a_receiver_that_joined_compiles_nothing_in_a_step(make_relay: MakeRelay, spec: RoutingSpec) -> None:
    for loop in (place_runs, column_sums):
        loop.cache_clear()
    relay = make_relay(spec=spec)
    (receiver,) = receivers_of(relay)
    receiver.join()
    before = place_runs.cache_info().misses, column_sums.cache_info().misses
    hand(receiver.receive(sealed(relay)))
    assert before == (1, 1) == (place_runs.cache_info().misses, column_sums.cache_info().misses)


# -- (a) at rest in the relay's store ----------------------------------------------------------------------------------


def held(relay: Relay, name: str) -> Ids:
    (rows,) = relay.samples.table.samples[name].held
    ids_TLK: Ids = rows.ids_TLK  # type: ignore[attr-defined]
    assert ids_TLK.flags.c_contiguous
    return ids_TLK


@pytest.mark.parametrize("layout", ["pp=2", "cp=2", "dp=2,cp=2,packing=thd"])
@pytest.mark.parametrize("when", ["before it is prepared", "after it was prepared"])
def test_a_byte_that_changes_at_rest_is_laid_to_its_sample(
    make_relay: MakeRelay, spec: RoutingSpec, layout: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay, prepare, damaged = make_relay(layout, spec=spec), SealedStep.prepare, list[int]()

    def damage() -> None:
        """Two samples, which all or the same receivers get."""
        for ids_TLK in (held(relay, "d"), held(relay, "b")):
            poke(ids_TLK, at := ids_TLK.nbytes // 2)
        damaged.append(spec.moe_layers[at % ids_TLK[0].nbytes // ids_TLK[0, 0].nbytes])

    def damaged_before(step: SealedStep, dp: int) -> Any:
        if not damaged:
            damage()
        return prepare(step, dp)

    if when.startswith("before"):
        monkeypatch.setattr(SealedStep, "prepare", damaged_before)
    ticket = sealed(relay)
    prepared(relay)
    if not damaged:
        damage()
    told = failures(relay, ticket)
    assert told, "some receiver gets that row"
    for error in told:
        assert isinstance(error, errors.FrameCorrupt) and "at rest" in str(error)
        assert (error.samples, error.step) == (("b", "d"), 0) and f"sample b, layers {damaged}" in str(error)
    # and what the message says helps
    assert relay.abandon(0) == 4 and relay.discard(["b", "d"]) == 2
    add(relay, "b", "d")
    assert wrong_rows(receive(receivers_of(relay), relay.seal(1, ticket.assignment))) == 0


def failures(relay: Relay, ticket: Ticket) -> list[errors.R3Error]:
    """What the receivers that get no rows raise."""
    found: list[errors.R3Error] = []
    for receiver in receivers_of(relay):
        try:
            receiver.receive(ticket)
        except errors.R3Error as error:
            found.append(error)
    return found


def add_turns(relay: Relay) -> None:
    """Sample s of three turns and 40 rows, of which every fifth has no routing."""
    ids_TLK = random_ids(40, spec=relay.spec)
    for begin, end in ((0, 11), (11, 12), (12, 40)):
        valid_T = np.arange(begin, end) % 5 > 0
        rows_TLK = ids_TLK[begin:end]
        frame = encode_frame(relay.spec, expert_ids_TLK=rows_TLK, first_row=begin, valid_T=valid_T)
        relay.add_frame("s", frame, range(end + 1), append=begin > 0)


@pytest.mark.parametrize("layout", ["", "cp=2", "pp=2,packing=thd"])
def test_at_rest_only_rows_with_routing_count(make_relay: MakeRelay, spec: RoutingSpec, layout: str) -> None:
    relay = make_relay(layout, spec=spec, invalid_rows="live")
    add_turns(relay)
    for shard in receive(receivers_of(relay), relay.seal(0, Assignment.given([[["s"]]]))):
        hand(shard)
    relay.join_previous()
    add_turns(relay)
    relay.seal(1, Assignment.given([[["s"]]]))
    step, turns = relay.steps._steps[1], relay.samples.table.samples["s"].held
    step.rows.verify(0)
    rows_TLK: Ids = turns[2].ids_TLK  # type: ignore[attr-defined]
    for row, counts in ((3, False), (4, True), (27, True)):  # 15, 16 and 39 of the sample
        poke(rows_TLK, rows_TLK[0].nbytes * row)
        if counts:
            with pytest.raises(errors.FrameCorrupt, match="sample s"):
                step.rows.verify(0)
        else:
            step.rows.verify(0)
        poke(rows_TLK, rows_TLK[0].nbytes * row)


# -- (b) on the wire ---------------------------------------------------------------------------------------------------


class Wire:
    """Changes one byte of the `number`-th thing that a receiver receives, a join's bytes left out."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int) -> None:
        self.seen, self._number = 0, number
        recv, start_recv = RelayConnection._recv, ProcessGroupTransport.start_recv

        def over_tcp(member: RelayConnection, out_N: memoryview, deadline_s: float) -> None:
            recv(member, out_N, deadline_s)
            self.look(np.frombuffer(out_N, np.uint8))

        def over_group(transport: ProcessGroupTransport, src: int, out_N: Any) -> Any:
            pending: Any = start_recv(transport, src, out_N)
            wait = pending.wait
            pending.wait = lambda **limit: (wait(**limit), self.look(out_N.numpy()))
            return pending

        patch.setattr(RelayConnection, "_recv", over_tcp)
        patch.setattr(ProcessGroupTransport, "start_recv", over_group)

    def look(self, data_N: Ids) -> None:
        if len(data_N) > 1:
            data_N[len(data_N) // 2] ^= 16 * (self.seen == self._number)
            self.seen += 1


@pytest.fixture(params=[buckets_for, DeviceBuckets], ids=["host", "device"])
def placed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are placed as on a host, or as on a GPU."""
    monkeypatch.setattr(receiver_module, "buckets_for", request.param)


@pytest.mark.usefixtures("placed")
@pytest.mark.parametrize("transport", ["tcp", "gloo"])
@pytest.mark.parametrize("number", [0, 1, -1], ids=["first bucket", "second bucket", "digests"])
def test_what_is_damaged_on_the_way_is_sent_again(
    make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch, transport: str, number: int
) -> None:
    relay = make_relay("pp=2", transport=transport)
    ticket = sealed(relay)
    buckets = [-(-shard.nbytes // 1024) for shard in ticket.plan.shards]
    Wire(monkeypatch, number if number >= 0 else buckets[0])
    shards = []
    for receiver in receivers_of(relay):
        shards.append(receiver.receive(ticket))
        hand(shards[-1])
    assert wrong_rows(shards) == 0
    assert sorted(relay.status()["receivers"]["lives"].values()) == [1, 2]
    relay.join_previous()


# -- what a relay sends, exchanged -------------------------------------------------------------------------------------

Moved = Callable[[str, int], tuple[str, int]]


def rotated(name: str, row: int) -> tuple[str, int]:
    return (name, (row + 1) % 32) if name == "a" else (name, row)


def chunks(name: str, row: int) -> tuple[str, int]:
    """The two context chunks of rows 0..9 and 9..18 of sample a."""
    return (name, row + 9 if row < 9 else row - 9) if name == "a" and row < 18 else (name, row)


def in_pairs(name: str, row: int) -> tuple[str, int]:
    return {"a": "b", "b": "a", "c": "d", "d": "c"}[name], row


def stays(name: str, row: int) -> tuple[str, int]:
    return name, row


EXCHANGES: dict[str, tuple[str, Moved, list[int], set[str]]] = {
    "rows within a sample": ("", rotated, [0, 1, 2], {"a"}),
    "rows within a sample, over context ranks": ("cp=2", rotated, [0, 1, 2], {"a"}),
    "two layers": ("", stays, [1, 0, 2], set(NAMES)),
    "two layers of different stages": ("pp=2", stays, [2, 1, 0], set(NAMES)),
    "two layers, over context ranks": ("cp=2", stays, [1, 0, 2], set(NAMES)),
    "context chunks": ("cp=2", chunks, [0, 1, 2], {"a"}),
    "context chunks of a pack": ("cp=2,packing=thd", chunks, [0, 1, 2], {"a"}),
    "two samples of equal length": ("", in_pairs, [0, 1, 2], set(NAMES)),
    "two samples of equal length, over context ranks": ("cp=2", in_pairs, [0, 1, 2], set(NAMES)),
    "the rows of two ranks": ("dp=2", in_pairs, [0, 1, 2], set(NAMES)),
}
"""What is exchanged -> (layout, where each row is taken from, where each layer is, the samples that are wrong)."""


@pytest.fixture(params=list(EXCHANGES))
def exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, set[str]]:
    """A relay that takes rows from elsewhere. (layout, samples)"""
    layout, moved, layers, names = EXCHANGES[request.param]

    def pieces(outgoing: RowStream) -> Iterator[Ids]:
        rows_of = originals(outgoing.stream.shard.spec)
        for sample, position, rows in outgoing.stream.sends():
            for row in range(position, position + rows):
                name, at = moved(outgoing.stream.samples[sample].sample_id, row)
                yield np.ascontiguousarray(rows_of[name][at : at + 1, layers])

    monkeypatch.setattr(RowStream, "pieces", pieces)
    return layout, names


def test_whatever_a_relay_exchanges_is_named(
    make_relay: MakeRelay, exchange: tuple[str, set[str]], spec: RoutingSpec
) -> None:
    layout, names = exchange
    relay = make_relay(layout, spec=spec, max_group_failures=1)
    told = failures(relay, sealed(relay))
    assert len(told) == relay.layout.world_size
    assert {name for error in told for name in error.samples} == names
    assert all(isinstance(error, errors.BucketCorrupt) and error.step == 0 for error in told)


def test_samples_exchanged_with_their_digests(make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch) -> None:
    add = Steps.add

    def mislaid(steps: Steps, ticket: Ticket, turns: list[Any], *masks: Any) -> None:
        add(steps, ticket, [turns[1], turns[0], *turns[2:]], *masks)

    monkeypatch.setattr(Steps, "add", mislaid)
    relay = make_relay(max_group_failures=1)
    (error,) = failures(relay, sealed(relay))
    assert isinstance(error, errors.TicketMismatch) and set(error.samples) == {"a", "b"}
    assert "other rows than their ticket says" in str(error) and error.ranks and error.step == 0


@pytest.mark.parametrize(
    ("layout", "said"), [("dp=2", "other rows than their"), ("cp=2,packing=thd", "announces")]
)
def test_a_relay_that_sent_other_rows_is_not_thanked_and_its_next_ones_are_taken(
    make_relay: MakeRelay, monkeypatch: pytest.MonkeyPatch, layout: str, said: str
) -> None:
    """Those of another rank, with their digests. A half of a pack has another size, too."""
    relay = make_relay(layout, max_group_failures=1)
    ticket, receivers = sealed(relay), receivers_of(relay)
    with monkeypatch.context() as patch:
        outgoing, axis = relay.steps.outgoing, 0 if layout == "dp=2" else 2

        def others(seal: Seal, key: tuple[int, int, int], **limit: float) -> RowStream | None:
            swapped: Any = tuple(1 - part if at == axis else part for at, part in enumerate(key))
            return outgoing(seal, swapped, **limit)

        patch.setattr(relay.steps, "outgoing", others)
        told = failures(relay, ticket)
    assert len(told) == 2 and all(said in str(error) and error.step == 0 for error in told)
    assert axis or {name for error in told for name in error.samples} == set(NAMES)
    assert relay.status()["steps"][0]["acknowledged"] == []
    assert wrong_rows(receive(receivers, ticket)) == 0
    assert relay.status()["steps"] == {}


# -- (c) after the scatter over tensor ranks ---------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["tp=2", "tp=2,cp=2,packing=thd", "tp=2,sp=0"])
def test_a_byte_that_changes_on_the_way_to_a_tensor_rank_is_named_by_that_rank(
    make_relay: MakeRelay, spec: RoutingSpec, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = make_relay(layout, spec=spec)
    name = "rebroadcast" if "sp=0" in layout else "scatter"
    hand_on, changed = getattr(Fanout, name), set[int]()

    def damaged(fanout: Fanout, *arguments: Any) -> None:
        hand_on(fanout, *arguments)
        if fanout.rank == 1 and id(fanout) not in changed:
            changed.add(id(fanout))
            arguments[-1][0] ^= 1

    monkeypatch.setattr(Fanout, name, damaged)
    for shard in receive(receivers_of(relay), sealed(relay)):
        if shard.tp == 0:
            hand(shard)
            continue
        with pytest.raises(errors.DigestMismatch, match="TP slot") as told:
            hand(shard)
        assert len(told.value.samples) == 1 and told.value.ranks == (shard.shard.key,)


# -- the trainer's own batch -------------------------------------------------------------------------------------------


def tokens_of(*names: str) -> list[list[list[int]]]:
    """Token ids of one micro-batch."""
    first = {name: 1000 * seed for seed, name in enumerate(NAMES)}
    return [[list(range(first[name], first[name] + TOKENS[name])) for name in names]]


def test_samples_of_equal_length_that_the_trainer_exchanged_are_both_named(make_relay: MakeRelay) -> None:
    relay = make_relay()
    ticket, receiver = sealed(relay), receivers_of(relay)[0]
    with pytest.raises(errors.TicketMismatch, match=r"hashes .*\['a', 'b'\] differ.*the ticket's") as told:
        receiver.receive(ticket, tokens=tokens_of("b", "a", "c", "d"))
    assert told.value.samples == ("a", "b") and told.value.ranks == ((0, 0, 0),) and told.value.step == 0
    said = r"micro-batch 0: samples of lengths \(33, 33, 17, 17\) planned.*\(33, 17, 33, 17\)"
    with pytest.raises(errors.TicketMismatch, match=said) as told:
        receiver.receive(ticket, tokens=tokens_of("a", "c", "b", "d"))
    assert (told.value.samples, told.value.ranks) == (("b", "c"), ((0, 0, 0),))
    with pytest.raises(errors.TicketMismatch, match=r"1 micro-batches planned, this trainer runs 2") as told:
        receiver.receive(ticket, tokens=[*tokens_of(*NAMES), *tokens_of("a")])
    assert (told.value.ranks, told.value.step) == (((0, 0, 0),), 0)
    batch = tokens_of(*NAMES)
    batch[0][2][-1] += 1  # one token is enough
    with pytest.raises(errors.TicketMismatch) as told:
        receiver.receive(ticket, tokens=batch)
    assert told.value.samples == ("c",)
    with pytest.raises(errors.TicketMismatch, match="'b', 'a'"):  # by name, where even their tokens are equal
        receiver.receive(ticket, samples=[["b", "a", "c", "d"]])
    assert relay.metrics.value("r3channel_buckets_total") == 0
    hand(receiver.receive(ticket, tokens=tokens_of(*NAMES), samples=[NAMES]))


def test_shards_that_came_from_a_recording_have_no_digests_and_are_not_judged(make_relay: MakeRelay) -> None:
    relay = make_relay()
    ticket = sealed(relay)
    (shard,) = receive(receivers_of(relay), ticket)
    again = RankShard.from_whole(ticket, shard.shard, shard.data_N, tp=0)
    again.layer_ids(0, 1)[0, -1] ^= 1
    hand(again)


# -- the known misalignments: at the relay's door, beside the trainer's own version, and where a router is handed its rows ------

NOT_HANDED = {
    "mixed_versions": "the ids are right; the ticket is the only one that says versions",
    "version_off_by_one": "the ids are right; the trainer's own version is another witness",
    "mtp_shift": "the channel hands MTP routers nothing, unless the layout maps one",
    "fused_shared_expert": "a row that is handed out has top-k columns",
}
"""What no digest of rows at the routers' end can show, and why."""
AT_THE_DOOR = {"zero_rows", "duplicated_ids", "out_of_range", "mtp_shift", "fused_shared_expert"}
"""What an engine's own frame is refused for; everything else that an engine gets wrong before it hashes is hashed wrong."""


@pytest.mark.parametrize("name", CASES)
def test_what_is_changed_between_engine_and_router_is_noticed_before_the_router_uses_it(name: str) -> None:
    spec, layout, mistake = CASES[name][0]
    want = engine_step(spec, layout)
    seen = mistake(want)
    of_pass = "recompute" if name.startswith("recompute") else "forward"
    plain = engine_step(spec)  # the same rows, on one rank
    same_shape = seen.spec == spec
    rows = {
        s.sample_id: seen.ids(s.sample_id, of_pass=of_pass)[0] if same_shape else rows_of(plain)[s.sample_id]
        for s in plain.samples
    }
    assert is_noticed(plain, rows) == (name not in NOT_HANDED)


def is_noticed(want: RecordedStep, rows: Rows) -> bool:
    shard = want.ticket.plan.shard(dp=0, pp=0)
    names = [name for batch in shard.microbatches for name in batch.sample_ids]
    digests_SL = np.stack([layer_digests(want.ids(name)[0], first_row=0) for name in names])
    whole_N = torch.from_numpy(place_samples(want.ticket.plan, dp=0, ids_of=rows.__getitem__)[shard.key])
    layers = [want.spec.moe_index(layer) for layer in shard.layers]
    expected_SL = torch.from_numpy(np.ascontiguousarray(digests_SL[:, layers]).view(np.int64))
    own = RankShard(want.ticket, shard, whole_N, tp=0, digests_SL=expected_SL)
    try:
        hand(own)
    except errors.DigestMismatch:
        assert own.digests.checked >= own.digests.different > 0
        return True
    assert (own.digests.checked, own.digests.different) == (digests_SL.size, 0)
    return False


def test_versions_that_are_one_off_are_ahead_of_the_trainers(caplog: pytest.LogCaptureFixture) -> None:
    """By default a line in the log; with a bound an error, as of one too low (tests/unit/test_rank_shard.py)."""
    want = engine_step()
    newest = max(want.ticket.weight_versions)
    Staleness(want.ticket, version=newest).check()
    assert not caplog.records
    Staleness(want.ticket, version=newest - 1).check()  # what engines said is one more than what they had
    assert "stamped before their update" in caplog.text


@pytest.mark.parametrize(
    "name", sorted({name for name, cases in CASES.items() if cases[0][0] == PLAIN} | AT_THE_DOOR)
)
def test_what_an_engine_itself_says_wrongly_is_refused_where_its_bytes_show_it(name: str) -> None:
    """Also as more layers or columns than the model has, which is another spec than the relay's."""
    want, spec = engine_step(), PLAIN
    rows = rows_of(want)
    if name == "out_of_range":
        rows["s1"][3, 2, 0] = PLAIN.num_experts
    else:
        seen = CASES[name][0][2](engine_step(PLAIN, CASES[name][0][1]))
        spec, rows = seen.spec, rows | {own: ids for own, ids in rows_of(seen).items() if own in rows}
    refused = 0
    with closing(Relay(PLAIN, TrainerLayout(), ChannelConfig())) as relay:
        for own, ids in rows.items():
            try:
                relay.add_frame(own, encode_frame(spec, expert_ids_TLK=ids), want.tokens[own])
            except errors.R3Error:
                refused += 1
        relay.discard(list(rows))
    assert bool(refused) == (name in AT_THE_DOOR)
