"""An engine that lost its weights gets them out of another one's memory, or from the trainer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from r3channel.cli import main
from r3channel.errors import EngineLeftBehind, GiverChanged, UsageError, WeightsError, WeightUpdateFailed
from r3channel.weights.rank_link import RankLink
from r3channel.weights.session import WeightSync
from tests.contract.test_weight_staged import loading
from tests.support.fake_engine import FakeEngine
from tests.support.waits import SOON_S, UPDATE_S
from tests.support.weights import COMMIT, NAMES, give, holds, in_gpu_memory, serving, session, weights

__all__ = ["loading"]
Trio = tuple[WeightSync, FakeEngine, FakeEngine, FakeEngine]


def backwards(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Not in the order of the engines' parameters."""
    return reversed(weights(version).items())


@pytest.fixture(params=["tcp", "shared_memory", "cuda_ipc"])
def trio(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Trio:
    """A session of three engines at version 1, none of which was called since."""
    if request.param == "cuda_ipc":
        in_gpu_memory(monkeypatch)
    engines = serving(), serving(), serving()
    sync = session(*engines, wire=request.param)
    give(sync, 1, backwards(1))
    for engine in engines:
        engine.calls.clear()
    return (sync, *engines)


def test_a_restarted_engine_is_filled_while_the_others_get_no_call(trio: Trio) -> None:
    sync, one, other, lost = trio
    again = lost.restarted()
    with sync:
        report = sync.update_one(again.url, timeout_s=UPDATE_S)
        assert report.version == 1 and report.verified == report.tensors == len(NAMES) and report.buckets > 0
        assert holds(again, 1) and one.calls == other.calls == [] and len(sync.routable()) == 3
        again.calls.clear()
        give(sync, 2, backwards(2))  # no engine is told of the tensors again
        assert [engine.calls for engine in (one, other, again)] == [COMMIT] * 3
        assert all(holds(engine, 2) for engine in (one, other, again))


def test_weights_that_somebody_changed_go_no_further(trio: Trio, capsys: pytest.CaptureFixture[str]) -> None:
    sync, one, _, lost = trio
    again = lost.restarted()
    one.tensors[NAMES[5]][3, 3] += 1
    with sync:
        with pytest.raises(WeightUpdateFailed, match=f"{one.url} rank 0: {NAMES[5]} holds other") as failure:
            sync.update_one(again.url, timeout_s=UPDATE_S)
        assert isinstance(failure.value.__cause__, GiverChanged)
        assert failure.value.__cause__.engines == (one.url,)
        assert again.version == "0" and not again.tensors[NAMES[0]].any() and not again.paused
        assert again.url not in sync.routable()
        assert one.url not in sync.routable() and one.url not in sync.routable(timeout_s=SOON_S)
        sync.update_one(again.url, timeout_s=UPDATE_S)  # from the other one
        assert holds(again, 1)
        assert main(["weights", "verify", "--engine", one.url, "--engine", again.url]) == 1
        assert NAMES[5] in capsys.readouterr().out
        sync.update_one(one.url, timeout_s=UPDATE_S)
        assert holds(one, 1) and len(sync.routable()) == 3


def test_an_engine_that_lost_its_links_since_its_commit_is_not_asked(trio: Trio) -> None:
    sync, one, other, lost = trio
    sync._engines.find(one.url).ranks[0].link.abort("as if the network had ended it")
    spoiled = dict(backwards(2)) | {NAMES[0]: torch.full((16, 16), float("nan"))}
    with sync:
        with pytest.raises(WeightUpdateFailed, match="NaN"):  # it is linked again, and nothing committed
            give(sync, 2, spoiled.items())
        again = lost.restarted()
        sync.update_one(again.url, timeout_s=UPDATE_S)
        assert holds(again, 1) and holds(one, 1) and holds(other, 1)


def test_an_engine_that_dies_while_read_spares_the_other(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, one, other, lost = trio
    again, fetch, fetched = lost.restarted(), RankLink.fetch, list[str]()

    def dying(self: RankLink, version: int, param: int, *, timeout_s: float) -> torch.Tensor:
        fetched.append(self.engine)
        if len(fetched) == 3:
            one.die()
        return fetch(self, version, param, timeout_s=timeout_s)

    monkeypatch.setattr(RankLink, "fetch", dying)
    with sync:
        with pytest.raises(WeightUpdateFailed, match=again.url):
            sync.update_one(again.url, timeout_s=UPDATE_S)
        assert again.version == "0" and not again.tensors[NAMES[0]].any() and not again.paused
        sync.update_one(again.url, timeout_s=UPDATE_S)  # from the one that lives
        assert holds(again, 1) and set(fetched[3:]) == {other.url}


def test_an_engine_with_another_version_is_asked_for_nothing(trio: Trio) -> None:
    sync, one, *_ = trio
    (link,) = sync._engines.find(one.url).ranks
    with sync:
        assert torch.equal(link.fetch(1, 0, timeout_s=5).view(16, 16), weights(1)[NAMES[0]])
        with pytest.raises(WeightsError, match="version 2 is asked for, version 1 was committed last"):
            link.fetch(2, 0, timeout_s=5)


def test_an_engine_that_was_left_behind_gives_nothing() -> None:
    behind, lost = serving(), serving()
    with session(behind, lost) as sync:
        behind.script["/continue_generation", 1] = "refuse"
        with pytest.raises(EngineLeftBehind):
            give(sync, 1)
        with pytest.raises(UsageError, match=f"nothing holds version.*for engine {lost.url}"):
            sync.update_one(lost.restarted().url, timeout_s=UPDATE_S)


@pytest.mark.parametrize("staged", [True, "auto"])
def test_an_engine_that_joins_without_our_half_waits_for_the_next_update(staged: str | bool) -> None:
    one, plain = serving(), FakeEngine()
    with session(one, staged=staged) as sync:
        give(sync, 1)
        if staged is True:
            with pytest.raises(WeightUpdateFailed, match=f"{plain.url} runs without our half"):
                sync.add_engine(plain.url, timeout_s=UPDATE_S)
        else:
            assert sync.add_engine(plain.url, timeout_s=UPDATE_S) is None
        assert sync.routable() == (one.url,) and not plain.paused
        report = give(sync, 2)
        assert holds(one, 2) and report.way.startswith("staged" if staged is True else "broadcast")
        if staged == "auto":
            one.calls.clear()
            give(sync, 3)
            assert holds(plain, 3) and holds(one, 3) and "order/hold" not in one.calls  # it is held already
            # Nobody's memory is known any more.
            assert sync.add_engine(serving().url, timeout_s=UPDATE_S) is None
            with pytest.raises(UsageError, match="nothing holds version 3"):
                sync.update_one(plain.url, timeout_s=UPDATE_S)


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32])
def test_what_an_engine_rounded_is_not_given_to_one_that_keeps_it_whole(kept: torch.dtype) -> None:
    whole = {name: tensor + 0.1 for name, tensor in weights(1).items()}
    rounding = FakeEngine(receives={n: torch.zeros_like(t).bfloat16() for n, t in whole.items()})
    joins = FakeEngine(receives={n: torch.zeros_like(t).to(kept) for n, t in whole.items()})
    with session(rounding) as sync:
        assert len(give(sync, 1, whole.items()).rounded) == len(NAMES)
        if kept is torch.float32:
            with pytest.raises(WeightUpdateFailed, match=r"keeps .* rounded \(float32 -> bfloat16\)"):
                sync.add_engine(joins.url, timeout_s=UPDATE_S)
            assert joins.version == "0" and not joins.tensors[NAMES[0]].any() and not joins.paused
        else:
            report = sync.add_engine(joins.url, timeout_s=UPDATE_S)
            assert report is not None and len(report.rounded) == len(NAMES)
            assert all(torch.equal(joins.tensors[n], t.bfloat16()) for n, t in whole.items())


