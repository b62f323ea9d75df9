"""An engine that lost its weights gets them out of another one's memory, where no trainer keeps a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from r3channel.errors import EngineLeftBehind, UsageError, WeightsCorrupt, WeightsError, WeightUpdateFailed
from r3channel.weights.session import WeightSync
from r3channel.weights.wires import RankLink
from tests.contract.test_weight_staged import (
    COMMIT,
    NAMES,
    Serving,
    holds,
    loading,
    serving,
    session,
    weights,
)
from tests.fake_engine import FakeEngine

__all__ = ["loading", "serving"]


def backwards(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Not in the order of the engines' parameters."""
    return reversed(weights(version).items())


@pytest.fixture(params=["tcp", "shared_memory"])
def trio(
    serving: Serving, request: pytest.FixtureRequest
) -> tuple[WeightSync, FakeEngine, FakeEngine, FakeEngine]:
    """A session of three engines at version 1, none of which was called since."""
    engines = serving(), serving(), serving()
    sync = session(*engines, wire=request.param)
    sync.update(backwards(1), version=1, timeout_s=20)
    for engine in engines:
        engine.calls.clear()
    return (sync, *engines)


@pytest.fixture
def restarted() -> Iterator[Callable[[FakeEngine], FakeEngine]]:
    """Another life of an engine, with zeros."""
    lives: list[FakeEngine] = []

    def restart(engine: FakeEngine) -> FakeEngine:
        lives.append(engine.restarted())
        return lives[-1]

    yield restart
    for engine in lives:
        engine.die()


Trio = tuple[WeightSync, FakeEngine, FakeEngine, FakeEngine]
Restart = Callable[[FakeEngine], FakeEngine]


def test_a_restarted_engine_is_filled_while_the_others_get_no_call(trio: Trio, restarted: Restart) -> None:
    sync, one, other, lost = trio
    again = restarted(lost)
    with sync:
        report = sync.update_one(again.url, timeout_s=20)
        assert report.version == 1 and report.verified == report.tensors == len(NAMES) and report.buckets > 0
        assert holds(again, 1) and one.calls == other.calls == [] and len(sync.routable()) == 3
        again.calls.clear()
        sync.update(backwards(2), version=2, timeout_s=20)  # no engine is told of the tensors again
        assert [engine.calls for engine in (one, other, again)] == [COMMIT] * 3
        assert all(holds(engine, 2) for engine in (one, other, again))


def test_an_engine_that_joins_holds_the_version_at_once(trio: Trio, serving: Serving) -> None:
    sync, one, *_ = trio
    late = serving()
    with sync:
        report = sync.add_engine(late.url, timeout_s=20)
        assert report is not None and report.version == 1 and holds(late, 1) and one.calls == []
        assert late.url in sync.routable()


@pytest.mark.parametrize("fails", ["staging", "commit"])
def test_an_update_that_failed_leaves_the_version_before_it_to_be_given(
    trio: Trio, restarted: Restart, fails: str
) -> None:
    sync, one, other, lost = trio
    if fails == "commit":  # one has changed over then
        other.script["order/commit", other._counts["order/commit"] + 1] = "refuse"
    tensors = dict(backwards(2))
    if fails == "staging":
        tensors[NAMES[0]] = torch.full((16, 16), float("nan"))
    with sync:
        with pytest.raises(WeightUpdateFailed):
            sync.update(tensors.items(), version=2, timeout_s=20)
        again = restarted(lost)
        sync.update_one(again.url, timeout_s=20)
        assert all(holds(engine, 1) for engine in (one, other, again))


def test_weights_that_somebody_changed_are_not_passed_on(trio: Trio, restarted: Restart) -> None:
    sync, one, _, lost = trio
    again = restarted(lost)
    one.tensors[NAMES[5]][3, 3] += 1
    with sync:
        with pytest.raises(WeightUpdateFailed, match=f"{one.url} rank 0: {NAMES[5]} holds other") as failure:
            sync.update_one(again.url, timeout_s=20)
        assert isinstance(failure.value.__cause__, WeightsCorrupt)
        assert again.version == "0" and not again.tensors[NAMES[0]].any() and not again.paused
        assert again.url not in sync.routable()
        one.tensors[NAMES[5]][3, 3] -= 1
        sync.update_one(again.url, timeout_s=20)
        assert holds(again, 1)


