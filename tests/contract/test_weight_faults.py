"""What becomes of engines when an update fails at each of its calls: none serves half a model, the error names who and where."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from r3channel import errors
from r3channel.transport.connection import Connection
from r3channel.transport.process_group import in_background
from r3channel.weights.broadcast import Broadcast
from r3channel.weights.hold import Hold
from r3channel.weights.rank_link import RankLink
from r3channel.weights.send_planner import _RECORD_BYTES
from r3channel.weights.session import WeightSync
from r3channel.weights.transaction import EngineState
from r3channel.weights.update import _at_once
from tests.support.fake_engine import UPDATE, FakeEngine
from tests.support.waits import SOON_S, UPDATE_S, busy, until
from tests.support.weights import NAMES, broadcasting, give, holds, refused, serving, session, weights

GOOD = [
    "/pause_generation", "/begin_weight_update", *[UPDATE] * (len(NAMES) // 2), "/end_weight_update", "/update_weight_version",
    "/continue_generation",
]  # fmt: skip
Pair = tuple[FakeEngine, FakeEngine]


@pytest.fixture
def pair() -> Pair:
    return FakeEngine(), FakeEngine()


@pytest.fixture
def sync(pair: Pair) -> Iterator[WeightSync]:
    """Both engines hold version 1."""
    with broadcasting(*pair) as opened:
        give(opened, 1)
        for engine in pair:
            engine.calls.clear()
            engine._counts.clear()
        yield opened


def test_the_order_of_calls_of_a_good_update(sync: WeightSync, pair: Pair) -> None:
    give(sync, 2)
    assert [engine.calls for engine in pair] == [GOOD, GOOD]
    assert all(holds(engine, 2) and engine.flushed == 2 for engine in pair)


STAGED = {
    "meet": "/server_info", "link": "order/open", "stage": "send", "verify": "verify", "pause": "/pause_generation",
    "commit": "order/commit", "resume": "/continue_generation",
}  # fmt: skip
PHASES = {
    "staged": STAGED,
    "shared_memory": {phase: STAGED[phase] for phase in ("stage", "verify", "commit")},
    "gloo": {phase: STAGED[phase] for phase in ("pause", "verify", "commit", "resume")}
    | {"group": "order/regroup", "stage": "_land", "later": "_land"},
    "broadcast": {
        "meet": "/server_info", "link": "/init_weights_update_group", "pause": "/pause_generation",
        "begin": "/begin_weight_update", "stage": UPDATE, "end": "/end_weight_update", "commit": "/update_weight_version",
        "resume": "/continue_generation",
    },
}  # fmt: skip
"""By way, the phases of an update of an engine that is met anew, and what is struck: a call to it, or a link of its rank."""
BYTES = "stage", "later"
# Linking may take all of an update's time, and a begin that is refused is taken for a bracket that is open already.
# Of a joint group only what is its own is struck in `make test`.
ALIKE = [("gloo", phase) for phase in ("pause", "verify", "commit", "resume")]
MATRIX = [
    pytest.param(way, phase, fault, marks=[pytest.mark.long] if (way, phase) in ALIKE else [])
    for way, phases in PHASES.items()
    for phase in phases
    for fault in ("refuse", "die", "drop", "hang")
    if (phase, fault) not in (("link", "hang"), ("begin", "refuse"))
]


def left_behind(phase: str, fault: str) -> bool:
    """Whether the other engine has the version by then, and this one answered that it does not take it, or does not serve."""
    return phase == "resume" or (phase == "commit" and fault == "refuse")


def strike(
    bad: FakeEngine, way: str, phase: str, fault: str, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck = PHASES[way][phase]
    if struck.startswith(("/", "order/")):
        # linking pauses a staged engine once, and resumes it; its life was asked for just now
        again = phase == "meet" or (way in ("staged", "gloo") and phase in ("pause", "resume"))
        bad.script[struck, int(again)] = fault
        return
    if struck.startswith("_"):
        strike_landing(bad, fault, 2 * (phase == "later"), limit_s, monkeypatch)
        return
    inner, record = getattr(RankLink, struck), Connection.send_record

    def damaged(link: Connection, kind: int, body: bytes = b"", **more: Any) -> None:
        """The digest at its end; of a question the update's number."""
        raw = bytearray(body)
        if raw:
            raw[-1 if phase == "stage" else 0] ^= 1
        return record(link, kind, bytes(raw), **more)

    def spoiled(link: RankLink, *words: Any, **more: Any) -> Any:
        if link.engine != bad.url:
            return inner(link, *words, **more)
        if fault == "refuse":
            with patch.object(link.link, "send_record", partial(damaged, link.link)):
                return inner(link, *words, **more)
        if fault == "hang":
            link.link.recv_record(timeout_s=more.get("record_timeout_s") or more["timeout_s"])
        else:
            (bad.die if fault == "die" else link.link.close)()
        return inner(link, *words, **more)

    monkeypatch.setattr(RankLink, struck, spoiled)