def test_a_tensor_that_the_giver_has_no_place_for_is_not_left_out_where_it_has_one() -> None:
    giver, joins = FakeEngine(receives=dict(list(weights(0).items())[:7])), serving()
    with session(giver, expected=None) as sync:
        assert give(sync, 1).skipped == (NAMES[7],)
        with pytest.raises(WeightUpdateFailed, match=f"{NAMES[7]}.* is wanted by the engines"):
            sync.add_engine(joins.url, timeout_s=UPDATE_S)
        assert holds(joins, 0)
        again = FakeEngine(receives={n: torch.zeros_like(t) for n, t in giver.tensors.items()})
        report = sync.add_engine(again.url, timeout_s=UPDATE_S)
        assert report is not None and report.skipped == (NAMES[7],)
        assert all(torch.equal(again.tensors[n], weights(1)[n]) for n in NAMES[:7])
        again.calls.clear()
        give(sync, 2)
        assert again.calls == COMMIT


def test_parameters_that_a_loader_derives_are_not_read_back(loading: dict[str, str]) -> None:
    pair = serving(), serving()
    with session(*pair) as sync:
        assert give(sync, 1).loaded
        with pytest.raises(UsageError, match="nothing holds version 1"):
            sync.update_one(pair[0].url, timeout_s=UPDATE_S)


# -- where no engine is left to read: the trainer gives the version again ---------------------------------------------------


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("count", [1, 2], ids=["the only engine", "all engines"])
def test_engines_that_were_all_killed_get_the_committed_version_again(staged: bool, count: int) -> None:
    engines = [serving() for _ in range(count)]
    with session(*engines, staged=staged) as sync:
        with pytest.raises(UsageError, match="of version None"):
            sync.republish(backwards(1), engines=[engines[0].url], timeout_s=UPDATE_S)
        give(sync, 1, backwards(1))
        engines = [engine.restarted() for engine in engines]
        with pytest.raises(UsageError, match=r"nothing holds version 1.*republish\(\)"):
            sync.update_one(engines[0].url, timeout_s=UPDATE_S)
        report = sync.republish(backwards(1), engines=[engine.url for engine in engines], timeout_s=UPDATE_S)
        assert report.version == 1 and all(holds(engine, 1) for engine in engines)
        assert len(sync.routable(timeout_s=5)) == count
        give(sync, 2, backwards(2))
        assert all(holds(engine, 2) for engine in engines)