def test_an_engine_that_dies_while_it_is_read_leaves_the_other_untouched(
    trio: Trio, restarted: Restart, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, one, other, lost = trio
    again, fetch, fetched = restarted(lost), RankLink.fetch, list[str]()

    def dying(self: RankLink, version: int, param: int, *, timeout_s: float) -> torch.Tensor:
        fetched.append(self.engine)
        if len(fetched) == 3:
            one.die()
        return fetch(self, version, param, timeout_s=timeout_s)

    monkeypatch.setattr(RankLink, "fetch", dying)
    with sync:
        with pytest.raises(WeightUpdateFailed, match=again.url):
            sync.update_one(again.url, timeout_s=20)
        assert again.version == "0" and not again.tensors[NAMES[0]].any() and not again.paused
        sync.update_one(again.url, timeout_s=20)  # from the one that lives
        assert holds(again, 1) and set(fetched[3:]) == {other.url}


def test_an_engine_with_another_version_is_asked_for_nothing(trio: Trio) -> None:
    sync, one, *_ = trio
    (link,) = next(member.ranks for member in sync._fleet.members if member.url == one.url)
    with sync:
        with pytest.raises(WeightsError, match="version 2 is asked for, version 1 was committed last"):
            link.fetch(2, 0, timeout_s=5)
        assert torch.equal(link.fetch(1, 0, timeout_s=5).view(16, 16), weights(1)[NAMES[0]])


@pytest.mark.parametrize("why", ["alone", "left behind", "before any update"])
def test_where_nothing_holds_the_version_the_caller_is_told(
    serving: Serving, restarted: Restart, why: str
) -> None:
    pair = serving(), serving()
    with session(*pair[: 1 if why == "alone" else 2]) as sync:
        update = partial(sync.update, weights(1).items(), version=1, timeout_s=20)
        if why == "left behind":
            pair[0].script["/continue_generation", 1] = "refuse"
            with pytest.raises(EngineLeftBehind):
                update()
        elif why == "alone":
            update()
        url = pair[0].url if why != "left behind" else restarted(pair[1]).url
        with pytest.raises(UsageError, match=f"nothing holds version.*for engine {url}"):
            sync.update_one(url, timeout_s=20)


@pytest.mark.parametrize("receives", [None, weights(0)], ids=["without our half", "held by us"])
def test_what_sglang_loaded_itself_is_not_read_back(
    restarted: Restart, receives: dict[str, torch.Tensor] | None
) -> None:
    pair = [FakeEngine(receives=receives and dict(receives)) for _ in range(2)]
    try:
        with session(*pair, staged=False) as sync:
            sync.update(weights(1).items(), version=1, timeout_s=20)
            with pytest.raises(UsageError, match="no other engine took it staged"):
                sync.update_one(restarted(pair[1]).url, timeout_s=20)
    finally:
        pair[0].die()


def test_an_engine_that_joins_without_our_half_is_told_what_it_lacks(serving: Serving) -> None:
    one, plain = serving(), FakeEngine()
    try:
        with session(one, staged="auto") as sync:
            sync.update(weights(1).items(), version=1, timeout_s=20)
            with pytest.raises(WeightUpdateFailed, match=f"{plain.url} runs without our half"):
                sync.add_engine(plain.url, timeout_s=20)
            assert tuple(sync.engine_states) == sync.routable() == (one.url,) and not plain.paused
            sync.update(weights(2).items(), version=2, timeout_s=20)
            assert holds(one, 2)
    finally:
        plain.die()


def test_parameters_that_a_loader_derives_are_not_read_back(
    serving: Serving, loading: dict[str, str]
) -> None:
    pair = serving(), serving()
    with session(*pair) as sync:
        assert sync.update(weights(1).items(), version=1, timeout_s=20).loaded
        with pytest.raises(UsageError, match="nothing holds version 1"):
            sync.update_one(pair[0].url, timeout_s=20)
