"""A reply on its way into the table: each bad one gets its own typed error, by sample and engine; turns are kept as they come."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r3channel import errors
from r3channel.config import ChannelConfig
from r3channel.model.spec import RoutingSpec
from r3channel.plan.assignment import Assignment
from r3channel.plan.layout import TrainerLayout
from r3channel.recordings.recorder import Recorder
from r3channel.relay.journal import Journal, read_remains
from r3channel.relay.relay import Relay
from r3channel.wire import frame_view as received
from r3channel.wire.frame import encode_error, encode_frame, sample_key
from r3channel.wire.routing import as_tokens, hash_tokens
from tests.support.delivery import receivers_of, recorded, start
from tests.support.direct import rows_here, turns_here
from tests.support.samples import SPEC, flipped, frame_of, random_ids, reply_for, reply_of, span
from tests.support.waits import SOON_S, until

TOKENS = list(range(100, 141))
IDS = random_ids(40, seed=5)


@pytest.fixture
def relay() -> Iterator[Relay]:
    with closing(Relay(SPEC, TrainerLayout(), ChannelConfig())) as relay:
        yield relay


# -- bad replies ---------------------------------------------------------------------------------------------------------

LENGTH = 12


def of_model(**changes: Any) -> dict[str, Any]:
    return reply_for("r0", LENGTH, spec=replace(SPEC, **changes))


def of_ids(ids: np.ndarray, **more: Any) -> dict[str, Any]:
    return reply_of(encode_frame(SPEC, expert_ids_TLK=ids, sample_key=sample_key("r0"), **more))


def with_id(where: tuple, value: int) -> dict[str, Any]:
    ids = random_ids(LENGTH - 1)
    ids[where] = value
    return of_ids(ids)


GOOD = reply_for("r0", LENGTH)
FIELD = {"routed_experts": GOOD["meta_info"]["routed_experts"]}
SGLEXT = {"id": "r0", "choices": [], "sglext": FIELD}


BAD = {
    "no routing": (lambda: {"meta_info": {"id": "r0"}}, errors.RoutingMissing),
    "no meta_info": (lambda: {"error": "x"}, errors.RoutingMissing),
    "empty": (lambda: {"meta_info": {"routed_experts": ""}}, errors.RoutingMissing),
    "a list": (lambda: [reply_for("r0", LENGTH)], errors.UsageError),
    "two choices": (lambda: SGLEXT | {"choices": [{}, {"index": 1}]}, errors.UsageError),
    "another place": (lambda: {"id": "r0", "choices": [{"sgl_ext": FIELD}]}, errors.FrameError),
    "no text": (lambda: {"meta_info": {"routed_experts": [[1, 2]]}}, errors.FrameError),
    "another's, in sglext": (lambda: SGLEXT | {"id": "r1"}, errors.FrameCorrupt),
    "not base64": (lambda: {"meta_info": {"routed_experts": "***"}}, errors.FrameCorrupt),
    "stock int32": (lambda: reply_of(random_ids(11).astype(np.int32).tobytes()), errors.FrameMagicMismatch),
    "html": (lambda: reply_of(b"<html>502 Bad Gateway</html>"), errors.FrameMagicMismatch),
    "too few rows": (lambda: reply_for("r0", LENGTH - 1), errors.RowCountMismatch),
    "too many rows": (lambda: reply_for("r0", LENGTH + 1), errors.RowCountMismatch),
    "start offset": (lambda: of_ids(random_ids(10), first_row=1), errors.RowCountMismatch),
    "wrong top-k": (lambda: of_model(top_k=4), errors.SpecMismatch),
    "wrong layers": (lambda: of_model(moe_layers=(1, 2)), errors.SpecMismatch),
    "wrong experts": (lambda: of_model(num_experts=64), errors.SpecMismatch),
    "another model": (lambda: of_model(num_layers=8), errors.SpecMismatch),
    "id >= E": (lambda: with_id((2, 1, 3), 200), errors.ExpertIdInvalid),
    "duplicate id": (lambda: with_id((2, 1), 5), errors.ExpertIdInvalid),
    "flipped bit": (lambda: reply_of(flipped(frame_of(LENGTH), 8 * -5 + 2)), errors.FrameCorrupt),
    "cut short": (lambda: reply_of(frame_of(LENGTH)[:-3]), errors.FrameCorrupt),
    "swapped replies": (lambda: reply_of(frame_of(LENGTH, sample_key=sample_key("r1"))), errors.FrameCorrupt),
    "an id that is no text": (lambda: reply_of(frame_of(LENGTH), request_id="\ud800"), errors.FrameCorrupt),
    "engine failed": (lambda: reply_of(encode_error("no slot")), errors.EngineReported),
    "invalid rows": (lambda: of_ids(random_ids(11), valid_T=np.arange(11) != 4), errors.RowsInvalid),
}


@pytest.mark.parametrize("whole_body", [True, False])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_reply_is_refused_by_its_error_and_not_kept(relay: Relay, name: str, whole_body: bool) -> None:
    make, error = BAD[name]
    with pytest.raises(error, match=r"s1 from engine http://e:1.*") as caught:
        if whole_body:
            relay.add_body("s1", json.dumps(make()).encode(), range(LENGTH), engine="http://e:1")
        else:
            relay.add("s1", make(), range(LENGTH), engine="http://e:1")
    assert type(caught.value) is error
    assert "expected" in str(caught.value) or "damaged on the way" in str(caught.value)
    status = relay.status()
    assert status["pending"] == [] and status["store"] == {"frames": 0, "bytes": 0}
    assert relay.metrics.value("r3channel_rejected_total", reason=error.reason) == 1


PLACES = {"0.5.23": SGLEXT, "meta_info": {"choices": [GOOD]}, "0.5.15": SGLEXT | {"choices": [GOOD]}}


@pytest.mark.parametrize("reply", PLACES.values(), ids=PLACES)
def test_a_frame_is_found_at_each_place_of_sglangs(relay: Relay, reply: dict[str, Any]) -> None:
    relay.add("parsed", reply, range(LENGTH))
    body = json.dumps(reply).encode()
    assert b"/" in body and "'routed_experts': ''" in str(relay.add_body("body", body, range(LENGTH)))
    relay.add_body("escaped", body.replace(b"/", b"\\/"), range(LENGTH))
    for name in ("parsed", "body", "escaped"):
        assert np.array_equal(rows_here(relay, name), random_ids(LENGTH - 1))


def events(*replies: Any, before: str = "", end: str = "\n\n") -> bytes:
    return "".join(f"{before}data: {reply}{end}" for reply in [*map(json.dumps, replies), "[DONE]"]).encode()


DELTA = {"id": "r0", "choices": [{"index": 0, "delta": {"content": 'say "routed_experts"'}}]}


STREAMS = (
    events(reply_for("r0", 4), GOOD),
    events(DELTA, SGLEXT, {"id": "r0", "choices": [], "usage": {}}),
    events(DELTA, SGLEXT, before=": ping\r\n\r\nevent: message\r\n", end="\r\n\r\n"),
)


@pytest.mark.parametrize("body", STREAMS)
def test_of_an_event_stream_the_last_frame_is_taken(relay: Relay, body: bytes) -> None:
    assert '"routed_experts": ""' in json.dumps(relay.add_body("s", body, range(LENGTH)))
    assert np.array_equal(rows_here(relay, "s"), random_ids(LENGTH - 1))


@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        (events(DELTA, {"choices": [{"index": 1}]}, SGLEXT), errors.UsageError, "several choices"),
        (events({"index": 1, **GOOD}, {"index": 0, **GOOD}), errors.UsageError, "several choices"),
        (events(DELTA, {"error": "out of memory"}), errors.RoutingMissing, "out of memory"),
        (events({"choices": [FIELD]}, DELTA), errors.FrameError, r"is at choices\.0\.routed_experts"),
        (events(SGLEXT)[:200], errors.RoutingMissing, "no JSON"),
        *((body, errors.RoutingMissing, "") for body in (b"[" * 100_000, b"{", b"\xff", b"", b'{"meta_info": ' * 50_000)),
    ],
)  # fmt: skip
def test_an_unusable_body_or_stream_is_refused_by_name(
    relay: Relay, body: bytes, error: Any, said: str
) -> None:
    with pytest.raises(error, match=f"sample s from engine e: .*{said}"):
        relay.add_body("s", body, lambda reply: reply["output_ids"], engine="e")


WAYS: dict[str, Any] = {
    "add": lambda relay, tokens: relay.add("s", reply_for("r0", 1), tokens),
    "add_body": lambda relay, tokens: relay.add_body("s", json.dumps(reply_for("r0", 1)).encode(), tokens),
    "add_frame": lambda relay, tokens: relay.add_frame("s", frame_of(1), tokens),
    "add_live": lambda relay, tokens: relay.add_live("s", tokens),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tokens", [[], [5]])
def test_a_sample_without_a_row_is_refused_by_name_and_costs_no_step(
    relay: Relay, way: str, tokens: list[int]
) -> None:
    relay.add("other", GOOD, range(LENGTH))
    with pytest.raises(
        errors.RowCountMismatch, match=r"sample s from .* which have no row; expected two"
    ) as told:
        WAYS[way](relay, tokens)
    assert told.value.samples == ("s",) and relay.status()["pending"] == ["other"]
    relay.seal(0, Assignment.given([[["other"]]]))
    assert relay.abandon(0) == 1


NAMES = ["s0", "s1", "s2"]


def choices(replies: list[dict[str, Any]]) -> dict[str, Any]:
    """As an OpenAI route answers n = 3 with `return_meta_info`; `sglext` is the first one's."""
    return {"id": "r", "sglext": replies[0]["meta_info"], "choices": replies}


