"""A framework's samples and the relay's rows: replaced, continued, forgotten, dumped, sealed."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from r3channel.config import ChannelConfig
from r3channel.errors import (
    ExpertIdInvalid,
    FrameMissing,
    RoutingMissing,
    RowCountMismatch,
    StepError,
    StoreFull,
)
from r3channel.integrations.slime.sample_rows import START, Rows, SampleRows, names_at, rows_of
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.plan.ticket import Ticket
from r3channel.relay.relay import Relay
from r3channel.wire.routing import as_tokens, hash_tokens
from tests.support.direct import deliver, draft_of, hello_of, reference_reply, rows_here
from tests.support.samples import SPEC, random_ids, reply_for, reply_of
from tests.support.waits import SOON_S, until


@dataclass
class Sample:
    """What slime's has of it."""

    index: int
    tokens: list[int] = field(default_factory=list)
    rollout_routed_experts: Any = None


@pytest.fixture
def rows(request: pytest.FixtureRequest) -> Iterator[SampleRows]:
    options: dict[str, Any] = {"step_timeout_s": 0.5, "frame_timeout_s": 0.05, "max_live": 1.0}
    relay = Relay(SPEC, TrainerLayout(), ChannelConfig(**{**options, **getattr(request, "param", {})}))
    try:
        yield SampleRows(relay)
    finally:
        relay.steps.close()
        relay.abandon(0)
        relay.close()


LIVE = {"on_missing": "live", "on_lost": "live", "on_changed": "live"}


def left_live(ticket: Ticket) -> dict[str, tuple[tuple[int, int], ...]]:
    return {sample.sample_id: sample.invalid for sample in ticket.samples}


def seal(rows: SampleRows, *samples: Sample) -> Ticket:
    return rows.seal(0, samples, [[[*range(len(samples))]]], steps=[1])


def meta(name: str, tokens: int, *, seed: int = 0, reason: str = "stop", **changes: Any) -> dict[str, Any]:
    reply = reply_for(name, tokens, seed=seed, **changes)
    return {**reply["meta_info"], "finish_reason": {"type": reason}, "weight_version": "3"}


def waiting(rows: SampleRows) -> set[str]:
    """Samples that are here once what was handed over is kept."""
    rows._keeper.submit(int).result(SOON_S)
    rows.tidy()
    return {name for name in (f"{i}.{n}" for i in range(5) for n in range(9)) if rows.relay.rows_held(name)}


def taken(rows: SampleRows, index: int = 0, tokens: int = 9, **reply: Any) -> Sample:
    """A sample whose reply came."""
    rows.take(sample := Sample(index, list(range(tokens))), reply or meta(str(index), tokens))
    return sample


def test_the_rest_of_a_reply_goes_on_and_a_later_one_replaces_the_rows(rows: SampleRows) -> None:
    sample = Sample(0, list(range(9)))
    rest = rows.take(sample, meta("a", 9))
    assert "routed_experts" not in rest and rest["weight_version"] == "3"
    assert waiting(rows) == {"0.0"}
    sample.tokens += [1, 2, 3]
    rows.take(sample, meta("a", 12, seed=1))
    assert waiting(rows) == {"0.1"}
    assert rows.seal(0, [sample], [[[0]]], steps=[1]).sample("0.1").tokens == 12


class Passes:
    """An engine. Each of its passes chooses other experts for every row, so that a row tells which pass has made it."""

    def __init__(self, rows: SampleRows, *, direct: bool = False) -> None:
        self.rows, self.direct, self.made, self.nbytes = rows, direct, 0, 0
        rows.relay.samples.engines.greet(hello_of())

    def speak(self, sample: Sample, new: int, *, reason: str = "stop", **payload: object) -> int:
        """A turn, as slime's generate function makes it; the first row that the engine was asked for."""
        asked = {"input_ids": list(sample.tokens), "return_routed_experts": True} | payload
        start = asyncio.run(self.rows.request(sample, asked)).get(START, 0)
        sample.tokens += range(self.made, self.made + new)
        draft = draft_of(str(self.made), len(sample.tokens) - 1 - start, first_row=start, seed=self.made)
        frame = draft.encode().tobytes()
        reply = reply_of(frame, request_id=str(self.made))
        if self.direct:
            deliver(self.rows.relay, (self.made, frame))
            reply = reference_reply(str(self.made), len(sample.tokens), serial=self.made, first_row=start)
        self.rows.take(sample, {**reply["meta_info"], START: start, "finish_reason": {"type": reason}})
        self.made, self.nbytes = self.made + 1, self.nbytes + len(frame)
        return start


