"""Engines come and go: leases, versions, and who may serve. Time is a number here."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from r3channel.errors import RegistryRefused, UsageError
from r3channel.weights.registry import EngineRecord, WeightRegistry


def registry() -> WeightRegistry:
    return WeightRegistry(torch="2.13.0", nccl="2.27.3", lease_s=10.0)


def record(engine: str = "a", boot_id: str = "1") -> EngineRecord:
    return EngineRecord(engine=engine, boot_id=boot_id, ranks=2, torch="2.13.0", nccl="2.27.3")


def named(engines: WeightRegistry, now_s: float) -> list[str]:
    return [record.engine for record in engines.members(now_s=now_s)]


def test_engines_join_leave_and_expire() -> None:
    engines = registry()
    engines.join(replace(record("a"), nccl=""), now_s=0)  # on a CPU
    assert named(engines, 0) == ["a"]
    engines.join(record("b"), now_s=1)
    engines.leave("a", "1")
    assert named(engines, 10.9) == ["b"] and named(engines, 11) == []


def test_a_renewed_lease_and_the_same_life_again_keep_an_engine_in() -> None:
    engines = registry()
    engines.join(record(), now_s=0)
    for now_s in (5, 14, 23):
        engines.renew("a", "1", now_s=now_s)
    engines.join(record(), now_s=30)
    assert named(engines, 39.9) == ["a"] and named(engines, 40) == []


def test_the_old_life_of_a_restarted_engine_is_refused() -> None:
    engines = registry()
    engines.join(record(), now_s=0)
    engines.commit("a", "1", version=4, now_s=0)
    engines.join(record(boot_id="2"), now_s=1)
    for act in (engines.renew, partial(engines.commit, version=4), engines.quarantine):
        with pytest.raises(RegistryRefused, match="boot id 1 acts, 2 has joined"):
            act("a", "1", now_s=2)
    engines.leave("a", "1")
    assert engines.routable(now_s=2) == () and named(engines, 2) == ["a"]


def test_a_silent_engine_belongs_no_more() -> None:
    engines = registry()
    engines.join(record("a"), now_s=0)
    engines.join(record("b"), now_s=5)
    engines.commit("b", "1", version=1, now_s=12)
    with pytest.raises(RegistryRefused, match="a is not a member"):
        engines.commit("a", "1", version=1, now_s=12)


def test_a_lease_can_be_held_for_the_length_of_an_update() -> None:
    engines = registry()
    engines.join(record(), now_s=0)
    engines.renew("a", "1", now_s=1, for_s=100)
    engines.commit("a", "1", version=1, now_s=100.5)
    assert engines.routable(now_s=110) == ("a",) and engines.routable(now_s=111) == ()
    engines.join(record(), now_s=200)
    engines.renew("a", "1", now_s=200, for_s=100)
    engines.quarantine("a", "1", now_s=201)
    assert named(engines, 210) == ["a"] and named(engines, 211) == []


def test_an_engine_is_routable_only_with_the_current_version() -> None:
    engines = registry()
    engines.join(record("a"), now_s=0)
    engines.join(record("b"), now_s=0)
    assert engines.routable(now_s=0) == ()
    for version, holders, routable in ((1, "ab", ("a", "b")), (2, "b", ("b",)), (2, "a", ("a", "b"))):
        for engine in holders:
            engines.commit(engine, "1", version=version, now_s=1)
        assert engines.routable(now_s=1) == routable
    engines.quarantine("a", "1", now_s=2)
    assert engines.routable(now_s=2) == ("b",)


def test_a_version_does_not_go_back() -> None:
    engines = registry()
    engines.join(record(), now_s=0)
    engines.commit("a", "1", version=5, now_s=0)
    with pytest.raises(UsageError, match="version 4 after 5"):
        engines.commit("a", "1", version=4, now_s=0)


@pytest.mark.parametrize(("field", "value"), [("torch", "2.12.1"), ("nccl", "2.26.2")])
def test_a_handshake_refuses_other_versions_with_both_values(field: str, value: str) -> None:
    ours = {"torch": "2.13.0", "nccl": "2.27.3"}[field]
    with pytest.raises(RegistryRefused, match=f"{field} {value}, the trainer {ours}"):
        registry().join(replace(record(), **{field: value}), now_s=0)
