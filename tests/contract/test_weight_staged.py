"""Updates through our half in the engine: staged beside what is served, changed over at the commit, undone bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from r3channel import errors
from r3channel.weights import hold, staged_copy, update
from r3channel.weights.loader_map import dry_run
from r3channel.weights.manifest import TensorMeta
from r3channel.weights.session import WeightSync
from r3channel.weights.transaction import EngineState
from tests.support.fake_engine import UPDATE, FakeEngine, Model
from tests.support.waits import UPDATE_S, busy
from tests.support.weights import COMMIT, NAMES, Weights, give, holds, refused, serving, session, weights


def test_an_update_reaches_every_engine_and_pauses_it_for_the_change_over_alone() -> None:
    pair = serving(), serving()
    during: list[bool] = []

    def watched(version: int) -> Iterator[tuple[str, torch.Tensor]]:
        for named in weights(version).items():
            during.append(any(engine.paused for engine in pair))
            yield named

    with session(*pair) as sync:
        report = give(sync, 1, watched(1))
        assert report.way == "staged" and report.verified == len(NAMES) and report.skipped == ()
        for engine in pair:
            engine.calls.clear()
        give(sync, 2, watched(2))
        assert [engine.calls for engine in pair] == [COMMIT, COMMIT]
        assert all(holds(engine, 2) and engine.version == "2" for engine in pair) and not any(during)


@pytest.mark.parametrize("order", [NAMES[3], "nan", "raise"])
def test_weights_that_are_wrong_before_the_commit_touch_no_engine(order: str) -> None:
    engine = serving()

    def wrong() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights(2).items():
            if name == NAMES[5] and order == "raise":
                raise ValueError("gather failed")
            if name == NAMES[5] and order == "nan":
                tensor = torch.full_like(tensor, float("nan"))
            if name != order:
                yield name, tensor

    with session(engine) as sync:
        give(sync, 1)
        engine.calls.clear()
        wanted = {NAMES[3]: errors.ManifestMismatch, "nan": errors.NonFiniteWeights, "raise": ValueError}
        refused(sync, 2, "version 1 stays", wrong(), cause=wanted[order])
        assert engine.calls == [] and holds(engine, 1) and sync.routable() == (engine.url,)
        give(sync, 2)  # over the links that are there
        assert holds(engine, 2) and engine.calls == COMMIT


def test_engine_that_finds_other_bytes_is_fenced_and_others_serve_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = serving(), serving()
    copied, spoiled = staged_copy._copy, list[int]()

    def wrong(target: torch.Tensor, staged: torch.Tensor) -> str:
        spoiled.append(1)
        return "0" * 16 if len(spoiled) == 1 else copied(target, staged)

    with session(*pair) as sync:
        give(sync, 1)
        monkeypatch.setattr(staged_copy, "_copy", wrong)
        with pytest.raises(errors.EngineLeftBehind, match="holds other bytes than were staged"):
            give(sync, 2)
        (bad,) = (engine for engine in pair if engine.paused)
        (good,) = (engine for engine in pair if engine is not bad)
        assert holds(good, 2) and sync.routable() == (good.url,)
        with pytest.raises(errors.UsageError, match="nothing holds version 2"):  # what it holds is not known
            sync.update_one(good.url, timeout_s=UPDATE_S)
        sync.update_one(bad.url, timeout_s=UPDATE_S)
        assert holds(bad, 2) and len(sync.routable()) == 2


@pytest.mark.parametrize("expected", ["engine", None])
def test_an_engine_of_float8_weights_refuses_others_by_name(expected: str | None) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    held = {name: torch.ones(8, 8).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    engine = FakeEngine(receives={key: tensor.clone() for key, tensor in held.items()})
    with session(engine, expected=expected) as sync:
        said = rf"keeps {name} float8_e4m3fn\[8, 8\].* bfloat16\[8, 8\].*Give float8 with its scales"
        refused(sync, 1, said, [(name, torch.full((8, 8), 0.5).bfloat16())])
        assert torch.equal(engine.tensors[name].float(), held[name].float()) and not engine.paused
        scaled = held | {name: torch.full((8, 8), 2.0).to(torch.float8_e4m3fn)}
        give(sync, 1, scaled.items())
        assert all(torch.equal(engine.tensors[key].float(), scaled[key].float()) for key in scaled)


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("expected", ["engine", None])
def test_an_engine_of_plain_weights_refuses_float8_ones_by_the_scale(staged: bool, expected: Any) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    given = {name: torch.ones(8, 8).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    engine = FakeEngine(receives={name: torch.zeros(8, 8)})
    with session(engine, staged=staged, expected=expected) as sync:
        refused(sync, 1, f"{name}_scale_inv", given.items(), cause=errors.ManifestMismatch)
        assert not engine.tensors[name].any() and not engine.paused and UPDATE not in engine.calls
    if staged:  # a draft's layer, which the engine does not have at all
        others = {key.replace("layers.0", "layers.1"): tensor for key, tensor in given.items()}
        with session(engine) as sync:
            report = give(sync, 1, ({name: torch.ones(8, 8)} | others).items())
            assert set(report.skipped) == set(others) and engine.tensors[name].all()


def test_a_session_that_expects_nothing_gives_a_part_of_the_model() -> None:
    engine = serving()
    half = dict(list(weights(1).items())[:4])
    with session(engine, expected=None) as sync:
        give(sync, 1, half.items())
        assert torch.equal(engine.tensors[NAMES[0]], half[NAMES[0]])
        assert torch.equal(engine.tensors[NAMES[7]], weights(0)[NAMES[7]])
    with session(engine, expected=None) as sync:  # of which this engine has nothing
        for version in (2, 3):
            assert give(sync, version, {"other": torch.ones(2)}.items()).skipped == ("other",)
        assert torch.equal(engine.tensors[NAMES[0]], half[NAMES[0]])


@pytest.mark.parametrize("staged", [True, False])
def test_two_sessions_never_mix_on_one_engine(staged: bool) -> None:
    engine = serving()
    with session(engine, staged=staged) as first:
        give(first, 1)
        for other in (False, True):
            with session(engine, staged=other) as second:
                refused(second, 5, "held by session r3channel-weights-", cause=errors.EngineRefused)
                assert holds(engine, 1)
        give(first, 2)
        assert holds(engine, 2)
        first.close()
        with session(engine) as third:
            give(third, 5)
            assert holds(engine, 5)


def test_a_trainer_that_is_silent_beyond_its_limit_holds_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that died behind a proxy, which keeps its links alive."""
    engine = serving()
    with session(engine) as silent, session(engine) as other:
        give(silent, 1)
        refused(silent, 2, "it died", disturbed(Mock(side_effect=ValueError("it died"))), timeout_s=UPDATE_S)
        for late_s, why in ((0.0, "held by session"), (UPDATE_S + 11, "")):
            monkeypatch.setattr(
                hold, "time", SimpleNamespace(monotonic=lambda s=late_s: time.monotonic() + s)
            )
            refused(other, 2, why) if why else give(other, 2)
        assert holds(engine, 2)


