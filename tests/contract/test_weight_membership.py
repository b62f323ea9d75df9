"""A session's engines: who may join, and who may get requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from r3channel import errors
from r3channel.weights.engine import EngineHandle
from r3channel.weights.session import WeightSync
from tests.support.fake_engine import FakeEngine
from tests.support.waits import UPDATE_S
from tests.support.weights import broadcasting, give, weights

OURS = str(torch.__version__)


def urls(*engines: FakeEngine) -> tuple[str, ...]:
    return tuple(sorted(engine.url for engine in engines))


@pytest.mark.parametrize(("what", "theirs", "ours"), [("torch", "2.1.0", OURS), ("nccl", "2.26.2", "2.27.3")])
def test_awex_handshake_refuses_an_engine_of_other_versions_before_a_group_is_formed(
    what: str, theirs: str, ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("r3channel.weights.engine.nccl_version", lambda: "2.27.3")
    monkeypatch.setattr("r3channel.weights.groups.device_of", lambda _: torch.device("cpu"))
    good, bad = FakeEngine(), FakeEngine()
    other = EngineHandle(bad.url)
    setattr(other, what, theirs)
    unlike = rf"{bad.url} runs {what} {theirs}, the trainer {ours.split('+')[0]}"
    refused = pytest.raises(errors.RegistryRefused, match=unlike)
    with WeightSync.whole([good.url, other], backend="nccl") as sync, refused:
        sync.connect(timeout_s=UPDATE_S)
    assert "/init_weights_update_group" not in good.calls + bad.calls

    with broadcasting(good) as sync:
        give(sync, 1)
        monkeypatch.setattr(sync._engines, "_ours", {"torch": OURS.split("+")[0], "nccl": "2.27.3"})
        with pytest.raises(errors.RegistryRefused, match=f"{what} {theirs}"):
            sync.add_engine(other, timeout_s=UPDATE_S)
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
        give(sync, 1)
        assert sync.routable() == urls(*pair)
        give(sync, 2, watched(2))
        assert sync.routable() == urls(*pair) and set(during) == {()}
        with pytest.raises(errors.UsageError, match="version 1 after 2"):
            give(sync, 1)
        newcomer = FakeEngine()
        sync.add_engine(newcomer.url, timeout_s=UPDATE_S)
        assert sync.routable() == urls(*pair)
        sync.republish(weights(2).items(), engines=[newcomer.url], timeout_s=UPDATE_S)
        assert sync.routable() == urls(*pair, newcomer)
        sync.remove_engine(newcomer.url)
        assert sync.routable() == urls(*pair)