@pytest.mark.parametrize("form", [list, choices])
@pytest.mark.parametrize("escaped", [False, True])
def test_each_reply_of_a_list_is_a_sample_of_its_own_and_a_bad_one_costs_no_other(
    relay: Relay, form: Any, escaped: bool
) -> None:
    replies: list[Any] = [reply_for(n, LENGTH, seed=seed) | {"index": seed} for seed, n in enumerate(NAMES)]
    text = replies[1]["meta_info"]["routed_experts"]
    replies[1]["meta_info"]["routed_experts"] = text[:200] + ("A" if text[200] != "A" else "B") + text[201:]
    body = json.dumps(form(replies)).encode()
    seen = list[tuple[str, int]]()

    def tokens(name: str, reply: Any) -> range:
        seen.append((name, reply.get("index", len(seen))))
        return range(LENGTH)

    taken = relay.add_bodies(NAMES, body.replace(b"/", b"\\/") if escaped else body, tokens, engine="e")
    assert seen == [(name, at) for at, name in enumerate(NAMES)]
    assert isinstance(bad := taken["s1"], errors.FrameError) and bad.samples == ("s1",)
    for seed in (0, 2):
        assert np.array_equal(rows_here(relay, NAMES[seed]), random_ids(LENGTH - 1, seed=seed))
        assert escaped or form is choices or '"routed_experts": ""' in json.dumps(taken[NAMES[seed]])
    assert relay.rows_held("s1") == 0