@pytest.mark.parametrize("rows", [{"step_timeout_s": SOON_S}], indirect=True, ids=["patient"])
@pytest.mark.parametrize("direct", [False, True], ids=["inband", "direct"])
def test_ten_turns_send_each_row_once_and_it_stays_the_one_of_the_pass_that_made_it(
    rows: SampleRows, direct: bool
) -> None:
    engine, long, sample = Passes(rows, direct=direct), Sample(0), Sample(1)
    engine.speak(long, 10_000)
    once, engine.nbytes = engine.nbytes, 0
    ends = [1000 * turn for turn in range(1, 11)]
    starts = [engine.speak(sample, 1000) for _ in ends]
    assert starts == [0, *(end - 1 for end in ends[:-1])]
    assert engine.nbytes <= 1.1 * once
    (told,) = seal(rows, sample).samples
    ids_TLK = rows_here(rows.relay, told.sample_id)
    assert len(ids_TLK) == 9999
    for turn, (start, end) in enumerate(zip(starts, ends, strict=True), start=1):
        assert np.array_equal(ids_TLK[start : end - 1], random_ids(end - 1, seed=turn)[start:])


def test_a_request_asks_for_all_rows_where_those_that_are_here_are_not_of_its_tokens_or_not_sound(
    rows: SampleRows,
) -> None:
    engine = Passes(rows)
    changed, refused, dropped, copied = samples = [Sample(index) for index in range(4)]
    for sample in samples:
        assert engine.speak(sample, 9) == 0
    rows.take(refused, meta("x", 5))
    twin = copy.deepcopy(copied)
    changed.tokens[3] = 99
    waiting(rows)
    rows.relay.discard(["2.2"])  # or it has expired
    assert [engine.speak(sample, 9) for sample in samples] == [0, 0, 0, 0]
    assert engine.speak(changed, 9, text="t", input_ids=None) == 0
    assert engine.speak(dropped, 9, return_routed_experts=False) == 0
    assert engine.speak(refused, 9, routed_experts_start_len=3) == 3, "the generate function's own"
    ticket = seal(rows, changed, copied, twin)
    assert [told.tokens for told in ticket.samples] == [27, 18, 9]


@pytest.mark.parametrize("direct", [False, True], ids=["inband", "direct"])
def test_turn_that_was_put_on_a_new_sample_is_refused_with_the_cause(rows: SampleRows, direct: bool) -> None:
    engine, asked = Passes(rows, direct=direct), Sample(0)
    engine.speak(asked, 9)
    fresh = Sample(0, list(asked.tokens))
    engine.speak(fresh, 9, routed_experts_start_len=8)  # as the request for the one that was given says
    with pytest.raises(RowCountMismatch, match=r"rows 8\.\.17 .* expected 0\.\.17.* put on a new Sample"):
        seal(rows, fresh)


def test_what_an_aborted_sample_has_said_stays_and_its_next_rollout_adds_to_it(rows: SampleRows) -> None:
    engine, sample = Passes(rows), Sample(0)
    assert engine.speak(sample, 9, reason="abort") == 0
    rows.take(sample, {"finish_reason": {"type": "abort"}, START: 8})  # in the engine's queue
    assert engine.speak(sample, 0, reason="abort") == 8  # before its first token: no row is new
    rows.take(sample, {**meta("x", 5), START: 8})  # a refused turn takes nothing with it
    assert engine.speak(sample, 5) == 8
    assert seal(rows, sample).samples[0].tokens == 14


