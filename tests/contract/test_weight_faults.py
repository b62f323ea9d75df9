"""What becomes of engines when an update fails at each of its calls: none serves half a model, the error names who and where."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from r3channel.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineLeftBehind,
    NonFiniteWeights,
    UsageError,
    WeightsCorrupt,
    WeightUpdateFailed,
)
from r3channel.weights.member import EngineState
from r3channel.weights.session import WeightSync
from tests.fake_engine import UPDATE, FakeEngine

Weights = dict[str, torch.Tensor]
Start = Callable[[], FakeEngine]

BUCKETS = 4
NAMES = [f"model.layers.{index}.input_layernorm.weight" for index in range(2 * BUCKETS)]
GOOD = [
    "/pause_generation",
    "/begin_weight_update",
    *[UPDATE] * BUCKETS,
    "/end_weight_update",
    "/weights_checker",
    "/update_weight_version",
    "/continue_generation",
]


def weights(version: int) -> Weights:
    return {name: torch.full((256,), float(10 * version + index)) for index, name in enumerate(NAMES)}


@pytest.fixture
def pair(start: Start) -> tuple[FakeEngine, FakeEngine]:
    return start(), start()


@pytest.fixture
def sync(pair: tuple[FakeEngine, FakeEngine]) -> Iterator[WeightSync]:
    """Both engines hold version 1."""
    with session(*pair) as opened:
        opened.update(weights(1).items(), version=1, timeout_s=20)
        for engine in pair:
            engine.calls.clear()
            engine._counts.clear()
        yield opened


def session(*engines: FakeEngine, timeout_s: float = 20, **options: object) -> WeightSync:
    values = {"staged": False, "bucket_bytes": 2048, "verify": True, "keep_copy": True, **options}
    opened = WeightSync([engine.url for engine in engines], **values)  # pyright: ignore[reportArgumentType]
    opened.connect(timeout_s=timeout_s)
    return opened


def holds(engine: FakeEngine, version: int) -> bool:
    """Whole weights of this version, under this version, and serving."""
    wanted = weights(version)
    equal = all(torch.equal(engine.tensors[name], wanted[name]) for name in NAMES)
    return equal and not engine.paused and not engine.open and engine.version == str(version)


def test_the_order_of_calls_of_a_good_update(sync: WeightSync, pair: tuple[FakeEngine, FakeEngine]) -> None:
    report = sync.update(weights(2).items(), version=2, timeout_s=20)
    assert [engine.calls for engine in pair] == [GOOD, GOOD]
    assert all(holds(engine, 2) and engine.flushed == 2 for engine in pair)
    assert report.verified == len(NAMES)


@pytest.mark.parametrize("bucket", range(BUCKETS))
@pytest.mark.parametrize("how", ["refuse", "die"])
def test_a_failure_at_any_bucket_gives_the_others_the_old_version_back(
    pair: tuple[FakeEngine, FakeEngine], bucket: int, how: str
) -> None:
    good, bad = pair
    with session(*pair, on_engine_loss="abort") as sync:
        sync.update(weights(1).items(), version=1, timeout_s=20)
        bad.script[UPDATE, BUCKETS + bucket] = how
        bad.calls.clear()
        with pytest.raises(
            WeightUpdateFailed, match=rf"version 1 stays: bucket {bucket} \(2 tensors"
        ) as failure:
            sync.update(weights(2).items(), version=2, timeout_s=20)
        assert bad.url in str(failure.value) and sync.version == 1
        assert holds(good, 1)
        if how == "refuse":
            assert holds(bad, 1)  # it answers again, so it was repaired as well
        else:
            assert sync.engine_states == {good.url: EngineState.SERVING, bad.url: EngineState.DIRTY}
            assert bad.paused and "/continue_generation" not in bad.calls


@pytest.mark.parametrize("bucket", range(BUCKETS))
def test_an_engine_that_dies_at_any_bucket_is_left_out_by_name_and_the_others_commit(
    sync: WeightSync, pair: tuple[FakeEngine, FakeEngine], bucket: int
) -> None:
    good, bad = pair
    bad.script[UPDATE, bucket] = "die"
    report = sync.update(weights(2).items(), version=2, timeout_s=20)
    assert report.evicted.keys() == {bad.url} == sync.evicted.keys() and holds(good, 2)
    assert sync.routable() == (good.url,)

    for version in (3, 4):  # it is asked no more
        assert sync.update(weights(version).items(), version=version, timeout_s=20).evicted == {}
    assert holds(good, 4)
    again = bad.restarted()
    try:
        sync.update_one(again.url, timeout_s=20)
        assert (
            holds(again, 4) and sync.evicted == {} and sync.routable() == tuple(sorted((good.url, again.url)))
        )
        sync.update(weights(5).items(), version=5, timeout_s=20)
        assert holds(good, 5) and holds(again, 5)
    finally:
        again.die()


def test_an_engine_that_hangs_is_restored_after_those_that_answer(
    sync: WeightSync, pair: tuple[FakeEngine, FakeEngine]
) -> None:
    hung, good = pair
    resumed: list[str] = []
    for engine in pair:
        resume = engine._set_paused

        def noted(paused: bool, engine: FakeEngine = engine, resume: Callable = resume) -> dict[str, object]:
            resumed.extend([] if paused else [engine.url])
            return resume(paused)

        engine._set_paused = noted
    hung.script[UPDATE, 1] = "refuse"
    hung.script["/server_info", 0] = "hang"
    begun_s = time.monotonic()
    with pytest.raises(WeightUpdateFailed, match=hung.url):
        sync.update(weights(2).items(), version=2, timeout_s=20)
    assert resumed[0] == good.url and holds(good, 1) and time.monotonic() - begun_s < 40


def test_a_restarted_engine_is_filled_alone_and_the_other_gets_no_call(
    sync: WeightSync, pair: tuple[FakeEngine, FakeEngine], start: Start
) -> None:
    good, bad = pair
    bad.script[UPDATE, 2] = "die"
    sync.update(weights(2).items(), version=2, timeout_s=20)
    good.calls.clear()
    groups = dict(good._groups)

    again = bad.restarted()
    try:
        report = sync.update_one(again.url, timeout_s=20)
        assert holds(again, 2) and again.checksums() == good.checksums() and report.version == 2
        assert good.calls == []

        sync.update(weights(3).items(), version=3, timeout_s=20)
        assert holds(good, 3) and holds(again, 3) and good._groups == groups
    finally:
        again.die()


def test_without_a_copy_a_half_loaded_engine_stays_paused_until_the_next_update(
    pair: tuple[FakeEngine, FakeEngine],
) -> None:
    good, bad = pair
    with session(*pair, keep_copy=False) as sync:
        sync.update(weights(1).items(), version=1, timeout_s=20)
        bad.script[UPDATE, BUCKETS + 1] = "refuse"
        with pytest.raises(WeightUpdateFailed, match="paused, holding parts of an update"):
            sync.update(weights(2).items(), version=2, timeout_s=20)
        assert good.paused and bad.paused and good.version == bad.version == "1"
        with pytest.raises(UsageError, match="keep_copy"):
            sync.update_one(good.url, timeout_s=20)
        sync.update(weights(2).items(), version=2, timeout_s=20)
    assert holds(good, 2) and holds(bad, 2)


@pytest.mark.parametrize("route", ["/pause_generation", "/begin_weight_update"])
def test_a_failure_before_the_first_bucket_leaves_all_serving(
    pair: tuple[FakeEngine, FakeEngine], route: str
) -> None:
    with session(*pair, on_engine_loss="abort") as sync:
        sync.update(weights(1).items(), version=1, timeout_s=20)
        pair[1].script[route, 1] = "die"
        with pytest.raises(WeightUpdateFailed, match=pair[1].url):
            sync.update(weights(2).items(), version=2, timeout_s=20)
        assert holds(pair[0], 1)


def test_an_engine_that_never_got_the_begin_serves_again(pair: tuple[FakeEngine, FakeEngine]) -> None:
    with session(*pair, on_engine_loss="abort") as sync:
        sync.update(weights(1).items(), version=1, timeout_s=20)
        pair[1].script["/begin_weight_update", 1] = "drop"
        with pytest.raises(WeightUpdateFailed, match=pair[1].url):
            sync.update(weights(2).items(), version=2, timeout_s=20)
        assert holds(pair[0], 1) and holds(pair[1], 1)
        assert set(sync.engine_states.values()) == {EngineState.SERVING}


@pytest.mark.parametrize("route", ["/end_weight_update", "/weights_checker"])
def test_a_failure_after_the_last_bucket_restores(
    sync: WeightSync, pair: tuple[FakeEngine, FakeEngine], route: str
) -> None:
    pair[1].script[route, 0] = "refuse"
    with pytest.raises(WeightUpdateFailed, match=f"{pair[1].url} {route}"):
        sync.update(weights(2).items(), version=2, timeout_s=20)
    assert holds(pair[0], 1) and holds(pair[1], 1)


def test_bytes_that_an_engine_keeps_otherwise_are_named(
    sync: WeightSync, pair: tuple[FakeEngine, FakeEngine]
) -> None:
    load = pair[1]._update

    def damaged(body: dict[str, object]) -> dict[str, object] | None:
        answer = load(body)
        if NAMES[5] in pair[1].tensors and pair[1].version == "1" and pair[1].flushed == 1:
            pair[1].tensors[NAMES[5]][0] += 1
        return answer

    pair[1]._update = damaged
    with pytest.raises(WeightUpdateFailed, match=rf"{pair[1].url}: 1 of 8 .*{NAMES[5]}") as failure:
        sync.update(weights(2).items(), version=2, timeout_s=20)
    assert isinstance(failure.value.__cause__, WeightsCorrupt) and pair[1].paused is False


@pytest.mark.parametrize("route", ["/update_weight_version", "/continue_generation"])
def test_one_engine_that_took_the_version_decides_and_the_other_is_left_behind(
    sync: WeightSync, pair: tuple[FakeEngine, FakeEngine], route: str
) -> None:
    good, bad = pair
    bad.script[route, 0] = "refuse"
    with pytest.raises(EngineLeftBehind, match=f"version 2 is committed, but 1 of 2 .*{bad.url}"):
        sync.update(weights(2).items(), version=2, timeout_s=20)
    assert holds(good, 2) and bad.paused and sync.version == 2

    good.calls.clear()
    sync.update_one(bad.url, timeout_s=20)
    assert holds(bad, 2) and good.calls == []


def test_an_engine_that_hangs_in_a_bucket_is_named_at_the_deadline_and_no_other_is_to_blame(
    start: Start,
) -> None:
    hung = start()
    with session(hung, keep_copy=False) as sync:
        sync.update(weights(1).items(), version=1, timeout_s=20)
        hung.script[UPDATE, BUCKETS + 1] = "hang"
        begun_s = time.monotonic()
        with pytest.raises(
            WeightUpdateFailed, match=f"version 1 stays: bucket 1 .*{hung.url}.*no answer within"
        ):
            sync.update(weights(2).items(), version=2, timeout_s=1)
        assert 1 <= time.monotonic() - begun_s < 17 and sync.engine_states == {hung.url: EngineState.DIRTY}


def test_an_engine_that_hangs_at_the_commit_does_not_keep_the_other_paused(
    sync: WeightSync, pair: tuple[FakeEngine, FakeEngine]
) -> None:
    good, bad = pair
    bad.script["/update_weight_version", 0] = "hang"
    report = sync.update(weights(2).items(), version=2, timeout_s=3)
    assert report.evicted.keys() == {bad.url} and holds(good, 2)
    assert bad.paused and sync.routable() == (good.url,)


def test_a_version_that_no_engine_takes_is_not_committed(start: Start) -> None:
    only = start()
    with session(only) as sync:
        sync.update(weights(1).items(), version=1, timeout_s=20)
        only.script["/update_weight_version", 1] = "refuse"
        with pytest.raises(WeightUpdateFailed, match="version 2 was not committed"):
            sync.update(weights(2).items(), version=2, timeout_s=20)
        assert sync.version == 1 and holds(only, 1)


def test_a_release_without_begin_and_end_is_updated_without_them(start: Start) -> None:
    old = start()
    old.settings = {"version": "0.5.15.post1"}
    routes = old._routes

    def without() -> dict[str, Callable]:
        missing = {"success": False, "detail": "Not Found"}
        return {
            **routes(),
            "/begin_weight_update": lambda _: missing,
            "/end_weight_update": lambda _: missing,
        }

    old._routes = without
    with session(old, staged="auto") as sync:
        for version in (1, 2):
            report = sync.update(weights(version).items(), version=version, timeout_s=20)
            assert holds(old, version) and "version=0.5.15.post1: it has no begin and end" in report.way
        assert not any(call.startswith("order/") for call in old.calls)


def test_an_engine_that_is_gone_when_the_first_update_begins_is_left_out(start: Start) -> None:
    good, gone = start(), start()
    with session(good, gone) as sync:
        gone.die()
        for version in (1, 2, 3):
            sync.update(weights(version).items(), version=version, timeout_s=20)
        assert sync.evicted.keys() == {gone.url} and holds(good, 3) and sync.routable() == (good.url,)


def test_a_cache_that_is_not_flushed_because_requests_wait_fails_no_update(start: Start) -> None:
    engine = start()
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
    with session(engine) as sync:
        sync.update(weights(1).items(), version=1, timeout_s=20)
    assert holds(engine, 1)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_float8_of_another_maker_is_sent_and_looked_through(start: Start, dtype: torch.dtype) -> None:
    engine, named = start(), {NAMES[0]: torch.ones(8, 8).to(dtype)}
    with session(engine, verify=False) as sync:
        sync.update(named.items(), version=1, timeout_s=20)
        assert torch.equal(engine.tensors[NAMES[0]].float(), torch.ones(8, 8))
        bad = {NAMES[0]: torch.full((8, 8), float("nan")).to(dtype)}
        with pytest.raises(WeightUpdateFailed, match="NaN"):
            sync.update(bad.items(), version=2, timeout_s=20)


def test_an_open_bracket_of_a_dead_trainer_is_never_served_again_without_a_whole_update(start: Start) -> None:
    left = start()
    left.paused = left.open = True

    with session(left) as sync:
        left.script[UPDATE, 0] = "refuse"
        with pytest.raises(WeightUpdateFailed, match="refused"):
            sync.update(weights(1).items(), version=1, timeout_s=20)
        assert left.paused and sync.engine_states == {left.url: EngineState.DIRTY}
        sync.update(weights(1).items(), version=1, timeout_s=20)
    assert holds(left, 1)


def test_a_group_that_never_forms_ends_at_the_deadline_and_names_the_engine(start: Start) -> None:
    good, stuck = start(), start()
    stuck.script["/init_weights_update_group", 0] = "hang"
    with session(good, stuck, on_engine_loss="abort") as sync:
        begun_s = time.monotonic()
        with pytest.raises(WeightUpdateFailed, match=stuck.url) as failure:
            sync.update(weights(1).items(), version=1, timeout_s=1.5)
        assert isinstance(failure.value.__cause__, DeadlineExceeded)
    assert time.monotonic() - begun_s < 10
    assert not good.paused and good.version == "0"


def test_engines_join_and_leave_without_a_call_to_the_others(
    sync: WeightSync, pair: tuple[FakeEngine, FakeEngine], start: Start
) -> None:
    newcomer = start()
    assert sync.add_engine(newcomer.url, timeout_s=20) is not None
    assert holds(newcomer, 1) and pair[0].calls == pair[1].calls == []

    sync.update(weights(2).items(), version=2, timeout_s=20)
    assert all(holds(engine, 2) for engine in (*pair, newcomer))

    for engine in pair:
        engine.calls.clear()
    newcomer.die()
    sync.remove_engine(newcomer.url)
    assert pair[0].calls == pair[1].calls == [] and newcomer.url not in sync.engine_states
    sync.update(weights(3).items(), version=3, timeout_s=20)
    assert all(holds(engine, 3) for engine in pair)


def test_an_engine_that_cannot_join_is_not_taken_in(
    sync: WeightSync, pair: tuple[FakeEngine, FakeEngine]
) -> None:
    with pytest.raises(WeightUpdateFailed, match=r"127\.0\.0\.1:9"):
        sync.add_engine("http://127.0.0.1:9", timeout_s=20)
    assert set(sync.engine_states) == {engine.url for engine in pair}
    with pytest.raises(ConfigError, match="is not one of"):
        sync.remove_engine("http://127.0.0.1:9")
    sync.remove_engine(pair[1].url)
    with pytest.raises(ConfigError, match="at least one"):
        sync.remove_engine(pair[0].url)


@pytest.mark.parametrize("first", [True, False])
def test_an_interrupt_during_the_update_of_one_leaves_it_as_any_failure_does(
    sync: WeightSync, pair: tuple[FakeEngine, FakeEngine], monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    engine, copy = pair[1], sync._copy
    assert copy is not None
    read = copy.read

    def interrupted() -> Iterator[list[torch.Tensor]]:
        yield from [] if first else list(read())[:1]
        raise KeyboardInterrupt

    monkeypatch.setattr(copy, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sync.update_one(engine.url, timeout_s=20)
    state = EngineState.SERVING if first else EngineState.DIRTY
    assert sync.engine_states[engine.url] is state and engine.paused is not first
    monkeypatch.undo()
    sync.update_one(engine.url, timeout_s=20)
    assert holds(engine, 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_is_refused_by_bucket_and_tensor(
    sync: WeightSync, pair: tuple[FakeEngine, FakeEngine], value: float
) -> None:
    bad = weights(2)
    bad[NAMES[5]][17] = value
    with pytest.raises(WeightUpdateFailed, match=rf"bucket 2: tensor {NAMES[5]} .*NaN or Inf") as failure:
        sync.update(bad.items(), version=2, timeout_s=20)
    assert isinstance(failure.value.__cause__, NonFiniteWeights)
    assert holds(pair[0], 1) and holds(pair[1], 1)


def test_such_numbers_pass_where_they_are_allowed(start: Start) -> None:
    engine, given = start(), weights(1)
    given[NAMES[0]][0] = float("nan")
    with session(engine, on_nonfinite="allow") as sync:
        sync.update(given.items(), version=1, timeout_s=20)
    assert engine.tensors[NAMES[0]].isnan().sum() == 1 and engine.version == "1"


def test_a_damaged_host_copy_is_not_sent(sync: WeightSync, pair: tuple[FakeEngine, FakeEngine]) -> None:
    assert sync._copy is not None
    sync._copy._committed[2][5] += 1
    with pytest.raises(WeightUpdateFailed, match=rf"tensor {NAMES[2]} .* host copy of version 1 changed"):
        sync.update_one(pair[1].url, timeout_s=20)
    assert holds(pair[1], 1) and holds(pair[0], 1)