@pytest.mark.parametrize("names", [["s0", "s1"], ["s0", "s1", "s1"], [*NAMES, "s3"]])
def test_names_that_are_not_one_for_each_reply_are_refused_and_nothing_is_kept(
    relay: Relay, names: Any
) -> None:
    body = json.dumps([reply_for(name, LENGTH) for name in NAMES]).encode()
    with pytest.raises(
        errors.UsageError, match=r"engine e: 3 replies for the samples .*expected one name for each"
    ):
        relay.add_bodies(names, body, lambda *_: range(LENGTH), engine="e")
    assert relay.rows_held("s0") == 0


@pytest.mark.parametrize("place", ["sglext", "meta_info"])
def test_rows_that_are_said_once_are_those_of_no_choice(relay: Relay, place: str) -> None:
    """`sglext` is the first one's, and nobody says so of the others."""
    said = reply_for("r", LENGTH)["meta_info"]
    body = json.dumps({"id": "r", place: said, "choices": [{}, {}]}).encode()
    taken = relay.add_bodies(["s0", "s1"], body, lambda *_: range(LENGTH))
    assert all(isinstance(error, errors.RoutingMissing) for error in taken.values())


GIVEN: Any = Assignment
NO_NAME = r"add\w*: sample_id is 7 \(int\), expected str"
WRONG: dict[str, tuple[Any, str]] = {
    "body": (lambda relay: relay.add_body("s", "{}", TOKENS), r"body is '\{\}' \(str\), expected bytes"),
    "sample of add": (lambda relay: relay.add(7, {}, [1, 2]), NO_NAME),
    "sample of add_frame": (lambda relay: relay.add_frame(7, {}, [1, 2]), NO_NAME),
    "sample of add_body": (lambda relay: relay.add_body(7, {}, [1, 2]), NO_NAME),
    "engine": (lambda relay: relay.add("s", {}, TOKENS, engine=None), r"engine is None \(NoneType\), expected str"),
    "names": (lambda relay: relay.add_bodies("ab", b"[]", len), r"sample_ids is 'ab' \(str\), expected Sequence\[str\]"),
    "discard": (lambda relay: relay.discard("a"), r"sample_ids is 'a' \(str\)"),
    "step in words": (lambda relay: relay.seal("1", ONE), r"step is '1' \(str\), expected int"),
    "no step": (lambda relay: relay.seal(None, ONE), "step is None"),
    "half a step": (lambda relay: relay.seal(1.5, ONE), r"step is 1\.5 \(float\)"),
    "a truth": (lambda relay: relay.abandon(True), r"step is True \(bool\)"),
    "letters": (lambda _: Assignment.given([["ab"]]), r"ranks is \[\['ab'\]\]"),
    "a number for a name": (lambda _: GIVEN.balanced({"a": 5, 1: 5}, dp=1, microbatch_size=1), "tokens is .*1: 5"),
    "ranks in words": (lambda _: GIVEN.round_robin(["a"], dp="1", microbatch_size=1), "dp is '1'"),
    "steps in words": (lambda _: GIVEN.given([[["a"]]], steps="1"), "steps is '1'"),
}  # fmt: skip
ONE = Assignment.given([[["s"]]])