def strike_landing(
    bad: FakeEngine, fault: str, first: int, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a record lands: in the engine's own half, on a link's thread."""
    inner, count = Hold._land, itertools.count()

    def spoiled(hold: Hold, *words: Any) -> Any:
        if bad.receiver is None or hold is not bad.receiver._hold or next(count) < first:
            return inner(hold, *words)
        if fault == "die":
            in_background(bad.die, name="test-die")
        elif fault == "drop":
            hold._links[0].close()
        elif fault == "hang":
            bad.dead.wait(1.5 * limit_s)
        if fault == "refuse":
            words[-1].update(b"another byte")
        return inner(hold, *words)

    monkeypatch.setattr(Hold, "_land", spoiled)


@pytest.mark.parametrize(("way", "phase", "fault"), MATRIX)
def test_a_fault_in_any_phase_leaves_every_engine_with_one_version_or_fenced_by_name(
    way: str, phase: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update's own time is longer than an engine's: who waited it out would take the healthy engine's with it."""
    monkeypatch.setitem(_RECORD_BYTES, "gloo", 2048)
    good, bad = (FakeEngine() if way == "broadcast" else serving() for _ in "12")
    wire, limit_s = way if way in ("shared_memory", "gloo") else "tcp", min(20.0, 2 * busy())
    with session(good, bad, staged=way != "broadcast", wire=wire, engine_timeout_s=limit_s) as sync:
        give(sync, 1)
        bad = bad.restarted()  # it has to be met again
        assert sync.routable(timeout_s=SOON_S) == (good.url,)
        said = ""
        with monkeypatch.context() as context:
            strike(bad, way, phase, fault, limit_s, context)
            in_group = way == "gloo" and phase in ("group", *BYTES)
            fails = not left_behind(phase, fault) and (fault == "refuse" or in_group)
            if left_behind(phase, fault):
                said = f"version 2 is committed, but 1 of 2 .*{bad.url}"
                refused(sync, 2, said, error=errors.EngineLeftBehind)
                # both updates' bytes, which go to each of two engines where they are staged
                assert sync.metrics.value("r3channel_weight_bytes_total") / 16384 == 1 + (way != "broadcast")
            elif fails:
                said, damages = refused(sync, 2, "version 1 stays"), phase in BYTES and way != "broadcast"
                assert ("damaged" in said) == (fault == "refuse" and damages)
                assert (NAMES[4 * (phase == "later")] if "damaged" in said else bad.url) in said
            else:
                assert give(sync, 2).evicted.keys() == {bad.url} == sync.evicted.keys()
        if way == "gloo" and phase in BYTES:  # joined, and left before it serves again
            assert fault == "refuse" or f"joint group has ended; engine {bad.url} rank 0: " in said
            assert good.calls[-3:] == ["order/regroup", "order/regroup", "/continue_generation"]
        if fails:
            in_place = way == "broadcast" and phase in ("stage", "end")  # engines hold parts of an update
            assert sync.version == 1 and sync.routable() == (() if in_place else (good.url,))
            assert good.paused if in_place else holds(good, 1)
        else:
            assert holds(good, 2) and sync.version == 2 and sync.routable() == (good.url,)
        if fault == "die":
            assert give(sync, 3).evicted.keys() == {bad.url} and holds(good, 3)
            bad = bad.restarted()
        report = give(sync, 4)
        assert report.evicted == sync.evicted == {} and holds(good, 4) and holds(bad, 4)
        assert set(sync.routable()) == {good.url, bad.url}


def test_a_source_that_has_left_before_it_sends_costs_one_engine(sync: WeightSync, pair: Pair) -> None:
    send, first = Broadcast._send, iter([True])

    def late(self: Broadcast, *words: Any) -> None:
        if next(first, False):
            until(lambda: self._source.group is None)
        send(self, *words)

    pair[1].script[UPDATE, 0] = "die"
    with patch.object(Broadcast, "_send", late):
        assert give(sync, 2).evicted.keys() == {pair[1].url} and holds(pair[0], 2)


def test_an_engine_that_refuses_to_say_how_an_order_went_serves_on() -> None:
    with session(engine := serving()) as sync:
        engine.script |= {("order/open", 0): "drop", ("order/look", 0): "refuse"}
        refused(sync, 1, f"{engine.url} ")
        assert holds(engine, 0)


def test_the_links_of_an_engine_are_idle_once_a_call_over_one_of_them_has_failed() -> None:
    engine, done = SimpleNamespace(ranks=[0.0, 0.2]), list[float]()

    def call(rank: Any) -> None:
        time.sleep(rank)
        done.append(1 / rank)

    with pytest.raises(ZeroDivisionError):
        _at_once(engine, call)  # pyright: ignore[reportArgumentType]
    assert done == [5.0]


def test_a_release_without_begin_and_end_is_updated_without_them() -> None:
    old = FakeEngine()
    old.settings = {"version": "0.5.15.post1"}
    routes = old._routes

    def without() -> dict[str, Callable]:
        missing = {"success": False, "detail": "Not Found"}
        return routes() | dict.fromkeys(("/begin_weight_update", "/end_weight_update"), lambda _: missing)

    old._routes = without
    with broadcasting(old, staged="auto") as sync:
        for version in (1, 2):
            report = give(sync, version)
            assert holds(old, version) and "version=0.5.15.post1: it has no begin and end of" in report.way
        assert not any(call.startswith("order/") for call in old.calls)


def test_a_cache_that_is_not_flushed_because_requests_wait_fails_no_update() -> None:
    engine = FakeEngine()
    load = engine._update

    def unflushed(body: dict[str, object]) -> dict[str, object] | None:
        said = {"success": False, "message": "Weights were updated, but the cache was not flushed because"}
        return load(body) and (said if body["flush_cache"] else {"success": True})

    engine._update = unflushed
    with broadcasting(engine) as sync:
        give(sync, 1)
    assert holds(engine, 1)


def test_neither_a_stranger_nor_the_last_engine_is_removed(sync: WeightSync, pair: Pair) -> None:
    with pytest.raises(errors.ConfigError, match="is not one of"):
        sync.remove_engine("http://127.0.0.1:9")
    sync.remove_engine(pair[1].url)
    with pytest.raises(errors.ConfigError, match="at least one"):
        sync.remove_engine(pair[0].url)


@pytest.mark.parametrize("first", [True, False])
def test_an_interrupt_leaves_an_engine_as_any_failure_does(sync: WeightSync, pair: Pair, first: bool) -> None:
    engine = pair[1]

    def interrupted() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights(1).items())[: 0 if first else 4]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sync.republish(interrupted(), engines=[engine.url], timeout_s=UPDATE_S)
    state = EngineState.SERVING if first else EngineState.FENCED
    assert sync.engine_states[engine.url] is state and engine.paused is not first
    sync.republish(weights(1).items(), engines=[engine.url], timeout_s=UPDATE_S)
    assert holds(engine, 1)
