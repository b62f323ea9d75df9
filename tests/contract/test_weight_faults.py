"""What becomes of engines when an update fails at each of its calls: none serves half a model, the error names who and where."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from r3channel import errors
from r3channel.weights.member import EngineState
from r3channel.weights.session import WeightSync
from tests.fake_engine import UPDATE, FakeEngine
from tests.weights import BUCKETS, NAMES, again_to, broadcasting, give, holds, refused, weights

GOOD = [
    "/pause_generation", "/begin_weight_update", *[UPDATE] * BUCKETS, "/end_weight_update", "/update_weight_version",
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


@pytest.mark.parametrize(
    ("route", "number", "how"),
    [
        (UPDATE, 0, "refuse"),
        (UPDATE, BUCKETS - 1, "refuse"),
        (UPDATE, 1, "die"),
        ("/end_weight_update", 0, "refuse"),
        ("/update_weight_version", 0, "refuse"),
    ],
)
def test_a_broadcast_that_failed_is_served_nowhere_and_is_tried_again_under_the_same_version(
    pair: Pair, route: str, number: int, how: str
) -> None:
    good, bad = pair if route == UPDATE or "end" in route else (pair[0], pair[0])
    with broadcasting(*{good, bad}, on_engine_loss="abort") as sync:
        give(sync, 1)
        bad.script[route, bad._counts[route] + 1 + number] = how
        said = refused(
            sync, 2, "version 1 stays: " + (rf"bucket {number} \(2 tensors" if route == UPDATE else "")
        )
        assert bad.url in said and set(sync.engine_states.values()) == {EngineState.DIRTY}
        assert (
            bad.paused and good.paused and good.version == "1" and sync.routable() == () and sync.version == 1
        )
        give(sync, 2) if how != "die" else sync.remove_engine(bad.restarted().url)
        give(sync, 2)
        assert holds(good, 2) and good.url in sync.routable()


@pytest.mark.parametrize("bucket", [0, BUCKETS - 1])
def test_an_engine_that_dies_at_any_bucket_is_left_out_by_name_and_the_others_commit(
    sync: WeightSync, pair: Pair, bucket: int
) -> None:
    good, bad = pair
    bad.script[UPDATE, bucket] = "die"
    report = give(sync, 2)
    assert report.evicted.keys() == {bad.url} == sync.evicted.keys() and holds(good, 2)
    assert sync.routable() == (good.url,)

    for version in (3, 4):  # it is asked no more
        assert give(sync, version).evicted == {}
    assert holds(good, 4)
    good.calls.clear()
    again, groups = bad.restarted(), dict(good._groups)
    with pytest.raises(errors.UsageError, match=r"nothing holds version 4.*republish\(\)"):
        sync.update_one(again.url, timeout_s=20)
    report = again_to(sync, again, version=4)
    assert good.calls == [] and again.checksums() == good.checksums() and report.version == 4
    assert holds(again, 4) and sync.evicted == {} and sync.routable() == tuple(sorted((good.url, again.url)))
    give(sync, 5)
    assert holds(good, 5) and holds(again, 5) and good._groups == groups


@pytest.mark.parametrize(
    ("route", "how"),
    [
        ("/pause_generation", "refuse"),
        ("/pause_generation", "die"),
        ("/begin_weight_update", "die"),
        ("/begin_weight_update", "drop"),
    ],
)
def test_a_failure_before_the_first_bucket_leaves_all_serving(pair: Pair, route: str, how: str) -> None:
    good, bad = pair
    with broadcasting(*pair, on_engine_loss="abort") as sync:
        give(sync, 1)
        bad.script[route, 1] = how
        refused(sync, 2, bad.url)
        assert holds(good, 1)
        if how != "die":
            assert holds(bad, 1) and set(sync.engine_states.values()) == {EngineState.SERVING}
            assert set(sync.routable()) == {good.url, bad.url}


@pytest.mark.parametrize("route", ["/update_weight_version", "/continue_generation"])
def test_one_engine_that_took_the_version_decides_and_the_other_is_left_behind(
    sync: WeightSync, pair: Pair, route: str
) -> None:
    good, bad = pair
    bad.script[route, 0] = "refuse"
    with pytest.raises(errors.EngineLeftBehind, match=f"version 2 is committed, but 1 of 2 .*{bad.url}"):
        give(sync, 2)
    assert holds(good, 2) and bad.paused and sync.version == 2 and sync.routable() == (good.url,)

    good.calls.clear()
    again_to(sync, bad, version=2)
    assert holds(bad, 2) and good.calls == [] and set(sync.routable()) == {good.url, bad.url}


def test_an_engine_that_hangs_in_a_bucket_is_named_at_the_deadline_and_no_other_is_to_blame() -> None:
    hung = FakeEngine()
    with broadcasting(hung) as sync:
        give(sync, 1)
        hung.script[UPDATE, BUCKETS + 1] = "hang"
        begun_s = time.monotonic()
        refused(sync, 2, f"version 1 stays: bucket 1 .*{hung.url}.*no answer within", timeout_s=1)
        assert 1 <= time.monotonic() - begun_s < 17 and sync.engine_states == {hung.url: EngineState.DIRTY}


def test_an_engine_that_hangs_at_the_commit_keeps_no_other_paused(sync: WeightSync, pair: Pair) -> None:
    good, bad = pair
    bad.script["/update_weight_version", 0] = "hang"
    report = give(sync, 2, timeout_s=3)
    assert report.evicted.keys() == {bad.url} and holds(good, 2)
    assert bad.paused and sync.routable() == (good.url,)


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


def test_an_engine_that_is_gone_when_the_first_update_begins_is_left_out() -> None:
    good, gone = FakeEngine(), FakeEngine()
    with broadcasting(good, gone) as sync:
        gone.die()
        for version in (1, 2, 3):
            give(sync, version)
        assert sync.evicted.keys() == {gone.url} and holds(good, 3) and sync.routable() == (good.url,)


def test_a_cache_that_is_not_flushed_because_requests_wait_fails_no_update() -> None:
    engine = FakeEngine()
    load = engine._update

    def unflushed(body: dict[str, object]) -> dict[str, object] | None:
        answer = load(body)
        if body["flush_cache"]:
            return {
                "success": False,
                "message": "Weights were updated, but the cache was not flushed because ...",
            }
        return answer

    engine._update = unflushed
    with broadcasting(engine) as sync:
        give(sync, 1)
    assert holds(engine, 1)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_float8_of_another_maker_is_sent_and_looked_through(dtype: torch.dtype) -> None:
    engine, named = FakeEngine(), {NAMES[0]: torch.ones(8, 8).to(dtype)}
    with broadcasting(engine) as sync:
        give(sync, 1, named.items())
        assert torch.equal(engine.tensors[NAMES[0]].float(), torch.ones(8, 8))
        bad = {NAMES[0]: torch.full((8, 8), float("nan")).to(dtype)}
        refused(sync, 2, "NaN", bad.items())


def test_an_open_bracket_of_a_dead_trainer_is_never_served_again_without_a_whole_update() -> None:
    left = FakeEngine()
    left.paused = left.open = True

    with broadcasting(left) as sync:
        left.script[UPDATE, 0] = "refuse"
        refused(sync, 1, "refused")
        assert left.paused and sync.engine_states == {left.url: EngineState.DIRTY}
        give(sync, 1)
    assert holds(left, 1)


def test_a_group_that_never_forms_ends_at_the_deadline_and_names_the_engine() -> None:
    good, stuck = FakeEngine(), FakeEngine()
    stuck.script["/init_weights_update_group", 0] = "hang"
    with broadcasting(good, stuck, on_engine_loss="abort") as sync:
        begun_s = time.monotonic()
        refused(sync, 1, stuck.url, timeout_s=1.5, cause=errors.DeadlineExceeded)

    assert time.monotonic() - begun_s < 10
    assert not good.paused and good.version == "0"


def test_engines_join_and_leave_without_a_call_to_the_others(sync: WeightSync, pair: Pair) -> None:
    newcomer = FakeEngine()
    assert (
        sync.add_engine(newcomer.url, timeout_s=20) is None
    )  # nobody holds what SGLang loaded; the trainer gives it again
    again_to(sync, newcomer, version=1)
    assert holds(newcomer, 1) and pair[0].calls == pair[1].calls == []

    give(sync, 2)
    assert all(holds(engine, 2) for engine in (*pair, newcomer))

    for engine in pair:
        engine.calls.clear()
    newcomer.die()
    sync.remove_engine(newcomer.url)
    assert pair[0].calls == pair[1].calls == [] and newcomer.url not in sync.engine_states
    give(sync, 3)
    assert all(holds(engine, 3) for engine in pair)


def test_an_engine_that_cannot_join_is_not_taken_in(sync: WeightSync, pair: Pair) -> None:
    with pytest.raises(errors.EngineUnavailable, match=r"127\.0\.0\.1:9"):
        sync.add_engine("http://127.0.0.1:9", timeout_s=20)
    assert set(sync.engine_states) == {engine.url for engine in pair}
    with pytest.raises(errors.ConfigError, match="is not one of"):
        sync.remove_engine("http://127.0.0.1:9")
    sync.remove_engine(pair[1].url)
    with pytest.raises(errors.ConfigError, match="at least one"):
        sync.remove_engine(pair[0].url)


@pytest.mark.parametrize("first", [True, False])
def test_an_interrupt_while_weights_are_given_again_leaves_an_engine_as_any_failure_does(
    sync: WeightSync, pair: Pair, first: bool
) -> None:
    engine = pair[1]

    def interrupted() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights(1).items())[: 0 if first else 4]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sync.republish(interrupted(), engines=[engine.url], timeout_s=20)
    state = EngineState.SERVING if first else EngineState.DIRTY
    assert sync.engine_states[engine.url] is state and engine.paused is not first
    again_to(sync, engine, version=1)
    assert holds(engine, 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_named_by_bucket_and_tensor(sync: WeightSync, pair: Pair, value: float) -> None:
    bad = weights(2)
    bad[NAMES[5]].view(-1)[17] = value
    refused(sync, 2, rf"bucket 2: tensor {NAMES[5]} .*NaN or Inf", bad.items(), cause=errors.NonFiniteWeights)
    give(sync, 2)
    assert holds(pair[0], 2) and holds(pair[1], 2)


def test_such_numbers_pass_where_they_are_allowed() -> None:
    engine, given = FakeEngine(), weights(1)
    given[NAMES[0]][0, 0] = float("nan")
    with broadcasting(engine, on_nonfinite="allow") as sync:
        give(sync, 1, given.items())
    assert engine.tensors[NAMES[0]].isnan().sum() == 1 and engine.version == "1"