def test_a_record_that_comes_late_does_not_count_in_the_update_that_another_trainer_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, hashed = serving(), hold.hashed_bytes
    with session(engine) as sync:
        give(sync, 1)
        assert engine.receiver is not None
        held, begun = engine.receiver._hold, hold._Stage(update=99)

        def overtaken(flat: torch.Tensor) -> memoryview:
            assert held is not None
            held._stage = begun  # in the midst of a record
            return hashed(flat)

        monkeypatch.setattr(hold, "hashed_bytes", overtaken)
        refused(sync, 2, " 0 of 2048 items of update 99 are staged")


def disturbed(act: Callable[[], object]) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of version 2; something happens in the midst of them."""
    for name, tensor in weights(2).items():
        if name == NAMES[4]:
            act()
        yield name, tensor


def test_an_iterator_that_outlasts_the_deadline_is_exhausted_and_the_engine_serves_on() -> None:
    engine, limit_s = serving(), busy()
    given, said = disturbed(lambda: time.sleep(1.2 * limit_s)), f"did not end within {limit_s:.1f} s"
    with session(engine) as sync:
        give(sync, 1)
        refused(sync, 2, said, given, cause=errors.DeadlineExceeded, timeout_s=limit_s)
        assert holds(engine, 1) and next(given, None) is None
        give(sync, 3)
        assert holds(engine, 3)


def test_without_our_half_staging_is_refused_or_falls_back_by_name() -> None:
    plain = FakeEngine()
    refused = pytest.raises(errors.WeightUpdateFailed, match="R3CHANNEL_WEIGHTS=1")
    with session(plain) as sync, refused as failure:
        give(sync, 1)
    assert isinstance(failure.value.__cause__, errors.CannotStage) and not plain.paused and not plain.open
    with session(plain, staged="auto", verify=True) as sync, refused:  # what it will hold cannot be told
        give(sync, 1)
    with pytest.raises(errors.ConfigError, match="staged=False stages none"):
        WeightSync.whole([plain.url], staged=False, verify=True)
    with session(plain, staged="auto") as sync:
        report = give(sync, 1)
        assert report.way.startswith("broadcast: engine http://127.0.0.1") and holds(plain, 1)
        assert sync.engine_states == {plain.url: EngineState.SERVING}


def test_padding_without_weights_becomes_what_the_loader_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was started with `--load-format dummy`: where no tensor lies, it holds chance until its first commit."""
    engine, rows = serving(), 12

    def load(model: Model, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            model.held[name][rows:].zero_()
            model.held[name][:rows].copy_(tensor)

    def given(version: int) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor[:rows].clone()) for name, tensor in weights(version).items())

    monkeypatch.setattr(Model, "load_weights", load)
    before = {name: tensor.clone() for name, tensor in engine.tensors.items()}
    with session(engine) as sync:
        refused(sync, 1, "NaN", [(name, tensor * float("nan")) for name, tensor in given(1)])
        assert all(torch.equal(engine.tensors[name], tensor) for name, tensor in before.items())
        for version in (1, 2, 3):  # the second one's staged copy is what the engine held at first
            give(sync, version, given(version))
            for name, tensor in given(version):
                held = engine.tensors[name]
                assert torch.equal(held[:rows], tensor) and not held[rows:].any()


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A model that looks at values, so that its own loader places whole tensors at the commit; it refuses the tensor `wrong`."""
    told = {"wrong": ""}

    def load(model: Model, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            if tensor.is_meta:
                raise ValueError("it looks at values")
            if name == told["wrong"]:
                raise ValueError(f"{name} does not fit")
            model.held[name].copy_(tensor)

    monkeypatch.setattr(Model, "load_weights", load)
    return told


def mixed(engine: FakeEngine) -> bool:
    """Half of the tensors are of version 2, the others of version 1, and nobody is answered."""
    equal = [torch.equal(engine.tensors[n], weights(2 if n < NAMES[4] else 1)[n]) for n in NAMES]
    return all(equal) and engine.paused


def half_way(sync: WeightSync, engine: FakeEngine, loading: dict[str, str]) -> None:
    """A commit that ends in the midst of the parameters."""
    assert "it looks at values" in give(sync, 1).loaded
    assert holds(engine, 1)
    loading["wrong"] = NAMES[4]
    refused(sync, 2, f"{NAMES[4]} does not fit")
    assert sync.engine_states == {engine.url: EngineState.FENCED} and sync.routable() == ()
    assert mixed(engine)
    loading["wrong"] = ""


def spoiled(version: int) -> Weights:
    return weights(version) | {NAMES[5]: torch.full((16, 16), float("nan"))}


@pytest.mark.parametrize("then", ["nan", "refused", "another trainer"])
def test_an_engine_serves_nothing_until_its_weights_are_whole(loading: dict[str, str], then: str) -> None:
    engine = serving()
    first = session(engine)
    if then == "another trainer":  # the first one dies at once: it undoes nothing
        engine.script["/begin_weight_update", 0] = "drop"
    half_way(first, engine, loading)
    if then == "another trainer":
        first.close()
        first = session(engine)
    if then != "nan":
        engine.script["order/commit", engine._counts["order/commit"] + 1] = "refuse"
    given = spoiled(3) if then == "nan" else weights(3)
    with first as sync:
        refused(sync, 3, f"(refused|holds NaN).*{EngineState.FENCED.value}", given.items())
        assert mixed(engine) and sync.engine_states == {engine.url: EngineState.FENCED}
        give(sync, 4)
        assert holds(engine, 4) and sync.routable() == (engine.url,)


def test_a_trainer_that_comes_again_costs_no_second_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = serving()
    runs: list[int] = []

    def counted(model: torch.nn.Module, tensors: Sequence[TensorMeta]) -> object:
        runs.append(len(tensors))
        return dry_run(model, tensors)

    monkeypatch.setattr("r3channel.weights.loader_map.dry_run", counted)
    for version in (1, 2):
        with session(engine) as sync:
            give(sync, version)
            assert holds(engine, version)
    assert runs == [len(weights(1))]

    name = next(iter(engine.tensors))
    # as if the engine had made its parameters anew
    engine.tensors[name] = torch.zeros_like(engine.tensors[name])
    with session(engine) as sync:
        give(sync, 3)
        assert holds(engine, 3) and len(runs) == 2


def test_an_engine_has_time_for_a_dry_run_and_for_what_it_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, copied = serving(), staged_copy._copy
    limit_s = min(20.0, busy())  # of these, 2.4 are less than the minute that is left to 60 GB

    def slow(seconds: float, call: Callable[..., Any], *arguments: Any) -> object:
        time.sleep(seconds)
        return call(*arguments)

    monkeypatch.setattr("r3channel.weights.loader_map.dry_run", partial(slow, 2.5 * limit_s, dry_run))
    with session(engine, engine_timeout_s=limit_s) as sync:
        assert give(sync, 1, timeout_s=UPDATE_S).way == "staged"
        assert holds(engine, 1)
        monkeypatch.setattr(staged_copy, "_copy", partial(slow, 0.6 * limit_s, copied))
        monkeypatch.setattr(update, "staged_bytes", lambda _params: 60_000_000_000)
        assert give(sync, 2, timeout_s=UPDATE_S).evicted == {}
        assert holds(engine, 2) and not engine.paused and sync.routable() == (engine.url,)