@pytest.mark.parametrize("rows", [{"backpressure_timeout_s": 0.01}], indirect=True)
def test_a_next_turn_waits_until_what_came_is_kept_and_not_without_end(rows: SampleRows) -> None:
    engine, sample, free = Passes(rows), Sample(0), threading.Event()
    engine.speak(sample, 9)
    waiting(rows)
    rows._keeper.submit(free.wait, 20)
    assert engine.speak(sample, 9) == 8
    assert engine.speak(sample, 9) == 0, "all rows, after step_timeout_s"
    timer = threading.Timer(0.1, free.set)
    timer.start()
    assert engine.speak(sample, 9) == 26
    timer.join()
    assert seal(rows, sample).samples[0].tokens == 36


def test_what_nobody_holds_is_discarded_and_counted_and_a_copy_holds_too(rows: SampleRows) -> None:
    kept, gone = taken(rows), taken(rows, 1, 7)
    twin = copy.deepcopy(kept)
    del kept, gone
    gc.collect()
    assert waiting(rows) == {"0.0"}
    assert rows.relay.metrics.value("r3channel_samples_total", outcome="discarded") == 1
    assert rows.seal(0, [twin], [[[0]]], steps=[1]).sample("0.0").tokens == 9


def test_a_dumped_sample_holds_no_rows(rows: SampleRows) -> None:
    sample = taken(rows)
    loaded = pickle.loads(pickle.dumps(sample))  # noqa: S301 - what torch.save of a framework's samples does
    assert rows_of(loaded) is None and isinstance(rows_of(sample), Rows)
    with pytest.raises(RoutingMissing, match=r"sample 0\.1"):
        rows.seal(0, [loaded], [[[0]]], steps=[1])


def test_ids_that_the_framework_decoded_itself_are_sealed(rows: SampleRows) -> None:
    dense_TLK = np.zeros((8, SPEC.num_layers, SPEC.top_k), np.int32)
    dense_TLK[:, list(SPEC.moe_layers)] = random_ids(8, seed=4)
    assert rows.seal(0, [Sample(0, list(range(9)), dense_TLK)], [[[0]]], steps=[1]).samples[0].tokens == 9
    dense_TLK[3] += 256  # uint8 would make other experts of them
    with pytest.raises(ExpertIdInvalid, match="row 3"):
        rows.seal(1, [Sample(0, list(range(9)), dense_TLK)], [[[0]]], steps=[2])


def test_replies_that_were_aborted_or_whose_samples_are_filtered_fail_nothing(rows: SampleRows) -> None:
    aborted, filtered, good = (Sample(index, list(range(9))) for index in range(3))
    assert "routed_experts" not in rows.take(aborted, meta("a", 5, reason="abort"))
    rows.take(aborted, {"finish_reason": {"type": "abort"}})
    rows.take(filtered, meta("b", 5))
    rows.take(good, meta("c", 9))
    assert left_live(seal(rows, good)) == {"2.2": ()} and waiting(rows) == {"2.2"}
    aborted.tokens += [1, 2, 3]
    rows.take(aborted, meta("a", 12))  # it is continued
    assert rows.seal(1, [aborted], [[[0]]], steps=[1]).samples[0].tokens == 12
    rows.relay.abandon(1)


def bad_samples(rows: SampleRows) -> list[Sample]:
    """Whole; other rows than tokens; no rows; a tool spoke last; cut; its frame is lost; a token is another; the last one is."""
    rows.relay.samples.engines.greet(hello_of())
    replies = {
        1: meta("1", 5),
        2: {"finish_reason": {"type": "stop"}},
        5: reference_reply("5", 9, serial=1)["meta_info"],
    }
    samples = [taken(rows, index, **replies.get(index, {})) for index in range(8)]
    samples[3].tokens += [7, 7]
    samples[4].tokens[3:] = [7, 7, 7]
    samples[6].tokens[3] = samples[7].tokens[8] = 7
    return samples


