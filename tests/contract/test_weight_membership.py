"""A session and its registry: who may join, whose lease runs out, who may get requests, and when an update is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from r3channel import errors
from r3channel.weights.registry import EngineRecord, WeightRegistry
from r3channel.weights.session import WeightSync
from r3channel.weights.sglang import EngineClient
from tests.fake_engine import UPDATE, FakeEngine
from tests.weights import BUCKETS, NAMES, broadcasting, give, refused, weights

OURS = str(torch.__version__)


def registry(lease_s: float = 1000.0) -> WeightRegistry:
    return WeightRegistry(torch=OURS, nccl="2.27.3", lease_s=lease_s)


def urls(*engines: FakeEngine) -> tuple[str, ...]:
    return tuple(sorted(engine.url for engine in engines))


def stranger(registry: WeightRegistry, url: str = "http://127.0.0.1:9", boot_id: str = "x") -> None:
    """Somebody else registers an engine, as a rollout manager does."""
    registry.join(EngineRecord(engine=url, boot_id=boot_id, ranks=1), now_s=time.monotonic())


@pytest.mark.parametrize(("what", "theirs", "ours"), [("torch", "2.1.0", OURS), ("nccl", "2.26.2", "2.27.3")])
def test_awex_handshake_refuses_an_engine_of_other_versions_before_a_group_is_formed(
    what: str, theirs: str, ours: str
) -> None:
    good, bad = FakeEngine(), FakeEngine()
    other = EngineClient(bad.url, **{what: theirs})  # pyright: ignore[reportArgumentType]
    unlike = rf"{bad.url} runs {what} {theirs}, the trainer {ours.split('+')[0]}"
    refused = pytest.raises(errors.RegistryRefused, match=unlike)
    with WeightSync([good.url, other], registry=registry()) as sync, refused:
        sync.connect(timeout_s=20)
    assert "/init_weights_update_group" not in good.calls + bad.calls

    with broadcasting(good, registry=registry()) as sync:
        give(sync, 1)
        with pytest.raises(errors.WeightUpdateFailed, match=f"{what} {theirs}"):
            sync.add_engine(other, timeout_s=20)
        assert sync.routable() == urls(good) == tuple(sync.engine_states)


def test_awex_engines_are_routable_from_their_commit_on_and_not_while_an_update_is_under_way() -> None:
    pair = FakeEngine(), FakeEngine()
    during: list[tuple[str, ...]] = []

    with broadcasting(*pair) as sync:

        def watched(version: int) -> Iterator[tuple[str, torch.Tensor]]:
            for named in weights(version).items():
                during.append(sync.routable())
                yield named

        assert sync.routable() == ()
        give(sync, 1, watched(1))
        assert sync.routable() == urls(*pair) and set(during) == {()}
        newcomer = FakeEngine()
        sync.add_engine(newcomer.url, timeout_s=20)
        assert sync.routable() == urls(*pair, newcomer)
        members = sync.registry.members(now_s=time.monotonic())
        assert {record.committed_version for record in members} == {1}
        assert len({record.boot_id for record in members}) == 3
        sync.remove_engine(newcomer.url)
        assert sync.routable() == urls(*pair)


def test_a_restarted_engine_that_nobody_updated_is_not_routable() -> None:
    """miles#1724: a restarted engine served base weights."""
    good, bad = FakeEngine(), FakeEngine()
    with broadcasting(good, bad) as sync:
        give(sync, 1)
        again = bad.restarted()
        assert sync.renew(timeout_s=10) == (good.url,)
        report = give(sync, 2)
        assert report.expired == () and sync.routable() == urls(good, again) and again.version == "2"


def test_an_engine_removed_while_asked_whether_it_lives_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    good, gone = FakeEngine(), FakeEngine()
    with broadcasting(good, gone) as sync:
        give(sync, 1)
        asked = sync._fleet.boot_ids

        def removed_meanwhile(timeout_s: float) -> object:
            lives = asked(timeout_s)
            sync.remove_engine(gone.url)
            return lives

        monkeypatch.setattr(sync._fleet, "boot_ids", removed_meanwhile)
        assert sync.renew(timeout_s=5) == (good.url,)
        members = sync.registry.members(now_s=time.monotonic())
        assert [record.engine for record in members] == [good.url]


