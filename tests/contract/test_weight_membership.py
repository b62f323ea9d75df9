"""A session and its registry: who may join, whose lease runs out, who may get requests, and when an update is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from r3channel.errors import (
    EngineLeftBehind,
    RegistryRefused,
    UsageError,
    WeightUpdateFailed,
)
from r3channel.weights.registry import EngineRecord, WeightRegistry
from r3channel.weights.session import WeightSync
from r3channel.weights.sglang import EngineClient
from tests.fake_engine import UPDATE, FakeEngine

Start = Callable[[], FakeEngine]

OURS = str(torch.__version__)
NAMES = [f"model.layers.{index}.input_layernorm.weight" for index in range(4)]


def weights(version: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((64,), float(10 * version + index)) for index, name in enumerate(NAMES)}


def registry(lease_s: float = 1000.0) -> WeightRegistry:
    return WeightRegistry(torch=OURS, nccl="2.27.3", lease_s=lease_s)


def session(*engines: FakeEngine | EngineClient, **options: object) -> WeightSync:
    values = {"staged": False, "bucket_bytes": 512, "verify": True, "keep_copy": True, **options}
    clients = [e if isinstance(e, EngineClient) else EngineClient(e.url) for e in engines]
    return WeightSync(clients, **values)  # pyright: ignore[reportArgumentType]


def opened(*engines: FakeEngine, **options: object) -> WeightSync:
    sync = session(*engines, **options)
    sync.connect(timeout_s=20)
    return sync


def urls(*engines: FakeEngine) -> tuple[str, ...]:
    return tuple(sorted(engine.url for engine in engines))


def stranger(registry: WeightRegistry, url: str = "http://127.0.0.1:9", boot_id: str = "x") -> None:
    """Somebody else registers an engine, as a rollout manager does."""
    registry.join(EngineRecord(engine=url, boot_id=boot_id, ranks=1), now_s=time.monotonic())


@pytest.mark.parametrize(("what", "theirs", "ours"), [("torch", "2.1.0", OURS), ("nccl", "2.26.2", "2.27.3")])
def test_awex_handshake_refuses_an_engine_of_other_versions_before_a_group_is_formed(
    start: Start, what: str, theirs: str, ours: str
) -> None:
    good, bad = start(), start()
    other = EngineClient(bad.url, **{what: theirs})  # pyright: ignore[reportArgumentType]
    with (
        session(good, other, registry=registry()) as sync,
        pytest.raises(
            RegistryRefused, match=rf"{bad.url} runs {what} {theirs}, the trainer {ours.split('+')[0]}"
        ),
    ):
        sync.connect(timeout_s=20)
    assert "/init_weights_update_group" not in good.calls + bad.calls

    with opened(good, registry=registry()) as sync:
        sync.update(weights(1).items(), version=1, timeout_s=20)
        with pytest.raises(WeightUpdateFailed, match=f"{what} {theirs}"):
            sync.add_engine(other, timeout_s=20)
        assert sync.routable() == urls(good) == tuple(sync.engine_states)


def test_awex_engines_are_routable_from_their_commit_on_and_not_while_an_update_is_under_way(
    start: Start,
) -> None:
    pair = start(), start()
    during: list[tuple[str, ...]] = []

    with opened(*pair) as sync:

        def watched(version: int) -> Iterator[tuple[str, torch.Tensor]]:
            for named in weights(version).items():
                during.append(sync.routable())
                yield named

        assert sync.routable() == ()
        sync.update(watched(1), version=1, timeout_s=20)
        assert sync.routable() == urls(*pair) and set(during) == {()}
        newcomer = start()
        sync.add_engine(newcomer.url, timeout_s=20)
        assert sync.routable() == urls(*pair, newcomer)
        members = sync.registry.members(now_s=time.monotonic())
        assert {record.committed_version for record in members} == {1}
        assert len({record.boot_id for record in members}) == 3
        sync.remove_engine(newcomer.url)
        assert sync.routable() == urls(*pair)


def test_a_dirty_engine_is_in_quarantine_until_it_is_repaired(start: Start) -> None:
    good, bad = start(), start()
    with opened(good, bad) as sync:
        sync.update(weights(1).items(), version=1, timeout_s=20)
        bad.script[UPDATE, 3] = "die"
        sync.update(weights(2).items(), version=2, timeout_s=20)
        assert sync.routable() == (good.url,) and sync.registry.current_version == 2
        again = bad.restarted()
        try:
            assert sync.routable() == (good.url,)
            sync.update_one(again.url, timeout_s=20)
            assert sync.routable() == urls(good, again)
        finally:
            again.die()


def test_an_engine_left_behind_is_not_routable(start: Start) -> None:
    good, bad = start(), start()
    with opened(good, bad) as sync:
        bad.script["/continue_generation", 0] = "refuse"
        with pytest.raises(EngineLeftBehind):
            sync.update(weights(1).items(), version=1, timeout_s=20)
        assert sync.routable() == (good.url,)
        sync.update_one(bad.url, timeout_s=20)
        assert sync.routable() == urls(good, bad)


def test_a_failure_before_the_first_byte_costs_nobody_the_gate(start: Start) -> None:
    pair = start(), start()
    with opened(*pair, on_engine_loss="abort") as sync:
        for version in (1, 2):
            sync.update(weights(version).items(), version=version, timeout_s=20)
        pair[1].script["/pause_generation", 2] = "refuse"
        with pytest.raises(WeightUpdateFailed, match=pair[1].url):
            sync.update(weights(3).items(), version=3, timeout_s=20)
        assert sync.routable() == urls(*pair) and sync.registry.current_version == 2


def test_a_restarted_engine_that_nobody_updated_is_not_routable(start: Start) -> None:
    """miles#1724: a restarted engine served base weights."""
    good, bad = start(), start()
    with opened(good, bad) as sync:
        sync.update(weights(1).items(), version=1, timeout_s=20)
        again = bad.restarted()
        try:
            assert sync.renew(timeout_s=10) == (good.url,)
            report = sync.update(weights(2).items(), version=2, timeout_s=20)
            assert report.expired == () and sync.routable() == urls(good, again) and again.version == "2"
        finally:
            again.die()