@pytest.mark.parametrize("direct", [False, True], ids=["inband", "direct"])
def test_of_a_sample_that_was_cut_the_rows_of_the_tokens_that_are_left_are_sealed(
    rows: SampleRows, direct: bool
) -> None:
    engine, sample = Passes(rows, direct=direct), Sample(0)
    engine.speak(sample, 9)
    engine.speak(sample, 9)
    del sample.tokens[13:]
    (told,) = seal(rows, sample).samples
    made = [*random_ids(8, seed=0), *random_ids(12, seed=1)[8:]]
    assert np.array_equal(rows_here(rows.relay, told.sample_id), made)
    assert told.tokens_hash == hash_tokens(as_tokens(sample.tokens))


@pytest.mark.parametrize("rows", [{"on_missing": "live"}], indirect=True, ids=["on_lost is not"])
def test_a_cut_sample_whose_frame_is_lost_is_named(rows: SampleRows) -> None:
    rows.relay.samples.engines.greet(hello_of())
    rows.take(lost := Sample(0, list(range(9))), reference_reply("0", 9, serial=1)["meta_info"])
    del lost.tokens[5:]
    with pytest.raises(FrameMissing, match=r"sample 0\.0"):
        seal(rows, lost)


def test_all_samples_that_cannot_be_replayed_are_named_at_once(rows: SampleRows) -> None:
    with pytest.raises(RowCountMismatch, match=r"6 of 8 samples .*'1\.1', '2\.2', '3\.3', '4\.4'") as raised:
        seal(rows, *bad_samples(rows))
    assert raised.value.samples == ("1.1", "2.2", "3.3", "4.4", "6.6", "7.7") and raised.value.step == 0
    edited = taken(rows, 8)
    edited.tokens[4] = 7
    with pytest.raises(StepError, match=r"9 tokens, and the routing of 9 .* the first 4 are the same"):
        seal(rows, edited)


@pytest.mark.parametrize("rows", [LIVE], indirect=True)
def test_a_run_goes_on_with_exactly_the_rows_that_nobody_has_left_to_the_live_router(
    rows: SampleRows, caplog: pytest.LogCaptureFixture
) -> None:
    samples = bad_samples(rows)
    ticket = seal(rows, *samples)
    whole = {"1.1": ((0, 8),), "2.2": ((0, 8),), "4.4": ((0, 5),), "5.5": ((0, 8),), "6.6": ((0, 8),)}
    assert left_live(ticket) == {"0.0": (), "3.3": ((8, 10),), "7.7": ()} | whole, "the last token has no row"
    assert ticket.samples[7].tokens_hash == hash_tokens(as_tokens(samples[7].tokens))
    assert "39 of 63 rows are left to the live router, of samples ['1.1', '2.2', '3.3'" in caplog.text
    assert "sample 5.5 from engine http://e:1, frame 1, rows 0..8: not delivered" in caplog.text
    assert "{'RowCountMismatch': 1, 'StepError': 4}; the first: sample 1.1" in caplog.text


@pytest.mark.parametrize("rows", [LIVE | {"max_live": 0.61}, LIVE | {"max_live": 0.62}], indirect=True)
def test_a_step_with_more_rows_left_than_allowed_is_refused_by_sample(rows: SampleRows) -> None:
    samples = bad_samples(rows)
    if rows.relay.config.max_live == 0.62:
        assert seal(rows, *samples).step == 0
        return
    with pytest.raises(StepError, match=r"39 of 63 rows .* max_live allows a share of 0.61") as raised:
        seal(rows, *samples)
    assert raised.value.samples == ("1.1", "2.2", "3.3", "4.4", "5.5", "6.6")
    assert seal(rows, samples[0]).step == 0  # and nothing was taken


@pytest.mark.parametrize("rows", [LIVE, LIVE | {"on_missing": "error"}], indirect=True)
def test_a_direct_frame_that_cannot_be_used_is_refused_rows(rows: SampleRows) -> None:
    rows.relay.samples.engines.greet(hello_of())
    samples = [taken(rows, at, **reference_reply(str(at), 9, serial=at)["meta_info"]) for at in range(2)]
    frames = [draft_of("0", 8).encode().tobytes(), draft_of("1", 5).encode().tobytes()]
    waiting(rows)
    deliver(rows.relay, *enumerate(frames))
    if rows.relay.config.on_missing == "live":
        assert left_live(seal(rows, *samples)) == {"0.0": (), "1.1": ((0, 8),)}
        return
    with pytest.raises(RowCountMismatch, match=r"sample 1\.1"):
        seal(rows, *samples)