def test_an_engine_whose_lease_runs_out_is_left_out_of_the_next_update_by_name() -> None:
    live, silent = FakeEngine(), FakeEngine()
    with broadcasting(live, silent, registry=registry(lease_s=1.5)) as sync:
        give(sync, 1)
        silent.die()
        limit = time.monotonic() + 60
        while silent.url in sync.renew(timeout_s=0.3):
            assert time.monotonic() < limit
            time.sleep(0.1)
        sync.renew(timeout_s=0.3)
        report = give(sync, 2)
        assert report.expired == (silent.url,) and set(sync.engine_states) == {live.url}
        assert live.version == "2" and sync.routable() == (live.url,)

        while sync.routable():
            assert time.monotonic() < limit
            time.sleep(0.1)
        with pytest.raises(errors.RegistryRefused, match=rf"no engine is left to update.*{live.url}"):
            give(sync, 3)
        assert live.version == "2" and not live.paused


def test_a_lease_covers_the_update_that_is_under_way() -> None:
    engine = FakeEngine()

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        time.sleep(1.0)
        yield from weights(1).items()

    with broadcasting(engine, registry=registry(lease_s=0.5)) as sync:
        sync.renew(timeout_s=5)
        give(sync, 1, slowly())
        assert engine.version == "1"


def test_a_lease_covers_a_pause_that_takes_longer() -> None:
    engine = FakeEngine()
    pause = engine._set_paused

    def slowly(paused: bool) -> dict[str, object]:
        time.sleep(1.0 if paused else 0.0)
        return pause(paused)

    with broadcasting(engine, registry=registry(lease_s=0.8)) as sync:
        engine._set_paused = slowly
        sync.renew(timeout_s=5)
        give(sync, 1)
        assert engine.version == "1"


def test_an_engine_that_joins_the_registry_during_an_update_changes_nothing_for_the_others() -> None:
    engine, shared = FakeEngine(), registry()

    def joined_by_another() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights(2).items()
        joining = threading.Thread(target=stranger, args=(shared,))
        joining.start()
        joining.join()

    with broadcasting(engine, registry=shared) as sync:
        give(sync, 1)
        give(sync, 2, joined_by_another())
        assert engine.version == "2" and sync.routable() == (engine.url,)


def test_an_engine_is_given_the_old_version_back_while_the_lease_of_a_dead_one_runs_out() -> None:
    dead, good = FakeEngine(), FakeEngine()
    load = good._update

    def slowly(body: dict[str, object]) -> dict[str, object] | None:
        time.sleep(0.6)
        return load(body)

    with broadcasting(dead, good, registry=registry(lease_s=1.0), on_engine_loss="abort") as sync:
        give(sync, 1)
        dead.script[UPDATE, BUCKETS + 1] = "die"
        good._update = slowly
        refused(sync, 2, dead.url)
        assert torch.equal(good.tensors[NAMES[0]], weights(1)[NAMES[0]])
        assert good.version == "1" and not good.paused and sync.routable() == (good.url,)


def test_members_that_change_do_not_keep_one_engine_from_its_repair() -> None:
    engine, shared = FakeEngine(), registry()
    load = engine._update

    def joined_by_another(body: dict[str, object]) -> dict[str, object] | None:
        stranger(shared)
        return load(body)

    with broadcasting(engine, registry=shared) as sync:
        give(sync, 1)
        engine._update = joined_by_another
        sync.update_one(engine.url, timeout_s=20)
        assert not engine.paused and sync.routable() == (engine.url,)


def test_a_new_trainer_on_the_same_registry_cannot_go_back() -> None:
    engine, shared = FakeEngine(), registry()
    with broadcasting(engine, registry=shared) as sync:
        give(sync, 5)
    with broadcasting(engine, registry=shared) as sync:
        assert sync.routable() == (engine.url,)
        with pytest.raises(errors.UsageError, match="version 4 after 5"):
            give(sync, 4)
        give(sync, 6)