def test_an_engine_that_is_removed_while_it_is_asked_whether_it_lives_stays_out(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, gone = start(), start()
    with opened(good, gone) as sync:
        sync.update(weights(1).items(), version=1, timeout_s=20)
        asked = sync._fleet.boot_ids

        def removed_meanwhile(timeout_s: float) -> object:
            lives = asked(timeout_s)
            sync.remove_engine(gone.url)
            return lives

        monkeypatch.setattr(sync._fleet, "boot_ids", removed_meanwhile)
        assert sync.renew(timeout_s=5) == (good.url,)
        members = sync.registry.members(now_s=time.monotonic())
        assert [record.engine for record in members] == [good.url]


def test_an_engine_whose_lease_runs_out_is_left_out_of_the_next_update_by_name(start: Start) -> None:
    live, silent = start(), start()
    with opened(live, silent, registry=registry(lease_s=1.5)) as sync:
        sync.update(weights(1).items(), version=1, timeout_s=20)
        silent.die()
        limit = time.monotonic() + 60
        while silent.url in sync.renew(timeout_s=0.3):
            assert time.monotonic() < limit
            time.sleep(0.1)
        sync.renew(timeout_s=0.3)
        report = sync.update(weights(2).items(), version=2, timeout_s=20)
        assert report.expired == (silent.url,) and set(sync.engine_states) == {live.url}
        assert live.version == "2" and sync.routable() == (live.url,)

        while sync.routable():
            assert time.monotonic() < limit
            time.sleep(0.1)
        with pytest.raises(RegistryRefused, match=rf"no engine is left to update.*{live.url}"):
            sync.update(weights(3).items(), version=3, timeout_s=20)
        assert live.version == "2" and not live.paused


def test_a_lease_covers_the_update_that_is_under_way(start: Start) -> None:
    engine = start()

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        time.sleep(1.0)
        yield from weights(1).items()

    with opened(engine, registry=registry(lease_s=0.5)) as sync:
        sync.renew(timeout_s=5)
        sync.update(slowly(), version=1, timeout_s=20)
        assert engine.version == "1"


def test_a_lease_covers_a_pause_that_takes_longer(start: Start) -> None:
    engine = start()
    pause = engine._set_paused

    def slowly(paused: bool) -> dict[str, object]:
        time.sleep(1.0 if paused else 0.0)
        return pause(paused)

    with opened(engine, registry=registry(lease_s=0.8)) as sync:
        engine._set_paused = slowly
        sync.renew(timeout_s=5)
        sync.update(weights(1).items(), version=1, timeout_s=20)
        assert engine.version == "1"


def test_an_engine_that_does_not_answer_to_the_pause_is_not_routable(start: Start) -> None:
    good, hung = start(), start()
    with opened(good, hung) as sync:
        sync.update(weights(1).items(), version=1, timeout_s=20)
        hung.script["/pause_generation", 1] = "die"
        assert sync.update(weights(2).items(), version=2, timeout_s=20).evicted.keys() == {hung.url}
        assert sync.routable() == (good.url,)


def test_an_engine_that_joins_the_registry_during_an_update_changes_nothing_for_the_others(
    start: Start,
) -> None:
    engine, shared = start(), registry()

    def joined_by_another() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights(2).items()
        joining = threading.Thread(target=stranger, args=(shared,))
        joining.start()
        joining.join()

    with opened(engine, registry=shared) as sync:
        sync.update(weights(1).items(), version=1, timeout_s=20)
        sync.update(joined_by_another(), version=2, timeout_s=20)
        assert engine.version == "2" and sync.routable() == (engine.url,)


def test_an_engine_is_given_the_old_version_back_while_the_lease_of_a_dead_one_runs_out(start: Start) -> None:
    dead, good = start(), start()
    load = good._update

    def slowly(body: dict[str, object]) -> dict[str, object] | None:
        time.sleep(0.6)
        return load(body)

    with opened(dead, good, registry=registry(lease_s=1.0), on_engine_loss="abort") as sync:
        sync.update(weights(1).items(), version=1, timeout_s=20)
        dead.script[UPDATE, 3] = "die"
        good._update = slowly
        with pytest.raises(WeightUpdateFailed, match=dead.url):
            sync.update(weights(2).items(), version=2, timeout_s=20)
        assert torch.equal(good.tensors[NAMES[0]], weights(1)[NAMES[0]])
        assert good.version == "1" and not good.paused and sync.routable() == (good.url,)


def test_members_that_change_do_not_keep_one_engine_from_its_repair(start: Start) -> None:
    engine, shared = start(), registry()
    load = engine._update

    def joined_by_another(body: dict[str, object]) -> dict[str, object] | None:
        stranger(shared)
        return load(body)

    with opened(engine, registry=shared) as sync:
        sync.update(weights(1).items(), version=1, timeout_s=20)
        engine._update = joined_by_another
        sync.update_one(engine.url, timeout_s=20)
        assert not engine.paused and sync.routable() == (engine.url,)


def test_a_new_trainer_on_the_same_registry_cannot_go_back(start: Start) -> None:
    engine, shared = start(), registry()
    with opened(engine, registry=shared) as sync:
        sync.update(weights(5).items(), version=5, timeout_s=20)
    with opened(engine, registry=shared) as sync:
        assert sync.routable() == (engine.url,)
        with pytest.raises(UsageError, match="version 4 after 5"):
            sync.update(weights(4).items(), version=4, timeout_s=20)
        sync.update(weights(6).items(), version=6, timeout_s=20)