@pytest.mark.parametrize("kind", WRONG)
def test_an_argument_of_a_wrong_type_is_named_and_nothing_is_kept(relay: Relay, kind: str) -> None:
    call, said = WRONG[kind]
    with pytest.raises(errors.UsageError, match=said):
        call(relay)
    assert relay.status()["store"]["frames"] == 0 and not relay.status()["steps"]


# -- turns ---------------------------------------------------------------------------------------------------------------


def part_of(ids_TLK: np.ndarray, begin: int, end: int, version: int = 0, *, spec=SPEC, **more: Any) -> bytes:
    """The frame of rows [begin, end)."""
    provenance = [span(begin, end, version)]
    return encode_frame(
        spec, expert_ids_TLK=ids_TLK[begin:end], first_row=begin, provenance=provenance, **more
    )


def turn(first_row: int, end: int, *, version: int = 0) -> dict[str, Any]:
    """The reply of a turn that returns rows [first_row, end)."""
    return reply_of(part_of(IDS, first_row, end, version, sample_key=sample_key("r")), request_id="r")


def sealed(relay: Relay, *names: str) -> Any:
    return relay.seal(0, Assignment.round_robin(list(names), dp=1, microbatch_size=len(names)))


def test_a_turn_looks_at_no_row_of_the_turns_before(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty turns: every row is verified once, lies where it was kept, and is never written again."""
    verified, checked = [], received.check
    seen = lambda ids_TLK, **its: verified.append(len(ids_TLK)) or checked(ids_TLK, **its)  # noqa: E731
    monkeypatch.setattr(received, "check", seen)
    ids, tokens, before = random_ids(300, seed=1), list(range(301)), []
    for number in range(30):
        first, end = 10 * number, 10 * number + 10
        relay.add_frame("s", part_of(ids, first, end), tokens[: end + 1], append=number > 0)
        turns = turns_here(relay, "s")
        assert len(turns) == number + 1
        assert all(one is other for one, other in zip(turns, before, strict=False))
        before = turns
    assert verified == [10] * 30 and relay.status()["store"]["frames"] == 30
    assert np.array_equal(rows_here(relay, "s"), ids)


def test_others_come_in_while_a_turn_is_verified(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    relay.add("s", turn(0, 10), TOKENS[:11])
    verifying, goes_on, checked = threading.Event(), threading.Event(), received.check

    def slow(ids_TLK: Any, **its: Any) -> Any:
        if len(ids_TLK) == 30:
            verifying.set()
            assert goes_on.wait(SOON_S)
        return checked(ids_TLK, **its)

    monkeypatch.setattr(received, "check", slow)
    with ThreadPoolExecutor(2) as pool:
        try:
            appended = pool.submit(relay.add, "s", turn(10, 40), TOKENS, append=True)
            assert verifying.wait(SOON_S)
            pool.submit(relay.add, "t", turn(0, 10), TOKENS[:11]).result(SOON_S)
            pool.submit(sealed, relay, "t").result(SOON_S)
            assert not appended.done() and relay.rows_held("s") == 10
        finally:
            goes_on.set()
        appended.result(SOON_S)
    assert relay.rows_held("s") == 40
    relay.abandon(0)


@pytest.mark.parametrize(
    "row, words", [(11, "the rows between are missing"), (9, "sent again"), (0, "sent again")]
)
def test_a_gap_or_overlap_is_refused_and_rows_stay(relay: Relay, row: int, words: str) -> None:
    relay.add("s", turn(0, 10), TOKENS[:11])
    said = rf"sample s from engine e: .*expected to begin at row 10 \({words}"
    with pytest.raises(errors.TurnMismatch, match=said):
        relay.add("s", turn(row, 20), TOKENS[:21], append=True, engine="e")
    assert relay.rows_held("s") == 10 and relay.status()["store"]["frames"] == 1
    relay.add("s", turn(10, 20), TOKENS[:21], append=True)
    assert np.array_equal(rows_here(relay, "s"), IDS[:20])


@pytest.mark.parametrize(
    "tokens", [[1.0, 2], np.array([1.0, 2.0]), np.array([1, 1 << 32]), {1, 2}, {1: 2, 3: 4}, range(1 << 31, (1 << 31) + 2)]
)  # fmt: skip
def test_what_are_no_int32_token_ids_is_refused(tokens: Any) -> None:
    with pytest.raises(errors.UsageError, match="tokens"):
        as_tokens(tokens)


def test_earlier_tokens_may_not_change_and_the_last_one_may_for_it_has_no_row_yet(relay: Relay) -> None:
    relay.add("s", turn(0, 10), TOKENS[:11])
    changed = [*TOKENS[:4], 7, *TOKENS[5:21]]
    with pytest.raises(errors.TurnMismatch, match="first 10 tokens differ"):
        relay.add("s", turn(10, 20), changed, append=True)
    relay.add("s", turn(10, 20), [*TOKENS[:10], 7, *TOKENS[11:21]], append=True)


SETS = RoutingSpec(num_layers=8, moe_layers=tuple(range(8)), num_experts=384, top_k=8)
ONE_LAYER = RoutingSpec(num_layers=1, moe_layers=(0,), num_experts=64, top_k=2)


@pytest.mark.parametrize(
    ("spec", "first", "second"),
    [(SETS, a, b) for a in (1, 3, 20) for b in (1, 8, 20)] + [(ONE_LAYER, 8193, 7), (ONE_LAYER, 8193, 8192)],
)
def test_honest_turns_of_codec_set_arrive(spec: RoutingSpec, first: int, second: int) -> None:
    relay, ids = Relay(spec, TrainerLayout(), ChannelConfig()), random_ids(first + second, spec=spec)
    for start_row, end in ((0, first), (first, first + second)):
        frame = part_of(ids, start_row, end, spec=spec, codec="set")
        relay.add_frame("s", frame, range(end + 1), append=start_row > 0)
    assert np.array_equal(np.sort(rows_here(relay, "s")), np.sort(ids))
    relay.close()


# -- responses that were cut ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["reply", "body", "held"])
@pytest.mark.parametrize("invalid", [(), (3, 12), (30,)])
def test_of_a_response_that_was_cut_the_rows_of_the_tokens_that_are_left_are_trained(
    tmp_path: Path, way: str, invalid: tuple[int, ...]
) -> None:
    """Before and behind the cut rows without routing lie, and another weight version begins behind it; a turn follows."""
    relay = Relay(SPEC, TrainerLayout(), ChannelConfig(invalid_rows="mask"), recorder=Recorder(tmp_path))
    valid_T = ~np.isin(np.arange(40), invalid)

    def frame(end: int, *spans: Any) -> bytes:
        parts: Any = {"expert_ids_TLK": IDS[:end], "valid_T": valid_T[:end], "provenance": spans}
        return encode_frame(SPEC, sample_key=sample_key("r"), **parts)

    reply: Any = reply_of(frame(40, span(0, 20, 1), span(20, 40, 2)), request_id="r")
    add: Any = relay.add_body if way == "body" else relay.add
    what = json.dumps(reply).encode() if way == "body" else reply
    with pytest.raises(errors.RowCountMismatch):
        add("s", what, TOKENS[:16])
    if way == "held":
        add("s", what, TOKENS)
        relay.cut("s", TOKENS, 16, step=0)
    else:
        add("s", what, TOKENS[:16], cut=True)
    recorder: Any = relay.samples.recorder
    assert recorder._kept["s"].tolist() == TOKENS[:16]
    (kept,) = turns_here(relay, "s")
    relay.add_frame("same", frame(15, span(0, 15, 1)), TOKENS[:16])
    (same,) = turns_here(relay, "same")
    for name in ("first_row", "end_row", "provenance", "invalid", "sample_key"):
        assert getattr(kept, name) == getattr(same, name), name
    assert np.array_equal(kept.ids_TLK, same.ids_TLK) and np.array_equal(kept.digests_L, same.digests_L)
    assert relay.status()["store"]["frames"] == 2 and relay.metrics.value("r3channel_cut_rows_total") == 25
    relay.add("s", turn(15, 40), TOKENS, append=True)
    start(receivers_of(relay), sealed(relay, "s"))[0].result(SOON_S)
    relay.join_previous(timeout_s=SOON_S)
    there = valid_T | (np.arange(40) >= 15)
    recording = recorded(tmp_path)
    assert np.array_equal(recording.rows("s")[there], IDS[there]) and len(recording.frames["s"]) == 2
    until(lambda: relay.metrics.value("r3channel_samples_total", outcome="cut") == 1)
    relay.close()


def test_what_is_not_cut_is_taken_as_it_is_and_what_cannot_be_is_named(relay: Relay) -> None:
    relay.add("s", turn(0, 40), TOKENS, cut=True)
    assert np.array_equal(rows_here(relay, "s"), IDS)
    with pytest.raises(errors.RowCountMismatch):
        relay.add("longer", turn(0, 10), TOKENS[:20], cut=True)
    with pytest.raises(errors.RowCountMismatch):
        relay.add("none", turn(0, 10), TOKENS[:1], cut=True)
    relay.add("two", turn(0, 10), TOKENS[:11])
    with pytest.raises(errors.RowCountMismatch):  # nothing of the turn is left
        relay.add("two", turn(10, 20), TOKENS[:8], append=True, cut=True)
    with pytest.raises(errors.TurnMismatch):
        relay.cut("s", [*TOKENS[:-1], 7], 16, step=3)
    for tokens in (1, 42):
        with pytest.raises(errors.RowCountMismatch, match=f"{tokens} of 41 tokens are to be left"):
            relay.cut("s", TOKENS, tokens, step=3)
    turns_here(relay, "s")[0].block.view[0] ^= 1
    with pytest.raises(
        errors.FrameCorrupt, match="step 3: sample s: rows at rest are not those that came"
    ) as corrupt:
        relay.cut("s", TOKENS, 16, step=3)
    assert corrupt.value.samples == ("s",)
    assert relay.rows_held("s", TOKENS) == 40
    assert relay.status()["store"]["frames"] == 2


@pytest.mark.parametrize("turns", [[10, 20, 29], [10, 20], [10, 15], [10], [3]], ids=str)
def test_of_turns_that_are_cut_what_is_left_is_sealed_and_survives_a_kill(
    on_disk: Relay, tmp_path: Path, turns: list[int]
) -> None:
    for begin, end in ((0, 10), (10, 20), (20, 40)):
        on_disk.add("s", turn(begin, end), TOKENS[: end + 1], append=begin > 0)
    left = TOKENS[: turns[-1] + 1]
    on_disk.cut("s", TOKENS, len(left), step=0)
    assert np.array_equal(rows_here(on_disk, "s"), IDS[: turns[-1]])
    (sample,), (folder,) = sealed(on_disk, "s").samples, tmp_path.iterdir()
    saved = sorted(read_remains(folder).samples["s"], key=lambda each: each.turn)
    assert [each.tokens - 1 for each in saved] == turns
    assert saved[-1].tokens_hash == sample.tokens_hash == hash_tokens(as_tokens(left))
    on_disk.abandon(0)


def test_with_tensors_beside_the_rows_no_response_is_cut() -> None:
    config = ChannelConfig(token_tensors="combine_weights")
    with closing(Relay(SPEC, TrainerLayout(), config)) as relay:
        with pytest.raises(errors.UsageError, match=r"sample s from engine .*token_tensors are declared"):
            relay.add("s", turn(0, 40), TOKENS[:16], cut=True)
        with pytest.raises(errors.UsageError, match=r"step 3: sample s: .*token_tensors are declared"):
            relay.cut("s", TOKENS, 16, step=3)


def test_a_reply_that_is_cut_needs_no_room_beside_its_own(relay: Relay) -> None:
    relay.add("whole", turn(0, 40), TOKENS)
    relay.samples.store.ceiling_bytes = relay.samples.store.live_bytes
    relay.discard(["whole"])
    relay.add("s", turn(0, 40), TOKENS[:16], cut=True)
    assert np.array_equal(rows_here(relay, "s"), IDS[:15])


# -- what the disk cannot keep -------------------------------------------------------------------------------------------


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Relay]:
    with closing(Relay(SPEC, TrainerLayout(), ChannelConfig(journal=str(tmp_path)))) as relay:
        yield relay


def full(*_: Any, **__: Any) -> None:
    raise errors.StoreFull("no room")


def test_rows_whose_note_cannot_be_written_stay_the_samples_own(
    on_disk: Relay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "note", full)
        on_disk.add("s", turn(0, 10), TOKENS[:11])
    assert "sample s would not survive a kill" in caplog.text
    on_disk.add("t", turn(0, 10), TOKENS[:11])
    assert on_disk.status()["store"]["frames"] == 2 and np.array_equal(rows_here(on_disk, "s"), IDS[:10])


def test_a_probe_leaves_nothing(on_disk: Relay, tmp_path: Path) -> None:
    on_disk.check_engine(reply_of(frame_of(3)), engine="e", tokens=3)
    assert not list(tmp_path.glob("*/*.frame")) and on_disk.status()["store"]["frames"] == 0