@pytest.mark.parametrize("rows", [{"store_bytes": 64 << 20, "backpressure_timeout_s": 0.1}], indirect=True)
def test_a_full_store_makes_requests_wait_and_not_the_thread_that_takes(rows: SampleRows) -> None:
    kept = taken(rows)
    assert waiting(rows) == {"0.0"}
    room = rows.relay.samples.store.allocate((64 << 20) - 4096)
    samples = [Sample(index, list(range(2001))) for index in range(1, 41)]
    for place in range(40):
        rows.take(samples[place], meta(str(place), 2001))  # waits for no room, as the next line finds
    assert rows._backlog() == 40
    with pytest.raises(StoreFull, match=r"step 0: waited 0.5 s for room for .* of 40 samples: .*'1\.1'"):
        seal(rows, *samples)
    del kept
    asyncio.run(rows.room())
    assert rows._backlog() == 40 and not rows.relay.rows_held("0.0"), "samples are discarded meanwhile"
    del samples[:-1]  # filtered: what they were to hold is not waited for
    until(lambda: rows._backlog() == 1, "only the one that somebody holds waits")
    room.free()
    assert seal(rows, *samples).samples[0].sample_id == "40.40" and rows.relay.rows_held("40.40") == 2000
    value = rows.relay.metrics.value
    assert value("r3channel_samples_total", outcome="discarded") == 40
    assert value("r3channel_rejected_total", reason="other") >= 1


def test_what_is_gone_makes_room_before_frames_are_waited_for(
    rows: SampleRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, wait = [], rows.relay.samples.await_frames
    gone, late = taken(rows), taken(rows, 1, **reference_reply("late", 9, serial=1)["meta_info"])
    rows._keeper.submit(int).result(SOON_S)

    def looked_at(*names: Any, **limits: Any) -> None:
        held.append(rows.relay.rows_held("0.0"))
        wait(*names, **limits)

    monkeypatch.setattr(rows.relay.samples, "await_frames", looked_at)
    del gone
    with pytest.raises(FrameMissing):
        seal(rows, late)
    assert held == [0]


def test_an_evaluated_sample_holds_nothing_and_is_counted(rows: SampleRows) -> None:
    sample = Sample(0, list(range(9)))
    assert "routed_experts" not in rows.take(sample, meta("a", 9), trained=False)
    assert rows_of(sample) is None and waiting(rows) == set()
    assert rows.relay.metrics.value("r3channel_samples_total", outcome="discarded") == 1
    rows.take(sample, {"finish_reason": {"type": "stop"}}, trained=False)  # no routing is no fault either


def test_the_assignment_is_the_callers_own(rows: SampleRows) -> None:
    samples = [taken(rows, index, 5 + index) for index in range(4)]
    rows.relay.steps.layout = TrainerLayout(dp=2)
    ticket = rows.seal(0, samples, [[[2], [0]], [[3], [1]]], steps=[1, 1])
    assert ticket.assignment.ranks == ((("2.2",), ("0.0",)), (("3.3",), ("1.1",)))
    assert ticket.assignment.steps == (1, 1)


def test_samples_are_named_by_their_place_also_where_two_have_one_index_or_none() -> None:
    planned = [["7.0", "7.1"], ["None.2", "8.3"]]
    ticket: Any = SimpleNamespace(assignment=Assignment.given([planned]))
    assert names_at(ticket, 0, [[7, 7], [None, 8]]) == planned
    assert names_at(ticket, 0, [[7, 8], [None, 7]]) == [["7.0", "8."], ["None.2", "7."]]
    assert names_at(ticket, 0, [[7, 7, None], [8, 9]]) == [["7.0", "7.1", "None.2"], ["8.3", "9."]]
